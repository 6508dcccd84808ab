"""The sinks behind the loggers: spdlog's, or Python's handlers where spdlog is not installed.

About spdlog: its sinks here are synchronous and safe for threads, and are never closed (a record after ``close()``
crashes); an asynchronous one would hang in a forked child. A pattern belongs to a sink, not to a logger, so a
console that is used with two patterns is two sinks. It writes through C's own buffers, which ``os._exit`` does not
empty; warnings and errors are therefore written at once.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
import syslog
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from rannd.errors import ConfigError
from rannd.log.pattern import PatternFormatter, display_name, spdlog_level
from rannd.log.settings import LoggerSettings, LogSettings, SinkSettings

if TYPE_CHECKING:
    import spdlog


class Backend(Protocol):
    """What writes records."""

    def write(self, record: logging.LogRecord, route: LoggerSettings) -> None:
        """Writes the record to the sinks of the route, in its pattern."""

    def flush(self) -> None:
        """Empties the buffers."""

    def close(self) -> None:
        """Called once, when nothing will be written any more."""


def open_backend(settings: LogSettings, label: str) -> Backend:
    """The best backend that is installed.

    Args:
        settings: the loggers, whose sinks are opened here and now.
        label: what stands for ``{rank}`` in names of files.

    Raises:
        ConfigError: a file cannot be written.
    """
    try:
        import spdlog  # noqa: F401
    except ImportError:
        return PlainBackend(settings, label)
    return SpdlogBackend(settings, label)


def file_of(sink: SinkSettings, label: str) -> str:
    """The file of a file sink in this process; its directory is there afterwards.

    Raises:
        ConfigError: the directory is missing and must not be made, or the file cannot be written.
    """
    path = Path(sink.filename.replace("{rank}", label).replace("{pid}", str(os.getpid()))).expanduser()
    try:
        if sink.create_parent_dir:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            raise ConfigError(
                f"{sink.where}: sink {sink.name}: the directory {path.parent} does not exist; make it, or set "
                "create_parent_dir = true"
            )
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{sink.where}: sink {sink.name}: {path} cannot be written; name another file")
    except OSError as exc:
        raise ConfigError(f"{sink.where}: sink {sink.name}: {path} cannot be made: {exc.strerror}") from exc
    return str(path)


class SpdlogBackend:
    """Writes through the package spdlog."""

    def __init__(self, settings: LogSettings, label: str) -> None:
        import spdlog

        self._spdlog = spdlog
        self._settings = {sink.name: sink for sink in settings.sinks}
        self._label = label
        self._sinks: dict[tuple[str, str], spdlog.Sink] = {}
        self._loggers: dict[str, spdlog.SinkLogger] = {}
        self._levels = [spdlog.LogLevel.TRACE, spdlog.LogLevel.DEBUG, spdlog.LogLevel.INFO]
        self._levels += [spdlog.LogLevel.WARN, spdlog.LogLevel.ERR, spdlog.LogLevel.CRITICAL]
        self._text = logging.Formatter()
        for route in settings.loggers:
            self._loggers[route.name] = self._logger(route.name, route)

    def write(self, record: logging.LogRecord, route: LoggerSettings) -> None:
        name = display_name(record.name)
        logger = self._loggers.get(name)
        if logger is None:
            logger = self._loggers[name] = self._logger(name, route)
        # A name of a file may hold bytes that are no UTF-8, which spdlog cannot take.
        text = self._text.format(record).encode(errors="backslashreplace").decode()
        logger.log(self._levels[spdlog_level(record.levelno)], text)

    def flush(self) -> None:
        for logger in self._loggers.values():
            logger.flush()

    def close(self) -> None:
        self.flush()

    def _logger(self, name: str, route: LoggerSettings) -> spdlog.SinkLogger:
        sinks = [self._sink(sink, route.pattern) for sink in route.sinks]
        logger = self._spdlog.SinkLogger(name, sinks)
        logger.set_pattern(route.pattern)
        logger.set_level(self._spdlog.LogLevel.TRACE)  # Python's level has been asked already
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
                sink.set_level(self._levels[spdlog_level(settings.level)])
        return self._sinks[key]

    def _open(self, sink: SinkSettings) -> spdlog.Sink:
        makers: dict[str, Callable[[], spdlog.Sink]] = {
            "stdout_sink": self._spdlog.stdout_sink_mt,
            "stderr_sink": self._spdlog.stderr_sink_mt,
            "color_stdout_sink": self._spdlog.stdout_color_sink_mt,
            "color_stderr_sink": self._spdlog.stderr_color_sink_mt,
            "null_sink": self._spdlog.null_sink_mt,
            "basic_file_sink": lambda: self._spdlog.basic_file_sink_mt(file_of(sink, self._label), sink.truncate),
            "rotating_file_sink": lambda: self._spdlog.rotating_file_sink_mt(
                file_of(sink, self._label), sink.max_size, sink.max_files
            ),
            "daily_file_sink": lambda: self._spdlog.daily_file_sink_mt(
                file_of(sink, self._label), sink.rotation_hour, sink.rotation_minute
            ),
            "syslog_sink": lambda: self._spdlog.syslog_sink_mt(
                sink.ident, sink.syslog_option, sink.syslog_facility, True
            ),
        }
        return makers[sink.kind]()


class PlainBackend:
    """Writes through Python's handlers: the same lines in the same files."""

    def __init__(self, settings: LogSettings, label: str) -> None:
        self._settings = {sink.name: sink for sink in settings.sinks}
        self._label = label
        self._handlers: dict[tuple[str, str], logging.Handler] = {}
        for route in settings.loggers:
            for sink in route.sinks:
                self._handler(sink, route.pattern)

    def write(self, record: logging.LogRecord, route: LoggerSettings) -> None:
        for sink in route.sinks:
            handler = self._handler(sink, route.pattern)
            if record.levelno >= handler.level:
                handler.handle(record)

    def flush(self) -> None:
        for handler in self._handlers.values():
            handler.flush()

    def close(self) -> None:
        for handler in self._handlers.values():
            handler.close()

    def _handler(self, name: str, pattern: str) -> logging.Handler:
        key = (name, pattern)
        if key not in self._handlers:
            sink = self._settings[name]
            handler = self._handlers[key] = self._open(sink)
            handler.setLevel(sink.level)
            colour = sink.kind.startswith("color_") and isinstance(handler, ConsoleHandler) and handler.is_terminal()
            handler.setFormatter(PatternFormatter(pattern, colour=colour))
        return self._handlers[key]

    def _open(self, sink: SinkSettings) -> logging.Handler:
        kind = sink.kind.removeprefix("color_")
        if kind in ("stdout_sink", "stderr_sink"):
            return ConsoleHandler(kind.removesuffix("_sink"))
        if kind == "null_sink":
            return logging.NullHandler()
        if kind == "syslog_sink":
            return SyslogHandler(sink.ident, sink.syslog_option, sink.syslog_facility)
        path = file_of(sink, self._label)
        if kind == "basic_file_sink":
            mode = "w" if sink.truncate else "a"
            return logging.FileHandler(path, mode, encoding="utf-8", errors="backslashreplace")
        if kind == "rotating_file_sink":
            rotating = logging.handlers.RotatingFileHandler(
                path,
                maxBytes=sink.max_size,
                backupCount=sink.max_files,
                encoding="utf-8",
                errors="backslashreplace",
            )
            rotating.namer = spdlog_rotated_name
            return rotating
        return DailyFileHandler(path, sink.rotation_hour, sink.rotation_minute)


