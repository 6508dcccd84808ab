"""``get`` and ``setup``, and the one handler between Python's loggers and the sinks."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from rannd.config.reading import config_directory
from rannd.log import settings as settings_
from rannd.log.pattern import BASE, display_name
from rannd.log.settings import LoggerSettings, LogSettings
from rannd.log.sinks import Backend, open_backend

LOG_FILE = "logging.toml"
#: RaNNC's loggers. Others may be used as well; logging.toml can name any.
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

#: Where launchers leave the rank's number; MPI's go before Slurm's, which a whole batch script inherits.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")

_lock = threading.Lock()
_handler: SinkHandler | None = None
_fork_watched = False


def get(name: str) -> logging.Logger:
    """The logger of this name; ``root`` is the one above all others of ours."""
    return logging.getLogger(BASE if name == "root" else f"{BASE}.{name}")


def setup(directory: Path | None = None, level: str = "", role: str = "") -> None:
    """Sends the records of our loggers to the sinks that logging.toml asks for.

    May be called again: the last call holds, and one that changes nothing does nothing. Without a file everything
    from info goes to the standard error.

    Args:
        directory: where logging.toml is looked for, the configuration directory if None.
        level: a level (``trace`` to ``off``) for all loggers instead of those in the file; empty: those in the file.
        role: what a process is that is no rank (``daemon``): stands, with the process id, for ``{rank}`` in names of
            files. Empty: the rank's number as the launcher gave it.

    Raises:
        ConfigError: logging.toml is wrong, a file in it cannot be written, or no level is named `level`.
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
    """A forked child must not inherit lines that both processes would then write."""
    if _handler is not None:
        _handler.flush()


def rank_of(environ: Mapping[str, str]) -> str:
    """The rank's number as the launcher left it, empty where there is none."""
    return next((environ[name] for name in _RANK_VARIABLES if environ.get(name, "").isdigit()), "")


def _label(role: str, environ: Mapping[str, str]) -> str:
    if role:
        return f"{role}-p{os.getpid()}"
    return rank_of(environ) or f"p{os.getpid()}"


class SinkHandler(logging.Handler):
    """Hands each record to the sinks of its logger.

    Raises ConfigError on construction where a file cannot be written.
    """

    def __init__(self, settings: LogSettings, label: str) -> None:
        super().__init__()
        self.settings = settings
        self._label = label
        self._routes = {logger.name: logger for logger in settings.loggers}
        self._pid = os.getpid()
        self.backend: Backend = open_backend(settings, label)

    def is_for(self, settings: LogSettings, label: str) -> bool:
        """Whether a new handler for these arguments would be the same."""
        return (self.settings, self._label) == (settings, label)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if os.getpid() != self._pid:
                self._reopen()
            self.backend.write(record, self._route(display_name(record.name)))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self.backend.flush()

    def close(self) -> None:
        self.backend.close()
        super().close()

    def _route(self, name: str) -> LoggerSettings:
        """The entry for a name, of the nearest name above it, or of root."""
        while name not in self._routes:
            name = name.rpartition(".")[0] or "root"
        return self._routes[name]

    def _reopen(self) -> None:
        """In a forked child: other files than the parent's, which it goes on writing."""
        pid = os.getpid()
        inherited, self.backend = self.backend, open_backend(self.settings, f"{self._label}-p{pid}")
        self._pid = pid
        inherited.close()
