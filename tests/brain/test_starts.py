"""A new job starts near the end of those that are like it, and inside its own bounds, whatever was told."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.brain.desk import BrainDesk
from dlrover.brain.settings import change_setting, warnings_about
from dlrover.brain.store.store import BrainStore
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.brain import (
    BrainPlan,
    DecisionsTold,
    FactsTold,
    JobAsked,
    JobBounds,
    JobRecipe,
    JobRecord,
    NodeEnded,
    NodeEndKind,
    PlanAsked,
    PlanStage,
    RunsTold,
    StartPlan,
)
from dlrover.protocol.messages.fleet import NodeType, Resource, Strategy
from dlrover.protocol.messages.identity import Micros, NodeRank, PlatformId
from dlrover.protocol.messages.job import ExitReason
from dlrover.protocol.messages.scaling import (
    Configuration,
    GroupSize,
    JobFacts,
    NodeUse,
    PlannedGroup,
    RunMeasured,
    ScaleDecision,
    ScaleOutcome,
    SizePlan,
    TypeUse,
)
from tests.brain.jobs import OTHERS, Clock, ask, began, ended, ref, run, whole_job


async def start_of(desk: BrainDesk, uid: str = "new", **more: object) -> StartPlan:
    start = await ask(desk, began(uid, **more))
    assert isinstance(start, StartPlan)
    return start


def workers_of(start: StartPlan | BrainPlan) -> PlannedGroup:
    assert start.plan is not None
    group = start.plan.group(NodeType.WORKER)
    assert group is not None
    return group


async def test_the_second_run_starts_where_the_first_ended(desk: BrainDesk, clock: Clock) -> None:
    first = await whole_job(desk, "first", run(1, nodes=1), run(2, nodes=4, memory=2000.0))
    assert (first.plan, first.level) == (None, 0)
    clock.now += 1000
    start = await start_of(desk)
    assert (start.level, start.similar, start.algorithm) == (1, 1, "start_like")
    assert workers_of(start).count == 4
    assert workers_of(start).memory_mb == 2400
    assert start.expected_speed == pytest.approx(4 / 0.5), "steps of all workers per second"


async def test_a_configuration_that_was_taken_back_is_no_start(desk: BrainDesk, clock: Clock) -> None:
    tried = SizePlan(groups=(PlannedGroup(node_type=NodeType.WORKER, count=8),))
    taken_back = ScaleDecision(number=1, at=Micros(1), outcome=ScaleOutcome.TAKEN_BACK, sentence="slower", plan=tried)
    await ask(desk, began("first"))
    await ask(desk, RunsTold(job=ref("first"), runs=(run(1, nodes=4), run(2, nodes=8))))
    await ask(desk, DecisionsTold(job=ref("first"), decisions=(taken_back,)))
    await ask(desk, ended("first"))
    clock.now += 1000
    assert workers_of(await start_of(desk)).count == 4


async def test_only_completed_jobs_say_which_size_is_right(desk: BrainDesk, clock: Clock) -> None:
    await whole_job(desk, "failed", run(1, nodes=9), reason=ExitReason.CODE_ERROR)
    clock.now += 1000
    assert (await start_of(desk)).plan is None


async def test_memory_that_was_too_little_is_a_lower_bound(desk: BrainDesk, clock: Clock) -> None:
    await whole_job(desk, "first", run(1, memory=1000.0))
    await ask(desk, began("second"))
    lost = NodeEnded(
        job=ref("second"),
        node=PlatformId(1),
        node_type=NodeType.WORKER,
        kind=NodeEndKind.OOM,
        resource=Resource(memory_mb=5000),
    )
    await ask(desk, lost)
    await ask(desk, ended("second", ExitReason.WORKER_OOM))
    clock.now += 1000
    assert workers_of(await start_of(desk)).memory_mb == 6000


async def test_levels_of_likeness(desk: BrainDesk, clock: Clock) -> None:
    await whole_job(desk, "first", run(1, nodes=6), recipe=JobRecipe(script_name="train.py", model_size=12_000))
    clock.now += 1000
    second = await start_of(desk, "by-script", recipe=JobRecipe(script_name="train.py"))
    assert (second.level, workers_of(second).count) == (2, 6)
    third = await start_of(desk, "by-size", user="bob", recipe=JobRecipe(script_name="other.py", model_size=99_000))
    assert (third.level, workers_of(third).count) == (3, 6)
    assert (await start_of(desk, "none", user="bob", recipe=JobRecipe(script_name="other.py"))).level == 0


@pytest.mark.parametrize("strategy", [Strategy.ALLREDUCE, Strategy.PS])
async def test_defect_29_a_job_of_which_nothing_is_known_is_like_no_other(
    desk: BrainDesk, clock: Clock, strategy: Strategy
) -> None:
    """Spec 07 §19: an empty scenario fitted all jobs, and failed jobs counted for servers."""
    groups = (GroupSize(NodeType.WORKER, 3), GroupSize(NodeType.PS, 2, 8.0, 8000))
    told = run(1, configuration=Configuration(groups=groups))
    for uid, name, reason in (
        ("unnamed", "", ExitReason.COMPLETED),
        ("failed", "nightly", ExitReason.WORKER_ERROR),
    ):
        await ask(desk, began(uid, strategy=strategy, recipe=JobRecipe(name=name)))
        await ask(desk, RunsTold(job=ref(uid), runs=(told,)))
        await ask(desk, ended(uid, reason))
    clock.now += 1000
    for uid, name in (("another", ""), ("again", "nightly")):
        start = await start_of(desk, uid, strategy=strategy, recipe=JobRecipe(name=name))
        assert (start.plan, start.level, start.similar) == (None, 0, 0)


async def test_what_becomes_known_of_a_job_makes_it_alike(desk: BrainDesk, clock: Clock) -> None:
    facts = JobFacts(dataset_name="clicks", total_variable_size=12_345)
    await ask(desk, began("first", recipe=JobRecipe(script_hash="ab")))
    await ask(desk, FactsTold(job=ref("first"), facts=facts))
    await ask(desk, RunsTold(job=ref("first"), runs=(run(1, nodes=5),)))
    await ask(desk, ended("first"))
    record = await ask(desk, JobAsked(uid="first"))
    assert isinstance(record, JobRecord)
    clock.now += 1000
    recipe = JobRecipe(script_hash="ab", dataset_hash=record.job.recipe.dataset_hash, model_size=12_349)
    start = await start_of(desk, recipe=recipe, user="bob")
    assert (start.level, workers_of(start).count) == (1, 5)


async def test_another_tenant_starts_with_nothing(desk: BrainDesk, clock: Clock) -> None:
    await whole_job(desk, "first", run(1), caller=OTHERS)
    clock.now += 1000
    assert (await start_of(desk)).plan is None


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (JobBounds(min_nodes=1, max_nodes=3), 3),
        (JobBounds(min_nodes=9, max_nodes=12), 9),
        (JobBounds(min_nodes=1, max_nodes=16, node_unit=4), 8),
        (JobBounds(min_nodes=2, max_nodes=5, node_unit=2), 4),
        (JobBounds(min_nodes=1, max_nodes=16, types=(NodeType.PS,)), None),
    ],
)
async def test_a_start_keeps_the_bounds_of_its_job(
    desk: BrainDesk, clock: Clock, bounds: JobBounds, expected: int | None
) -> None:
    await whole_job(desk, "first", run(1, nodes=6))
    clock.now += 1000
    start = await start_of(desk, bounds=bounds)
    assert (None if start.plan is None else workers_of(start).count) == expected


def absurd() -> list[RunMeasured]:
    huge = Configuration(groups=(GroupSize(NodeType.WORKER, 10**6),))
    numbers = [math.nan, math.inf, -1.0, 1e300]
    found = [run(3, **{name: number}) for name in ("seconds", "step_time", "records_per_second") for number in numbers]
    found += [run(3, types=(TypeUse(node_type=NodeType.WORKER, memory_mb=number),)) for number in numbers]
    found += [run(3, types=(TypeUse(node_type=NodeType.WORKER, cpu=number),)) for number in numbers]
    found += [run(3, configuration=huge), run(3, steps=-5), run(3, steps=2**62), run(0), run(-1), run(2**40)]
    found += [run(3, configuration=Configuration(groups=(GroupSize(NodeType.WORKER, 4, 1e9, 1),)))]
    found += [run(3, configuration=Configuration(groups=(GroupSize(NodeType.WORKER, 4, 1.0, 2**60),)))]
    found.append(replace(run(3), nodes=tuple(NodeUse(rank=NodeRank(rank)) for rank in range(400))))
    return found


async def test_absurd_runs_are_ignored_and_the_next_start_is_sane(desk: BrainDesk, clock: Clock) -> None:
    await ask(desk, began("first"))
    await ask(desk, RunsTold(job=ref("first"), runs=(run(1, nodes=4),)))
    reports = absurd()
    for each in reports:
        await ask(desk, RunsTold(job=ref("first"), runs=(each,)))
    await ask(desk, ended("first"))
    record = await ask(desk, JobAsked(uid="first"))
    assert isinstance(record, JobRecord)
    assert [each.number for each in record.runs] == [1]
    assert desk.num_absurd["run"] == len(reports)
    clock.now += 1000
    start = await start_of(desk)
    assert workers_of(start).count == 4
    assert workers_of(start).memory_mb == 1200


@pytest.mark.parametrize(
    "bounds",
    [
        JobBounds(min_nodes=5, max_nodes=4),
        JobBounds(max_nodes=2, node_unit=3),
        JobBounds(smallest=Resource(cpu=9), largest=Resource(cpu=1, memory_mb=9)),
        JobBounds(largest=Resource(cpu=math.nan)),
        JobBounds(largest=Resource(cpu=math.inf)),
        JobBounds(limits=Resource(cpu=-1.0)),
        JobBounds(smallest=Resource(memory_mb=-1)),
    ],
)
async def test_bounds_that_make_no_sense_are_refused(desk: BrainDesk, bounds: JobBounds) -> None:
    with pytest.raises(Rejected):
        await ask(desk, began(bounds=bounds))


def server_run(number: int, cores: tuple[float, ...], *, workers: int = 5, cpu: float = 10.0) -> RunMeasured:
    configuration = Configuration(
        groups=(GroupSize(NodeType.WORKER, workers, 4.0), GroupSize(NodeType.PS, len(cores), cpu, 8000))
    )
    nodes = tuple(
        NodeUse(platform_node=PlatformId(index), node_type=NodeType.PS, cpu=used, memory_mb=1000.0)
        for index, used in enumerate(cores)
    )
    types = (
        TypeUse(node_type=NodeType.WORKER, cpu=2.0, memory_mb=500.0),
        TypeUse(node_type=NodeType.PS, cpu=sum(cores) / len(cores), cpu_max=max(cores), memory_mb=1000.0),
    )
    return RunMeasured(
        number=number,
        configuration=configuration,
        seconds=60.0,
        steps=100,
        step_time=0.5,
        types=types,
        nodes=nodes,
        last_step=100 * number,
    )


SERVERS: dict[str, Any] = {
    "strategy": Strategy.PS,
    "bounds": JobBounds(max_nodes=60, largest=Resource(cpu=64.0, memory_mb=100_000)),
}


async def test_defect_30_hot_servers_get_more_cores_by_the_historical_rule(desk: BrainDesk) -> None:
    """Spec 07 §19: at the original these rules could never trigger."""
    await ask(desk, began(**SERVERS))
    await ask(desk, RunsTold(job=ref(), runs=tuple(server_run(number, (6.0, 9.0)) for number in (1, 2, 3))))
    found = await ask(desk, PlanAsked(job=ref(), stage=PlanStage.RUNNING))
    assert isinstance(found, BrainPlan)
    assert found.algorithm == "optimize_job_hot_ps_resource"
    assert found.plan is not None
    assert {int(node.platform_node): node.cpu for node in found.plan.nodes}[1] == 32.0


async def test_no_plan_is_an_answer_and_a_proposal_is_kept_once(desk: BrainDesk) -> None:
    await ask(desk, began(**SERVERS))
    nothing = await ask(desk, PlanAsked(job=ref()))
    assert isinstance(nothing, BrainPlan)
    assert nothing.plan is None
    assert nothing.sentence
    await ask(desk, RunsTold(job=ref(), runs=tuple(server_run(number, (6.0, 9.0)) for number in (1, 2, 3))))
    for _ in range(3):
        await ask(desk, PlanAsked(job=ref()))
    await ask(desk, ended())  # after what was proposed, because changes are made in their order
    record = await ask(desk, JobAsked(uid="job-1"))
    assert isinstance(record, JobRecord)
    assert [(plan.outcome, plan.algorithm) for plan in record.plans] == [("proposed", "optimize_job_hot_ps_resource")]


async def test_defect_31_settings_choose_another_algorithm(desk: BrainDesk, store: BrainStore, clock: Clock) -> None:
    """Spec 07 §19: keys of samples that no algorithm read are named, and thresholds are read by their keys."""
    await whole_job(desk, "first", run(1, nodes=4))
    await store.write(lambda connection: change_setting(connection, 1, ["optimize-algorithm=percentile"], None, None))
    clock.now += 1000
    start = await start_of(desk)
    assert (start.algorithm, workers_of(start).count) == ("percentile", None)
    (warning,) = warnings_about(["optimizer.ps.cpu.hot-adjust=1", "optimizer.ps.count.maximum=3"])
    assert "optimizer.ps.memory.hot-adjust" in warning
    with pytest.raises(ConfigError, match="optimize-algorithm"):
        warnings_about(["optimize-algorithm=guess"])


async def test_an_unknown_algorithm_is_refused(desk: BrainDesk) -> None:
    await ask(desk, began())
    with pytest.raises(Rejected, match="unknown"):
        await ask(desk, PlanAsked(job=ref(), algorithm="guess"))
