"""Reads and checks logging.toml: sinks, loggers and patterns in the format of spdlog_setup."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from rannd.config.item import nearest, toml_text
from rannd.config.tomlfile import TomlFile
from rannd.errors import ConfigError
from rannd.log.pattern import FLAGS, unknown_flag

TRACE = 5
DETAIL = 15
"""Level of RaNNC's own messages of a first run, which are written as info: at log_level=debug, and by a logger that
logging.toml itself names at info, as RaNNC's does."""
_OFF = logging.CRITICAL + 10
#: spdlog's level names, short and long, and the Python levels they stand for.
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "err": logging.ERROR,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": _OFF,
}
DEFAULT_PATTERN = "[%n] [%l] %v"

#: Sink types (without _st or _mt) and their keys besides name, type and level.
_KINDS = {
    "stdout_sink": (),
    "stderr_sink": (),
    "color_stdout_sink": (),
    "color_stderr_sink": (),
    "null_sink": (),
    "basic_file_sink": ("filename", "truncate", "create_parent_dir"),
    "rotating_file_sink": ("base_filename", "max_size", "max_files", "create_parent_dir"),
    "daily_file_sink": ("base_filename", "rotation_hour", "rotation_minute", "create_parent_dir"),
    "syslog_sink": ("ident", "syslog_option", "syslog_facility"),
}
_SIZE = re.compile(r"([0-9]+)([KMGT]?)")
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TYPE_WORDS = {str: "a string", bool: "true or false", int: "a whole number", list: "a list of strings"}
_LOG_USER = 8  # the facility of user programs in syslog.h
_T = TypeVar("_T", str, bool, int)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """One destination of log lines: a [[sink]]."""

    name: str
    kind: str
    """Type without ``_st`` or ``_mt``."""
    level: int = 0
    where: str = dataclasses.field(default="default", compare=False)
    """File and line, for error messages."""
    filename: str = ""
    """For file sinks; contains ``{rank}`` or ``{pid}``."""
    create_parent_dir: bool = False
    truncate: bool = False
    max_size: int = 0
    """Bytes."""
    max_files: int = 0
    rotation_hour: int = 0
    rotation_minute: int = 0
    ident: str = ""
    syslog_option: int = 0
    syslog_facility: int = _LOG_USER


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggerSettings:
    """Sinks, level and pattern of one logger: a [[logger]]."""

    name: str
    sinks: tuple[str, ...]
    level: int = logging.INFO
    pattern: str = DEFAULT_PATTERN


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogSettings:
    """The content of a logging.toml; there is always a logger ``root``."""

    sinks: tuple[SinkSettings, ...]
    loggers: tuple[LoggerSettings, ...]

    def with_level(self, name: str) -> LogSettings:
        """These settings with one level for all loggers.

        Raises:
            ConfigError: `name` is not a level.
        """
        if name not in LEVELS:
            raise ConfigError(f"{toml_text(name)} is not a log level; use one of {', '.join(LEVELS)}")
        loggers = tuple(dataclasses.replace(logger, level=LEVELS[name]) for logger in self.loggers)
        return dataclasses.replace(self, loggers=loggers)


_CONSOLE = SinkSettings(name="console of rannd", kind="stderr_sink")
#: The settings if there is no file: records of level info and above go to standard error.
DEFAULT = LogSettings(sinks=(_CONSOLE,), loggers=(LoggerSettings(name="root", sinks=(_CONSOLE.name,)),))


