"""
`/metrics` on a port of its own, for masters without the page.

Written by hand, because a scrape is one small GET: the client library's own server would answer from a thread that reads what the event loop
changes, and the page's framework is an extra that a master with metrics alone need not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable

from dlrover.master.view.metrics import CONTENT_TYPE
from dlrover.protocol.rpc.door import Door

log = logging.getLogger(__name__)

MAX_HEAD = 8 * 1024
TIMEOUT = 10.0
"""Seconds for one scrape, from the first byte to the last."""
MAX_SCRAPES = 16
"""At the same time, of those who show the token."""
MAX_CONNECTIONS = 128
"""At the same time, of which an address has `door.MAX_OF_ADDRESS`."""


class MetricsServer:
    def __init__(self, render: Callable[[], Awaitable[bytes]], may_read: Callable[[str], bool]) -> None:
        """`may_read`: whether a bearer token opens it."""
        self._render = render
        self._may_read = may_read
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Future[None] | None = None
        self._num_scrapes = 0

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Gives the port. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD, ssl=tls)
        bound = int(self._server.sockets[0].getsockname()[1])
        self._watching = asyncio.ensure_future(Door(bound, max_outside=MAX_CONNECTIONS).run())
        return bound

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                status, body = await self._answer(reader)
                writer.write(_response(status, body))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # whoever asked does not want it any more
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, bytes]:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.LimitOverrunError:
            return "431 Request Header Fields Too Large", b"the request is too large\n"
        first, *lines = head.split("\r\n")
        method, _, rest = first.partition(" ")
        if method != "GET" or rest.split(" ")[0].partition("?")[0] != "/metrics":
            return "404 Not Found", b"there is only GET /metrics\n"
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not self._may_read(token.strip()):
            return "401 Unauthorized", b"give the job's token, or its read-only one, as a bearer token\n"
        if self._num_scrapes >= MAX_SCRAPES:
            return "503 Service Unavailable", b"too many scrapes at once\n"
        self._num_scrapes += 1
        try:
            return "200 OK", await self._render()
        finally:
            self._num_scrapes -= 1


def _response(status: str, body: bytes) -> bytes:
    kind = CONTENT_TYPE if status.startswith("200") else "text/plain; charset=utf-8"
    extra = "WWW-Authenticate: Bearer\r\n" if status.startswith("401") else ""
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}Connection: close\r\n\r\n"
    )
    return head.encode() + body
