"""
Carries out what the agent decided, act by act. None of it waits: what takes time happens in tasks, and comes back as a fact.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, assert_never

from dlrover.agent.decisions.acts import (
    Act,
    AskFailover,
    BindPort,
    Depart,
    DropOffer,
    EnterWhenStopped,
    Interrupted,
    KillWorkers,
    Note,
    OfferPort,
    Reattach,
    StartCheck,
    StartWorkers,
    StopCheck,
    StopWorkers,
    TellMaster,
    Waiting,
    WarmUp,
)
from dlrover.agent.decisions.decisions import AgentDecisions
from dlrover.agent.decisions.departure import Departure
from dlrover.agent.deliveries import Deliveries
from dlrover.agent.failover import Failover
from dlrover.agent.node_check import CheckRunner
from dlrover.agent.offers import Offers
from dlrover.agent.recovery import Recovery
from dlrover.agent.seams import AgentPatience
from dlrover.agent.workers.driver import WorkerDriver
from dlrover.protocol.messages.job import Check, ReportFailure, Wait, WorldSpec

log = logging.getLogger("dlrover.agent")


class Acting:
    """The hands of one agent."""

    def __init__(
        self,
        decisions: AgentDecisions,
        patience: AgentPatience,
        *,
        driver: WorkerDriver,
        check: CheckRunner,
        offers: Offers,
        recovery: Recovery,
        deliveries: Deliveries,
        reattach: Callable[[], Coroutine[Any, Any, None]],
        warm_up: Callable[[float], Awaitable[None]] | None,
        failover: Failover | None,
        start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        on_news: Callable[[], None],
    ) -> None:
        """`start`: a task of the agent. `on_news`: there is something to follow."""
        self._decisions = decisions
        self._patience = patience
        self._driver = driver
        self._check = check
        self._offers = offers
        self._recovery = recovery
        self._deliveries = deliveries
        self._reattach = reattach
        self._warm_up = warm_up
        self._failover = failover
        self._start = start
        self._on_news = on_news
        self._is_wait_timed = False
        """Whether a timer looks if this node still waits for its first world."""
        self.departure: Departure | None = None
        """How this agent shall go; None: it stays."""
        self.tasks: list[asyncio.Task[None]] = []
        """To be cancelled when the agent goes."""

    def do(self, acts: list[Act]) -> None:
        for act in acts:
            match act:
                case StartWorkers(world=world):
                    self._start_workers(world)
                case StopWorkers(cause=cause, is_patient=is_patient):
                    self._driver.want_none(cause, is_patient=is_patient)
                case KillWorkers():
                    self._driver.kill()
                case StartCheck(check=check):
                    self._start_check(check)
                case StopCheck():
                    self._check.want_none()
                case OfferPort(join=join):
                    self.do(self._decisions.joining.offer(join))
                case BindPort():
                    self._bind(act)
                case DropOffer():
                    self._offers.drop()
                case WarmUp():
                    assert self._warm_up is not None, "nothing is cold"
                    self.tasks.append(self._start(self._enter_when_warm(self._warm_up), "warm-up"))
                case EnterWhenStopped():
                    self._start(self._enter_when_stopped(act), "enter")
                case Interrupted(round=round_, reason=reason):
                    log.info("workers of round %d stop: %s", round_, reason)
                    self._recovery.began(round_, reason)
                case Waiting(reason=reason):
                    self._wait(reason)
                case Note(text=text):
                    log.warning("%s", text)
                case TellMaster(command=command):
                    self._deliveries.tell(command)
                case AskFailover(report=report):
                    self._deliveries.ask(self._ask_failover(report))
                case Reattach():
                    self._start(self._reattach(), "reattach")
                case Depart(departure=departure):
                    self.departure = departure
                case _:
                    assert_never(act)

    def _bind(self, act: BindPort) -> None:
        joining = self._decisions.joining
        try:
            address, is_reused = self._offers.bind(act.port)
        except OSError as error:
            is_idle = self._driver.is_settled and self._check.is_settled
            self.do(self._decisions.not_offered(act.join, str(error), is_idle=is_idle))
            self._on_news()
        else:
            self.do(joining.offered(act.join, address, is_reused=is_reused))

    async def _ask_failover(self, report: ReportFailure) -> None:
        assert self._failover is not None, "no extension is to be asked"
        self.do(self._decisions.decided(await self._failover.decide(report, self._decisions.membership.node_rank)))

    async def _enter_when_warm(self, warm_up: Callable[[float], Awaitable[None]]) -> None:
        await warm_up(self._patience.warm_up)
        self.do(self._decisions.joining.warmed_up())

    async def _enter_when_stopped(self, act: EnterWhenStopped) -> None:
        await self._driver.settle()
        await self._check.settle()
        self.do(self._decisions.joining.stopped(act.join))

    def _start_workers(self, world: WorldSpec) -> None:
        log.info(
            "round=%d group_rank=%d of %d first_global_rank=%d world_size=%d coordinator=%s",
            world.round,
            world.group_rank,
            world.group_world_size,
            world.first_global_rank,
            world.world_size,
            world.coordinator,
        )
        if world.task is None:  # a process of a cluster has no round of workers to recover
            self._recovery.running(world)
        self._driver.want(world, self._offers.take())

    def _start_check(self, check: Check) -> None:
        world = check.world
        log.info(
            "node check round=%d phase=%s group_rank=%d of %d coordinator=%s",
            world.round,
            check.phase,
            world.group_rank,
            world.group_world_size,
            world.coordinator,
        )
        self._check.want(check, self._decisions.membership.node_rank, self._offers.take())

    def _wait(self, reason: str) -> None:
        log.info("waiting: %s", reason)
        if not self._decisions.started_round and not self._is_wait_timed:
            self._is_wait_timed = True
            asyncio.get_running_loop().call_later(self._patience.wait_told, self._tell_of_waiting)

    def _tell_of_waiting(self) -> None:
        desired = self._decisions.membership.desired
        if not self._decisions.started_round and desired is not None and isinstance(desired.wish, Wait):
            log.warning(
                "this node has joined the job and waits for a place in a world. To see what the job waits for, "
                "run `dlrover status` on the master's host."
            )
