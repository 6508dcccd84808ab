"""The command `rannc-cache`.

In: a subcommand. Out: entries of the daemon's store, listed, explained, cleared, exported and imported. Begin with
`cache_command.py`.
"""
