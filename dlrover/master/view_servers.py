"""
Everything for people who watch a job, put together: the gatherer, the metrics and the page. Only what was asked for exists.

None of it may harm the job. A port that is taken or a page that breaks is told in the log, and the job goes on without.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import ssl
from typing import TYPE_CHECKING

from dlrover.master.config import MasterConfig
from dlrover.master.loop.loop import MasterLoop
from dlrover.master.view.gatherer import Gatherer
from dlrover.master.view.metrics import CONTENT_TYPE, JobMetrics
from dlrover.master.view.metrics_server import MetricsServer
from dlrover.master.view.roles import gather_roles
from dlrover.master.view.sources import gather_data, gather_diagnosis, gather_events, gather_goodput, gather_scaling
from dlrover.master.web.access import Access
from dlrover.master.web.logs import LogReader
from dlrover.protocol.addresses import Address
from dlrover.protocol.messages.job import Micros, NodeId
from dlrover.protocol.messages.watch import WatchObservation

if TYPE_CHECKING:
    from dlrover.master.web.server import PageServer

log = logging.getLogger(__name__)

LAST_LOOK = 0.5
"""Seconds for looking at the end of the job, for those who watch it."""


class ViewServers:
    def __init__(self, config: MasterConfig, master_loop: MasterLoop, token: str) -> None:
        self.dashboard = ""
        self.link = ""
        """Where people open the page: where it is served, or the proxy in front of it."""
        """Address of the page; empty: there is none."""
        self.metrics = ""
        self.gatherer = Gatherer(master_loop)
        self.job_metrics = JobMetrics(
            self.gatherer, last_heard=master_loop.last_heard, num_in_work=lambda: master_loop.num_in_work
        )
        self._config = config
        self._master_loop = master_loop
        self._access = Access(token)
        self._logs = LogReader(config.log_file, order=master_loop.order, workers=self._workers)
        self._page: PageServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._looking: asyncio.Future[None] | None = None
        self.gatherer.sources += [gather_data, gather_events, gather_goodput, gather_scaling, gather_diagnosis]
        if config.roles_file:
            self.gatherer.sources.append(gather_roles(config.roles_file))
        master_loop.listeners.on_decided += [self.gatherer.hear, self.job_metrics.hear]

    def observe(self, observation: WatchObservation, now: Micros) -> None:
        self.gatherer.observe(observation, now)
        self._logs.observe(observation, now)

    async def start(self) -> None:
        self._looking = asyncio.ensure_future(self.gatherer.run())
        self._looking.add_done_callback(_say_bug)
        if self._config.dashboard_port >= 0:
            self._start_page()
        if self._config.metrics_port >= 0:
            await self._start_metrics()

    async def stop(self) -> None:
        if self.gatherer.num_viewers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_LOOK):
                    await self.gatherer.look()
        if self._looking is not None:
            self._looking.cancel()
        self.gatherer.board.close()
        if self._page is not None:
            await self._page.stop()
        if self._metrics_server is not None:
            self._metrics_server.stop()

    def _start_page(self) -> None:
        from dlrover.master.web.app import Web
        from dlrover.master.web.hosts import Hosts, parse_urls
        from dlrover.master.web.server import PageServer

        config = self._config
        web = Web(
            self.gatherer,
            access=self._access,
            ask=self._master_loop.ask,
            logs=self._logs,
            metrics=self.job_metrics.render,
            metrics_type=CONTENT_TYPE,
            hosts=Hosts(config.dashboard_host, config.dashboard_url),
        )
        try:
            page = PageServer(web.app(), config.tls, is_known=web.is_known)
            port = _start_anywhere(page, config.dashboard_host, config.dashboard_port)
        except OSError as error:
            log.error(
                "the dashboard could not be started address=%s port=%d reason=%s",
                config.dashboard_host,
                config.dashboard_port,
                error,
            )
            return
        self._page = page
        scheme = "http" if config.tls is None else "https"
        self.dashboard = f"{scheme}://{Address(config.dashboard_host, port)}/"
        proxies = parse_urls(config.dashboard_url)
        self.link = f"{proxies[0]}/" if proxies else self.dashboard
        log.info("dashboard %s link=%s", self.dashboard, self.link)

    async def _start_metrics(self) -> None:
        config = self._config
        metrics_server = MetricsServer(
            self.job_metrics.render, lambda token: self._access.scope_of_token(token) is not None
        )
        try:
            tls = None
            if config.tls is not None:
                tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                tls.load_cert_chain(config.tls.cert, config.tls.key)
            port = await metrics_server.start(config.metrics_host, config.metrics_port, tls)
        except OSError as error:
            log.error(
                "the metrics could not be served address=%s port=%d reason=%s",
                config.metrics_host,
                config.metrics_port,
                error,
            )
            return
        self._metrics_server = metrics_server
        scheme = "http" if config.tls is None else "https"
        self.metrics = f"{scheme}://{Address(config.metrics_host, port)}/metrics"
        log.info("metrics %s", self.metrics)

    def _workers(self) -> dict[int, NodeId]:
        return {
            worker.global_rank: node for node, report in self.gatherer.progress.items() for worker in report.workers
        }


def _start_anywhere(page: PageServer, host: str, port: int) -> int:
    """On another port if that one is taken: the second job of a host shall be seen, too."""
    try:
        return page.start(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        log.warning("port of the dashboard is taken port=%d, choosing another", port)
        return page.start(host, 0)


def _say_bug(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error(
            "The page and the metrics are not updated any more because of a bug. The job continues.",
            exc_info=task.exception(),
        )
