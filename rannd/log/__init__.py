"""Logging: Python loggers in front, spdlog sinks behind, configured by logging.toml.

In: log records, from ``get(name)``, and logging.toml, which ``setup`` reads and checks. Out: lines on the standard
streams, in files or in syslog, written by the package spdlog.

The loggers have RaNNC's names, are Python's and lie below ``rannd``. One handler on ``rannd`` passes each record to the
sinks of its logger; records then propagate to Python's root logger, where pytest's caplog and the user's own handlers
see them. Importing this package attaches no handler, reads no file and does not import spdlog.

Begin with ``loggers`` (``get``, ``setup`` and the handler). Then ``settings`` (logging.toml, with ``pattern`` for the
flags of a line) and ``sinks`` (spdlog). ``progress`` shows the progress of long work, ``phases`` that work without
countable steps goes on, ``subject`` names the model that a line is about.
"""

from rannd.log.loggers import LOG_FILE, LOGGERS, get, rank_of, setup
from rannd.log.phases import PHASES, long_phase
from rannd.log.progress import Progress
from rannd.log.settings import DETAIL, TRACE
from rannd.log.subject import LogSubject

__all__ = [
    "DETAIL",
    "LOGGERS",
    "LOG_FILE",
    "PHASES",
    "TRACE",
    "Progress",
    "LogSubject",
    "get",
    "long_phase",
    "rank_of",
    "setup",
]
