"""
Shards for the worker processes of a DataLoader: they ask the process that trains, which alone takes shards and reports them.

A worker process has a connection for as long as it lives and gets one whole shard at a time, so the batches of a shard come back in order. When it
begins a new pass, or another process does after its end, shards that it had and that were not used go back to the job.
"""

from __future__ import annotations

import socket
from collections import deque

from msgspec import Struct

from dlrover.host.edges import attempt
from dlrover.protocol.messages.data import LeasedShard
from dlrover.trainer.data.loader_service import LoaderClient, LoaderService
from dlrover.trainer.data.shard_reader import ShardReader

_LOOK = 0.2
"""Seconds that a request may hold up others, and that a worker with half a batch waits for the rest."""


class ShardAsked(Struct, frozen=True):
    begins: bool = False
    """A pass; otherwise: a shard is wanted."""
    is_patient: bool = True
    """Whether to wait until there is one."""
    asks_begun: bool = False
    """Only: does the job know already where the data stand?"""


class ShardAnswer(Struct, frozen=True):
    shard: LeasedShard | None = None
    is_end: bool = False
    is_begun: bool = False
    trouble: str = ""


class ShardService(LoaderService[ShardAsked]):
    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self.is_restored = False
        """A rank has said where the data stand."""
        self._ids: dict[socket.socket, list[int]] = {}
        """Shards that each connection got in its pass."""
        self._orphans: list[int] = []
        """Shards of connections that are gone."""
        self._waiting: deque[tuple[socket.socket, ShardAsked]] = deque()
        super().__init__(ShardAsked)

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting)

    def _came(self, connection: socket.socket) -> None:
        self._ids[connection] = []

    def _left(self, connection: socket.socket) -> None:
        self._orphans += self._ids.pop(connection)
        self._waiting = deque(each for each in self._waiting if each[0] is not connection)

    def _heard(self, connection: socket.socket, ask: ShardAsked) -> None:
        if ask.begins:
            self._reader.give_back([*self._ids[connection], *self._orphans])
            self._ids[connection], self._orphans = [], []
            self._send(connection, ShardAnswer())
        else:
            self._waiting.append((connection, ask))

    def _answer(self, ask: ShardAsked) -> ShardAnswer | None:
        """None: there is nothing yet."""
        try:
            if ask.asks_begun:
                return ShardAnswer(is_begun=self.is_restored or self._reader.state().num_consumed > 0)
            shard = self._reader.take(_LOOK)
        except TimeoutError:
            return None if ask.is_patient else ShardAnswer()
        return ShardAnswer(shard=shard, is_end=shard is None)

    def _serve(self) -> None:
        connection, ask = self._waiting[0]
        # The worker process raises it, and the DataLoader brings it to the training loop.
        answer = attempt(
            lambda: self._answer(ask), lambda error: ShardAnswer(trouble=f"{type(error).__name__}: {error}")
        )
        if answer is None:
            self._waiting.rotate(-1)  # the next one may be content with nothing
            return
        self._waiting.popleft()
        if answer.shard is not None:
            self._ids[connection].append(answer.shard.id)
        if not self._send(connection, answer) and answer.shard is not None:
            self._reader.give_back([answer.shard.id])


class ShardClient(LoaderClient[ShardAnswer]):
    def __init__(self, address: str) -> None:
        super().__init__(address, ShardAnswer)

    def begin(self) -> None:
        self._ask(ShardAsked(begins=True))

    def is_begun(self) -> bool:
        return self._ask(ShardAsked(asks_begun=True)).is_begun

    def take(self, *, is_patient: bool) -> tuple[LeasedShard | None, bool]:
        """A shard, or none; and whether that is the end of the data."""
        answer = self._ask(ShardAsked(is_patient=is_patient))
        return answer.shard, answer.is_end
