"""Implementation of RaNNC; users import `pyrannc`. docs/architecture.md describes the packages and where to begin.

The version is defined only here; pyproject.toml reads it without importing the package. It is not read from
importlib.metadata, which takes time at each start and returns an outdated version for an editable install whose sources
have changed. ``conf`` and ``systemd`` beside this file link to the repository's folders; wheels contain their files.
"""

__version__ = "0.1.0"
