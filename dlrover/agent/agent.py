"""
The agent of a node: follows what the master wants of it, and tells what happened here.

What it does is decided in `decisions`, from the newest wish and the newest facts; here its decisions meet processes, sockets and
signals. `_follow` never waits for workers to stop or for the master to answer: both happen in tasks of their own, so a
master that is away delays nothing and workers train on without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec import UNSET, UnsetType

from dlrover.agent.acting import Acting
from dlrover.agent.config import AgentConfig, AgentResult
from dlrover.agent.decisions.decisions import AgentDecisions, AgentTerms
from dlrover.agent.decisions.departure import Departure, broken, by_signal, preempted
from dlrover.agent.deliveries import Deliveries
from dlrover.agent.failover import Failover
from dlrover.agent.leaving import Leaving
from dlrover.agent.monitor.config_tuner import FILE_NAME, ConfigTuner
from dlrover.agent.monitor.stopped import StoppedProcesses
from dlrover.agent.node_check import CheckOutcome, CheckRunner, RunTask
from dlrover.agent.offers import Offers
from dlrover.agent.preemption import wait_for_notice
from dlrover.agent.recovery import Recovery
from dlrover.agent.relay import Relay
from dlrover.agent.seams import AgentPatience, BuildGroup, Connect, Exchange, WatchProtocol
from dlrover.agent.workers.driver import WorkerDriver
from dlrover.agent.workers.failures import fit_into_report
from dlrover.agent.workers.group import Failed, Finished, PortOffer
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.check import ExitClass, ReportCheck
from dlrover.protocol.messages.checkpoint import HeldSnapshot
from dlrover.protocol.messages.fleet import Strategy
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    Check,
    Desired,
    FailureKind,
    Heartbeat,
    Micros,
    NodeRank,
    PlatformId,
    ReportFailure,
    Round,
    WorldSpec,
)
from dlrover.protocol.messages.watch import StepShape
from dlrover.protocol.rpc.client import AgentChannel

log = logging.getLogger("dlrover.agent")

_USUAL_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_OF_OUR_OWN_DOING = (
    signal.SIGPIPE, signal.SIGXFSZ, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS,
    signal.SIGTRAP,
)  # fmt: skip
"""A process gets these for what it does itself: a peer that hung up must not look like an order to leave."""


class Agent:
    """One per node. Built by `__main__`, run once."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        token: str,
        local_world_size: int,
        build_group: BuildGroup,
        step: Callable[[], int | None],
        snapshot_step: Callable[[], int | None] | None = None,
        has_whole_state: Callable[[], bool] | None = None,
        run_check: RunTask | None = None,
        on_break: Callable[[], None] | None = None,
        promise: Callable[[], tuple[HeldSnapshot, ...]] | None = None,
        on_leaving: Callable[[], None] | None = None,
        warm_up: Callable[[float], Awaitable[None]] | None = None,
        exchange: Exchange | None = None,
        watch: WatchProtocol | None = None,
        failover: Failover | None = None,
        settle_output: Callable[[Callable[[int], bool]], None] | None = None,
        connect: Connect = AgentChannel,
        patience: AgentPatience | None = None,
    ) -> None:
        """
        `has_whole_state` says whether the workers can go on without the memory of another node.
        `run_check` is needed where the job's terms ask for a node check. `on_break` is told when workers failed or were stopped for
        good: what they left in memory may be worth keeping; `promise` says what of it will be written after a farewell. `on_leaving` is told before the farewell of a node that goes by itself. `exchange` has the snapshots of workers ready before they start. `watch` is asked for what workers do, `failover` for what shall follow a failure. `settle_output`
        is told whose last words the console may have, by global rank. `patience`: by default what the terms say."""
        detection = config.terms.detection
        self._config = config
        self._patience = patience or AgentPatience(heartbeat=detection.heartbeat, lease=detection.lease)
        self._step = step
        self._snapshot_step = snapshot_step or (lambda: None)
        self._has_whole_state = has_whole_state or (lambda: False)
        self._on_break = on_break or (lambda: None)
        self._exchange = exchange
        self._watch = watch
        self._stopped = StoppedProcesses()
        self._launcher_pid = os.getppid()
        self._clock_offset = 0
        """Microseconds to add to our monotonic clock for the master's."""
        self._signal: signal.Signals | None = None
        self.told_to_end = asyncio.Event()
        """A signal came: this process shall end. Also set after `run`, while the last saves are written."""
        self._news = asyncio.Event()

        self._offers = Offers(config.host, config.host_ports)
        self._driver = WorkerDriver(
            lambda world: build_group(world, node_rank=self._me.node_rank, master_now=self._master_now),
            on_outcome=self._on_outcome,
            on_error=lambda error: self._leave(broken(str(error))),
            ready=lambda: self._check.settle(),
            prepare=self._prepare,
            on_stopped=self._on_stopped,
        )
        self._check = CheckRunner(
            _refuse_check if run_check is None else run_check,
            start=lambda coroutine: self._start_task(coroutine, "node check"),
            ready=self._driver.settle,
            on_outcome=self._on_checked,
        )
        identity = _identity(config, local_world_size, peer="" if exchange is None else exchange.address)
        terms = AgentTerms(
            master_addr=config.master_addr,
            master_grace=config.master_grace,
            first_connection=self._patience.first_connection,
            finished=self._patience.finished,
            lease=self._patience.lease,
            coordinator_port=config.coordinator_port,
            has_failover=failover is not None,
        )
        self._warm_up = warm_up
        self._decisions = AgentDecisions(identity, self._driver, terms, is_warm=warm_up is None)
        self._me = self._decisions.membership
        self._channel = connect(
            config.master_addr,
            token=token,
            tls=config.tls,
            attach=self._decisions.presentation,
            on_attached=self._on_attached,
            on_desired=self._on_desired,
            on_order=None if watch is None else watch.take_order,
            on_blocked=self._on_blocked,
            find_address=config.find_master if config.master_file else None,
        )
        if watch is not None:
            watch.connect(self._channel.observe, self._me.who, self._master_now)
        self.relay = Relay(self._channel.call, self._me.who, self._channel.observe)
        """For the requests of our workers."""
        self._recovery = Recovery(
            self._channel.call,
            start=lambda coroutine: self._start_task(coroutine, "recovery"),
            first_step=(lambda _round: None) if watch is None else watch.first_step,
            is_over=lambda round_: self._driver.running_round != round_,
            settle_output=settle_output or (lambda _is_shown: None),
            shares_console_as=(lambda: self._me.node_rank) if config.platform_node >= 0 else None,
        )
        self._deliveries = Deliveries(
            self._channel.call,
            start=self._start_task,
            on_refused=lambda command, code: self._acting.do(self._decisions.mend(command, code)),
            timeout=config.master_grace + self._patience.finished,
        )
        self._acting = Acting(
            self._decisions,
            self._patience,
            driver=self._driver,
            check=self._check,
            offers=self._offers,
            recovery=self._recovery,
            deliveries=self._deliveries,
            reattach=self._channel.reattach,
            warm_up=warm_up,
            failover=failover,
            start=self._start_task,
            on_news=self._news.set,
        )
        self._leaving = Leaving(
            self._decisions,
            driver=self._driver,
            channel=self._channel,
            deliveries=self._deliveries,
            recovery=self._recovery,
            farewell_timeout=self._patience.farewell,
            promise=promise or (lambda: ()),
            on_leaving=on_leaving or (lambda: None),
            on_break=self._on_break,
            settle_output=settle_output or (lambda _is_shown: None),
        )

    async def run(self) -> AgentResult:
        loop = asyncio.get_running_loop()
        for number in sorted({*_USUAL_SIGNALS, *self._config.signals}.difference(_OF_OUR_OWN_DOING)):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                helpers = [
                    self._start_task(self._keep_channel(), "channel"),
                    self._start_task(self._heartbeats(), "heartbeats"),
                    self._start_task(self._driver.run(), "driver"),
                ]
                if self._watch is not None:
                    helpers.append(self._start_task(self._watch.run(), "watch"))
                if self._config.is_tuned:
                    path = os.path.join(self._config.runtime_dir, FILE_NAME)
                    helpers.append(self._start_task(ConfigTuner(self._channel.call, path).run(), "tuner"))
                if self._config.preemption_file:
                    helpers.append(self._start_task(self._watch_for_preemption(), "preemption"))
                result = await self._leaving.go(await self._follow())
                self._recovery.close()
                await self._channel.close()
                await self._check.close()
                for helper in [*helpers, *self._acting.tasks]:
                    helper.cancel()
        finally:
            self._offers.drop()
        return result

    def _start_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.create_task(coroutine, name=name)

    async def _follow(self) -> Departure:
        while True:
            self._news.clear()
            self._acting.do(self._decisions.follow(time.monotonic(), self._channel.outage()))
            if self._acting.departure is not None:
                return self._acting.departure
            await self._news.wait()

    async def _prepare(self, world: WorldSpec) -> None:
        if self._exchange is not None:
            await self._exchange.enter(world, node=self._me.node, node_rank=self._me.node_rank, ask=self.relay)

    # What the master and the workers tell us.

    def _on_attached(self, attached: Attached) -> None:
        acts = self._decisions.attached(attached)
        if acts:
            log.warning(
                "The master considered this node lost and removed it from the job. The node stops its workers "
                "and joins again."
            )
        self._acting.do(acts)
        self._clock_offset = attached.now - time.monotonic_ns() // 1000
        if self._watch is not None:
            self._watch.attached()
        log.info(
            "attached node=%d node_rank=%d incarnation=%d", attached.node, attached.node_rank, attached.incarnation
        )

    def _on_desired(self, desired: Desired) -> None:
        if self._decisions.take(desired):
            self._news.set()

    def _on_blocked(self, reason: str) -> None:
        # Where nodes share a console, whoever shows the state of the job there shows this too.
        level = logging.WARNING if self._config.platform_node < 0 else logging.INFO
        log.log(level, "%s", reason or "The master can write its journal again, and the job continues.")

    def _on_outcome(self, round_: Round, outcome: Finished | Failed) -> None:
        if self._watch is not None:
            self._watch.report()  # before the round ends: what its workers did last is known only now
        self._recovery.look()
        if isinstance(outcome, Finished):
            self._acting.do(self._decisions.finished(round_, outcome.step, time.monotonic()))
            self._news.set()
            return
        for failure in outcome.failures:
            log.info("global rank %d failed: %s", failure.global_rank, failure.message)
        if not self._me.is_leaving and self._decisions.task is None:
            first = outcome.failures[0]
            self._recovery.began(round_, f"global rank {first.global_rank} failed: {first.message}")
        report = ReportFailure(
            node=self._me.node,
            incarnation=self._me.incarnation,
            round=round_,
            failures=fit_into_report(outcome.failures),
            step=outcome.step,
            lived=outcome.lived,
            reach=outcome.reach,
            has_whole_state=self._needs_no_other(outcome),
            shape=self._shape_without_memory(round_, outcome),
        )
        self._acting.do(self._decisions.failed(report))

    def _shape_without_memory(self, round_: Round, outcome: Failed) -> StepShape | UnsetType:
        """What a step was for the first worker whose memory did not suffice."""
        failed = (each for each in outcome.failures if each.kind is FailureKind.MEMORY_ERROR)
        first = next(failed, None)
        return UNSET if first is None or self._watch is None else self._watch.shape(round_, first.global_rank)

    def _needs_no_other(self, outcome: Failed) -> bool:
        """Asked only where another node may be lost: to look into the segments takes a moment."""
        is_peer_lost = any(failure.kind is FailureKind.PEER_LOST for failure in outcome.failures)
        is_copied = self._exchange is not None and self._exchange.copied_step is not None
        return is_peer_lost and (is_copied or self._has_whole_state())

    def _on_stopped(self, round_: Round) -> None:
        """Before other workers can start, and after those of the round have written their last."""
        if round_ != self._decisions.finished_round:
            self._on_break()

    def _on_checked(self, round_: Round, outcome: CheckOutcome) -> None:
        level = logging.INFO if outcome.exit_class is ExitClass.OK else logging.WARNING
        log.log(
            level,
            "node check round=%d %s elapsed=%.0f ms %s",
            round_,
            outcome.exit_class.name.lower(),
            outcome.elapsed_ms,
            outcome.message,
        )
        report = ReportCheck(
            node=self._me.node,
            incarnation=self._me.incarnation,
            round=round_,
            exit_class=outcome.exit_class,
            elapsed_ms=outcome.elapsed_ms,
            bandwidth_gbps=outcome.bandwidth_gbps,
            message=outcome.message,
        )
        self._deliveries.tell(report)

    @property
    def signal(self) -> signal.Signals | None:
        """The first one that told us to end."""
        return self._signal

    def _on_signal(self, number: int) -> None:
        self._signal = self._signal or signal.Signals(number)
        self.told_to_end.set()
        self._leave(by_signal(self._signal, is_alone=os.getppid() != self._launcher_pid))

    async def _watch_for_preemption(self) -> None:
        await wait_for_notice(self._config.preemption_file)
        self._leave(preempted(f"{self._config.preemption_file} announced that this machine will be taken away"))

    def _leave(self, departure: Departure) -> None:
        self._decisions.leave(departure)
        self._news.set()

    # Talking.

    async def _keep_channel(self) -> None:
        if self._warm_up is not None and self._config.terms.strategy is Strategy.PS:
            # Parameter servers change when all of the next set are there: one that still has to import would keep the others waiting.
            await self._warm_up(self._patience.warm_up)
        try:
            await self._channel.run()
        except Rejected as error:
            self._decisions.rejected(error.code, str(error))
            self._news.set()

    async def _heartbeats(self) -> None:
        while True:
            wakes_at = time.clock_gettime(time.CLOCK_BOOTTIME) + self._patience.heartbeat * random.uniform(0.8, 1.2)
            await asyncio.sleep(wakes_at - time.clock_gettime(time.CLOCK_BOOTTIME))
            away = time.clock_gettime(time.CLOCK_BOOTTIME) - wakes_at  # the nap itself is no absence
            if acts := self._decisions.woke(away):
                log.warning(
                    "this agent was paused for %.0f s. It kills its workers first, because the master may have "
                    "replaced the node",
                    away,
                )
                self._acting.do(acts)
            for pid in self._stopped.look(self._driver.pids) if self._decisions.task is not None else ():
                self._acting.do(self._decisions.found_stopped(pid))
            if self._channel.outage():
                self._news.set()  # how long the master is away is the one fact that no event announces
            elif self._me.node >= 0:
                self._channel.beat(
                    Heartbeat(
                        node=self._me.node,
                        incarnation=self._me.incarnation,
                        step=self._step(),
                        snapshot_step=self._snapshot_step(),
                        copied_step=None if self._exchange is None else self._exchange.copied_step,
                    )
                )
                if self._watch is not None:
                    self._watch.report()

    def _master_now(self) -> Micros:
        return Micros(time.monotonic_ns() // 1000 + self._clock_offset)


def _identity(config: AgentConfig, local_world_size: int, peer: str) -> Attach:
    return Attach(
        launch=config.launch,
        host=config.host,
        terms=config.terms,
        local_world_size=local_world_size,
        node_rank=None if config.node_rank is None else NodeRank(config.node_rank),
        life=os.urandom(8).hex(),  # tells this process from a former one of the same launch
        place=config.place,
        group=config.group,
        platform_node=PlatformId(config.platform_node),
        node_type=config.node_type,
        name=config.node_name,
        node_ip=config.node_ip,
        foreign_node=config.foreign_node,
        peer=peer,
    )


async def _refuse_check(check: Check, node_rank: NodeRank, offer: PortOffer | None) -> CheckOutcome:
    """An agent whose job has no check is never asked for one, unless the master is of another job."""
    return CheckOutcome(ExitClass.SETUP, message="this agent was started without a node check")
