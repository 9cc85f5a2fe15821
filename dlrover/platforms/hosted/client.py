"""
The local platform as the master sees it: intents and sights over the node host's unix socket.

The nodes are children of the host (`dlrover local`), not of the master. So a master that is killed takes no node along,
and the exit codes of nodes that ended meanwhile are still there for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

import msgspec
from msgspec import Struct

from dlrover.host.ownership import check_server
from dlrover.platforms.base import Capabilities, Intent, LaunchNotTaken, NodeRoom, RoomChanged, Sight, StaleMaster
from dlrover.platforms.hosted.messages import (
    ANSWER,
    REQUEST,
    AskRoom,
    HostAnswer,
    HostRequest,
    IntentRefused,
    LimitNodes,
    ListNodes,
    RefusalKind,
    RoomFound,
    Taken,
    WatchNodes,
)
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.local_frames import pack, read_frame
from dlrover.protocol.messages.fleet import (
    LaunchNode,
    NodeChanged,
    NodesListed,
    PlatformNode,
    RemoveNode,
    Resource,
)

CALL_TIMEOUT = 10.0
"""Seconds for the host's answer. It answers in milliseconds, or tens of them where it sets up a namespace."""
MAX_PAUSE = 2.0
"""Seconds between two attempts to reach a host that is away, at most; the host is on this machine."""


class LocalOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    socket: str
    own_addresses: bool = False
    can_limit_memory: bool = False
    can_cordon: bool = False


class LocalPlatform:
    def __init__(self, options: LocalOptions, job_uid: str) -> None:
        self._socket = options.socket
        self._job_uid = job_uid
        self.capabilities = Capabilities(
            own_addresses=options.own_addresses,
            can_limit_memory=options.can_limit_memory,
            can_cordon=options.can_cordon,
            knows_room=True,
        )

    @classmethod
    def from_options(cls, job_uid: str, options: Mapping[str, object]) -> LocalPlatform:
        try:
            return cls(msgspec.convert(dict(options), LocalOptions), job_uid)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"The options of the local platform are not valid: {error}. Start the job with `dlrover local`, "
                "which sets them."
            ) from error

    async def apply(self, intent: Intent) -> None:
        answer = await self._ask(intent)
        if isinstance(answer, IntentRefused):
            raise _error_of(answer, intent)
        if not isinstance(answer, Taken):
            raise Unavailable(_unexpected("an order to start or remove a node", answer))

    async def list(self) -> tuple[PlatformNode, ...]:
        answer = await self._ask(ListNodes())
        if not isinstance(answer, NodesListed):
            raise Unavailable(_unexpected("a request for the list of nodes", answer))
        return answer.nodes

    async def watch(self) -> AsyncIterator[Sight]:
        pause = 0.0
        while True:
            with contextlib.suppress(Unavailable):
                async with contextlib.aclosing(self._watch_once()) as sights:
                    async for sight in sights:
                        pause = 0.0
                        yield sight
            # The host ends after the master. If it is not there, it was killed, and so will we be.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(MAX_PAUSE, max(0.05, 2 * pause))

    async def room(self, resource: Resource) -> NodeRoom:
        answer = await self._ask(AskRoom(resource))
        if isinstance(answer, IntentRefused):
            raise Rejected(answer.message, code=answer.code)
        if not isinstance(answer, RoomFound):
            raise Unavailable(_unexpected("a request for its free room", answer))
        return NodeRoom(answer.free, answer.reason)

    async def close(self) -> None:
        """Nothing is held between two calls; a watch lets go of its own when it is closed."""

    async def _watch_once(self) -> AsyncGenerator[Sight, None]:
        reader, writer = await self._connect()
        try:
            writer.write(pack(REQUEST.encode(HostRequest(job_uid=self._job_uid, body=WatchNodes()))))
            while (answer := await self._receive(reader)) is not None:
                if isinstance(answer, NodesListed | NodeChanged | RoomChanged):
                    yield answer
        finally:
            writer.close()

    async def limit_nodes(self, most: int) -> None:
        """For people: so many nodes may run on this host from now on. Raises `Rejected`, `Unavailable`."""
        answer = await self._ask(LimitNodes(most))
        if isinstance(answer, IntentRefused):
            raise Rejected(answer.message, code=answer.code)

    async def _ask(self, body: LaunchNode | RemoveNode | ListNodes | AskRoom | LimitNodes) -> HostAnswer:
        data = pack(REQUEST.encode(HostRequest(job_uid=self._job_uid, body=body)))
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                reader, writer = await self._connect()
                try:
                    writer.write(data)
                    answer = await self._receive(reader)
                finally:
                    writer.close()
        except TimeoutError as error:
            raise Unavailable(
                f"The node host, which is the process that starts the nodes, did not answer at {self._socket} within {CALL_TIMEOUT:g} s. "
                "Check that it is running and not stopped."
            ) from error
        if answer is None:
            raise Unavailable(f"The node host at {self._socket} closed the connection without an answer.")
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError as error:
            raise Unavailable(f"The node host at {self._socket} cannot be reached: {error.strerror}.") from error
        try:
            check_server(writer.get_extra_info("socket"))
        except OSError as error:
            writer.close()
            raise Unavailable(
                f"The master does not trust the node host at {self._socket}: {error.strerror}."
            ) from error
        return reader, writer

    async def _receive(self, reader: asyncio.StreamReader) -> HostAnswer | None:
        try:
            frame = await read_frame(reader)
            return None if frame is None else ANSWER.decode(frame)
        except (OSError, Rejected) as error:
            raise Unavailable(f"The connection to the node host broke: {error}") from error


def _unexpected(asked: str, answer: object) -> str:
    return (
        f"The master sent the node host {asked} and got an unexpected answer ({type(answer).__name__}). Use the same version of "
        "dlrover for both."
    )


def _error_of(refused: IntentRefused, intent: Intent) -> Rejected | Unavailable:
    match refused.kind:
        case RefusalKind.NOT_NOW:
            return LaunchNotTaken(refused.message)
        case RefusalKind.OLD_MASTER:
            return StaleMaster(intent, refused.newest_master_epoch)
        case RefusalKind.BAD:
            return Rejected(refused.message, code=refused.code)
