"""The page's own port, inside the master's event loop. Whatever happens to it, the job goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from dlrover.master.web.questions import ASK_PATH
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.rpc.door import Door

log = logging.getLogger(__name__)

STOP_TIMEOUT = 1
"""Seconds that open pages have when the master ends."""
MAX_STRANGERS = 256
"""Connections that show no token, at a time: half requests, TLS handshakes, and people with the form for the token."""
MAX_CONNECTIONS = 1024
"""All together. Beyond it the page answers 503."""
MAX_HEAD = 16 * 1024


class PageServer:
    """`is_known`: whether a request shows the token. All other connections have the limits of `Door`: uvicorn has none for half requests."""

    def __init__(self, app: ASGIApp, tls: TlsConfig | None, *, is_known: Callable[[Scope], bool]) -> None:
        self._app = app
        self._is_known = is_known
        self._door: Door | None = None
        self._watching: asyncio.Future[None] | None = None
        config = uvicorn.Config(
            self._answer,
            log_config=None,
            log_level="error",  # it warns of each bad request
            access_log=False,  # links carry tokens
            interface="asgi3",
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_TIMEOUT,
            timeout_keep_alive=15,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEAD,
            http="h11",
            ws="none",
            ssl_certfile=tls.cert if tls is not None else None,
            ssl_keyfile=tls.key if tls is not None else None,
        )
        self._server = _Server(config)
        self._serving: asyncio.Future[None] | None = None

    def start(self, host: str, port: int) -> int:
        """Gives the port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        listener.setblocking(False)
        bound = int(listener.getsockname()[1])
        self._door = Door(bound, max_outside=MAX_STRANGERS)
        self._watching = asyncio.ensure_future(self._door.run())
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        self._serving.add_done_callback(_ended)
        return bound

    async def stop(self) -> None:
        if self._serving is None:
            return
        if self._watching is not None:
            self._watching.cancel()
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=STOP_TIMEOUT + 1)
        self._serving.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._door is not None, "served before start"
        is_inside = scope["client"] is not None and self._is_known(scope)  # None: the connection is gone already
        with self._door.inside(scope["client"]) if is_inside else contextlib.nullcontext():
            await self._app(scope, receive, send)
        if not is_inside and scope["client"] is not None and scope["path"] == ASK_PATH:
            self._door.refuse(scope["client"])  # a program; a browser without the token was given a form, and stays


class _Server(uvicorn.Server):
    """One that leaves the process's signals alone: they are the master's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _ended(serving: asyncio.Future[None]) -> None:
    if not serving.cancelled() and serving.exception() is not None:
        log.error("The page cannot be shown any more. The job continues.", exc_info=serving.exception())
