"""
Files of an actor on its machine: a closed directory that is removed with the actor, or by the next one if it was killed.

Who is dead is told by a lock that the actor holds for life, as for launchers. The nodes' output stays beside it, for a week.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time

from dlrover.host.ownership import make_private

LOGS = "logs"
KEEP_LOGS = 7 * 86400.0
"""Seconds that the output of a node stays on its machine."""
STALE_AFTER = 600.0
"""Seconds without a change before the directory of a dead actor is removed: the next life of a host looks for its journal."""
_LIFE = "alive.lock"


class ActorDirectory:
    """`path` is 0700 and short enough for a unix socket."""

    def __init__(self, name: str, *, is_shared: bool = False) -> None:
        """`is_shared`: the next actor of the same name on this machine finds the files again. Raises OSError."""
        root = _root()
        make_private(root)
        reap(root)
        self.path = os.path.join(root, name) if is_shared else tempfile.mkdtemp(prefix=f"{name}-", dir=root)
        make_private(self.path)
        self._life = os.open(os.path.join(self.path, _LIFE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._life, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.logs = os.path.join(root, LOGS)
        make_private(self.logs)

    def write(self, name: str, text: str) -> str:
        """A 0600 file that appears whole."""
        path = os.path.join(self.path, name)
        fresh = f"{path}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
        os.rename(fresh, path)
        return path

    def read(self, name: str) -> str:
        """Empty: there is no such file."""
        try:
            with open(os.path.join(self.path, name), encoding="ascii") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def empty(self) -> None:
        """Remove what another actor left here."""
        for name in _names(self.path):
            if name != _LIFE:
                os.unlink(os.path.join(self.path, name))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._life >= 0:
            os.close(self._life)
            self._life = -1


def reap(root: str = "") -> list[str]:
    """Directories of dead actors, and old logs. Tells what was removed."""
    root = root or _root()
    removed = []
    for name in _names(root):
        path = os.path.join(root, name)
        if name == LOGS:
            removed += _reap_logs(path)
        elif _is_dead(path) and _age(path) > STALE_AFTER:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _root() -> str:
    return os.path.join(os.environ.get("TMPDIR") or "/tmp", f"dlrover-ray-{os.getuid()}")


def _age(path: str) -> float:
    """Seconds since something in it was written."""
    newest = 0.0
    for name in _names(path):
        with contextlib.suppress(OSError):
            newest = max(newest, os.stat(os.path.join(path, name)).st_mtime)
    return time.time() - newest


def _is_dead(path: str) -> bool:
    try:
        descriptor = os.open(os.path.join(path, _LIFE), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # about to be made
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _reap_logs(path: str) -> list[str]:
    removed = []
    for name in _names(path):
        file = os.path.join(path, name)
        with contextlib.suppress(OSError):
            if os.stat(file).st_mtime < time.time() - KEEP_LOGS:
                os.unlink(file)
                removed.append(file)
    return removed


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
