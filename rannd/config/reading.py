"""Loads the configuration: defaults, overridden by rannc_conf.toml, overridden by ``RANNC_<ITEM>`` variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rannd.config.item import nearest
from rannd.config.table import ITEMS, Config
from rannd.config.tomlfile import TomlFile
from rannd.errors import ConfigError

CONF_FILE = "rannc_conf.toml"
_DIRECTORY_VARIABLE = "RANNC_CONF_DIR"
_FILE_VARIABLE = "RANNC_CONF_FILE"


def config_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The directory of rannc_conf.toml and logging.toml: RANNC_CONF_DIR, or else ``~/.pyrannc``, which may not exist.

    Raises:
        ConfigError: RANNC_CONF_DIR is not a directory, or there is no home directory.
    """
    environ = os.environ if environ is None else environ
    named = environ.get(_DIRECTORY_VARIABLE)
    if named is None:
        try:
            return Path(environ["HOME"] if environ.get("HOME") else Path.home()) / ".pyrannc"
        except RuntimeError as exc:
            raise ConfigError(
                f"user {os.getuid()} has no home directory for ~/.pyrannc; set {_DIRECTORY_VARIABLE} to a directory"
            ) from exc
    if not named:
        raise ConfigError(f"{_DIRECTORY_VARIABLE} is empty; set it to a directory, or unset it to use ~/.pyrannc")
    directory = Path(named).expanduser()
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise ConfigError(f"{_DIRECTORY_VARIABLE}={named} {what}; create it, or unset the variable to use ~/.pyrannc")
    return directory


def file_to_read(environ: Mapping[str, str], file: Path | None = None) -> Path | None:
    """The file to read: `file`, else RANNC_CONF_FILE, else rannc_conf.toml in the configuration directory.

    None if neither names a file and the directory has none. A named file need not exist.

    Raises:
        ConfigError: RANNC_CONF_DIR is not a directory, or RANNC_CONF_FILE is empty.
    """
    # Called first: a wrong RANNC_CONF_DIR is an error even if a file is named.
    default_file = config_directory(environ) / CONF_FILE
    if file is not None:
        return file
    if _FILE_VARIABLE in environ:
        if not environ[_FILE_VARIABLE]:
            raise ConfigError(f"{_FILE_VARIABLE} is empty; set it to a file, or unset it to use {default_file}")
        return Path(environ[_FILE_VARIABLE]).expanduser()
    return default_file if os.path.lexists(default_file) else None


def load(environ: Mapping[str, str] | None = None, file: Path | None = None) -> Config:
    """Loads the configuration of this process.

    Args:
        environ: the environment variables; None: those of the process.
        file: the file to read, which must exist; None: RANNC_CONF_FILE (``rannc-run --config`` sets it for the
            ranks), else rannc_conf.toml in :func:`config_directory`, if there is one.

    Raises:
        ConfigError: the directory, the file, an item or a variable is invalid; the message names the place, the item,
            its value and what is allowed.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    file = file_to_read(environ, file)
    if file is not None:
        toml = TomlFile(file)
        for name, value in toml.data.items():
            where = toml.where(name)
            if name not in ITEMS:
                if isinstance(value, dict):
                    raise ConfigError(f"{where}: a table [{name}]; items stand at the top of the file, in no table")
                raise ConfigError(f"{where}: no item is named {name}; the nearest is {nearest(name, ITEMS)}")
            values[name] = value
            origins[name] = where
    variables = {item.variable: item for item in ITEMS.values()}
    for variable, text in environ.items():
        if not variable.startswith("RANNC_") or variable in (_DIRECTORY_VARIABLE, _FILE_VARIABLE):
            continue
        if variable not in variables:
            known = nearest(variable, [*variables, _DIRECTORY_VARIABLE, _FILE_VARIABLE])
            raise ConfigError(f"{variable}={text}: no item has this variable; the nearest is {known}")
        item = variables[variable]
        values[item.name] = item.parse(text, variable)
        origins[item.name] = variable
    return Config.of(values, origins)
