"""
The two ports of the operator: health for the kubelet, metrics for Prometheus.

Every program in the cluster reaches them, and aiohttp lets a connection be silent for ever. So connections are few and short: strangers who
keep theirs open take neither the memory nor the last descriptor of the operator, which needs both to look after jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from dlrover.protocol.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web_protocol, web_server

Readiness = Callable[[], str | None]
"""None: ready; else why not."""
MAX_CONNECTIONS = 256
"""Of a port, at a time. The oldest one goes first: a client that wants an answer has it within milliseconds."""
PATIENCE = 10.0
"""Seconds for which a connection lasts at most, and half of that at least. Prometheus and kubelets open another one."""


class OperatorMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.actions = Counter(
            "dlrover_operator_actions",
            "Actions of the operator, by kind and result.",
            ("action", "result"),
            registry=self.registry,
        )
        self.jobs = Gauge("dlrover_operator_jobs", "ElasticJobs by phase.", ("phase",), registry=self.registry)
        self.is_leader = Gauge("dlrover_operator_leader", "1 while this operator acts.", registry=self.registry)

    def report(self, action: str, result: str) -> None:
        self.actions.labels(action, result).inc()

    def count_jobs(self, phases: list[str]) -> None:
        self.jobs.clear()
        for phase in phases:
            self.jobs.labels(phase or "New").inc()


def parse_door(text: str, option: str) -> tuple[str | None, int] | None:
    """`:8080` → all addresses; `0` → None, the door stays closed. Raises `ConfigError`."""
    if text == "0":
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{option} {text}: give HOST:PORT or :PORT with a port from 0 to 65535, or 0 for no port.")
    return host.strip("[]") or None, int(port)


@contextlib.asynccontextmanager
async def open_doors(
    health: tuple[str | None, int] | None,
    metrics: tuple[str | None, int] | None,
    *,
    readiness: Readiness,
    numbers: OperatorMetrics,
    count: Callable[[], list[str]],
    patience: float = PATIENCE,
) -> AsyncIterator[None]:
    """Raises `ConfigError` if a port is taken."""
    from aiohttp import web

    async def alive(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(request: web.Request) -> web.Response:
        trouble = readiness()
        return web.Response(text="ok\n") if trouble is None else web.Response(text=f"{trouble}\n", status=503)

    async def show(request: web.Request) -> web.Response:
        numbers.count_jobs(count())
        body = generate_latest(numbers.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async with contextlib.AsyncExitStack() as stack:
        routes = ((health, {"/healthz": alive, "/readyz": ready}), (metrics, {"/metrics": show}))
        for door, pages in routes:
            if door is None:
                continue
            app = web.Application()
            for path, page in pages.items():
                app.router.add_get(path, page)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            assert runner.server is not None, "it was set up"
            crowd = _Crowd(runner.server, patience)
            try:
                listening = await asyncio.get_running_loop().create_server(crowd.admit, *door, backlog=128)
            except OSError as error:
                raise ConfigError(f"The port {door[1]} cannot be opened: {error.strerror or error}.") from error
            stack.callback(listening.close)
            looking = asyncio.create_task(crowd.thin_out())
            stack.callback(looking.cancel)
        yield


class _Crowd:
    """The connections of one port."""

    def __init__(self, server: web_server.Server, patience: float) -> None:
        self._server = server
        self._patience = patience

    def admit(self) -> web_protocol.RequestHandler:
        """For a new connection."""
        present = self._server.connections  # the oldest first
        for each in present[: max(0, len(present) + 1 - MAX_CONNECTIONS)]:
            each.force_close()
        return self._server()

    async def thin_out(self) -> None:
        """Until cancelled. Who is here at two looks has been here long enough; a timer for each would remember those who have gone."""
        seen: set[web_protocol.RequestHandler] = set()
        while True:
            await asyncio.sleep(self._patience / 2)
            present = set(self._server.connections)
            for each in present & seen:
                each.force_close()
            seen = present
