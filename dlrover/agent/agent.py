"""
The agent of a node: follows what the master wants of it, and tells what happened here.

The master's wish is a level: it may be repeated, or skipped when a newer one exists. `_follow` compares the newest wish and
the newest facts (workers failed or finished, a signal came, the master is away for too long) and sets the target of the
`WorkerDriver`. It never waits for workers to stop or for the master to answer: both happen in tasks of their own, so a
master that is away delays nothing and workers train on without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, assert_never

from msgspec.structs import replace

from dlrover.agent.config import AgentConfig, AgentResult
from dlrover.agent.failover import Failover
from dlrover.agent.monitor.progress import FirstStep
from dlrover.agent.node_check import CheckOutcome, CheckRunner, RunTask
from dlrover.agent.preemption import wait_for_notice
from dlrover.agent.recovery import Recovery
from dlrover.agent.relay import Relay, SnapshotRelay
from dlrover.agent.workers.driver import DrivenGroup, WorkerDriver
from dlrover.agent.workers.failures import fit_into_report
from dlrover.agent.workers.group import Failed, Finished, PortOffer
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.errors import DLRoverError, JobError, Rejected, Unavailable
from dlrover.protocol.messages.check import ExitClass, ReportCheck
from dlrover.protocol.messages.checkpoint import HeldSnapshot
from dlrover.protocol.messages.job import (
    NODE_CHECK_RENDEZVOUS,
    TRAINING_RENDEZVOUS,
    AgentCommand,
    Attach,
    Attached,
    Check,
    Desired,
    End,
    ExitReason,
    Heartbeat,
    Idle,
    Incarnation,
    Join,
    JoinCheck,
    JoinRendezvous,
    Leave,
    LeaveJob,
    LeaveReason,
    Micros,
    NodeId,
    NodeRank,
    PlatformId,
    Query,
    Reply,
    ReportFailure,
    ReportFinished,
    Round,
    Run,
    StopCause,
    Wait,
    WorldSpec,
)
from dlrover.protocol.messages.watch import WatchObservation, WatchOrder
from dlrover.protocol.rpc.client import AgentChannel

log = logging.getLogger("dlrover.agent")

NUM_OFFERED = 128

_USUAL_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_OF_OUR_OWN_DOING = (
    signal.SIGPIPE, signal.SIGXFSZ, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS,
    signal.SIGTRAP,
)  # fmt: skip
"""A process gets these for what it does itself: a peer that hung up must not look like an order to leave."""

EXIT_FAILED = 1
EXIT_MASTER_LOST = 23
EXIT_BY_SIGNAL = 128


class AgentPatience(NamedTuple):
    """Seconds that the agent gives to things; how long workers train on without a master is the user's to say."""

    heartbeat: float = 5.0
    """Between two heartbeats, roughly."""
    warm_up: float = 60.0
    """A node whose imports take longer joins all the same."""
    lease: float = 30.0
    """An agent that did not run for so long (stopped, machine suspended) kills its workers before it talks to anybody."""
    farewell: float = 2.0
    """To tell the master that we go. Best effort: never worth a longer wait."""
    finished: float = 30.0
    """A finished training is a success even if the master is gone for good: wait so long for it, then leave with 0."""
    first_connection: float = 120.0
    """For the master to appear at all, however short its later absences may be."""
    wait_told: float = 20.0
    """A node that waits for its first world for so long says so: in silence it would be taken for one that hangs."""


class BuildGroup(Protocol):
    def __call__(self, world: WorldSpec, *, node_rank: NodeRank, master_now: Callable[[], Micros]) -> DrivenGroup: ...


class MasterChannel(Protocol):
    """What the agent needs of an `AgentChannel`, whose docstrings say what it means."""

    async def run(self) -> None: ...

    async def call(self, command: AgentCommand | Query, *, timeout: float) -> Reply: ...

    def beat(self, heartbeat: Heartbeat) -> None: ...

    def observe(self, observation: WatchObservation) -> None: ...

    def outage(self) -> float: ...

    async def close(self) -> None: ...

    async def reattach(self) -> None: ...


