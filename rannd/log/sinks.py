"""Writes log records through spdlog.

The spdlog sinks used here are synchronous and thread-safe. They are never closed, because a record after ``close()``
crashes; an asynchronous one would hang in a forked child. A pattern belongs to a sink, not to a logger, so a console
with two patterns is two sinks. spdlog writes through C's own buffers, which ``os._exit`` does not flush; warnings and
errors are therefore written at once.
"""

from __future__ import annotations

import bisect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rannd.errors import ConfigError
from rannd.log.settings import DETAIL, LoggerSettings, LogSettings, SinkSettings

if TYPE_CHECKING:
    import spdlog

#: The lowest Python levels that are spdlog's debug, info, warn, err and critical; anything below is its trace.
_LEVELS = (logging.DEBUG, DETAIL, logging.WARNING, logging.ERROR, logging.CRITICAL)


def _spdlog_level(levelno: int) -> int:
    """The index of a Python level in spdlog's order: 0 trace, 1 debug, 2 info, 3 warn, 4 err, 5 critical."""
    return bisect.bisect_right(_LEVELS, levelno)


def _import_spdlog() -> Any:
    """The module spdlog, imported by the first ``setup`` rather than with rannd.log, whose import must stay cheap.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        import spdlog
    except ImportError as exc:
        raise ConfigError(
            f"the package spdlog, which writes the log, cannot be imported: {exc}; run 'pip install spdlog' (it is "
            "built from source, which needs a C++ compiler and Python's headers)"
        ) from exc
    return spdlog


def _log_file(sink: SinkSettings, label: str) -> str:
    """The file of a file sink in this process. Creates its directory if the sink says so.

    Raises:
        ConfigError: the directory does not exist and must not be created, or the file cannot be written.
    """
    path = Path(sink.filename.replace("{rank}", label).replace("{pid}", str(os.getpid()))).expanduser()
    try:
        if sink.create_parent_dir:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            raise ConfigError(
                f"{sink.where}: sink {sink.name}: the directory {path.parent} does not exist; create it, or set "
                "create_parent_dir = true"
            )
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{sink.where}: sink {sink.name}: {path} cannot be written; use another file name")
    except OSError as exc:
        raise ConfigError(f"{sink.where}: sink {sink.name}: {path} cannot be created: {exc.strerror}") from exc
    return str(path)


class SpdlogSinks:
    """The sinks of all loggers, opened on construction.

    Args:
        settings: the loggers and their sinks.
        label: replaces ``{rank}`` in file names.

    Raises:
        ConfigError: spdlog cannot be imported, or a file cannot be written.
    """

    def __init__(self, settings: LogSettings, label: str) -> None:
        self._spdlog = _import_spdlog()
        self._settings = {sink.name: sink for sink in settings.sinks}
        self._label = label
        self._sinks: dict[tuple[str, str], spdlog.Sink] = {}
        self._loggers: dict[str, spdlog.SinkLogger] = {}
        self._files: dict[str, tuple[str, os.stat_result]] = {}
        """Path, and the file that was opened there, of each sink to a plain file."""
        level = self._spdlog.LogLevel
        self._levels = (level.TRACE, level.DEBUG, level.INFO, level.WARN, level.ERR, level.CRITICAL)
        self._text = logging.Formatter()
        for route in settings.loggers:
            self._loggers[route.name] = self._logger(route.name, route)

    def write(self, record: logging.LogRecord, name: str, route: LoggerSettings, prefix: str = "") -> None:
        """Writes a record of the logger `name`, after `prefix`, to the sinks of `route`, in its pattern."""
        for sink in route.sinks:
            self._follow(sink)
        logger = self._loggers.get(name)
        if logger is None:
            logger = self._loggers[name] = self._logger(name, route)
        # A file name may hold bytes that are not UTF-8, which spdlog rejects.
        text = f"{prefix}{self._text.format(record)}".encode(errors="backslashreplace").decode()
        logger.log(self._levels[_spdlog_level(record.levelno)], text)

    def flush(self) -> None:
        """Writes out C's buffers."""
        for logger in self._loggers.values():
            logger.flush()

    def _follow(self, sink: str) -> None:
        """Open the file of a sink anew if it was moved or deleted since, as logrotate does."""
        if sink not in self._files:
            return
        path, opened = self._files[sink]
        try:
            if os.path.samestat(os.stat(path), opened):
                return
        except OSError:
            pass  # opening it says what is wrong
        self._sinks = {key: each for key, each in self._sinks.items() if key[0] != sink}
        self._loggers.clear()  # made anew with this sink's new file and the other sinks as they are

    def _logger(self, name: str, route: LoggerSettings) -> spdlog.SinkLogger:
        sinks = [self._sink(sink, route.pattern) for sink in route.sinks]
        logger = self._spdlog.SinkLogger(name, sinks)
        logger.set_pattern(route.pattern)
        logger.set_level(self._spdlog.LogLevel.TRACE)  # the Python logger has already checked its level
        logger.flush_on(self._spdlog.LogLevel.WARN)
        return logger

    def _sink(self, name: str, pattern: str) -> spdlog.Sink:
        key = (name, pattern)
        if key not in self._sinks:
            settings = self._settings[name]
            sink = self._sinks[key] = self._open(settings)
            if settings.level > logging.CRITICAL:
                sink.set_level(self._spdlog.LogLevel.OFF)
            else:
                sink.set_level(self._levels[_spdlog_level(settings.level)])
        return self._sinks[key]

    def _open(self, sink: SinkSettings) -> spdlog.Sink:
        makers: dict[str, Callable[[], spdlog.Sink]] = {
            "stdout_sink": self._spdlog.stdout_sink_mt,
            "stderr_sink": self._spdlog.stderr_sink_mt,
            "color_stdout_sink": self._spdlog.stdout_color_sink_mt,
            "color_stderr_sink": self._spdlog.stderr_color_sink_mt,
            "null_sink": self._spdlog.null_sink_mt,
            "basic_file_sink": lambda: self._plain_file(sink),
            "rotating_file_sink": lambda: self._spdlog.rotating_file_sink_mt(
                _log_file(sink, self._label), sink.max_size, sink.max_files
            ),
            "daily_file_sink": lambda: self._spdlog.daily_file_sink_mt(
                _log_file(sink, self._label), sink.rotation_hour, sink.rotation_minute
            ),
            "syslog_sink": lambda: self._spdlog.syslog_sink_mt(
                sink.ident, sink.syslog_option, sink.syslog_facility, True
            ),
        }
        return makers[sink.kind]()

    def _plain_file(self, sink: SinkSettings) -> spdlog.Sink:
        path = _log_file(sink, self._label)
        opened = self._spdlog.basic_file_sink_mt(path, sink.truncate and sink.name not in self._files)
        self._files[sink.name] = path, os.stat(path)
        return opened
