"""
Workers' requests, and those of the saver and of the exchange of snapshots, on their way to the master, in the name of this node.

All workers of a node share the agent's one stream. A command gets the agent's number there, so one that is sent again
after a broken stream is applied once; it names the life of the agent that took it on, so it is refused and not applied
anew if that life has ended meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.checkpoint import AnyCheckpointCommand, AwaitSaveDuties
from dlrover.protocol.messages.cluster import AnyClusterCommand
from dlrover.protocol.messages.data import AnyDataCommand
from dlrover.protocol.messages.fleet import ReportNodeError
from dlrover.protocol.messages.job import (
    AgentCommand,
    AskStatus,
    BlockRendezvous,
    Done,
    Incarnation,
    NodeId,
    Query,
    Reply,
    UnblockRendezvous,
    WorkerNews,
    WorkerRequest,
)
from dlrover.protocol.messages.kv import AnyKvCommand
from dlrover.protocol.messages.peers import AskPeers
from dlrover.protocol.messages.sync import AnySyncCommand

MAX_RELAYED = 32
"""Commands that may be on their way at a time. The master stores 64 replies for who has to send again, and the agent's
own commands need some of them."""

STATUS_FRESH = 1.0
"""Seconds for which all workers of the node share one answer about the job: it is the largest that the master gives."""

_Named = (
    AnyKvCommand
    | AnySyncCommand
    | AnyDataCommand
    | AnyClusterCommand
    | AnyCheckpointCommand
    | BlockRendezvous
    | UnblockRendezvous
    | ReportNodeError
    | AwaitSaveDuties
    | AskPeers
)
"""What says of which node it is."""


class Call(Protocol):
    async def __call__(self, command: AgentCommand | Query, *, timeout: float) -> Reply: ...


class SnapshotRelay(Protocol):
    """What the exchange of snapshots needs of a relay."""

    async def __call__(self, question: AskPeers, /, *, timeout: float) -> Reply: ...


class Relay:
    def __init__(
        self,
        call: Call,
        who: Callable[[], tuple[NodeId, Incarnation]],
        observe: Callable[[WorkerNews], None] = lambda _news: None,
    ) -> None:
        self._call = call
        self._who = who
        self._observe = observe
        self._under_way = asyncio.Semaphore(MAX_RELAYED)
        self._asking_status = asyncio.Lock()
        """Guards the next two: of workers that ask at a time, one asks for all."""
        self._status: Reply | None = None
        self._status_at = 0.0

    async def __call__(
        self, request: WorkerRequest | AnyCheckpointCommand | AwaitSaveDuties | AskPeers, *, timeout: float
    ) -> Reply:
        """Raises Rejected, or Unavailable: then a command may still be applied."""
        end_at = time.monotonic() + timeout
        if isinstance(request, WorkerNews):
            node, incarnation = self._who()
            self._observe(replace(request, node=node, incarnation=incarnation))
            return Done()
        if isinstance(request, AwaitSaveDuties | AskPeers):
            return await self._send_named(request, end_at)
        if isinstance(request, AskStatus):
            return await self._ask_status(end_at)
        if isinstance(request, Query):
            return await self._call(request, timeout=timeout)
        try:
            async with asyncio.timeout(timeout):
                await self._under_way.acquire()
        except TimeoutError:
            raise Unavailable(f"{MAX_RELAYED} commands of this node already wait for the master") from None
        try:
            if isinstance(request, _Named):
                return await self._send_named(request, end_at)
            return await self._call(request, timeout=max(end_at - time.monotonic(), 0.0))
        finally:
            self._under_way.release()

    async def _ask_status(self, end_at: float) -> Reply:
        try:
            async with asyncio.timeout(max(end_at - time.monotonic(), 0.0)), self._asking_status:
                if self._status is None or time.monotonic() - self._status_at > STATUS_FRESH:
                    self._status = await self._call(AskStatus(), timeout=max(end_at - time.monotonic(), 0.0))
                    self._status_at = time.monotonic()
                return self._status
        except TimeoutError:
            raise Unavailable("The master did not answer the question about the job's state in time.") from None

    async def _send_named(self, request: _Named, end_at: float) -> Reply:
        """Once more, where the refusal concerns the sending and not what was asked for."""
        former = self._who()
        try:
            return await self._send(request, end_at)
        except Rejected as error:
            # It was refused before, and the answer lost with the stream: had it been applied, its reply would be stored.
            was_refused = error.code == ErrorCode.TOO_OLD
            # The same life under another number: a master without its journal has numbered the nodes anew.
            is_renamed = error.code == ErrorCode.WRONG_SENDER and self._is_renamed(former)
            if not was_refused and not is_renamed:
                raise
            return await self._send(request, end_at)

    def _is_renamed(self, former: tuple[NodeId, Incarnation]) -> bool:
        node, incarnation = self._who()
        return incarnation == former[1] and node != former[0]

    async def _send(self, request: _Named, end_at: float) -> Reply:
        node, incarnation = self._who()
        named = (
            replace(request, node=node)
            if isinstance(request, AskPeers)
            else replace(request, node=node, incarnation=incarnation)
        )
        return await self._call(named, timeout=max(end_at - time.monotonic(), 0.0))
