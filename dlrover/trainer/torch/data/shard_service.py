"""
Shards for the worker processes of a DataLoader: they ask the process that trains, which alone takes shards and reports them.

A worker process has a connection for as long as it lives and gets one whole shard at a time, so the batches of a shard come back in order. When it
begins a new pass, or another process does after its end, shards that it had and that were not used go back to the job.

The socket has no name in the file system (nothing to remove after a kill -9) but a random one among the abstract ones, and only this user's
processes are answered. Messages are lines of JSON.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import uuid
from collections import deque
from typing import BinaryIO

import msgspec
from msgspec import Struct

from dlrover.protocol.data_messages import Shard
from dlrover.trainer.shard_feed import DataUnavailable
from dlrover.trainer.shard_reader import ShardReader

_LOOK = 0.2
"""Seconds that a request may hold up others, and that a worker with half a batch waits for the rest."""
_MOST_BYTES = 1 << 16


class Ask(Struct, frozen=True):
    begins: bool = False
    """A pass; otherwise: a shard is wanted."""
    is_patient: bool = True
    """Whether to wait until there is one."""
    asks_begun: bool = False
    """Only: does the job know already where the data stand?"""


class Answer(Struct, frozen=True):
    shard: Shard | None = None
    is_end: bool = False
    is_begun: bool = False
    trouble: str = ""


class ShardService:
    """In the process that trains; a thread of its own that sleeps until a worker process asks."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self.address = f"dlrover-data-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(128)
        self._wake, self._woken = socket.socketpair()
        self.is_restored = False
        """Somebody has said where the data stand."""
        self._ids: dict[socket.socket, list[int]] = {}
        """Shards that each connection got in its pass."""
        self._left: list[int] = []
        """Shards of connections that are gone."""
        self._waiting: deque[tuple[socket.socket, Ask]] = deque()
        self._buffers: dict[socket.socket, bytes] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="dlrover-loader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._wake.send(b"w")
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._is_closing:
                for key, _ in selector.select(0 if self._waiting else None):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj is not self._woken:
                        self._hear(selector, key.fileobj)
                if self._waiting and not self._is_closing:
                    self._serve_first()
        for each in (self._listener, self._wake, self._woken, *self._buffers):
            each.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._listener.accept()
        _pid, user, _group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            connection.close()
            return
        self._buffers[connection] = b""
        self._ids[connection] = []
        selector.register(connection, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        whole, newline, rest = (self._buffers[connection] + data).rpartition(b"\n")
        self._buffers[connection] = rest
        try:
            asked = [msgspec.json.decode(line, type=Ask) for line in whole.splitlines()] if newline else []
        except msgspec.MsgspecError:
            data, asked = b"", []
        if not data or len(rest) > _MOST_BYTES:
            selector.unregister(connection)
            connection.close()
            self._left += self._ids.pop(connection)
            del self._buffers[connection]
            self._waiting = deque(each for each in self._waiting if each[0] is not connection)
            return
        for ask in asked:
            if ask.begins:
                self._reader.give_back([*self._ids[connection], *self._left])
                self._ids[connection], self._left = [], []
                self._send(connection, Answer())
            else:
                self._waiting.append((connection, ask))

    def _serve_first(self) -> None:
        connection, ask = self._waiting[0]
        try:
            if ask.asks_begun:
                is_begun = self.is_restored or self._reader.state().num_consumed > 0
                answer = Answer(is_begun=is_begun)
            else:
                shard = self._reader.take(_LOOK)
                answer = Answer(shard=shard, is_end=shard is None)
        except TimeoutError:
            if ask.is_patient:
                self._waiting.rotate(-1)  # the next one may be content with nothing
                return
            answer = Answer()
        except Exception as error:  # the worker process raises it, and the DataLoader brings it to the training loop
            answer = Answer(trouble=f"{type(error).__name__}: {error}")
        self._waiting.popleft()
        if answer.shard is not None:
            self._ids[connection].append(answer.shard.id)
        if not self._send(connection, answer) and answer.shard is not None:
            self._reader.give_back([answer.shard.id])

    @staticmethod
    def _send(connection: socket.socket, answer: Answer) -> bool:
        try:
            connection.sendall(msgspec.json.encode(answer) + b"\n")
        except OSError:
            return False  # gone; its end is heard next
        return True


class ShardClient:
    """In a worker process."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect("\0" + address)
        except OSError as error:
            raise DataUnavailable(f"The process that trains does not answer its DataLoader: {error}.") from error
        self._lines: BinaryIO = self._socket.makefile("rb")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def begin(self) -> None:
        self._ask(Ask(begins=True))

    def is_begun(self) -> bool:
        return self._ask(Ask(asks_begun=True)).is_begun

    def take(self, *, is_patient: bool) -> tuple[Shard | None, bool]:
        """A shard, or none; and whether that is the end of the data."""
        answer = self._ask(Ask(is_patient=is_patient))
        return answer.shard, answer.is_end

    def _ask(self, ask: Ask) -> Answer:
        try:
            self._socket.sendall(msgspec.json.encode(ask) + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise DataUnavailable(f"The process that trains is gone: {error}.") from error
        if not line:
            raise DataUnavailable("The process that trains has closed the dataset.")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.trouble:
            raise DataUnavailable(answer.trouble)
        return answer
