"""A Brain in the test's own process, with the ways in which a real one can be away; and a job that is driven by hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dlrover.core.job import Job
from dlrover.core.outcome import Outcome
from dlrover.core.state import JobState
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.brain import (
    Allowance,
    AllowanceAsked,
    BrainPlan,
    BrainQuestion,
    BrainReply,
    BrainStored,
    DecisionsTold,
    FactsTold,
    JobBegan,
    JobEnded,
    NodeEnded,
    PlanAsked,
    RunsTold,
    StartPlan,
)
from dlrover.protocol.messages.fleet import DefineFleet, FleetSpec, NodesListed, NodeType, ReplicaSpec
from dlrover.protocol.messages.identity import Micros, micros
from dlrover.protocol.messages.job import Command, MasterStarted, Reply
from dlrover.protocol.messages.scaling import (
    AskScaling,
    Configuration,
    DefineScaling,
    GroupSize,
    RunMeasured,
    ScaleDecision,
    ScaleMode,
    ScaleTerms,
    ScalingStatus,
    SizePlan,
)


def run(number: int, *, seconds: float = 60.0, nodes: int = 2) -> RunMeasured:
    return RunMeasured(
        number=number,
        configuration=Configuration(groups=(GroupSize(NodeType.WORKER, nodes),)),
        seconds=seconds,
        steps=round(seconds * 2),
        step_time=0.5,
    )


@dataclass
class FakeBrain:
    """`Channel` of a client."""

    address: str = "brain:50001"
    runs: dict[int, RunMeasured] = field(default_factory=dict)
    decisions: dict[int, ScaleDecision] = field(default_factory=dict)
    ends: list[JobEnded] = field(default_factory=list)
    node_ends: list[NodeEnded] = field(default_factory=list)
    facts: list[FactsTold] = field(default_factory=list)
    began: list[JobBegan] = field(default_factory=list)
    plan: SizePlan | None = None
    offer: SizePlan | None = None
    allowance: Allowance = field(default_factory=Allowance)
    asked: list[AllowanceAsked | PlanAsked] = field(default_factory=list)
    is_away: bool = False
    is_frozen: bool = False
    is_refusing: bool = False
    loses_answers: bool = False
    """It stores, and the answer does not arrive."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False

    async def ask(self, question: BrainQuestion, *, timeout: float) -> BrainReply:
        try:
            if self.is_frozen:
                async with asyncio.timeout(timeout):
                    await asyncio.Event().wait()
            if self.is_away:
                raise Unavailable("Brain is away")
            if self.is_refusing:
                raise Rejected("The token is not known.")
            answer = self._answer(question)
            if self.loses_answers:
                raise Unavailable("the connection broke")
            return answer
        except TimeoutError:
            raise Unavailable(f"no answer within {timeout:g} s") from None
        finally:
            self.changed.set()

    def _answer(self, question: BrainQuestion) -> BrainReply:
        match question:
            case JobBegan():
                self.began.append(question)
                return StartPlan(
                    plan=self.plan if question.wants_plan else None, sentence="five alike", newest_run=self._newest()
                )
            case RunsTold(runs=runs):
                for each in runs:
                    known = self.runs.get(each.number)
                    if known is None or known.seconds <= each.seconds:
                        self.runs[each.number] = each
            case DecisionsTold(decisions=decisions):
                self.decisions.update({each.number: each for each in decisions})
            case JobEnded():
                self.ends.append(question)
            case NodeEnded():
                self.node_ends.append(question)
            case FactsTold():
                self.facts.append(question)
            case PlanAsked():
                self.asked.append(question)
                return BrainPlan(plan=self.offer, sentence="the last jobs used two", expected_speed=100.0)
            case AllowanceAsked():
                self.asked.append(question)
                return self.allowance
        return BrainStored(newest_run=self._newest())

    def _newest(self) -> int:
        return max(self.runs, default=0)

    async def close(self) -> None:
        self.is_closed = True

    async def until(self, what: object) -> None:
        """`what` is called after each question."""
        async with asyncio.timeout(60):
            while not what():  # type: ignore[operator]
                self.changed.clear()
                await self.changed.wait()


class DrivenJob:
    """`JobShell` of a client, around the real core."""

    def __init__(self, mode: ScaleMode = ScaleMode.ON, *, is_defined: bool = True) -> None:
        self.job = Job()
        self.at = Micros(0)
        self.told: list[Command] = []
        self.do(MasterStarted(1, "a-job"))
        self.do(DefineScaling(terms=ScaleTerms(mode=mode, nodes_start=1)))
        if is_defined:
            self.do(DefineFleet(spec=FLEET))
            self.do(NodesListed(nodes=()))

    def do(self, command: Command) -> Outcome:
        self.at = Micros(self.at + micros(1.0))
        return self.job.apply(command, self.at)

    def tell(self, command: Command) -> asyncio.Future[Reply]:
        self.told.append(command)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self.do(command).reply)
        except Rejected as error:
            future.set_exception(error)
        return future

    def state(self) -> JobState:
        return self.job.state

    def now(self) -> Micros:
        return self.at

    async def scaling(self) -> ScalingStatus:
        answer = self.job.ask(AskScaling())
        assert isinstance(answer, ScalingStatus)
        return answer


FLEET = FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=4)})
