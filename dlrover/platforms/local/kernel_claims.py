"""
Who owns what the kernel keeps by name: network namespaces, interfaces, cgroups.

These outlive the process that made them. So each node host draws a tag, holds a lock on a file of that name for life, and
gives everything it makes a name with the tag in it. A tag whose lock is not held is of a dead host, and everything
with its name can go. The lock decides, not a pid: pids are used again, and other containers cannot see them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dlrover.protocol.errors import ConfigError

CLAIMS = Path("/run/dlrover")
"""Of root alone: no other user can make what is claimed here."""
_TAG = re.compile(r"[0-9a-f]{6}")
_MAX_TRIES = 5


class KernelTag:
    """A tag that is ours until `release` or the end of this process."""

    def __init__(self, directory: Path = CLAIMS) -> None:
        """Raises `ConfigError`."""
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            for _ in range(_MAX_TRIES):
                self.tag = os.urandom(3).hex()
                self._path = directory / self.tag
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                os.write(self._descriptor, str(os.getpid()).encode())
                if _is_taken(self._descriptor):
                    return
                os.close(self._descriptor)  # somebody who cleans up looked at it in this very moment
        except OSError as error:
            raise ConfigError(f"The directory {directory} cannot be used: {error.strerror}.") from error
        raise ConfigError(f"The directory {directory} is cleaned up faster than it can be used.")

    def release(self) -> None:
        """Last, when everything with the tag is gone."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def tag_of(pid: int, directory: Path = CLAIMS) -> str:
    """Of the node host with this pid. Raises `ConfigError` if it has none."""
    for path in _claims(directory):
        with contextlib.suppress(OSError):
            if path.read_text(encoding="ascii") == str(pid):
                return path.name
    raise ConfigError(f"Process {pid} is no node host with network namespaces or cgroups of its own.")


@contextlib.contextmanager
def dead_tags(directory: Path = CLAIMS) -> Iterator[list[str]]:
    """Tags whose owners are dead; forgotten afterwards, so remove inside what has their name."""
    held: dict[Path, int] = {}
    try:
        for path in _claims(directory):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            if _is_taken(descriptor):
                held[path] = descriptor
            else:
                os.close(descriptor)
        yield [path.name for path in held]
        for path in held:
            path.unlink(missing_ok=True)
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def _claims(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if _TAG.fullmatch(path.name))
    except OSError:
        return []


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
