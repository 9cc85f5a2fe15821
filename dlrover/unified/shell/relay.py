"""
The node actor's end of its workers' sockets: passes calls on in both directions, and opens none.

A worker that serves is entered into the book of the job, under a number above all its former lives. When its socket closes, those who wait for its
answer hear that it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from typing import Any, Protocol

from dlrover.unified.runtime.relay_frames import (
    HEAD_BYTES,
    LENGTH_BYTES,
    BadFrame,
    Message,
    RelayedAnswer,
    RelayedCall,
    ServeCalls,
    ServingCalls,
    WorkerHello,
    WorkerWelcome,
    pack_frame,
    read_head,
    read_lengths,
    read_message,
)
from dlrover.unified.runtime.wire import CallHeader, Parts, Raised
from dlrover.unified.shell.actor_wire import start
from dlrover.unified.shell.book import KeyBook, Place
from dlrover.unified.shell.sender import CalleeGone

log = logging.getLogger(__name__)

BUFFER = 1 << 22
"""Bytes that a socket holds before its sender waits."""


class OutwardWire(Protocol):
    """Of the node actor to the rest of the job."""

    book: KeyBook

    async def send(self, role: str, rank: int, header: CallHeader, parts: Parts) -> Parts:
        """Raises `Raised`."""


class CallRelay:
    """Of one node."""

    def __init__(self, wire: OutwardWire, welcome: WorkerWelcome, config: bytes, *, namespace: str, actor: str) -> None:
        """`welcome` and `config`: for each worker that comes. `namespace`, `actor`: where this node is called."""
        self._wire = wire
        self._welcome = welcome
        self._config = config
        self._role = welcome.role
        self._namespace = namespace
        self._actor = actor
        self._workers: dict[int, _RelayedWorker] = {}
        """By rank: those that serve."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def open(self, path: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        self._listener = listener
        start(self._serve(listener), self._tasks)

    async def close(self) -> None:
        """Its workers' sockets, too."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def answer(self, header: CallHeader, target: tuple[str, int, int], parts: Parts) -> Parts:
        """A call to a worker of this node. Raises `CalleeGone` or `Raised`."""
        _, rank, incarnation = target
        worker = self._workers.get(rank)
        if worker is None or worker.place is None or worker.place.incarnation != incarnation:
            raise CalleeGone(was_sent=False)
        return await worker.ask(header, parts)

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(listener)
            if _uid_of(peer) != os.getuid():
                peer.close()
                continue
            start(self._attend(peer), self._tasks)

    async def _attend(self, peer: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=peer, limit=BUFFER)
        worker = _RelayedWorker(writer)
        rank = -1
        try:
            while True:
                message, parts = await _receive(reader)
                match message:
                    case WorkerHello(rank, pid):
                        log.debug("worker joined rank=%d pid=%d", rank, pid)
                        await worker.send(self._welcome, [self._config])
                    case ServeCalls(repeatable):
                        self._enter(rank, worker, repeatable)
                        assert worker.place is not None
                        await worker.send(ServingCalls(worker.place.incarnation))
                    case RelayedCall():
                        start(self._pass_on(worker, message, parts), self._tasks)
                    case RelayedAnswer():
                        worker.answered(message, parts)
                    case _:
                        raise BadFrame(f"{type(message).__name__} from a worker")
        except (OSError, EOFError, BadFrame) as error:
            log.debug("worker left rank=%d reason=%s", rank, error)
        finally:
            self._leave(rank, worker)
            writer.close()

    def _enter(self, rank: int, worker: _RelayedWorker, repeatable: tuple[str, ...]) -> None:
        life = worker.place.incarnation if worker.place else self._wire.book.next_life(self._role, rank)
        worker.place = Place(
            role=self._role,
            rank=rank,
            incarnation=life,
            namespace=self._namespace,
            actor=self._actor,
            is_relayed=True,
            repeatable=repeatable,
        )
        self._workers[rank] = worker
        self._wire.book.enter(worker.place)

    def _leave(self, rank: int, worker: _RelayedWorker) -> None:
        worker.lose()
        if self._workers.get(rank) is worker:
            del self._workers[rank]
        if worker.place is not None:
            self._wire.book.leave(worker.place)

    async def _pass_on(self, worker: _RelayedWorker, ask: RelayedCall, parts: Parts) -> None:
        try:
            result = await self._wire.send(ask.role, ask.rank, ask.header, parts)
            await worker.send(RelayedAnswer(ask.ticket), result)
        except Raised as error:
            await worker.send(RelayedAnswer(ask.ticket, error.kind, error.text, error.data))


class _RelayedWorker:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._sending = asyncio.Lock()  # frames of several tasks must not mix
        self._next = 0
        self._asked: dict[int, asyncio.Future[Parts]] = {}
        self._is_lost = False
        self.place: Place | None = None

    async def ask(self, header: CallHeader, parts: Parts) -> Parts:
        if self._is_lost:
            raise CalleeGone(was_sent=False)
        self._next += 1
        ticket = self._next
        answer: asyncio.Future[Parts] = asyncio.get_running_loop().create_future()
        self._asked[ticket] = answer
        assert self.place is not None
        await self.send(RelayedCall(ticket, self.place.role, self.place.rank, header), parts)
        return await answer

    def answered(self, answer: RelayedAnswer, parts: Parts) -> None:
        future = self._asked.pop(answer.ticket, None)
        if future is None or future.done():
            return
        if answer.kind:
            future.set_exception(Raised(answer.kind, answer.text, answer.data))
        else:
            future.set_result(parts)

    def lose(self) -> None:
        self._is_lost = True
        for future in self._asked.values():
            if not future.done():
                future.set_exception(CalleeGone(was_sent=True))
        self._asked.clear()

    async def send(self, message: Message, parts: Parts = ()) -> None:
        async with self._sending:
            with contextlib.suppress(OSError):  # it is gone: `lose` tells those who wait
                for buffer in pack_frame(message, parts):
                    self._writer.write(buffer)
                    await self._writer.drain()


async def _receive(reader: asyncio.StreamReader) -> tuple[Message, list[Any]]:
    size, num_parts = read_head(await reader.readexactly(HEAD_BYTES))
    lengths = read_lengths(await reader.readexactly(LENGTH_BYTES * num_parts))
    message = read_message(await reader.readexactly(size))
    return message, [await reader.readexactly(length) for length in lengths]


def _uid_of(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
