"""``get`` returns a logger, ``setup`` connects all of them to the spdlog sinks that logging.toml configures."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from rannd.config.reading import config_directory
from rannd.log import settings as settings_
from rannd.log.settings import LoggerSettings, LogSettings
from rannd.log.sinks import SpdlogSinks
from rannd.log.subject import prefix
from rannd.ranks.rank_variables import RANKS

LOG_FILE = "logging.toml"
#: The Python logger that is the parent of all others here.
BASE = "rannd"
#: RaNNC's loggers. Other names work as well; logging.toml may list any.
LOGGERS = (
    "root",
    "RaNNCModule",
    "RaNNCProcess",
    "GraphLauncher",
    "GraphValueStorage",
    "GraphUtil",
    "Decomposer",
    "Decomposition",
    "GraphProfiler",
    "ParamStorage",
    "GraphConnector",
    "TorchDriver",
    "AllReduceRunner",
    "MLPartitioner",
    "DPStaging",
)

_lock = threading.Lock()
_handler: SinkHandler | None = None
_fork_watched = False


def get(name: str) -> logging.Logger:
    """The logger of this name; ``root`` is the parent of all others here."""
    return logging.getLogger(BASE if name == "root" else f"{BASE}.{name}")


def setup(directory: Path | None = None, level: str = "", role: str = "") -> None:
    """Sends the records of all loggers to the sinks that logging.toml configures.

    May be called again: the last call takes effect, and one that changes nothing does nothing. Without a file, all
    records of level info and above go to standard error.

    Args:
        directory: the directory of logging.toml; None: the configuration directory.
        level: the level (``trace`` to ``off``) of all loggers, in place of the levels in the file; empty: the levels
            in the file.
        role: the role of a process that is not a rank, such as ``daemon``; replaces, with the process id, ``{rank}``
            in file names. Empty: the rank that the launcher assigned.

    Raises:
        ConfigError: logging.toml is invalid, a file in it cannot be written, `level` is not a level, or spdlog cannot
            be imported.
    """
    global _handler, _fork_watched
    file = (config_directory() if directory is None else directory) / LOG_FILE
    settings = settings_.read(file) if os.path.lexists(file) else settings_.DEFAULT
    if level:
        settings = settings.with_level(level)
    label = _label(role, os.environ)
    with _lock:
        if _handler is not None and _handler.is_for(settings, label):
            return
        handler = SinkHandler(settings, label)
        logging.addLevelName(settings_.TRACE, "TRACE")
        logging.addLevelName(settings_.DETAIL, "DETAIL")
        base = logging.getLogger(BASE)
        if _handler is not None:
            for logger in _handler.settings.loggers:
                get(logger.name).setLevel(logging.NOTSET)
            base.removeHandler(_handler)
            _handler.close()
        for logger in settings.loggers:
            get(logger.name).setLevel(logger.level)
        base.addHandler(handler)
        _handler = handler
        if not _fork_watched:
            os.register_at_fork(before=_flush)
            _fork_watched = True


def _flush() -> None:
    """Flushes before a fork: parent and child would both write lines that are still in the buffers."""
    if _handler is not None:
        _handler.flush()


def rank_of(environ: Mapping[str, str]) -> str:
    """The rank that the launcher assigned, as text; empty if there is none."""
    return next((environ[name] for name in RANKS if environ.get(name, "").isdigit()), "")


def _label(role: str, environ: Mapping[str, str]) -> str:
    if role:
        return f"{role}-p{os.getpid()}"
    return rank_of(environ) or f"p{os.getpid()}"


class SinkHandler(logging.Handler):
    """Writes each record to the sinks of its logger.

    Raises ConfigError on construction if a file cannot be written or spdlog cannot be imported.
    """

    def __init__(self, settings: LogSettings, label: str) -> None:
        # First, as it may fail: logging flushes all handlers at exit, from super().__init__ on.
        self._sinks = SpdlogSinks(settings, label)
        super().__init__()
        self.settings = settings
        self._label = label
        self._routes = {logger.name: logger for logger in settings.loggers}
        self._pid = os.getpid()

    def is_for(self, settings: LogSettings, label: str) -> bool:
        """Whether this handler was made for the same arguments."""
        return (self.settings, self._label) == (settings, label)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if os.getpid() != self._pid:
                self._reopen()
            name = "root" if record.name == BASE else record.name.removeprefix(f"{BASE}.")
            self._sinks.write(record, name, self._route(name), prefix())
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._sinks.flush()

    def close(self) -> None:
        self._sinks.flush()
        super().close()

    def _route(self, name: str) -> LoggerSettings:
        """The settings of a logger: its own, else those of its nearest parent, else those of root."""
        while name not in self._routes:
            name = name.rpartition(".")[0] or "root"
        return self._routes[name]

    def _reopen(self) -> None:
        """Opens own files in a forked child; the parent keeps writing its own."""
        pid = os.getpid()
        inherited, self._sinks = self._sinks, SpdlogSinks(self.settings, f"{self._label}-p{pid}")
        self._pid = pid
        inherited.flush()
