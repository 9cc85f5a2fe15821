"""
The master's side of Brain: asks how to begin, tells what the job measured, and brings offers.

The job never waits for it. Only the start plan is waited for, at most two seconds in all, and only before the first node of a new job is asked for. Everything
else runs beside the loop: while Brain is away nothing is lost, because what it has to hear is in the journal, and the local optimiser decides from the same runs.

What Brain proposes is an offer like any other: the brakes of the core judge it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dlrover.core.outcome import Outcome
from dlrover.core.state import JobState
from dlrover.host.edges import logged
from dlrover.master.brain.outbox import BrainOutbox
from dlrover.master.brain.past_runs import past_runs
from dlrover.master.config import BrainTerms
from dlrover.master.loop.loop import MasterLoop
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.brain import (
    Allowance,
    AllowanceAsked,
    AskedGroup,
    BrainPlan,
    BrainQuestion,
    BrainReply,
    BrainStored,
    DecisionsTold,
    FactsTold,
    JobBegan,
    JobBounds,
    JobEnded,
    JobRef,
    JobTotals,
    NodeEnded,
    PlanAsked,
    PlanStage,
    RunsTold,
    StartPlan,
)
from dlrover.protocol.messages.fleet import FleetSpec, NodeChanged, NodesListed, NodeType, Resource, Strategy
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, Micros
from dlrover.protocol.messages.job import Command, DeadlinePassed, ExitReason, JobEnd, Limits, Reply
from dlrover.protocol.messages.scaling import (
    AskScaling,
    JobFacts,
    PlanOffered,
    RunMeasured,
    ScaleMode,
    ScaleTerms,
    ScaleTo,
    ScalingStatus,
    SetScaling,
    SpeedPoint,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BrainPatience:
    """Seconds, which only tests change."""

    start: float = 2.0
    """The start of a job is delayed at most so long."""
    call: float = 10.0
    first_pause: float = 0.5
    """Between two attempts; doubled from one to the next."""
    longest_pause: float = 60.0
    refused: float = 600.0
    """After a refusal that asking again does not change: a person may mend it meanwhile."""
    gathering: float = 0.5
    """Between the first news and the message that carries it."""
    plan: float = 300.0
    allowance: float = 60.0
    farewell: float = 5.0
    """For what Brain has not heard when the job is over."""


PATIENCE = BrainPatience()

_NEWS = (RunMeasured, JobFacts, NodeChanged, NodesListed, DeadlinePassed, SetScaling, ScaleTo, PlanOffered)
"""After these there may be something to tell."""


class Channel(Protocol):
    """To Brain: `BrainChannel`, or one that a test holds."""

    address: str

    async def ask(self, question: BrainQuestion, *, timeout: float) -> BrainReply: ...

    async def close(self) -> None: ...


class JobShell(Protocol):
    """What the client needs of the loop."""

    def tell(self, command: Command) -> asyncio.Future[Reply]: ...

    def state(self) -> JobState: ...

    def now(self) -> Micros: ...

    async def scaling(self) -> ScalingStatus: ...


class LoopShell:
    """The running master."""

    def __init__(self, master_loop: MasterLoop) -> None:
        self._loop = master_loop

    def tell(self, command: Command) -> asyncio.Future[Reply]:
        return self._loop.tell(command)

    def state(self) -> JobState:
        return self._loop.job.state

    def now(self) -> Micros:
        return self._loop.now()

    async def scaling(self) -> ScalingStatus:
        answer = await self._loop.ask(AskScaling())
        assert isinstance(answer, ScalingStatus), "the answer to this question"
        return answer


class BrainClient:
    """Of one master. `begin` before the fleet is defined, `run` as a task, `hear` for each decision, `finish` at the end of the job."""

    def __init__(
        self,
        terms: BrainTerms,
        channel: Channel,
        shell: JobShell,
        *,
        job: JobRef,
        job_name: str,
        journal: Path,
        fleet: FleetSpec | None,
        scaling: ScaleTerms,
        patience: BrainPatience = PATIENCE,
    ) -> None:
        self._terms = terms
        self._channel = channel
        self._shell = shell
        self._job = job
        self._job_name = job_name
        self._journal = journal
        self._fleet = fleet
        self._scaling = scaling
        self._patience = patience
        self.allow: Callable[[int | None, str], None] | None = None
        """Takes how many workers Brain lets the job have, None for any number. Set by the service; None: no platform heeds it."""
        self._outbox = BrainOutbox()
        self._news = asyncio.Event()
        self._taken = -1
        """The newest run that Brain has; -1: this life has not asked yet."""
        self._is_known = False
        self._trouble = ""
        self._plan_at = 0.0
        self._told_since_plan = False
        self._allowance_at = 0.0
        self._allowed_until: float | None = None

    async def begin(self) -> PlanOffered | None:
        """How a new job should begin, as an offer; None: as its user says. Takes two seconds at most."""
        try:
            start = await self._introduce(limit=self._patience.start, wants_plan=True)
        except (Unavailable, Rejected) as error:
            self._note_trouble(f"The job starts with the sizes that its user gave: {error}")
            return None
        log.info("brain address=%s start=%s", self._channel.address, start.sentence or "no plan")
        if start.plan is None:
            return None
        return PlanOffered(plan=start.plan, sentence=start.sentence, expected_speed=start.expected_speed)

    def hear(self, command: Command, outcome: Outcome, now: Micros) -> None:
        """Something was decided, and is durable."""
        if isinstance(command, RunMeasured):
            self._outbox.hear_run(command)
        if isinstance(command, _NEWS):
            self._news.set()

    async def run(self) -> None:
        """Until cancelled. A mistake in here costs the job its Brain, never its master."""
        with logged(log, "Brain is not used any more by this master because of an unexpected error"):
            await self._converse()
        await asyncio.get_running_loop().create_future()  # the master ends when a task of its own returns

    async def _converse(self) -> None:
        pause = self._patience.first_pause
        while True:
            try:
                await self._tell_all()
                await self._ask_for_more()
                pause = self._patience.first_pause
                self._note_trouble("")
                await self._wait(self._seconds_to_question(), for_news=True)
                await asyncio.sleep(self._patience.gathering)
            except Unavailable as error:
                self._is_known = False
                self._note_trouble(str(error))
                await self._wait(max(error.retry_after or 0.0, pause * random.uniform(0.5, 1.0)), for_news=False)
                pause = min(2 * pause, self._patience.longest_pause)
            except Rejected as error:
                self._is_known = False
                self._note_trouble(str(error))
                await self._wait(self._patience.refused * random.uniform(0.5, 1.0), for_news=False)

    async def finish(self, end: JobEnd) -> None:
        """The job is over: what Brain has not heard yet, and the end. For a few seconds at most."""
        state = self._shell.state()
        totals = _totals(state)
        try:
            async with asyncio.timeout(self._patience.farewell):
                await self._tell_all()
                if end.reason is not ExitReason.STOPPED_BY_USER or totals.steps:
                    await self._ask(JobEnded(job=self._job, reason=end.reason, totals=totals))
        except (Unavailable, Rejected, TimeoutError) as error:
            why = str(error) or f"no answer within {self._patience.farewell:g} s"
            log.warning("Brain did not receive all measurements of this job reason=%s", why)
        finally:
            await self._channel.close()

    # What Brain hears.

    async def _introduce(self, *, limit: float, wants_plan: bool) -> StartPlan:
        answer = await self._channel.ask(self._presentation(wants_plan), timeout=limit)
        if not isinstance(answer, StartPlan):
            raise Rejected(f"Brain answered the start of the job with {type(answer).__name__}.")
        self._is_known = True
        return answer

    def _presentation(self, wants_plan: bool) -> JobBegan:
        state, terms, scaling = self._shell.state(), self._terms, self._scaling
        fleet = self._fleet if state.fleet is None else state.fleet.spec
        replicas = {} if fleet is None else fleet.replicas
        most = replicas[NodeType.WORKER].count if NodeType.WORKER in replicas else 1
        limits = (
            state.terms.limits
            if state.terms is not None
            else Limits(min_nodes=terms.min_nodes, max_nodes=max(terms.min_nodes, most), node_unit=terms.node_unit)
        )
        asked = tuple(
            AskedGroup(node_type=kind, count=each.count, resource=each.resource) for kind, each in replicas.items()
        )
        began_at = state.rendezvous.began_at
        return JobBegan(
            job=self._job,
            name=self._job_name,
            user=terms.user,
            cluster=terms.cluster,
            namespace=terms.namespace,
            app=terms.app,
            strategy=Strategy.ALLREDUCE if fleet is None else fleet.strategy,
            recipe=terms.recipe,
            bounds=JobBounds(
                min_nodes=limits.min_nodes,
                max_nodes=limits.max_nodes,
                node_unit=limits.node_unit,
                limits=JobBounds().limits if fleet is None else fleet.limits,
                smallest=_smallest(scaling, asked),
                largest=scaling.largest,
                most_workers=scaling.most_workers,
                most_servers=scaling.most_servers,
                types=scaling.types,
            ),
            asked=asked,
            age=0.0 if began_at is None else max(0.0, (self._shell.now() - began_at) / MICROS_PER_SECOND),
            wants_plan=wants_plan,
        )

    async def _tell_all(self) -> None:
        """Raises what the channel raises."""
        if not self._is_known:
            start = await self._introduce(limit=self._patience.call, wants_plan=False)
            await self._catch_up(start.newest_run)
        elif self._taken < 0:
            await self._catch_up(0)
        outbox = self._outbox
        outbox.look(self._shell.state(), self._shell.now())
        if (facts := outbox.facts) is not None:
            await self._ask(FactsTold(job=self._job, facts=facts))
            outbox.settle_facts(facts)
        while runs := outbox.next_runs():
            taken = await self._ask(RunsTold(job=self._job, runs=runs))
            outbox.settle_runs(runs)
            self._taken = max(self._taken, taken.newest_run)
            self._told_since_plan = True
        while decisions := outbox.next_decisions():
            await self._ask(DecisionsTold(job=self._job, decisions=decisions))
            outbox.settle_decisions(decisions)
        for lost in list(outbox.lost_nodes.values()):
            age = max(0.0, (self._shell.now() - lost.at) / MICROS_PER_SECOND)
            ended = NodeEnded(
                job=self._job, node=lost.id, node_type=lost.node_type, kind=lost.kind, resource=lost.resource, age=age
            )
            await self._ask(ended)
            outbox.lost_nodes.pop(lost.id, None)

    async def _catch_up(self, newest: int) -> None:
        """Runs that former lives measured, and those that Brain has lost. The newest that it has may have lasted longer since."""
        if newest >= self._taken >= 0:
            return
        try:
            runs = await asyncio.to_thread(past_runs, self._journal, since=newest)
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"The earlier runs in the journal cannot be read now: {error}") from error
        self._outbox.hear_past(runs.values())
        self._taken = newest

    async def _ask(self, question: BrainQuestion) -> BrainStored:
        answer = await self._channel.ask(question, timeout=self._patience.call)
        if not isinstance(answer, BrainStored):
            raise Rejected(f"Brain answered {type(question).__name__} with {type(answer).__name__}.")
        return answer

    # What Brain proposes.

    def _is_scaling(self) -> bool:
        scaling = self._shell.state().scaling
        return scaling.mode is not ScaleMode.OFF

    async def _ask_for_more(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_scaling():
            return
        if self._told_since_plan and loop.time() >= self._plan_at:
            self._told_since_plan, self._plan_at = False, loop.time() + self._patience.plan * random.uniform(0.9, 1.1)
            await self._ask_for_plan()
        if self.allow is not None and loop.time() >= self._allowance_at:
            self._allowance_at = loop.time() + self._patience.allowance * random.uniform(0.9, 1.1)
            await self._ask_for_allowance()

    def _seconds_to_question(self) -> float:
        now = asyncio.get_running_loop().time()
        moments = [self._allowance_at] if self.allow is not None and self._is_scaling() else []
        if self._told_since_plan:
            moments.append(self._plan_at)
        return max(0.1, min(moments, default=now + self._patience.longest_pause) - now)

    async def _ask_for_plan(self) -> None:
        answer = await self._channel.ask(PlanAsked(job=self._job, stage=PlanStage.RUNNING), timeout=self._patience.call)
        if not isinstance(answer, BrainPlan) or answer.plan is None:
            return
        offer = PlanOffered(plan=answer.plan, sentence=answer.sentence, expected_speed=answer.expected_speed)
        with contextlib.suppress(Unavailable):  # the next question comes
            try:
                await self._shell.tell(offer)
            except Rejected as error:
                log.warning("the job rejected Brain's plan reason=%s", error)

    async def _ask_for_allowance(self) -> None:
        state = self._shell.state()
        if state.fleet is None or state.fleet.spec.strategy is not Strategy.ALLREDUCE or state.terms is None:
            return
        status = await self._shell.scaling()
        answer = await self._channel.ask(
            _allowance_question(self._job, status, state.scaling.newest), timeout=self._patience.call
        )
        if isinstance(answer, Allowance) and self.allow is not None:
            self.allow(answer.nodes, answer.sentence)
            self._allowed_until = None if answer.nodes is None else asyncio.get_running_loop().time() + answer.lasts

    # Waiting.

    async def _wait(self, seconds: float, *, for_news: bool) -> None:
        """An allowance that is not renewed lapses meanwhile."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            lapse = self._allowed_until
            limit = left if lapse is None else min(left, max(0.0, lapse - loop.time()))
            if for_news:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limit):
                        await self._news.wait()
                    self._news.clear()
                    return
            else:
                await asyncio.sleep(limit)
            if lapse is not None and loop.time() >= lapse and self.allow is not None:
                self._allowed_until = None
                self.allow(None, "")
                log.info("the node limit that Brain gave has expired")

    def _note_trouble(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("Brain cannot be reached, so the job decides without it reason=%s", trouble)
        elif self._trouble and not trouble:
            log.info("Brain answers again")
        self._trouble = trouble


def job_ref(uid: str, token: str) -> JobRef:
    """The secret follows from the job's token, so each master of the job has it and Brain learns nothing of the token."""
    secret = hmac.new(token.encode(), f"dlrover brain {uid}".encode(), hashlib.sha256).hexdigest() if token else ""
    return JobRef(uid=uid, secret=secret)


def _allowance_question(job: JobRef, status: ScalingStatus, newest: RunMeasured | None) -> AllowanceAsked:
    curve: dict[int, float] = {}
    for point in status.points:  # what a fit forecasts comes last and counts more: one run may have had bad luck
        if point.speed > 0:
            curve[point.nodes] = point.speed
    remaining, last = 0.0, status.facts.max_steps
    if newest is not None and newest.last_step is not None and last:
        remaining = max(0, last - newest.last_step) * newest.step_time * status.speed
    return AllowanceAsked(
        job=job,
        min_nodes=max(1, status.min_nodes),
        max_nodes=max(1, status.min_nodes, status.max_nodes),
        node_unit=status.node_unit,
        nodes=0 if status.configuration is None else status.configuration.num_workers,
        points=tuple(SpeedPoint(nodes, curve[nodes]) for nodes in sorted(curve)),
        remaining=remaining,
        change_cost=min(1e6, max(0.0, status.cost)),
    )


def _smallest(terms: ScaleTerms, asked: tuple[AskedGroup, ...]) -> Resource:
    """A job whose nodes are smaller than what a plan may usually give gets plans for such nodes."""
    cpu = min([terms.smallest.cpu, *(each.resource.cpu for each in asked if each.resource.cpu)])
    memory = min([terms.smallest.memory_mb, *(each.resource.memory_mb for each in asked if each.resource.memory_mb)])
    return Resource(cpu=cpu, memory_mb=memory)


def _totals(state: JobState) -> JobTotals:
    """Core-hours are those of the nodes that trained: cores given, or used where none were given."""
    goodput, newest = state.goodput, state.scaling.newest
    node_seconds = sum(sum(place.micros.values()) for place in goodput.places.values()) / MICROS_PER_SECOND
    cores = 0.0
    if newest is not None:
        given = newest.configuration.group(NodeType.WORKER)
        used = max((use.cpu for use in newest.types if use.node_type is NodeType.WORKER), default=0.0)
        cores = used if given is None or not given.cpu else given.cpu
    seconds = 0.0 if goodput.began_at is None else (state.now - goodput.began_at) / MICROS_PER_SECOND
    steps = goodput.highest_step
    if steps is None:
        steps = 0 if newest is None or newest.last_step is None else newest.last_step
    return JobTotals(
        seconds=max(0.0, seconds),
        steps=max(0, steps),
        core_hours=node_seconds * cores / 3600,
        num_node_ends=0 if state.fleet is None else len(state.fleet.failures),
    )
