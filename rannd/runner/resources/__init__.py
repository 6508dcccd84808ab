"""Resources given to this process: hosts, slots, a rank, environment variables.

In: flags, host files, variables of batch systems. Out: a list of hosts with slots (`host_list.py`, begin there;
`allocation.py` for batch systems), and the environment of the ranks.
"""
