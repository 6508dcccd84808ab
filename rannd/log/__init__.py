"""Logging: Python's own in front, spdlog's sinks behind, logging.toml between.

Loggers have RaNNC's names and are Python's, below ``rannd``. Their records reach one handler on ``rannd``, which
hands each to the sinks that logging.toml gives its logger, and then go on to Python's root logger, where pytest's
caplog and the handlers of the user find them; none of ours is there. Importing this does nothing.
"""

from rannd.log.door import LOG_FILE, LOGGERS, get, rank_of, setup
from rannd.log.progress import Progress
from rannd.log.settings import TRACE

__all__ = ["LOGGERS", "LOG_FILE", "TRACE", "Progress", "get", "rank_of", "setup"]
