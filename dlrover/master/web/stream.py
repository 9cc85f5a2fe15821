"""
News of the board as server-sent events.

One event is what changed since the last one; its id says up to where, so a browser that comes back after a broken connection (it sends the id
by itself) goes on from there. Nothing is queued: a reader that takes long gets one larger difference instead of many small ones, and one that
takes nothing for half a minute is let go.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Receive, Scope, Send

from dlrover.master.view.gatherer import Gatherer

KEEP_ALIVE = 15.0
"""Seconds without news after which a comment is sent: proxies close silent connections."""
STUCK = 30.0
RETRY_MILLIS = 1000
"""After which a browser comes back."""


class EventStream:
    """An ASGI response."""

    def __init__(
        self, gatherer: Gatherer, last_event_id: str, headers: list[tuple[bytes, bytes]], *, stuck: float = STUCK
    ) -> None:
        """`stuck`: seconds that the reader may take for what was sent to it."""
        self._gatherer = gatherer
        self._stuck = stuck
        self._since = _version_of(last_event_id, gatherer.board.life)
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._gatherer.came()
        try:
            await self._gatherer.fresh()
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            leaving = asyncio.ensure_future(_until_gone(receive))
            writing = asyncio.ensure_future(self._write(send))
            try:
                await asyncio.wait({leaving, writing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (leaving, writing):
                    task.cancel()
                await asyncio.gather(leaving, writing, return_exceptions=True)
        finally:
            self._gatherer.went()

    async def _write(self, send: Send) -> None:
        board = self._gatherer.board
        await self._send(send, f"retry: {RETRY_MILLIS}\n\n".encode())
        since = self._since
        with contextlib.suppress(TimeoutError, OSError):
            while True:
                if board.version > since or not since:
                    version, data = board.version, board.encoded(since)
                    since = version
                    await self._send(send, b"id: %s-%d\ndata: %s\n\n" % (board.life.encode(), version, data))
                elif board.is_closed:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                elif not await board.wait_beyond(since, KEEP_ALIVE):
                    await self._send(send, b": nothing new\n\n")

    async def _send(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(self._stuck):
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _version_of(event_id: str, life: str) -> int:
    """0, for everything, unless the id is one of ours."""
    owner, _, version = event_id.partition("-")
    is_ours = owner == life and version.isascii() and version.isdigit() and len(version) < 16
    return int(version) if is_ours else 0