def read(path: Path) -> LogSettings:
    """Reads a logging.toml.

    Raises:
        ConfigError: the file cannot be read or is invalid; the message names the file, line, key, value and what is
            allowed.
    """
    toml = TomlFile(path)
    top = _Table(toml, (), toml.data)
    global_pattern = top.pattern("global_pattern", DEFAULT_PATTERN)
    patterns: dict[str, str] = {}
    for table in top.tables("pattern"):
        name = table.string("name")
        table.once(name, patterns)
        patterns[name] = table.pattern("value")
        table.finish()
    sinks: dict[str, SinkSettings] = {}
    for table in top.tables("sink"):
        sink = _sink(table)
        table.once(sink.name, sinks)
        sinks[sink.name] = sink
    loggers: dict[str, LoggerSettings] = {}
    file_patterns: dict[str, tuple[str, str]] = {}
    for table in top.tables("logger"):
        logger = _logger(table, sinks, patterns, global_pattern)
        table.once(logger.name, loggers)
        loggers[logger.name] = logger
        for name in logger.sinks:
            other, pattern = file_patterns.setdefault(name, (logger.name, logger.pattern))
            if sinks[name].filename and pattern != logger.pattern:
                raise table.error(
                    "pattern",
                    f"loggers {other} and {logger.name} write to the file of sink {name} in two patterns; give them "
                    "one pattern, or two sinks with two files",
                )
    top.finish()
    files: dict[str, str] = {}
    for sink in sinks.values():
        if sink.filename and files.setdefault(sink.filename, sink.name) != sink.name:
            raise ConfigError(
                f"{sink.where}: sinks {files[sink.filename]} and {sink.name} write to the same file "
                f"{sink.filename}; give them two files"
            )
    if "root" not in loggers:
        sinks[_CONSOLE.name] = _CONSOLE
        loggers["root"] = LoggerSettings(name="root", sinks=(_CONSOLE.name,), pattern=global_pattern)
    return LogSettings(sinks=tuple(sinks.values()), loggers=tuple(loggers.values()))


def _sink(table: _Table) -> SinkSettings:
    name = table.string("name")
    kinds = [f"{kind}_{suffix}" for kind in _KINDS for suffix in ("mt", "st")]
    kind = table.string("type", choices=kinds).rpartition("_")[0]
    keys = _KINDS[kind]
    filename = ""
    for key in ("filename", "base_filename"):
        if key in keys:
            filename = table.string(key)
            if "{rank}" not in filename and "{pid}" not in filename:
                stem, dot, suffix = filename.rpartition(".")
                mended = f"{stem}.{{rank}}.{suffix}" if dot and "/" not in suffix else f"{filename}.{{rank}}"
                raise table.error(
                    key,
                    f"{key} = {toml_text(filename)} is one file for all ranks, and several processes would corrupt it; "
                    f"use {key} = {toml_text(mended)}",
                )
    sink = SinkSettings(
        name=name,
        kind=kind,
        level=table.level(0),
        where=table.where(),
        filename=filename,
        create_parent_dir="create_parent_dir" in keys and table.value("create_parent_dir", False),
        truncate="truncate" in keys and table.value("truncate", False),
        max_size=table.size("max_size") if "max_size" in keys else 0,
        max_files=table.number("max_files", None, 1, 200000) if "max_files" in keys else 0,
        rotation_hour=table.number("rotation_hour", 0, 0, 23) if "rotation_hour" in keys else 0,
        rotation_minute=table.number("rotation_minute", 0, 0, 59) if "rotation_minute" in keys else 0,
        ident=table.value("ident", "") if "ident" in keys else "",
        syslog_option=table.number("syslog_option", 0, 0, 255) if "syslog_option" in keys else 0,
        syslog_facility=table.number("syslog_facility", _LOG_USER, 0, 255) if "syslog_facility" in keys else _LOG_USER,
    )
    table.finish()
    return sink


def _logger(
    table: _Table, sinks: dict[str, SinkSettings], patterns: dict[str, str], global_pattern: str
) -> LoggerSettings:
    name = table.string("name")
    pattern = global_pattern
    if table.has("pattern"):
        pattern = patterns[table.string("pattern", choices=patterns, what="[[pattern]]")]
    if table.has("type"):
        # spdlog_setup allows asynchronous loggers, which hang in a forked child.
        table.string("type", choices=["sync"])
    level = table.level(logging.INFO)
    if level == logging.INFO and name != "root":
        level = DETAIL
    logger = LoggerSettings(name=name, sinks=table.names("sinks", sinks), level=level, pattern=pattern)
    table.finish()
    return logger


