"""A second user of the machine, for tests that run as root: processes of another uid, and files that belong to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SECOND_USER = 65534
_LAST = b"the last client"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user of the machine")


@contextlib.contextmanager
def shared_directory() -> Iterator[Path]:
    """Like /tmp: everybody may put something in it, and nobody may take away what is another's."""
    path = Path(tempfile.mkdtemp(prefix="dlrover-shared-", dir="/tmp"))
    try:
        path.chmod(0o1777)
        yield path
    finally:
        shutil.rmtree(path)


def give_away(path: Path, mode: int) -> Path:
    """To the second user."""
    os.chown(path, SECOND_USER, SECOND_USER, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(mode)
    return path


class SecondServer:
    """Listens at a unix address as the second user, and remembers what clients send."""

    def __init__(self, address: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        self._address = address
        self._heard, heard = os.pipe()
        ready, tell_ready = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.setgroups([])
                os.setgid(SECOND_USER)
                os.setuid(SECOND_USER)
                listener.listen(8)
                os.write(tell_ready, b"x")
                while True:
                    connection, _ = listener.accept()
                    while data := connection.recv(4096):
                        os.write(heard, data)
                    connection.close()
            finally:
                os._exit(1)
        for each in (heard, tell_ready):
            os.close(each)
        listener.close()
        assert os.read(ready, 1) == b"x"
        os.close(ready)

    def heard(self) -> bytes:
        """What all clients until now have said."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as last:  # they are served in the order of their coming
            last.connect(self._address)
            last.sendall(_LAST)
        heard = b""
        while not heard.endswith(_LAST):
            heard += os.read(self._heard, 4096)
        return heard.removesuffix(_LAST)

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._heard)
