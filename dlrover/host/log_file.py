"""
`dlrover.log` below DLROVER_LOG_ROOT_DIR: the log file that the original's users collect.

Launcher, master, agents and trainers of one machine may all write to it, and each may find it full. So a record is one append, and who
wants to rotate takes a lock on the directory and looks again: a file that another process has moved aside is not moved once more.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os

from dlrover.host.edges import contained
from dlrover.host.log_root import LogRoot
from dlrover.host.ownership import make_directory, open_checked

log = logging.getLogger(__name__)

FILE_NAME = "dlrover.log"
FORM = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"


def log_to_file(root: LogRoot | None) -> None:
    """Have the records of this process in the file, too. A file that cannot be opened costs a warning."""
    if root is None:
        return
    try:
        file = RotatingLog(root)
    except OSError as error:
        log.warning("No log file is written to DLROVER_LOG_ROOT_DIR=%s: %s", root.directory, error.strerror)
        return
    logger = logging.getLogger()
    for other in logger.handlers:
        other.setLevel(other.level or logger.level)  # what the file wants beyond that is not for them
    logger.setLevel(min(logger.level, file.level))
    logger.addHandler(file)


class RotatingLog(logging.Handler):
    """Log lines to the file of a `LogRoot`. Raises `OSError` if it cannot be opened; a disk that fills up later costs lines only."""

    def __init__(self, root: LogRoot) -> None:
        super().__init__(root.level)
        self.setFormatter(logging.Formatter(FORM))
        self._root = root
        make_directory(root.directory)
        self._path = os.path.join(root.directory, FILE_NAME)
        self._descriptor = self._open()

    def emit(self, record: logging.LogRecord) -> None:
        # As the handlers of the standard library do it: arguments may not fit the text.
        with contained(lambda _error: self.handleError(record)):
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
            with contextlib.suppress(OSError):
                self._make_room(len(line))
                os.write(self._descriptor, line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        super().close()

    def _open(self) -> int:
        return open_checked(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def _make_room(self, size: int) -> None:
        """Until the open file is the one of that name and has room for so many bytes."""
        self._follow()
        if os.fstat(self._descriptor).st_size + size <= self._root.max_bytes:
            return
        directory = os.open(self._root.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            self._follow()  # another process may have rotated meanwhile
            if 0 < os.fstat(self._descriptor).st_size > self._root.max_bytes - size:
                self._rotate()
                self._follow()
        finally:
            os.close(directory)

    def _follow(self) -> None:
        """To the new file if the one that is open was moved aside or removed."""
        opened = os.fstat(self._descriptor)
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino):
            former, self._descriptor = self._descriptor, self._open()
            os.close(former)

    def _rotate(self) -> None:
        for number in range(self._root.num_backups, 0, -1):
            older = self._path if number == 1 else f"{self._path}.{number - 1}"
            with contextlib.suppress(FileNotFoundError):
                os.replace(older, f"{self._path}.{number}")
