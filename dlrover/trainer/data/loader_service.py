"""
A line from the worker processes of a DataLoader to the process that trains, which alone takes shards and reports them.

The socket has no name in the file system (nothing to remove after a kill -9) but a random one among the abstract ones, and only this user's
processes are answered. Messages are lines of JSON.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import uuid
from typing import BinaryIO, Generic, TypeVar

import msgspec
from msgspec import Struct

from dlrover.host.ownership import check_server, peer_credentials
from dlrover.trainer.data.shard_feed import DataUnavailable

_MOST_BYTES = 1 << 16

AskT = TypeVar("AskT", bound=Struct)
AnswerT = TypeVar("AnswerT", bound=Struct)


class LoaderService(Generic[AskT]):
    """In the process that trains; a thread of its own that sleeps until a worker process asks. Subclasses say what is answered."""

    def __init__(self, ask: type[AskT]) -> None:
        self._decoder = msgspec.json.Decoder(ask)
        self.address = f"dlrover-data-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(128)
        self._wake, self._woken = socket.socketpair()
        self._buffers: dict[socket.socket, bytes] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="dlrover-loader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._wake.send(b"w")
        self._thread.join(timeout=10.0)

    @property
    def _is_busy(self) -> bool:
        """Something can be served."""
        raise NotImplementedError

    def _came(self, connection: socket.socket) -> None:
        """A worker process has connected."""

    def _heard(self, connection: socket.socket, ask: AskT) -> None:
        """It asks, and is not answered yet."""
        raise NotImplementedError

    def _left(self, connection: socket.socket) -> None:
        """It is gone."""

    def _serve(self) -> None:
        """Answer a caller; called while busy. Must not wait long: others are not heard meanwhile."""
        raise NotImplementedError

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._is_closing:
                for key, _ in selector.select(0 if self._is_busy else None):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj is not self._woken:
                        self._hear(selector, key.fileobj)
                if self._is_busy and not self._is_closing:
                    self._serve()
        for connection in self._buffers:
            with contextlib.suppress(OSError):
                connection.shutdown(
                    socket.SHUT_RDWR
                )  # forks may have copies of it, and a close alone would not be heard
        for each in (self._listener, self._wake, self._woken, *self._buffers):
            each.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._listener.accept()
        if peer_credentials(connection)[1] != os.getuid():
            connection.close()
            return
        self._buffers[connection] = b""
        self._came(connection)
        selector.register(connection, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        whole, newline, rest = (self._buffers[connection] + data).rpartition(b"\n")
        self._buffers[connection] = rest
        try:
            asked = [self._decoder.decode(line) for line in whole.splitlines()] if newline else []
        except msgspec.MsgspecError:
            data, asked = b"", []
        if not data or len(rest) > _MOST_BYTES:
            selector.unregister(connection)
            connection.close()
            del self._buffers[connection]
            self._left(connection)
            return
        for ask in asked:
            self._heard(connection, ask)

    @staticmethod
    def _send(connection: socket.socket, answer: Struct) -> bool:
        try:
            connection.sendall(msgspec.json.encode(answer) + b"\n")
        except OSError:
            return False  # gone; its end is heard next
        return True


class LoaderClient(Generic[AnswerT]):
    """In a worker process."""

    def __init__(self, address: str, answer: type[AnswerT]) -> None:
        self._decoder = msgspec.json.Decoder(answer)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect("\0" + address)
            check_server(self._socket)
        except OSError as error:
            self._socket.close()
            raise DataUnavailable(
                f"The training process did not answer this DataLoader worker: {error}. See the log of the "
                "training process."
            ) from error
        self._lines: BinaryIO = self._socket.makefile("rb")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _ask(self, ask: Struct) -> AnswerT:
        try:
            self._socket.sendall(msgspec.json.encode(ask) + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise DataUnavailable(
                f"This DataLoader worker ends, because its training process has ended: {error}. See the log of "
                "the training process."
            ) from error
        if not line:
            raise DataUnavailable(
                "This DataLoader worker gets no more records, because the training process has closed the dataset."
            )
        answer = self._decoder.decode(line)
        if trouble := getattr(answer, "trouble", ""):
            raise DataUnavailable(trouble)
        return answer
