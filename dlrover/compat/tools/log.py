"""
The logger of the original: lines on stderr, and in a file that rotates where `DLROVER_LOG_ROOT_DIR` is set.

A logger apart from ours, so that a script that uses it does not turn on or off what this software says. It is made when a script
first asks for it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from dlrover.compat.names.constants import BasicClass
from dlrover.host.log_file import FORM, RotatingLog
from dlrover.host.log_root import DEFAULT_BACKUPS, DEFAULT_BYTES, MIN_BYTES, LogRoot

_NAME = "dlrover.logger"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

log = logging.getLogger(__name__)

_known: dict[str, logging.Logger] = {}


def get_log_level() -> str:
    level = os.environ.get(BasicClass.LOG_LEVEL_ENV, "")
    return level if level in _LEVELS else "INFO"


def get_base_log_dir() -> str:
    return os.environ.get(BasicClass.LOG_ROOT_DIR_ENV, "")


def get_agent_log_dir() -> str:
    return os.environ.get(BasicClass.LOG_AGENT_DIR_ENV, "")


def get_base_log_file() -> str:
    """Empty: no file. The directory is made."""
    directory = get_base_log_dir()
    if not directory:
        return ""
    os.makedirs(directory, exist_ok=True)
    return os.path.join(directory, "dlrover.log")


def get_file_handler_max_bytes() -> int:
    return _at_least(MIN_BYTES, BasicClass.LOG_ROTATE_MAX_BYTES_ENV, DEFAULT_BYTES)


def get_file_handler_backup_count() -> int:
    return _at_least(1, BasicClass.LOG_ROTATE_BACKUP_COUNT_ENV, DEFAULT_BACKUPS)


def get_logger(name: str, handlers: Sequence[logging.Handler] | None = None, update: bool = False) -> logging.Logger:
    """The same one each time, unless `update`. With `handlers`: those, and stderr."""
    if name in _known and not update:
        return _known[name]
    logger = logging.getLogger(name)
    logger.setLevel(get_log_level())
    logger.propagate = False
    logger.handlers = [*(_file_handlers() if handlers is None else handlers), _stderr]
    _known[name] = logger
    return logger


def _file_handlers() -> list[logging.Handler]:
    """The file that agents and master write to as well."""
    directory = get_base_log_dir()
    if not directory:
        return []
    root = LogRoot(
        directory=os.path.abspath(directory),
        level=get_log_level(),
        max_bytes=get_file_handler_max_bytes(),
        num_backups=get_file_handler_backup_count(),
    )
    try:
        return [RotatingLog(root)]
    except OSError as error:
        log.warning("DLROVER_LOG_ROOT_DIR=%s: no log file there, %s", directory, error.strerror)
        return []


def _at_least(least: int, variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() and int(text) >= least else default


_stderr = logging.StreamHandler(sys.stderr)
_stderr.setFormatter(logging.Formatter(FORM))

default_logger = get_logger(_NAME)