def spdlog_rotated_name(name: str) -> str:
    """Python's ``x.log.1`` as spdlog names it: ``x.1.log``."""
    base, _, number = name.rpartition(".")
    stem, suffix = os.path.splitext(base)
    return f"{stem}.{number}{suffix}"


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stdout`` or ``sys.stderr`` is when a record comes."""

    def __init__(self, stream: str) -> None:
        logging.Handler.__init__(self)
        self._stream = stream

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        stream: TextIO = getattr(sys, self._stream)
        return stream

    def is_terminal(self) -> bool:
        """Whether a person reads it."""
        return self.stream is not None and self.stream.isatty()


class DailyFileHandler(logging.FileHandler):
    """A file for each day, ``x_2026-01-31.log``, begun at a time of the day."""

    def __init__(self, path: str, hour: int, minute: int) -> None:
        self._stem, self._suffix = os.path.splitext(path)
        self._time = (hour, minute)
        now = time.time()
        self._end = self._next(now)
        super().__init__(self._dated(now), encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        if record.created >= self._end:
            self.close()
            self.baseFilename = os.path.abspath(self._dated(record.created))
            self._end = self._next(record.created)
            self.stream = self._open()
        super().emit(record)

    def _dated(self, now: float) -> str:
        return f"{self._stem}_{time.strftime('%Y-%m-%d', time.localtime(now))}{self._suffix}"

    def _next(self, now: float) -> float:
        """The next time, after `now`, that the clock shows the rotation's hour and minute."""
        day = time.localtime(now)
        for days in (0, 1, 2):  # mktime puts the day right, and hours that a change of summer time leaves out
            end = time.mktime((day.tm_year, day.tm_mon, day.tm_mday + days, *self._time, 0, 0, 0, -1))
            if end > now:
                return end
        raise AssertionError(f"no {self._time} within two days after {now}")


class SyslogHandler(logging.Handler):
    """Writes to the system's log by syslog(3)."""

    _PRIORITIES = (
        *(syslog.LOG_DEBUG, syslog.LOG_DEBUG, syslog.LOG_INFO),
        *(syslog.LOG_WARNING, syslog.LOG_ERR, syslog.LOG_CRIT),
    )

    def __init__(self, ident: str, option: int, facility: int) -> None:
        super().__init__()
        syslog.openlog(ident or "rannd", option, facility)
        self._facility = facility

    def emit(self, record: logging.LogRecord) -> None:
        syslog.syslog(self._facility | self._PRIORITIES[spdlog_level(record.levelno)], self.format(record))
