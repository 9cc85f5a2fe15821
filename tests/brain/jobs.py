"""Jobs as they speak with Brain, for tests."""

from __future__ import annotations

from dlrover.brain.config import RateTerms
from dlrover.brain.desk import BrainDesk
from dlrover.brain.tenants import TokenHolder, TokenRole
from dlrover.protocol.messages.brain import (
    BrainQuestion,
    BrainReply,
    JobBegan,
    JobBounds,
    JobEnded,
    JobRecipe,
    JobRef,
    JobTotals,
    RunsTold,
    StartPlan,
)
from dlrover.protocol.messages.fleet import NodeType, Resource, Strategy
from dlrover.protocol.messages.job import ExitReason
from dlrover.protocol.messages.scaling import Configuration, GroupSize, RunMeasured, TypeUse

BIG_RATE = RateTerms(messages=1e6, size_bytes=1e12)
TEAM = TokenHolder(tenant="team", role=TokenRole.JOB)
OTHERS = TokenHolder(tenant="others", role=TokenRole.JOB)
ADMIN = TokenHolder(tenant="office", role=TokenRole.ADMIN)
RECIPE = JobRecipe(name="nightly", script_name="train.py", script_hash="ab")


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def ref(uid: str = "job-1", secret: str = "a secret") -> JobRef:
    return JobRef(uid=uid, secret=secret)


def began(uid: str = "job-1", **more: object) -> JobBegan:
    values: dict[str, object] = {
        "job": ref(uid),
        "name": "a-job",
        "user": "ann",
        "strategy": Strategy.ALLREDUCE,
        "recipe": RECIPE,
        "bounds": JobBounds(min_nodes=1, max_nodes=16, smallest=Resource(cpu=1, memory_mb=512)),
    }
    return JobBegan(**{**values, **more})  # type: ignore[arg-type]


def run(number: int, *, nodes: int = 4, seconds: float = 60.0, memory: float = 1000.0, **more: object) -> RunMeasured:
    values: dict[str, object] = {
        "number": number,
        "configuration": Configuration(groups=(GroupSize(NodeType.WORKER, nodes),)),
        "seconds": seconds,
        "steps": 120,
        "step_time": 0.5,
        "types": (TypeUse(node_type=NodeType.WORKER, cpu=2.0, cpu_most=2.5, cpu_max=2.5, memory_mb=memory),),
    }
    return RunMeasured(**{**values, **more})  # type: ignore[arg-type]


def ended(uid: str = "job-1", reason: ExitReason = ExitReason.COMPLETED) -> JobEnded:
    return JobEnded(job=ref(uid), reason=reason, totals=JobTotals(seconds=100, steps=1000, core_hours=2.0))


async def ask(desk: BrainDesk, question: BrainQuestion, caller: TokenHolder = TEAM) -> BrainReply:
    return await desk.answer(caller, question, 100)


async def whole_job(
    desk: BrainDesk,
    uid: str,
    *runs: RunMeasured,
    caller: TokenHolder = TEAM,
    reason: ExitReason = ExitReason.COMPLETED,
    **more: object,
) -> StartPlan:
    """Begins, measures and ends. Gives its start plan."""
    start = await ask(desk, began(uid, **more), caller)
    assert isinstance(start, StartPlan)
    await ask(desk, RunsTold(job=ref(uid), runs=runs), caller)
    await ask(desk, ended(uid, reason), caller)
    return start
