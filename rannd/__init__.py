"""The inside of RaNNC; users import `pyrannc`. docs/architecture.md says which folder does what, and where to begin.

The package's version is here and nowhere else: pyproject.toml reads it, without importing anything. It is not asked of
importlib.metadata, which takes time at each start and tells an old version where the sources of an editable install
went on. ``conf`` and ``systemd`` beside this file link to the folders of the repository; wheels have the files there.
"""

__version__ = "0.1.0"
