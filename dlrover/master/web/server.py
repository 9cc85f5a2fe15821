"""The page's own port, inside the master's event loop. Whatever happens to it, the job goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from dlrover.protocol.addresses import TlsConfig

log = logging.getLogger(__name__)

STOP_TIMEOUT = 1
"""Seconds that open pages have when the master ends."""
MAX_CONNECTIONS = 256
MAX_HEAD = 16 * 1024


class PageServer:
    def __init__(self, app: ASGIApp, tls: TlsConfig | None) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,  # links carry tokens
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
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        self._serving.add_done_callback(_ended)
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        if self._serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=STOP_TIMEOUT + 1)
        self._serving.cancel()


class _Server(uvicorn.Server):
    """One that leaves the process's signals alone: they are the master's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _ended(serving: asyncio.Future[None]) -> None:
    if not serving.cancelled() and serving.exception() is not None:
        log.error("the page is gone, the job goes on", exc_info=serving.exception())
