"""Configuration: rannc_conf.toml, the ``RANNC_<ITEM>`` variables, and files that describe clusters.

In: TOML files and environment variables, all of which are checked; an error names the file and line, or the variable.
Out: :class:`Config`, frozen, with the origin of each value, and :class:`rannd.config.cluster.Cluster`.

Begin with ``table``, which declares every item once: the file, the variables, ``--show-config``,
``docs/configuration.md`` and ``conf/rannc_conf.toml`` are all derived from it. Then ``reading`` (``load``), ``item``
(types, ranges and parsing of one item), ``tomlfile`` (TOML with line numbers), ``cluster`` and ``document``.
"""

from rannd.config.item import Item, Value
from rannd.config.reading import CONF_FILE, config_directory, file_to_read, load
from rannd.config.table import ITEMS, Config

__all__ = ["CONF_FILE", "ITEMS", "Config", "Item", "Value", "config_directory", "file_to_read", "load"]
