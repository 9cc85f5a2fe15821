"""With which numbers a job with parameter servers starts: what several former lives say together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.core.scaling.history.alike import find_alike
from dlrover.core.scaling.history.seen import COMPLETED, FormerRun, JobSeen, Recipe, former_run
from dlrover.core.scaling.history.server_start import MOST_STEP, ServerNumbers, measured_worth, start_numbers
from dlrover.core.scaling.history.starting import MEMORY_MARGIN, StartFound, measured, start_like
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import Configuration, GroupSize, RunMeasured, TypeUse

RECIPE = Recipe(name="nightly")
Law = Callable[[int, int, float, float], float]


def needy(workers: int, servers: int, worker_cpu: float, server_cpu: float) -> float:
    """Step time: every core counts."""
    return 0.1 + 4.0 / worker_cpu + 1.0 * workers / (servers * server_cpu)


def run(
    size: tuple[int, int, float, float],
    law: Law = needy,
    *,
    memory: float = 1000.0,
    number: int = 1,
    has_paid: bool = True,
) -> FormerRun:
    workers, servers, worker_cpu, server_cpu = size
    groups = (GroupSize(NodeType.WORKER, workers, worker_cpu, 8192), GroupSize(NodeType.PS, servers, server_cpu, 8192))
    uses = (
        TypeUse(node_type=NodeType.WORKER, cpu=worker_cpu / 2, cpu_max=worker_cpu / 2, memory_mb=500.0),
        TypeUse(node_type=NodeType.PS, cpu=server_cpu / 2, cpu_max=server_cpu / 2, memory_mb=memory),
    )
    told = RunMeasured(
        number=number,
        configuration=Configuration(groups=groups),
        seconds=600.0,
        steps=500,
        step_time=law(*size),
        types=uses,
    )
    return former_run(told, has_paid=has_paid, ended_at=600.0 * number)


def start_of(*lives: Sequence[FormerRun]) -> StartFound:
    """The oldest life first."""
    jobs = [
        JobSeen(uid=f"job-{at}", recipe=RECIPE, began_at=1000.0 * at, exit_reason=COMPLETED, runs=tuple(runs))
        for at, runs in enumerate(lives, start=1)
    ]
    found = start_like(find_alike(RECIPE, jobs, before=1e6))
    assert found is not None
    return found


def numbers(found: StartFound) -> ServerNumbers:
    worker, server = found.plan.group(NodeType.WORKER), found.plan.group(NodeType.PS)
    assert worker is not None
    assert server is not None
    return ServerNumbers(worker.count or 0, server.count or 0, worker.cpu or 0.0, server.cpu or 0.0)


def test_the_best_life_counts_and_not_the_newest() -> None:
    good, bad = (8, 4, 6.0, 6.0), (2, 8, 16.0, 16.0)
    assert numbers(start_of([run(good)], [run(bad)])) == good


def test_a_size_that_was_taken_back_is_no_start_however_well_it_looks() -> None:
    kept, refused = (2, 8, 16.0, 16.0), (8, 4, 6.0, 6.0)
    assert numbers(start_of([run(kept), run(refused, number=2, has_paid=False)])) == kept


def test_one_life_is_repeated_as_it_was_best() -> None:
    assert numbers(start_of([run((8, 4, 6.0, 6.0))])) == (8, 4, 6.0, 6.0)


def test_the_fit_of_several_lives_moves_the_start_by_a_step_at_most() -> None:
    sizes = [(2, 2, 4.0, 4.0), (4, 2, 4.0, 4.0), (4, 4, 4.0, 4.0), (4, 4, 6.0, 4.0), (4, 4, 6.0, 8.0)]
    runs = [run(size) for size in sizes]
    seen = measured_worth([measured(each) for each in runs])
    best = max(seen, key=lambda size: seen[size])
    found = numbers(start_of(*[[each] for each in runs]))
    assert found != best, "more workers are worth it by this law"
    for wanted, had in zip(found, best, strict=True):
        assert math.floor(had / MOST_STEP) <= wanted <= math.ceil(had * MOST_STEP)
    worth = found.workers / needy(*found) / math.sqrt(found.cores)
    assert worth > seen[best]


def test_a_step_that_a_life_took_in_vain_is_not_taken_again() -> None:
    def crowded(workers: int, servers: int, worker_cpu: float, server_cpu: float) -> float:
        return needy(workers, servers, worker_cpu, server_cpu) + (5.0 if workers > 4 else 0.0)

    sizes = [(2, 2, 4.0, 4.0), (4, 2, 4.0, 4.0), (4, 4, 4.0, 4.0), (4, 4, 6.0, 4.0), (4, 4, 6.0, 8.0)]
    first = numbers(start_of(*[[run(size, crowded)] for size in sizes]))
    assert first.workers > 4, "no life has seen the crowd yet"
    second = numbers(start_of(*[[run(size, crowded)] for size in [*sizes[1:], tuple(first)]]))  # type: ignore[arg-type]
    assert second.workers <= 4


def test_memory_comes_from_runs_with_as_many_servers_or_more() -> None:
    few, many = run((8, 2, 6.0, 6.0), memory=40_000.0), run((8, 4, 6.0, 6.0), memory=22_000.0, number=2)
    found = start_of([few, many])
    server = found.plan.group(NodeType.PS)
    assert server is not None
    assert (server.count, server.memory_mb) == (4, MEMORY_MARGIN * 22_000.0)


def test_fewer_servers_than_any_life_had_get_more_memory() -> None:
    def serial(workers: int, servers: int, worker_cpu: float, server_cpu: float) -> float:
        return 1.0 + 4.0 / worker_cpu

    sizes = [(4, 8, 4.0, 4.0), (6, 8, 4.0, 4.0), (4, 6, 4.0, 4.0), (4, 6, 6.0, 4.0), (8, 6, 4.0, 4.0)]
    found = start_of(*[[run(size, serial, memory=12_000.0)] for size in sizes])
    server = found.plan.group(NodeType.PS)
    assert server is not None
    assert server.count is not None
    assert server.memory_mb is not None
    assert server.count < 6
    assert server.memory_mb >= MEMORY_MARGIN * 12_000.0 * 6 / server.count


size_of = st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(1, 32), st.integers(1, 32))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(size_of, min_size=1, max_size=12),
    times=st.lists(st.floats(0.01, 100.0), min_size=12, max_size=12),
)
def test_no_start_is_further_than_a_step_from_the_best_that_was_seen(
    sizes: list[tuple[int, int, int, int]], times: list[float]
) -> None:
    runs = [
        measured(run((size[0], size[1], float(size[2]), float(size[3])), lambda *_, time=time: time, number=at))
        for at, (size, time) in enumerate(zip(sizes, times, strict=False), start=1)
    ]
    known, found = measured_worth(runs), start_numbers(runs)
    assert found is not None
    best = max(known, key=lambda size: (known[size], size))
    for wanted, had in zip(found, best, strict=True):
        assert max(1, math.floor(had / MOST_STEP)) <= wanted <= math.ceil(had * MOST_STEP)
    assert start_numbers([]) is None
