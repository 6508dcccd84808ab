"""The configuration: one declared table, and the two doors that read it.

Every item is declared once, in :mod:`rannd.config.table`; the file, the variables, ``--show-config``,
``docs/configuration.md`` and ``conf/rannc_conf.toml`` all come from there.
"""

from rannd.config.item import Item, Value
from rannd.config.reading import CONF_FILE, config_directory, file_to_read, load
from rannd.config.table import ITEMS, Config

__all__ = ["CONF_FILE", "ITEMS", "Config", "Item", "Value", "config_directory", "file_to_read", "load"]