class _Table:
    """A table of the file, with its line numbers; remembers which keys were read."""

    def __init__(self, toml: TomlFile, path: tuple[str | int, ...], data: dict[str, object]) -> None:
        self._toml = toml
        self._path = path
        self._data = data
        self._known: list[str] = []

    def where(self, *key: str) -> str:
        return self._toml.where(*self._path, *key)

    def error(self, key: str, message: str) -> ConfigError:
        title = f"[[{self._path[0]}]]" if self._path else "the file"
        name = self._data.get("name")
        if self._path and isinstance(name, str):
            title += f" {name}"
        return ConfigError(f"{self.where(key)}: {title}: {message}")

    def wrong(self, key: str, wanted: str) -> ConfigError:
        return self.error(key, f"{key} = {toml_text(self._data[key])}, but {key} must be {wanted}")

    def has(self, key: str) -> bool:
        self._known.append(key)
        return key in self._data

    def value(self, key: str, default: _T) -> _T:
        """The value of a key, which must have the type of the default."""
        if not self.has(key):
            return default
        value = self._data[key]
        if type(value) is not type(default):
            raise self.wrong(key, _TYPE_WORDS[type(default)])
        return value

    def string(self, key: str, choices: Iterable[str] | None = None, what: str = "") -> str:
        """A required string that is not empty and, if `choices` is given, one of them."""
        if not self.has(key):
            raise self.error(key, f"{key} is missing; it must be a string")
        value = self.value(key, "")
        if not value:
            raise self.wrong(key, "a non-empty string")
        if choices is not None and value not in choices:
            choices = list(choices)
            if not choices:
                raise self.error(key, f"{key} = {toml_text(value)}, but the file has no {what}; add one with this name")
            wanted = f"the name of a {what}" if what else f"one of {', '.join(choices)}"
            raise self.error(
                key, f"{key} = {toml_text(value)}, but {key} must be {wanted}; the nearest is {nearest(value, choices)}"
            )
        return value

    def number(self, key: str, default: int | None, least: int, most: int) -> int:
        wanted = f"a whole number from {least} to {most}"
        if not self.has(key):
            if default is None:
                raise self.error(key, f"{key} is missing; it must be {wanted}")
            return default
        value = self._data[key]
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, wanted)
        return value

    def size(self, key: str) -> int:
        """A size in bytes, from a number or a string with a unit."""
        if not self.has(key):
            raise self.error(key, f'{key} is missing; it must be a number of bytes, or a size such as "10M"')
        value = self._data[key]
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            value = int(match[1]) * _SIZE_UNITS[match[2]]
        if type(value) is not int or not 0 < value < 1 << 63:
            raise self.wrong(key, 'a number of bytes above 0, or a size such as "512K", "10M", "1G"')
        return value

    def level(self, default: int) -> int:
        return LEVELS[self.string("level", choices=LEVELS)] if self.has("level") else default

    def pattern(self, key: str, default: str | None = None) -> str:
        value = self.string(key) if default is None else self.value(key, default)
        flag = unknown_flag(value)
        if flag is not None:
            raise self.error(
                key, f"{key} = {toml_text(value)} has the unknown flag {flag}; known flags are {' '.join(FLAGS)}"
            )
        return value

    def names(self, key: str, known: Iterable[str]) -> tuple[str, ...]:
        """A required list of sink names."""
        if not self.has(key):
            raise self.error(key, f"{key} is missing; it must be {_TYPE_WORDS[list]}")
        value = self._data[key]
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, _TYPE_WORDS[list])
        names = list(known)
        for name in value:
            if name not in names:
                hint = f"the nearest is {nearest(name, names)}" if names else "the file has no [[sink]]; add one"
                raise self.error(key, f"{key} names {toml_text(name)}, which is not a [[sink]]; {hint}")
        return tuple(dict.fromkeys(value))

    def tables(self, key: str) -> list[_Table]:
        """The elements of an array of tables, an empty list if it is absent."""
        if not self.has(key):
            return []
        value = self._data[key]
        if not isinstance(value, list) or not all(isinstance(element, dict) for element in value):
            raise self.error(key, f"{key} must be tables, each under a line [[{key}]]")
        return [_Table(self._toml, (*self._path, key, index), element) for index, element in enumerate(value)]

    def once(self, name: str, earlier: Iterable[str]) -> None:
        if name in earlier:
            raise self.error("name", f"name = {toml_text(name)} is used twice; rename or remove one")

    def finish(self) -> None:
        """Raises ConfigError for a key that was never read."""
        for key in self._data:
            if key not in self._known:
                raise self.error(key, f"unknown key {key}; the nearest is {nearest(key, self._known)}")
