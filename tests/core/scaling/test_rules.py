"""The vectors of spec 07 for jobs with parameter servers, each named by its paragraph."""

from __future__ import annotations

import math

import pytest

from dlrover.core.scaling import rules, tuning
from dlrover.core.scaling.rules import NodeSample, Sized, UseSample
from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.scaling import ModelCard, ScaleTerms

TERMS = ScaleTerms()
BIG = Resource(cpu=100, memory_mb=102_400)


def servers(*used: float, cpu: float = 4.0, memory_used: float = 2048, memory: int = 4096) -> tuple[NodeSample, ...]:
    return tuple(NodeSample(rank, each, cpu, memory_used, memory) for rank, each in enumerate(used))


def workers(count: int, used: float = 1.0, memory_used: float = 2048) -> tuple[NodeSample, ...]:
    return tuple(NodeSample(100 + rank, used, 1.0, memory_used) for rank in range(count))


@pytest.mark.parametrize(
    ("kind", "wanted", "becomes"),
    [
        (NodeType.WORKER, Sized(1, 1, 256), Sized(1, 4, 6144)),
        (NodeType.PS, Sized(1, 64, 2_560_000), Sized(1, 32, 65_536)),
        (NodeType.WORKER, Sized(90, 8, 8192), Sized(60, 8, 8192)),
        (NodeType.PS, Sized(20, 8, 8192), Sized(15, 8, 8192)),
        (NodeType.WORKER, Sized(0, 0, 0), Sized(0, 0, 0)),
        (NodeType.WORKER, Sized(2, 0, 0), Sized(2, 4, 8000)),
    ],
)
def test_2_2_a_plan_is_clamped(kind: NodeType, wanted: Sized, becomes: Sized) -> None:
    assert rules.clamped(kind, wanted, TERMS) == becomes


def test_8_1_create_takes_a_fifth_of_the_limits() -> None:
    assert rules.create(Resource(cpu=10, memory_mb=8192)) == Sized(1, 2, 1639)
    assert rules.create(Resource(cpu=1000, memory_mb=10**6)) == Sized(1, 16, 8192)


@pytest.mark.parametrize(("limit", "count"), [(10, 2), (100, 12)])
def test_8_2_servers_for_the_most_workers_that_the_limit_allows(limit: float, count: int) -> None:
    sample = UseSample(servers(1.4, 1.0), workers(3))
    assert rules.first_servers([sample], limit) == Sized(count, 4.0, 2457)


def test_8_2_needs_samples_of_servers() -> None:
    assert rules.first_servers([], 10) is None
    assert rules.first_servers([UseSample((), workers(3))], 10) is None


def test_8_3_workers_until_the_servers_are_busy() -> None:
    sample = UseSample(servers(1.0, 1.0), workers(3), speed=10)
    found = rules.workers([sample], BIG)
    assert found == Sized(10, 1.0, 3072)


def test_8_3_nothing_for_saturated_idle_or_unprofitable_jobs() -> None:
    assert rules.workers([UseSample(servers(3.9), workers(3))], BIG) is None
    assert rules.workers([UseSample(servers(0.0), workers(3))], BIG) is None
    worse = [UseSample(servers(1.0), workers(4), speed=12.1), UseSample(servers(1.0), workers(3), speed=12.0)]
    assert rules.workers(worse, BIG) is None


def test_8_3_the_limits_count_what_servers_take() -> None:
    sample = UseSample(servers(1.0, 1.0, memory=40_000), workers(3), speed=10)
    assert rules.workers([sample], BIG) == Sized(7, 1.0, 3072), "22,400 MiB are left for 3,072 each"


def test_8_3_speed_ratio() -> None:
    before, after = UseSample(servers(1.0), workers(3), speed=12), UseSample(servers(1.0), workers(4), speed=15)
    assert rules.speed_ratio([after, before]) == pytest.approx(0.75)
    assert rules.speed_ratio([after]) == 1
    assert rules.speed_ratio([before, before]) == 1


def test_8_4_a_hot_server_gets_the_cores_of_the_most_workers() -> None:
    sample = UseSample(servers(3.6, 0.3), workers(3))
    assert rules.hot_servers([sample], 100) == {0: 32.0}
    assert rules.hot_servers([UseSample(servers(3.0, 0.3), workers(3))], 100) == {}


def test_8_4_samples_of_another_set_of_servers_do_not_count() -> None:
    newest, older = UseSample(servers(1.0, 0.3), workers(3)), UseSample(servers(3.9), workers(3))
    assert rules.hot_servers([newest, older], 100) == {}


def test_8_5_memory_is_doubled_after_an_oom() -> None:
    assert rules.after_oom(1024) == 2048


@pytest.mark.parametrize(("wanted", "is_in"), [(9.9, True), (5.0, False), (12.0, False), (11.9, True), (4.0, False)])
def test_8_6_small_changes_of_servers_are_not_worth_it(wanted: float, is_in: bool) -> None:
    assert rules.is_in_dead_band(wanted, 10.0) == is_in


def test_9_1_the_first_plan_and_the_evaluator() -> None:
    plan = rules.first_plan(Resource())
    assert plan == {NodeType.WORKER: Sized(2, 1, 8000), NodeType.PS: Sized(1, 1, 8000)}
    assert rules.evaluator_size(Sized(1, 1, 512), Sized(3, 8, 4096)) == Sized(1, 8, 4096)
    assert rules.evaluator_size(Sized(1, 4, 2048), Sized(3, 8, 4096)) == Sized(1, 4, 2048)


def test_9_2_whose_word_counts() -> None:
    assert rules.overridden(NodeType.WORKER, Sized(8, 4, 4096), Sized(3, 1, 512)) == Sized(3, 4, 4096)
    assert rules.overridden(NodeType.PS, Sized(8, 4, 4096), Sized(0, 8, 512)) == Sized(8, 8, 4096)
    assert rules.overridden(NodeType.PS, Sized(8, 4, 4096), Sized(2, 1, 2048)) == Sized(2, 4, 2048)


def test_9_4_memory_after_an_oom() -> None:
    assert rules.after_oom(1024, group_mb=8192) == 8192
    assert rules.after_oom(10_240) == 18_432, "at most 8 GiB more"
    assert rules.after_oom(60_000) == 65_536
    assert rules.after_oom(1024, user_mb=4096) == 4096


@pytest.mark.parametrize(("unit", "free", "size"), [(4, 4, 8), (4, 3, 4), (1, 3, 7), (1, 9, 8)])
def test_10_a_world_grows_by_what_is_free_in_whole_units(unit: int, free: int, size: int) -> None:
    assert rules.world_size(8, 4, free, unit) == size


def test_15_the_historical_batch_and_learning_rate() -> None:
    batch = tuning.historical_batch(32, 24_000 - 4000, ModelCard())
    assert batch == 177
    assert tuning.rate_factor(177, 32) * 0.01 == pytest.approx(0.01 * math.sqrt(177 / 32))
    assert tuning.historical_batch(32, 2400, ModelCard()) is None
