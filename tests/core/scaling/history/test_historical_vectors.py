"""The vectors of spec 07 §13.7, each named by its paragraph, and what the paragraphs say beside them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.core.scaling.history.creating import (
    create_servers,
    create_servers_cold,
    create_workers,
    create_workers_after_oom,
)
from dlrover.core.scaling.history.parameters import HistoryParameters
from dlrover.core.scaling.history.seen import GroupWish, HistoryPlan, NodeSeen, NodeWish
from dlrover.core.scaling.history.servers import adjust_servers, hot_servers, idle_servers, servers_after_oom
from dlrover.core.scaling.history.workers import WorkerPhase, size_workers
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import JobFacts
from tests.core.scaling.history.seen_jobs import completed, record, running, servers, used

GIVEN = HistoryParameters()
SHORT = JobFacts(dataset_size=1000, batch_size=10, num_epochs=1, recv_op_count=249)
"""100 steps: 10 seconds with one worker at 10 steps a second."""
LONG = replace(SHORT, dataset_size=10**9)


def group(plan: HistoryPlan | None) -> GroupWish:
    assert plan is not None
    (found,) = plan.groups
    return found


def test_13_7_ps_create_takes_the_cores_and_the_memory_that_former_servers_used() -> None:
    job = completed(record((4.0, 6.0), memory=(1000, 2000)), record((4.0, 6.0), memory=(1000, 2000)))
    found = group(create_servers(running(), [job], GIVEN))
    assert (found.count, found.cpu) == (2, 10), "15 cores in servers of 6 + 4"
    assert found.memory_mb == 2400


def test_13_7_ps_create_never_has_more_than_the_most_servers() -> None:
    job = completed(record([10.0] * 60, memory=100))
    found = group(create_servers(running(), [job], GIVEN))
    assert (found.count, found.cpu) == (15, 60)


def test_13_7_ps_create_spreads_the_memory_of_all_servers() -> None:
    job = completed(record((1.0, 1.0, 1.0, 1.0), memory=1000))
    found = group(create_servers(running(), [job], GIVEN))
    assert (found.count, found.memory_mb) == (2, 2400)


def test_13_7_ps_create_is_not_moved_by_one_odd_job() -> None:
    jobs = [completed(record((8.0,)), uid=str(each)) for each in range(4)]
    odd = completed(record((1.0,)), uid="odd")
    assert group(create_servers(running(), [*jobs, odd], GIVEN)) == group(create_servers(running(), jobs, GIVEN))


@pytest.mark.parametrize("memory", [0.0, 100.0])
def test_13_7_ps_create_gives_nothing_without_cores_or_memory(memory: float) -> None:
    assert create_servers(running(), [], GIVEN) is None
    assert create_servers(running(), [completed(record((0.0,), memory=memory))], GIVEN) is None
    assert create_servers(running(), [completed(record((1.0,), memory=0.0))], GIVEN) is None


def test_13_7_ps_cold_create_is_what_the_settings_say() -> None:
    found = group(create_servers_cold(running(), [], GIVEN))
    assert (found.count, found.cpu, found.memory_mb) == (4, 12, 16 * 1024)


@pytest.mark.parametrize(
    ("cores", "count", "cpu"), [((3.0, 3.0), 5, 14), ((2.0, 24.0), 2, 28)], ids=["even", "one-busy"]
)
def test_13_7_ps_init_adjust_prepares_for_the_workers_that_will_come(
    cores: tuple[float, ...], count: int, cpu: float
) -> None:
    job = running(record(cores, memory=(10_000, 8000)), facts=SHORT)
    found = group(adjust_servers(job, [], replace(GIVEN, init_target_workers=32)))
    assert (found.count, found.cpu, found.memory_mb) == (count, cpu, 12_000)


def test_13_7_ps_init_adjust_of_a_long_job_expects_more_workers() -> None:
    job = running(record((3.0, 3.0)), facts=LONG)
    assert group(adjust_servers(job, [], replace(GIVEN, init_target_workers=32))).count == 14
    assert group(adjust_servers(job, [], replace(GIVEN, init_target_workers=20))).count == 9


def test_13_7_ps_init_adjust_keeps_the_number_where_no_speed_is_known() -> None:
    assert group(adjust_servers(running(record((3.0, 3.0), speed=0), facts=LONG), [], GIVEN)).count is None


def test_13_7_ps_init_adjust_needs_a_model_and_a_record() -> None:
    assert adjust_servers(running(record((3.0, 3.0))), [], GIVEN) is None
    assert adjust_servers(running(facts=SHORT), [], GIVEN) is None


def test_13_7_ps_init_adjust_gives_servers_with_many_operations_16_cores() -> None:
    job = running(record((3.0, 3.0)), facts=replace(LONG, recv_op_count=1000))
    assert group(adjust_servers(job, [], GIVEN)).cpu == 16


def test_13_7_ps_oom_without_records_doubles_the_memory() -> None:
    found = group(servers_after_oom(running(nodes=servers(4, 4, memory=(110, 100))), [], GIVEN))
    assert (found.count, found.memory_mb) == (None, 220)


def test_13_7_ps_oom_of_equal_servers_doubles_their_number() -> None:
    job = running(record((1.0, 1.0), memory=100), nodes=servers(4, 4, memory=(110, 100)))
    assert group(servers_after_oom(job, [], GIVEN)).count == 4


def test_13_7_ps_oom_of_unequal_servers_doubles_the_memory_that_was_used() -> None:
    job = running(record((1.0, 1.0), memory=(100, 200)), nodes=servers(4, 4, memory=(110, 100)))
    found = group(servers_after_oom(job, [], GIVEN))
    assert (found.count, found.memory_mb) == (None, 400)


def test_13_7_ps_oom_at_64_gib_doubles_the_number() -> None:
    found = group(servers_after_oom(running(nodes=servers(4, 4, memory=65_536)), [], GIVEN))
    assert (found.count, found.memory_mb) == (4, 65_536)


def test_13_7_hot_ps_gets_32_cores() -> None:
    job = running(*[record((6.0, 9.0))] * 3, nodes=servers(10, 10))
    plan = hot_servers(job, [], replace(GIVEN, hot_target_workers=1000))
    assert plan is not None
    assert plan.nodes[1] == NodeWish(id=1, node_type=NodeType.PS, cpu=32)
    assert plan.nodes[0].cpu == 22, "what it will need when the busy one has its 32"


def test_13_7_hot_ps_needs_three_records_and_a_hot_server() -> None:
    assert hot_servers(running(*[record((6.0, 9.0))] * 2, nodes=servers(10, 10)), [], GIVEN) is None
    assert hot_servers(running(*[record((6.0, 7.0))] * 3, nodes=servers(10, 10)), [], GIVEN) is None


def test_13_7_ps_that_is_full_of_memory_gets_8_gib_more() -> None:
    job = running(*[record((1.0, 1.0), memory=(950, 10))] * 3, nodes=servers(10, 10, memory=1000))
    plan = hot_servers(job, [], GIVEN)
    assert plan is not None
    assert plan.nodes == (NodeWish(id=0, node_type=NodeType.PS, memory_mb=1000 + 8192),)
    once = [record((1.0,), memory=memory) for memory in (950, 800, 950)]
    assert hot_servers(running(*once, nodes=servers(10, memory=1000)), [], GIVEN) is None


def test_13_7_ps_resource_util_takes_idle_cores_from_a_server() -> None:
    job = running(
        *[record((4.0, 9.5), workers=32, memory=(100, 100), speed=10)] * 3,
        nodes=servers(20, 10),
        facts=LONG,
    )
    plan = idle_servers(job, [], GIVEN)
    assert plan is not None
    (wish,) = plan.nodes
    assert (wish.id, wish.cpu, wish.memory_mb) == (0, 8, 120)


def test_13_7_ps_resource_util_leaves_a_job_alone_that_can_grow_or_ends_soon() -> None:
    records, nodes = [record((4.0, 9.5), workers=32)] * 3, servers(20, 10)
    assert idle_servers(running(*records, nodes=nodes, facts=SHORT), [], GIVEN) is None
    few = [record((4.0, 9.5), workers=5)] * 3
    assert idle_servers(running(*few, nodes=nodes, facts=LONG), [], GIVEN) is None
    assert idle_servers(running(*records[:2], nodes=nodes, facts=LONG), [], GIVEN) is None
    largest = [record((4.0, 26.0), workers=5)] * 3
    assert idle_servers(running(*largest, nodes=servers(20, 32), facts=LONG), [], GIVEN) is not None


def test_13_7_worker_create_gives_one_worker_with_ample_cores() -> None:
    job = completed(record((1.0,), worker_cpu=2.5, worker_memory=20_000))
    found = group(create_workers(running(), [job], GIVEN))
    assert (found.count, found.cpu, found.memory_mb) == (1, 12, 30_000)
    large = completed(record((1.0,), worker_cpu=14.2, worker_memory=1000))
    found = group(create_workers(running(), [large], GIVEN))
    assert (found.cpu, found.memory_mb) == (15, 16 * 1024)
    assert create_workers(running(), [], GIVEN) is None


def former_workers() -> list[NodeSeen]:
    return [
        NodeSeen(id=each, node_type=NodeType.WORKER, used_memory_mb=memory, is_oom=is_oom)
        for each, (memory, is_oom) in enumerate([(13.0, True), (10.0, False), (14.0, False)])
    ]


def test_13_7_worker_create_oom_takes_a_fifth_more_than_what_was_too_little() -> None:
    found = group(create_workers_after_oom(running(), [completed(nodes=tuple(former_workers()))], GIVEN))
    assert found == GroupWish(node_type=NodeType.WORKER, memory_mb=pytest.approx(15.6))


def test_13_7_worker_create_oom_grows_beyond_the_last_plan() -> None:
    job = running(planned_worker_memory_mb=10_000.0)
    found = group(create_workers_after_oom(job, [completed(nodes=tuple(former_workers()))], GIVEN))
    assert found.memory_mb == pytest.approx(10_000 + 4e9 / 2**20)


def test_13_7_worker_resource_grows_until_the_servers_are_busy() -> None:
    job = running(*[record((6.0,), workers=5, worker_cpu=1.0)] * 6, nodes=servers(10))
    found = group(size_workers(job, [], GIVEN, WorkerPhase.STABLE))
    assert (found.count, found.cpu, found.memory_mb) == (7, 2, 120)


def test_13_7_worker_resource_of_a_short_job_gives_ten() -> None:
    job = running(*[record((6.0,), workers=5)] * 6, nodes=servers(10), facts=SHORT)
    assert group(size_workers(job, [], GIVEN, WorkerPhase.SAMPLE)).count == 10


def test_13_7_worker_resource_of_an_unknown_speed_adds_a_few() -> None:
    job = running(*[record((0.6,), workers=5, speed=0)] * 6, nodes=servers(10), facts=LONG)
    assert group(size_workers(job, [], GIVEN, WorkerPhase.SAMPLE)).count == 9


def test_13_7_worker_resource_of_a_long_job_gives_at_most_32_at_first() -> None:
    job = running(*[record((0.6,), workers=5)] * 6, nodes=servers(10), facts=LONG)
    assert group(size_workers(job, [], GIVEN, WorkerPhase.INITIAL)).count == 32


def test_13_7_worker_resource_takes_workers_from_exhausted_servers() -> None:
    job = running(*[record((9.8,), workers=10)] * 6, nodes=servers(10))
    assert group(size_workers(job, [], GIVEN)).count == 6


def test_13_7_worker_resource_does_not_grow_after_a_growth_that_slowed_the_job() -> None:
    before = [record((3.0,), workers=4, speed=10)] * 5
    after = [record((3.0,), workers=6, speed=8)] * 5
    assert group(size_workers(running(*before, *after, nodes=servers(10)), [], GIVEN)).count == 6
    faster = [record((3.0,), workers=6, speed=14)] * 5
    assert group(size_workers(running(*before, *faster, nodes=servers(10)), [], GIVEN)).count == 10


def test_defect_32_a_stable_job_that_is_not_faster_keeps_its_workers() -> None:
    """Spec 07 §19: the original took the number that its servers would bear, without a cap."""
    before = [record((0.5,), workers=4, speed=10)] * 5
    after = [record((0.5,), workers=6, speed=10)] * 5
    job = running(*before, *after, nodes=servers(10))
    assert group(size_workers(job, [], GIVEN, WorkerPhase.STABLE)).count == 6
    assert group(size_workers(job, [], GIVEN, WorkerPhase.SAMPLE)).count == 10, "in other phases it grows"


def test_13_7_worker_resource_drops_a_single_busy_moment() -> None:
    calm, busy = record((6.0,), workers=5), record((9.9,), workers=5, worker_memory=100_000)
    job = running(calm, calm, calm, busy, calm, calm, nodes=servers(10))
    found = group(size_workers(job, [], GIVEN))
    assert (found.count, found.memory_mb) == (7, 120)


def test_13_7_worker_resource_takes_the_maximum_of_a_job_that_begins() -> None:
    records = [record((6.0,), workers=1, worker_cpu=cpu) for cpu in (1.0, 3.0, 1.0)]
    assert group(size_workers(running(*records, nodes=servers(10)), [], GIVEN)).cpu == 4
    many = [record((6.0,), workers=1, worker_cpu=cpu) for cpu in (1.0, 1.0, 1.0, 1.0, 3.0, 2.0)]
    assert group(size_workers(running(*many, nodes=servers(10)), [], GIVEN)).cpu == 3


def test_13_7_worker_resource_of_too_few_records_is_nothing() -> None:
    assert size_workers(running(record((6.0,), workers=5), nodes=servers(10)), [], GIVEN) is None
    assert size_workers(running(nodes=servers(10)), [], GIVEN) is None


def test_13_7_only_records_with_the_newest_servers_count() -> None:
    older = [record((9.0, 9.0), workers=9)] * 3
    job = running(*older, *[record((6.0,), workers=5)] * 6, nodes=servers(10, 10))
    assert group(size_workers(job, [], GIVEN)).count == 7
    assert used(1.0)[0].id == 0