class Exchange(Protocol):
    """What the agent needs of `Replicas`."""

    address: str

    @property
    def copied_step(self) -> int | None:
        """The newest step of which other nodes keep what this one has."""

    async def enter(
        self,
        world: WorldSpec,
        *,
        node: NodeId,
        node_rank: NodeRank,
        ask: SnapshotRelay,
    ) -> None: ...


class Connect(Protocol):
    def __call__(
        self,
        address: str,
        *,
        token: str,
        tls: TlsConfig | None,
        attach: Callable[[], Attach],
        on_attached: Callable[[Attached], None],
        on_desired: Callable[[Desired], None],
        on_order: Callable[[WatchOrder], None] | None = None,
        on_blocked: Callable[[str], None] | None = None,
    ) -> MasterChannel: ...


class WatchProtocol(Protocol):
    """What the agent needs of `Watch`."""

    def connect(
        self,
        observe: Callable[[WatchObservation], None],
        who: Callable[[], tuple[NodeId, Incarnation]],
        master_now: Callable[[], Micros],
    ) -> None: ...

    def report(self) -> None: ...

    def first_step(self, after: Round) -> FirstStep | None: ...

    def attached(self) -> None: ...

    def take_order(self, order: WatchOrder) -> None: ...

    async def run(self) -> None: ...


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
        `run_check` is needed where the job's terms ask for a node check. `on_break` is told when workers failed or were stopped for
        good: what they left in memory may be worth keeping; `promise` says what of it will be written after a farewell. `on_leaving` is told before the farewell of a node that goes by itself. `exchange` has the snapshots of workers ready before they start. `watch` is asked for what workers do, `failover` for what shall follow a failure. `settle_output`
        is told whose last words the console may have, by global rank. `patience`: by default what the terms say."""
        detection = config.terms.detection
        self._config = config
        self._patience = patience or AgentPatience(heartbeat=detection.heartbeat, lease=detection.lease)
        self._local_world_size = local_world_size
        self._step = step
        self._snapshot_step = snapshot_step or (lambda: None)
        self._on_break = on_break or (lambda: None)
        self._promise = promise or (lambda: ())
        self._on_leaving = on_leaving or (lambda: None)
        self._exchange = exchange
        self._watch = watch
        self._failover = failover
        self._settle_output = settle_output or (lambda _is_shown: None)
        self._warm_up = warm_up
        """Waited for before the first join; None when it is over."""
        self._warming: asyncio.Task[None] | None = None
        self._launcher_pid = os.getppid()
        self._noted = ""
        """What was said last of this node, so that it is not said again in every round."""
        self._life = os.urandom(8).hex()
        """Tells this process from a former one of the same launch, when an answer to its attach was lost."""
        self._channel = connect(
            config.master_addr,
            token=token,
            tls=config.tls,
            attach=self._attach,
            on_attached=self._on_attached,
            on_desired=self._on_desired,
            on_order=None if watch is None else watch.take_order,
            on_blocked=self._on_blocked,
        )
        if watch is not None:
            watch.connect(self._channel.observe, lambda: (self._node, self._incarnation), self._master_now)
        self._driver = WorkerDriver(
            lambda world: build_group(world, node_rank=self._node_rank, master_now=self._master_now),
            on_outcome=self._on_outcome,
            on_error=self._on_broken,
            ready=self._settle_check,
            prepare=self._prepare,
            on_stopped=self._on_stopped,
        )
        self._check = CheckRunner(
            _refuse_check if run_check is None else run_check,
            start=lambda coroutine: self._tasks.create_task(coroutine, name="node check"),
            ready=self._driver.settle,
            on_outcome=self._on_checked,
        )

        self._recovery = Recovery(
            self._channel.call,
            start=lambda coroutine: self._tasks.create_task(coroutine, name="recovery"),
            first_step=(lambda _round: None) if watch is None else watch.first_step,
            is_over=lambda round_: self._driver.running_round != round_,
            settle_output=self._settle_output,
            shares_console_as=(lambda: self._node_rank) if config.platform_node >= 0 else None,
        )

        # Who we are, as the master said.
        self._node = NodeId(-1)
        self._node_rank = NodeRank(-1)
        self._incarnation = Incarnation(0)
        self._clock_offset = 0
        """Microseconds to add to our monotonic clock for the master's."""

        self._desired: Desired | None = None
        self._is_followed = False
        """A wish that came again is followed again: it means nothing in the same life, and everything in a new one."""
        self._joined = ("", Round(0))
        """Rendezvous and round that we joined last."""
        self._checked_round = Round(0)
        """Newest round of the node check whose task we started. Each is run once, as with workers."""
        self._offer: PortOffer | None = None
        """The port we offered for `_joined`, held until what meets there starts."""
        self._is_wait_timed = False
        """Whether somebody looks after a while if this node still waits for its first world."""
        self._started_round = Round(0)
        """Newest round whose workers we started. Each is started once: a repeated wish for it means nothing."""
        self._world: WorldSpec | None = None
        """Of `_started_round`: told to a master whose journal was lost."""
        self._finished_round = Round(0)
        self._finished_at = 0.0
        self._offered_ports: deque[int] = deque(maxlen=NUM_OFFERED)
        """Oldest first: a port serves one round, or comes back last where HOST_PORTS has no other."""
        self._signal: signal.Signals | None = None
        self.told_to_end = asyncio.Event()
        """A signal came: somebody wants us gone. Also after `run`, while the last saves are written."""
        self._is_preempted = False
        self._broken: DLRoverError | None = None
        """This node cannot go on: the master refused it for good, or workers cannot be started here."""
        self._released: Leave | None = None
        """The job goes on without this node, which heard so when it wanted to attach again."""
        self._is_leaving = False
        """The result is known: nothing that is still refused or wished can bring this node back into the job."""
        self._reports: set[asyncio.Task[None]] = set()
        """On their way to the master."""
        self._news = asyncio.Event()
        self.relay = Relay(self._channel.call, lambda: (self._node, self._incarnation), self._channel.observe)
        """For the requests of our workers."""

    async def run(self) -> AgentResult:
        loop = asyncio.get_running_loop()
        for number in sorted({*_USUAL_SIGNALS, *self._config.signals}.difference(_OF_OUR_OWN_DOING)):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                helpers = [
                    self._tasks.create_task(self._keep_channel(), name="channel"),
                    self._tasks.create_task(self._heartbeats(), name="heartbeats"),
                    self._tasks.create_task(self._driver.run(), name="driver"),
                ]
                if self._watch is not None:
                    helpers.append(self._tasks.create_task(self._watch.run(), name="watch"))
                if self._config.preemption_file:
                    helpers.append(self._tasks.create_task(self._watch_for_preemption(), name="preemption"))
                result = await self._follow()
                self._recovery.close()
                await self._channel.close()
                await self._check.close()
                if self._warming is not None:
                    helpers.append(self._warming)
                for helper in helpers:
                    helper.cancel()
        finally:
            self._drop_offer()
        return result

    async def _follow(self) -> AgentResult:
        while True:
            self._news.clear()
            if self._signal is not None:
                return await self._leave_by_signal(self._signal)
            if self._is_preempted:
                return await self._leave_preempted()
            if self._released is not None:
                return await self._leave(self._released)
            if self._broken is not None:
                return await self._give_up(EXIT_FAILED, str(self._broken))
            if self._has_lost_master():
                return await self._without_master()
            if self._desired is not None and not self._is_followed:
                self._is_followed = True
                if (result := await self._obey(self._desired)) is not None:
                    return result
            await self._news.wait()

    async def _obey(self, desired: Desired) -> AgentResult | None:
        wish = desired.wish
        if not isinstance(wish, Check):
            self._check.want_none()
        match wish:
            case Join() | JoinCheck():
                self._enter_round(wish)
            case Check():
                self._run_check(wish)
            case Run():
                self._run_world(wish.world)
            case Wait() | Idle():
                log.info("waiting: %s", wish.reason)
                if self._driver.is_wanted:
                    self._driver.want_none(StopCause.MEMBERSHIP)
                self._tell_if_it_takes_long()
            case End():
                return await self._end(wish)
            case Leave():
                return await self._leave(wish)
            case _:
                assert_never(wish)
        return None

    def _tell_if_it_takes_long(self) -> None:
        if not self._started_round and not self._is_wait_timed:
            self._is_wait_timed = True
            asyncio.get_running_loop().call_later(self._patience.wait_told, self._tell_of_waiting)

    def _tell_of_waiting(self) -> None:
        if not self._started_round and self._desired is not None and isinstance(self._desired.wish, Wait):
            log.warning(
                "this node has joined and waits for a place in a world; `dlrover status` on the master's host says what the job "
                "waits for"
            )

    def _enter_round(self, join: Join | JoinCheck) -> None:
        name = NODE_CHECK_RENDEZVOUS if isinstance(join, JoinCheck) else TRAINING_RENDEZVOUS
        if self._joined == (name, join.round) and self._offer is not None:
            return
        if isinstance(join, Join) and join.note and join.note != self._noted:
            self._noted = join.note
            log.warning("%s", join.note)
        if self._driver.running_round:
            log.info("workers of round %d stop: %s", self._driver.running_round, join.reason)
            self._recovery.began(self._driver.running_round, join.reason)
        if self._driver.is_wanted:
            self._driver.want_none(join.cause, is_patient=join.cause is StopCause.FAILURE)
        self._drop_offer()
        if self._warm_up is not None:
            # Whoever joins makes the others stop. Workers that cannot start before torch is imported would keep them waiting.
            if self._warming is None:
                self._warming = self._tasks.create_task(self._enter_when_warm(self._warm_up), name="warm-up")
            return
        if not self._take_offer(join):
            return
        assert self._offer is not None, "an offer was taken"
        self._joined = (name, join.round)
        if isinstance(join, JoinCheck) and join.round <= self._checked_round:
            # A master without its journal took our world up, but counts the rounds of its node checks anew.
            self._checked_round = Round(join.round - 1)
        is_reused = self._offer.port in self._offered_ports
        if is_reused:
            self._offered_ports.remove(self._offer.port)
        self._offered_ports.append(self._offer.port)
        self._tell(
            JoinRendezvous(
                node=self._node,
                incarnation=self._incarnation,
                round=join.round,
                local_world_size=self._local_world_size,
                offer=self._offer.address,
                is_offer_reused=is_reused,
                name=name,
            )
        )

    def _take_offer(self, join: Join | JoinCheck) -> bool:
        """Whether there is a port to offer. If not, this node enters the round when its workers have stopped, or not at all."""
        port = self._config.coordinator_port if isinstance(join, Join) else 0
        # Workers of the last round would find the coordinator of the next one at the port of the user, and take part there. And what
        # they tell of a mistake in the script must be known before the next round begins.
        if (port and not self._driver.is_settled) or self._driver.is_patient:
            self._tasks.create_task(self._enter_when_stopped(join), name="enter")
            return False
        if port:
            self._offer = PortOffer(self._config.host, port)
            return True
        try:
            self._offer = PortOffer.bind(self._config.host, self._config.host_ports, offered=self._offered_ports)
        except OSError as error:
            if self._driver.is_settled and self._check.is_settled:
                self._on_broken(JobError(f"This node can offer no port to its workers: {error}. Check HOST_PORTS."))
            else:
                # Where HOST_PORTS has no other, the workers that are just being stopped may still hold the port.
                self._tasks.create_task(self._enter_when_stopped(join), name="enter")
            return False
        return True

    async def _enter_when_warm(self, warm_up: Callable[[float], Awaitable[None]]) -> None:
        await warm_up(self._patience.warm_up)
        self._warm_up = None
        if not self._is_leaving and self._desired is not None and isinstance(self._desired.wish, Join | JoinCheck):
            self._enter_round(self._desired.wish)

    async def _enter_when_stopped(self, join: Join | JoinCheck) -> None:
        await self._driver.settle()
        await self._check.settle()
        if not self._is_leaving and self._desired is not None and self._desired.wish == join:
            self._enter_round(join)

    def _offer_another_port(self, refused: JoinRendezvous) -> None:
        """The one we bound has served an earlier round by chance: join the same round with another."""
        if self._offer is None or self._offer.address != refused.offer:
            return  # we have joined anew since
        self._drop_offer()
        if self._desired is not None and isinstance(self._desired.wish, Join | JoinCheck):
            self._enter_round(self._desired.wish)

    def _run_world(self, world: WorldSpec) -> None:
        if world.round <= self._started_round:
            return
        self._started_round = world.round
        self._world = world
        self._finished_round = Round(0)  # of an earlier one, which then was not enough
        offer, self._offer = self._offer, None
        log.info(
            "round=%d group_rank=%d of %d first_global_rank=%d world_size=%d coordinator=%s",
            world.round,
            world.group_rank,
            world.group_world_size,
            world.first_global_rank,
            world.world_size,
            world.coordinator,
        )
        self._recovery.running(world)
        self._driver.want(world, offer)

    def _run_check(self, wish: Check) -> None:
        if wish.world.round <= self._checked_round:
            return
        self._checked_round = wish.world.round
        offer, self._offer = self._offer, None
        log.info(
            "node check round=%d phase=%s group_rank=%d of %d coordinator=%s",
            wish.world.round,
            wish.phase,
            wish.world.group_rank,
            wish.world.group_world_size,
            wish.world.coordinator,
        )
        self._check.want(wish, self._node_rank, offer)

    async def _settle_check(self) -> None:
        await self._check.settle()

    async def _prepare(self, world: WorldSpec) -> None:
        if self._exchange is not None:
            await self._exchange.enter(world, node=self._node, node_rank=self._node_rank, ask=self.relay)

    async def _end(self, wish: End) -> AgentResult:
        self._is_leaving = True
        self._driver.want_none(StopCause.END_OF_JOB)
        await self._driver.settle()
        if self._reports and not self._channel.outage():
            # Of workers that were on their way out: the master may learn only now who failed first.
            await asyncio.wait(self._reports, timeout=self._patience.farewell)
        await self._recovery.finish(but=None if wish.end.first_failure is None else wish.end.first_failure.round)
        await self._say_farewell(LeaveReason.JOB_ENDED)
        newest = wish if self._desired is None else self._desired.wish
        end = newest.end if isinstance(newest, End) else wish.end
        first = end.first_failure
        is_told = end.reason in (ExitReason.COMPLETED, ExitReason.STOPPED_BY_USER)
        self._settle_output(lambda rank: rank == first.failure.global_rank if first is not None else not is_told)
        failure = end.first_failure.failure if end.first_failure else None
        return AgentResult(
            exit_code=end.exit_code,
            message=end.message,
            worker_exit_code=None if failure is None else _shell_code(failure.exit_code, failure.signal),
            first_failed_rank=None if failure is None else failure.global_rank,
            num_restarts=end.num_restarts,
            end=end,
        )

    async def _leave_by_signal(self, number: signal.Signals) -> AgentResult:
        self._is_leaving = True
        is_failed = self._recovery.is_cause_untold  # before the signal came: nothing of that may be lost
        # A launcher that died cannot clean up after us: be quick then. Otherwise workers get the grace the user asked for.
        is_alone = os.getppid() != self._launcher_pid
        cause = StopCause.FAILURE if is_alone else StopCause.END_OF_JOB
        self._driver.want_none(cause, number)
        await asyncio.gather(self._driver.settle(), self._part(LeaveReason.STOPPED_BY_USER, f"{number.name} received"))
        self._settle_output(lambda _rank: is_failed)
        self._on_break()
        return AgentResult(exit_code=EXIT_BY_SIGNAL + number, message=f"stopped by {number.name}")

    async def _leave_preempted(self) -> AgentResult:
        """The machine goes: the master hears it first, so that the others meet again while our workers still stop."""
        self._is_leaving = True
        notice = f"{self._config.preemption_file} announced that this machine is taken away"
        log.warning("%s: leaving", notice)
        parting = asyncio.ensure_future(self._part(LeaveReason.PREEMPTED, notice))
        await asyncio.sleep(0)  # the farewell is on its way before anything stops
        self._driver.want_none(StopCause.PREEMPTION)
        await asyncio.gather(self._driver.settle(), parting)
        self._settle_output(lambda _rank: False)
        self._on_break()
        message = f"{notice}; the job goes on without it."
        return AgentResult(exit_code=EXIT_BY_SIGNAL + signal.SIGTERM, message=message, is_job_alive=True)

    async def _leave(self, wish: Leave) -> AgentResult:
        """The job goes on without us."""
        self._is_leaving = True
        log.warning("leaving the job: %s", wish.reason)
        self._driver.want_none(StopCause.MEMBERSHIP)
        await asyncio.gather(self._driver.settle(), self._part(LeaveReason.DISMISSED, wish.reason))
        self._settle_output(lambda _rank: False)
        message = f"This node left the job: {wish.reason}."
        return AgentResult(exit_code=wish.exit_code, message=message, is_job_alive=True)

    async def _part(self, reason: LeaveReason, message: str) -> None:
        """Say farewell, then close: a stream that broke while workers stop would be healed and bring us back."""
        await self._say_farewell(reason, message, self._promise())
        await self._channel.close()

    async def _without_master(self) -> AgentResult:
        self._is_leaving = True
        if self._finished_round:
            log.warning("training finished, but the master is gone: leaving without its word")
            self._driver.want_none(StopCause.END_OF_JOB)
            await self._driver.settle()
            return AgentResult(exit_code=0, message="training finished; the master was gone")
        return await self._give_up(
            EXIT_MASTER_LOST,
            f"No master at {self._config.master_addr} for {self._channel.outage():.0f} s (limit --master-grace "
            f"{self._config.master_grace:g} s): the workers were stopped. Start the job again where the master's host is back.",
        )

    async def _give_up(self, exit_code: int, message: str) -> AgentResult:
        self._is_leaving = True
        self._driver.want_none(StopCause.FAILURE)
        await self._driver.settle()
        await self._say_farewell(LeaveReason.FAILED, message)
        return AgentResult(exit_code=exit_code, message=message)

    async def _say_farewell(self, reason: LeaveReason, message: str = "", held: tuple[HeldSnapshot, ...] = ()) -> None:
        if self._node < 0 or self._channel.outage():
            return
        if reason not in (LeaveReason.STOPPED_BY_USER, LeaveReason.PREEMPTED):
            self._on_leaving()
        command: LeaveJob | None = None
        # If its answer was lost, attaching again has brought us back as a new life, which has to leave, too.
        while command is None or command.incarnation != self._incarnation:
            command = LeaveJob(
                node=self._node, incarnation=self._incarnation, reason=reason, message=message, held=held
            )
            try:
                await self._channel.call(command, timeout=self._patience.farewell)
            except (Rejected, Unavailable) as error:
                log.info("farewell not heard: %s", error)

    # What the master and the workers tell us.

    def _attach(self) -> Attach:
        return Attach(
            launch=self._config.launch,
            host=self._config.host,
            terms=self._config.terms,
            local_world_size=self._local_world_size,
            node_rank=None if self._config.node_rank is None else NodeRank(self._config.node_rank),
            incarnation=self._incarnation,
            running_round=max(self._driver.running_round, self._finished_round),
            is_finished=self._finished_round > 0,
            life=self._life,
            world=self._claimed_world(),
            former_rank=self._node_rank if self._node_rank >= 0 else None,
            place=self._config.place,
            group=self._config.group,
            platform_node=PlatformId(self._config.platform_node),
            node_type=self._config.node_type,
            name=self._config.node_name,
            node_ip=self._config.node_ip,
            foreign_node=self._config.foreign_node,
            peer="" if self._exchange is None else self._exchange.address,
        )

    def _claimed_world(self) -> WorldSpec | None:
        """The world whose workers run here, or have finished here."""
        round_ = max(self._driver.running_round, self._finished_round)
        return self._world if self._world is not None and self._world.round == round_ else None

    def _on_attached(self, attached: Attached) -> None:
        if self._incarnation and attached.incarnation != self._incarnation and not self._is_leaving:
            # The master gave up our former life; whatever still runs belongs to it and may not disturb the new world.
            log.warning("the master had given this node up: its workers stop, it joins anew")
            self._forget_former_life()
        self._node, self._node_rank, self._incarnation = attached.node, attached.node_rank, attached.incarnation
        self._clock_offset = attached.now - time.monotonic_ns() // 1000
        if self._watch is not None:
            self._watch.attached()
        log.info(
            "attached node=%d node_rank=%d incarnation=%d", attached.node, attached.node_rank, attached.incarnation
        )

    def _on_desired(self, desired: Desired) -> None:
        if not self._incarnation:
            return  # for the life that we have just given up
        newest = self._desired
        if newest is None or (desired.master_epoch, desired.number) >= (newest.master_epoch, newest.number):
            self._desired, self._is_followed = desired, False
            self._news.set()

    def _on_blocked(self, reason: str) -> None:
        # Where nodes share a console, whoever shows the state of the job there shows this too.
        level = logging.WARNING if self._config.platform_node < 0 else logging.INFO
        log.log(level, "%s", reason or "The master can write its journal again, and the job goes on.")

    def _on_outcome(self, round_: Round, outcome: Finished | Failed) -> None:
        if self._watch is not None:
            self._watch.report()  # before the round ends: what its workers did last is known only now
        self._recovery.look()
        if isinstance(outcome, Finished):
            self._finished_round, self._finished_at = round_, time.monotonic()
            self._tell(ReportFinished(node=self._node, incarnation=self._incarnation, round=round_, step=outcome.step))
            self._news.set()
            return
        for failure in outcome.failures:
            log.info("global rank %d failed: %s", failure.global_rank, failure.message)
        if not self._is_leaving:
            first = outcome.failures[0]
            self._recovery.began(round_, f"global rank {first.global_rank} failed: {first.message}")
        report = ReportFailure(
            node=self._node,
            incarnation=self._incarnation,
            round=round_,
            failures=fit_into_report(outcome.failures),
            step=outcome.step,
            lived=outcome.lived,
            reach=outcome.reach,
        )
        if self._failover is None:
            self._tell(report)
        else:
            task = self._tasks.create_task(self._ask_failover(self._failover, report), name="failover")
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def _ask_failover(self, failover: Failover, report: ReportFailure) -> None:
        for command in await failover.decide(report, self._node_rank):
            await self._deliver(command)

    def _on_stopped(self, round_: Round) -> None:
        """Before other workers can start, and after those of the round have written their last."""
        if round_ != self._finished_round:
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
        self._tell(
            ReportCheck(
                node=self._node,
                incarnation=self._incarnation,
                round=round_,
                exit_class=outcome.exit_class,
                elapsed_ms=outcome.elapsed_ms,
                bandwidth_gbps=outcome.bandwidth_gbps,
                message=outcome.message,
            )
        )

    def _on_broken(self, error: DLRoverError) -> None:
        self._broken = self._broken or error
        self._news.set()

    async def _watch_for_preemption(self) -> None:
        await wait_for_notice(self._config.preemption_file)
        self._is_preempted = True
        self._news.set()

    @property
    def signal(self) -> signal.Signals | None:
        """The first one that told us to end."""
        return self._signal

    def _on_signal(self, number: int) -> None:
        self._signal = self._signal or signal.Signals(number)
        self.told_to_end.set()
        self._news.set()

    # Talking.

    async def _keep_channel(self) -> None:
        try:
            await self._channel.run()
        except Rejected as error:
            if error.code == "node-released":
                self._released = Leave(str(error).rstrip("."))  # no failure of this node's: the master has let it go
                self._news.set()
                return
            self._on_broken(
                Rejected(f"The master at {self._config.master_addr} refused this node: {error}", error.code)
            )

    def _tell(self, command: AgentCommand) -> None:
        delivery = self._deliver(command)
        try:
            task = self._tasks.create_task(delivery, name=type(command).__name__)
        except RuntimeError:  # the tasks are being taken down, by a bug elsewhere: nobody is left to tell
            delivery.close()
            return
        if isinstance(command, ReportFailure | ReportFinished):
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def _deliver(self, command: AgentCommand) -> None:
        try:
            await self._channel.call(command, timeout=self._config.master_grace + self._patience.finished)
        except Rejected as error:
            # Told too late: the world has moved on, and the master's wish says where to.
            log.info("%s was refused: %s", type(command).__name__, error)
            if not self._is_leaving:
                await self._mend(command, error.code)
        except Unavailable as error:
            log.info("%s was not delivered: %s", type(command).__name__, error)

    async def _mend(self, command: AgentCommand, code: str) -> None:
        """What was refused cannot be told; see to it that the master and we do not wait for each other."""
        match command:
            case JoinRendezvous() if code == "offer-used":
                self._offer_another_port(command)
            case (
                JoinRendezvous(incarnation=life)
                | ReportFailure(incarnation=life)
                | ReportFinished(incarnation=life)
                | ReportCheck(incarnation=life)
            ):
                if life != self._incarnation or not life:
                    return  # of a former life, and refused because the new one has begun: no reason for a third
                if code == "wrong-sender" and command.node != self._node:
                    # The same life under another number: a master without its journal has numbered the nodes anew.
                    self._tell(replace(command, node=self._node))
                    return
                is_failure_untold = isinstance(command, ReportFailure) and code not in ("too-old", "unknown-round")
                if code == "stale-incarnation" or is_failure_untold:
                    # As a fresh agent we get a round in any case.
                    self._forget_former_life()
                    self._incarnation = Incarnation(0)
                    await self._channel.reattach()
                elif isinstance(command, ReportFinished):
                    await self._channel.reattach()  # presenting ourselves says it too

    def _forget_former_life(self) -> None:
        self._driver.want_none(StopCause.FAILURE)
        self._check.want_none()
        self._drop_offer()
        self._desired = None
        self._joined = ("", Round(0))
        self._started_round = self._checked_round = Round(0)
        self._world = None

    async def _heartbeats(self) -> None:
        while True:
            wakes_at = time.clock_gettime(time.CLOCK_BOOTTIME) + self._patience.heartbeat * random.uniform(0.8, 1.2)
            await asyncio.sleep(wakes_at - time.clock_gettime(time.CLOCK_BOOTTIME))
            away = time.clock_gettime(time.CLOCK_BOOTTIME) - wakes_at  # the nap itself is no absence
            if away > self._patience.lease and self._driver.running_round:
                log.warning("this agent was stopped for %.0f s: its workers are killed before anything else", away)
                self._driver.kill()
            if self._channel.outage():
                self._news.set()  # how long the master is away is the one fact that no event announces
            elif self._node >= 0:
                self._channel.beat(
                    Heartbeat(
                        node=self._node,
                        incarnation=self._incarnation,
                        step=self._step(),
                        snapshot_step=self._snapshot_step(),
                        copied_step=None if self._exchange is None else self._exchange.copied_step,
                    )
                )
                if self._watch is not None:
                    self._watch.report()

    def _master_now(self) -> Micros:
        return Micros(time.monotonic_ns() // 1000 + self._clock_offset)

    def _has_lost_master(self) -> bool:
        outage, grace = self._channel.outage(), self._config.master_grace
        if self._finished_round:
            return min(outage, time.monotonic() - self._finished_at) > self._patience.finished
        return outage > (grace if self._node >= 0 else max(grace, self._patience.first_connection))

    def _drop_offer(self) -> None:
        if self._offer is not None:
            self._offer.release()
            self._offer = None


async def _refuse_check(check: Check, node_rank: NodeRank, offer: PortOffer | None) -> CheckOutcome:
    """An agent whose job has no check is never asked for one, unless the master is of another job."""
    return CheckOutcome(ExitClass.SETUP, message="this agent was started without a node check")


def _shell_code(exit_code: int | None, number: int | None) -> int:
    """The exit code a shell would show: that of the worker, or 128 + n for signal n."""
    if number is not None:
        return EXIT_BY_SIGNAL + number
    return exit_code if exit_code else EXIT_FAILED
