"""The unix socket of a node host: who may ask, and what is answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import Protocol

from dlrover.host.ownership import peer_credentials
from dlrover.platforms.base import Intent, StaleMaster
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
from dlrover.platforms.hosted.nodes import HostedJob, NodeEvents
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.local_frames import pack, read_frame
from dlrover.protocol.messages.fleet import Resource

log = logging.getLogger(__name__)

REQUEST_TIMEOUT = 10.0
"""Seconds for a request to arrive whole."""


class ServedHost(Protocol):
    """What clients reach by the socket."""

    def job(self, uid: str) -> HostedJob: ...

    def apply(self, job_uid: str, intent: Intent) -> None: ...

    async def room(self, resource: Resource) -> RoomFound: ...

    def limit_nodes(self, most: int) -> None: ...


class HostSocket:
    """Of one host. `start` serves it, `close` hangs up on all clients."""

    def __init__(self, path: str, host: ServedHost) -> None:
        self._path = path
        self._host = host
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._talk, self._path)
        os.chmod(self._path, 0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for talk in tuple(self._talks):
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            await self._converse(reader, writer)
        except (OSError, Rejected, TimeoutError) as error:
            log.info("the node host closed the connection to a client reason=%s", error)
        except asyncio.CancelledError:
            pass  # the host closes; a task that asyncio's server started must not end as cancelled
        finally:
            self._talks.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: socket.socket = writer.get_extra_info("socket")
        _, uid, _ = peer_credentials(peer)
        if uid not in (0, os.geteuid()):
            raise Rejected(f"a process of user {uid} may not use this node host. Only root and user {os.geteuid()} may")
        async with asyncio.timeout(REQUEST_TIMEOUT):
            frame = await read_frame(reader)
        if frame is None:
            return
        request = REQUEST.decode(frame)
        if isinstance(request.body, WatchNodes):
            await self._serve_watch(request.job_uid, reader, writer)
        else:
            await _send(writer, await self._answer(request))

    async def _answer(self, request: HostRequest) -> HostAnswer:
        body = request.body
        if isinstance(body, ListNodes):
            return self._host.job(request.job_uid).listing()
        assert not isinstance(body, WatchNodes), "watches are served elsewhere"
        try:
            if isinstance(body, AskRoom):
                return await self._host.room(body.resource)
            if isinstance(body, LimitNodes):
                self._host.limit_nodes(body.most)
                return Taken()
            self._host.apply(request.job_uid, body)
        except StaleMaster as error:
            newest = self._host.job(request.job_uid).master_epoch
            return IntentRefused(kind=RefusalKind.OLD_MASTER, message=str(error), newest_master_epoch=newest)
        except Rejected as error:
            return IntentRefused(kind=RefusalKind.BAD, message=str(error), code=error.code)
        except Unavailable as error:
            return IntentRefused(kind=RefusalKind.NOT_NOW, message=str(error))
        return Taken()

    async def _serve_watch(self, job_uid: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._host.job(job_uid).watch() as events:
            sending = asyncio.ensure_future(_send_all(writer, events))
            hanging_up = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.wait([sending, hanging_up], return_when=asyncio.FIRST_COMPLETED)
            finally:
                sending.cancel()
                hanging_up.cancel()
                await asyncio.gather(sending, hanging_up, return_exceptions=True)


async def _send_all(writer: asyncio.StreamWriter, queue: NodeEvents) -> None:
    while (answer := await queue.get()) is not None:
        await _send(writer, answer)


async def _send(writer: asyncio.StreamWriter, answer: HostAnswer) -> None:
    writer.write(pack(ANSWER.encode(answer)))
    await writer.drain()
