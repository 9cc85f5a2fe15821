"""The whole service: store, desk, both ports and the hourly pruning, from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from sqlalchemy import Engine

from dlrover.brain.config import ServiceTerms
from dlrover.brain.desk import BrainDesk
from dlrover.brain.metrics import BrainMetrics
from dlrover.brain.page import HttpDoor, HttpServer
from dlrover.brain.rates import SendRates
from dlrover.brain.service import BrainServer
from dlrover.brain.store.database import check_version, shown_url
from dlrover.brain.store.pruning import prune
from dlrover.brain.store.store import BrainStore
from dlrover.brain.tenants import REREAD_EVERY, Doorkeeper, TokenHolder
from dlrover.protocol.addresses import is_loopback
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.brain import BrainQuestion, BrainReply
from dlrover.protocol.messages.frames import Refusal

log = logging.getLogger(__name__)


class RunningBrain:
    """`async with`: it serves inside. Raises ConfigError or Unavailable."""

    def __init__(self, engine: Engine, terms: ServiceTerms, *, clock: Callable[[], float] | None = None) -> None:
        self._terms = terms
        self.store = (
            BrainStore(engine, gather=terms.gather)
            if clock is None
            else BrainStore(engine, gather=terms.gather, clock=clock)
        )
        self.doorkeeper = Doorkeeper(self.store, may_open=is_loopback(terms.host))
        self.desk = BrainDesk(self.store, SendRates(terms.rate), start_patience=terms.start_patience)
        self.metrics = BrainMetrics(lambda: self.desk.num_absurd, lambda: self.store.num_commits)
        self._server = BrainServer(self.doorkeeper, self.desk, self.metrics, terms.tls)
        self._http = HttpServer(HttpDoor(self.store, self.doorkeeper, self.metrics, self._ask), terms.tls)
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0
        self.http_port: int | None = None

    async def __aenter__(self) -> RunningBrain:
        terms = self._terms
        try:
            check_version(self.store.engine)
            self.store.start()
            await self.doorkeeper.refresh()
            if self.doorkeeper.is_useless:
                raise ConfigError(
                    f"Brain cannot listen on {terms.host} for all machines, because no tenant has a token. Make "
                    "one with `dlrover brain tenants add NAME`, or listen on 127.0.0.1."
                )
            self.port = self._server.bind(terms.host, terms.port)
            await self._server.start()
            if terms.http_port is not None:
                self.http_port = self._http.start(terms.host, terms.http_port)
        except BaseException:
            await self._close()
            raise
        self._tasks = [asyncio.create_task(self._reread_tokens()), asyncio.create_task(self._prune())]
        log.info(
            "brain serves host=%s port=%d http=%s database=%s",
            terms.host,
            self.port,
            self.http_port,
            shown_url(self.store.engine.url),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.stop()
        await self._server.stop()
        await asyncio.to_thread(self.store.close)

    async def _ask(self, caller: TokenHolder, question: BrainQuestion) -> BrainReply:
        """For the HTTP door: the same as over gRPC, with the same figures."""
        verdict = await self._server.verdict_on(caller, question, 256)
        if isinstance(verdict, Refusal):
            if verdict.retry_after is not None:
                raise Unavailable(verdict.message, verdict.retry_after, verdict.code)
            raise Rejected(verdict.message, verdict.code)
        return verdict

    async def _reread_tokens(self) -> None:
        while True:
            await asyncio.sleep(REREAD_EVERY)
            with contextlib.suppress(Unavailable):
                await self.doorkeeper.refresh()

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(self._terms.prune_every)
            try:
                deleted = await prune(self.store, self._terms.retention)
            except Unavailable as error:
                log.warning("old data are deleted later reason=%s", error)
                continue
            if any(deleted.values()):
                log.info("pruned %s", " ".join(f"{table}={count}" for table, count in deleted.items()))
