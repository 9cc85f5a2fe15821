"""Where a new job starts, from the jobs that are like it. What a store does with them is in `tests/brain`."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from dlrover.core.scaling.history.alike import AlikeJobs, find_alike
from dlrover.core.scaling.history.seen import COMPLETED, FormerRun, GroupWish, JobSeen, NodeSeen
from dlrover.core.scaling.history.starting import is_sane, last_that_paid, percentile, start_like
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import Configuration, GroupSize, TypeUse
from tests.core.scaling.history.seen_jobs import RECIPE

PS, WORKER = NodeType.PS, NodeType.WORKER


def run(
    number: int = 1, *, workers: int = 4, cpu: float = 8.0, servers: int = 0, memory: float = 1000.0, **more: object
) -> FormerRun:
    groups = [GroupSize(node_type=WORKER, count=workers, cpu=cpu)]
    if servers:
        groups.append(GroupSize(node_type=PS, count=servers, cpu=2.0))
    values = {
        "number": number,
        "configuration": Configuration(groups=tuple(groups)),
        "seconds": 600.0,
        "steps": 1000,
        "step_time": 0.5,
        "uses": (TypeUse(node_type=WORKER, cpu=3.0, memory_mb=memory),),
    }
    return FormerRun(**{**values, **more})  # type: ignore[arg-type]


def job(uid: str, *runs: FormerRun, began_at: float = 100.0, **more: object) -> JobSeen:
    values = {"uid": uid, "recipe": RECIPE, "exit_reason": COMPLETED, "runs": runs, "began_at": began_at}
    return JobSeen(**{**values, **more})  # type: ignore[arg-type]


def alike(*jobs: JobSeen) -> AlikeJobs:
    return AlikeJobs(level=1, jobs=jobs)


def test_jobs_that_are_alike_come_the_newest_first_and_equals_by_name() -> None:
    jobs = [job("b", began_at=10.0), job("a", began_at=10.0), job("new", began_at=20.0), job("failed", exit_reason="x")]
    found = find_alike(RECIPE, jobs, before=100.0)
    assert (found.level, [each.uid for each in found.jobs]) == (1, ["failed", "new", "a", "b"])
    assert [each.uid for each in found.completed] == ["new", "a", "b"]


def test_jobs_of_the_last_hours_count_and_none_of_the_future() -> None:
    jobs = [job(str(at), began_at=at) for at in (6399.0, 6400.0, 10_000.0, 10_001.0)]
    found = find_alike(RECIPE, jobs, before=10_000.0, hours=1.0)
    assert [each.uid for each in found.jobs] == ["10000.0", "6400.0"]


def test_jobs_of_other_tenants_are_not_alike() -> None:
    assert find_alike(replace(RECIPE, tenant="others"), [job("a")], before=200.0) == AlikeJobs()


def test_the_start_is_where_the_newest_ended_with_the_memory_of_the_largest() -> None:
    newest = job("newest", run(1, workers=2), run(2, workers=4, memory=2000.0))
    older = job("older", run(workers=8, memory=3000.0), began_at=50.0)
    found = start_like(alike(newest, older))
    assert found is not None
    assert found.plan.groups == (GroupWish(node_type=WORKER, count=4, cpu=8.0, memory_mb=1.2 * 3000.0),)
    assert found.plan.algorithm == "start_like"
    assert found.configuration == newest.runs[1].configuration
    assert (found.level, found.similar) == (1, 2)
    assert found.confidence == 1 / 5, "one of five ended near this start, the newest itself"
    assert found.speed == 4 / 0.5


def test_a_group_with_unknown_cpu_or_memory_leaves_them_as_they_are() -> None:
    found = start_like(alike(job("a", run(cpu=0.0, memory=0.0))))
    assert found is not None
    assert found.plan.groups == (GroupWish(node_type=WORKER, count=4),)


def test_only_the_newest_five_jobs_with_a_run_are_looked_at() -> None:
    jobs = [job(str(age), run(memory=1000.0 + age), began_at=100.0 - age) for age in range(7)]
    found = start_like(alike(job("without runs"), *jobs))
    assert found is not None
    assert found.plan.groups[0].memory_mb == pytest.approx(1.2 * 1004.0)
    assert (found.confidence, found.similar) == (1.0, 8)


def test_a_run_that_was_taken_back_is_no_start() -> None:
    former = job("a", run(1, workers=4), run(2, workers=8, has_paid=False))
    assert last_that_paid(former) == former.runs[0]
    assert start_like(alike(job("b", run(has_paid=False)))) is None


@pytest.mark.parametrize(
    ("workers", "cpu", "servers", "confidence"),
    [(10, 8.0, 0, 0.4), (8, 8.0, 0, 0.4), (7, 8.0, 0, 0.2), (10, 6.4, 0, 0.4), (10, 6.3, 0, 0.2), (10, 8.0, 1, 0.2)],
)
def test_a_job_that_ended_within_a_fifth_raises_the_confidence(
    workers: int, cpu: float, servers: int, confidence: float
) -> None:
    other = job("other", run(workers=workers, cpu=cpu, servers=servers))
    found = start_like(alike(job("newest", run(workers=10)), other))
    assert found is not None
    assert found.confidence == confidence


def test_a_node_that_ran_out_of_memory_had_too_little() -> None:
    def with_nodes(uid: str, began_at: float, *nodes: NodeSeen) -> JobSeen:
        return job(uid, exit_reason="failed", began_at=began_at, nodes=nodes)

    oom = NodeSeen(id=1, node_type=WORKER, memory_mb=5000.0, is_oom=True)
    others = (
        with_nodes("oom", 100.0, oom),
        with_nodes("well", 100.0, replace(oom, memory_mb=6000.0, is_oom=False)),
        with_nodes("server", 100.0, replace(oom, memory_mb=7000.0, node_type=PS)),
        with_nodes("absurd", 100.0, replace(oom, memory_mb=2.0**26 + 1)),
        with_nodes("before them all", 99.0, replace(oom, memory_mb=8000.0)),
    )
    found = start_like(alike(job("a", run()), *others))
    assert found is not None
    assert found.plan.groups[0].memory_mb == 1.2 * 5000.0


def test_former_servers_size_the_memory_also_if_the_newest_run_reports_a_group_of_none() -> None:
    """A client of another kind may report that."""
    use = TypeUse(node_type=PS, cpu=1.0, memory_mb=3000.0)
    workers, none = GroupSize(node_type=WORKER, count=4, cpu=8.0), GroupSize(node_type=PS, count=0, cpu=2.0)
    odd = run(2, configuration=Configuration(groups=(workers, none)))
    found = start_like(alike(job("a", run(1, servers=2, uses=(use,)), odd)))
    assert found is not None
    assert found.plan.groups[1] == GroupWish(node_type=PS, count=0, cpu=2.0, memory_mb=1.2 * 2 * 3000.0)


def test_the_step_time_is_fitted_to_the_runs_of_all() -> None:
    sizes = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3}
    runs = [run(number, workers=number, step_time=seconds, steps=500) for number, seconds in sizes.items()]
    found = start_like(alike(job("a", *runs)))
    assert found is not None
    assert found.features, "a world of workers has a fit"
    assert len(found.features) == len(found.thetas)
    alone = start_like(alike(job("a", runs[0])))
    assert alone is not None
    assert (alone.features, alone.thetas) == ((), ()), "one run fits everything"


def test_the_percentile_is_that_of_time_with_a_margin() -> None:
    def used(cpu: float, memory: float, seconds: float) -> FormerRun:
        use = TypeUse(node_type=PS, cpu=1.0, cpu_most=cpu, memory_mb=memory)
        return run(seconds=seconds, uses=(use,), servers=1)

    plan = percentile(alike(job("a", used(2.0, 100.0, 950.0), used(4.0, 300.0, 50.0))))
    assert plan is not None
    assert plan.algorithm == "percentile"
    assert plan.groups == (GroupWish(node_type=PS, cpu=1.15 * 2.0, memory_mb=1.15 * 100.0),)
    plan = percentile(alike(job("a", used(2.0, 100.0, 940.0)), job("b", used(4.0, 300.0, 60.0))))
    assert plan is not None
    assert plan.groups == (GroupWish(node_type=PS, cpu=1.15 * 4.0, memory_mb=1.15 * 300.0),)


def test_the_percentile_takes_the_mean_where_no_peak_was_seen_and_each_type_apart() -> None:
    uses = (TypeUse(node_type=PS, cpu=1.0), TypeUse(node_type=WORKER, memory_mb=10.0))
    plan = percentile(alike(job("a", run(uses=uses))))
    assert plan is not None
    assert plan.groups == (
        GroupWish(node_type=WORKER, memory_mb=1.15 * 10.0),
        GroupWish(node_type=PS, cpu=1.15),
    )
    assert percentile(alike(job("a", run(uses=())))) is None
    sixth = [job(str(age), run(uses=())) for age in range(5)]
    assert percentile(alike(*sixth, job("too old", run()))) is None


LIMIT = 2.0**26


@pytest.mark.parametrize(
    "more",
    [
        {"steps": 19},
        {"seconds": 19.9},
        {"step_time": 0.0},
        {"step_time": math.nan},
        {"records_per_second": -1.0},
        {"records_per_second": math.inf},
        {"workers": 0},
        {"workers": 100_001},
        {"cpu": 4096.5},
        {"cpu": -1.0},
        {"uses": (TypeUse(node_type=WORKER, cpu=4096.5),)},
        {"uses": (TypeUse(node_type=WORKER, cpu_max=4096.5),)},
        {"uses": (TypeUse(node_type=WORKER, cpu_most=math.nan),)},
        {"uses": (TypeUse(node_type=WORKER, memory_mb=LIMIT + 1),)},
        {"configuration": Configuration(groups=(GroupSize(node_type=WORKER, count=1, memory_mb=LIMIT + 1),))},
        {"configuration": Configuration(groups=(GroupSize(node_type=WORKER, count=1, memory_mb=-1),))},
    ],
    ids=str,
)
def test_a_run_with_absurd_numbers_is_no_evidence(more: dict[str, object]) -> None:
    assert not is_sane(run(**more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "more",
    [
        {"steps": 20},
        {"seconds": 20.0},
        {"step_time": 1e-9},
        {"workers": 1},
        {"workers": 100_000},
        {"cpu": 4096.0},
        {"cpu": 0.0},
        {"uses": (TypeUse(node_type=WORKER, cpu=4096.0, cpu_max=4096.0, memory_mb=LIMIT),)},
        {"configuration": Configuration(groups=(GroupSize(node_type=WORKER, count=1, memory_mb=2**26),))},
    ],
    ids=str,
)
def test_a_run_at_the_limits_is_evidence(more: dict[str, object]) -> None:
    assert is_sane(run(**more))  # type: ignore[arg-type]
