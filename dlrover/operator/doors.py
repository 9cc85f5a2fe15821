"""The two ports of the operator: health for the kubelet, metrics for Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from dlrover.protocol.errors import ConfigError

Readiness = Callable[[], str | None]
"""None: ready; else why not."""


class OperatorMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.actions = Counter(
            "dlrover_operator_actions", "Actions by kind and result.", ("action", "result"), registry=self.registry
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
            try:
                await web.TCPSite(runner, *door).start()
            except OSError as error:
                raise ConfigError(f"The port {door[1]} cannot be opened: {error.strerror or error}.") from error
        yield
