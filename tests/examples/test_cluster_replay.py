"""The cluster replay: its law, its scheduler, and that each policy carries every job to its end."""

from __future__ import annotations

import statistics

import pytest
from cluster_replay import PARAMETERS, as_asked, by_percentile, fitted, historical, warm_start
from msgspec.structs import replace
from replay_cluster import Begin, Cluster, Result, summary
from replay_laws import Parameters, read_parameters, server_scene, world_scene
from replay_worlds import WorldCluster

GIVEN = replace(read_parameters(PARAMETERS), jobs=8, kinds=2)
POLICIES: dict[str, Begin] = {
    "request": as_asked,
    "percentile": by_percentile,
    "historical": historical,
    "fitted": fitted(2.0, has_brain=False),
    "warm": warm_start(2.0),
    "brain": fitted(2.0, has_brain=True),
}


def replayed(begin: Begin, *, backfill: bool = True, given: Parameters = GIVEN, seed: int = 1) -> list[Result]:
    return Cluster(server_scene(given, seed, is_right=False), begin, backfill=backfill, pause=2.0).run()


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_job_ends_and_a_seed_gives_the_same_again(name: str) -> None:
    results = replayed(POLICIES[name])
    assert sorted(each.uid for each in results) == sorted(f"job-{index}" for index in range(GIVEN.jobs))
    for each in results:
        assert each.submitted <= each.began < each.ended
        assert 0 < each.used_core_seconds <= each.core_seconds
        assert 0 < each.used_memory_seconds <= each.memory_seconds
    assert replayed(POLICIES[name]) == results


def test_jobs_never_hold_more_cores_than_the_cluster_has() -> None:
    results = replayed(as_asked, given=replace(GIVEN, cores=2400, load=5.0))
    moments = [(each.began, each.core_seconds / (each.ended - each.began)) for each in results]
    moments += [(each.ended, -each.core_seconds / (each.ended - each.began)) for each in results]
    held = most = 0.0
    for _, cores in sorted(moments):
        held += cores
        most = max(most, held)
    assert 0 < most <= 2400 + 1e-6


def test_back_fill_delays_nobody_who_is_first_and_shortens_the_queue() -> None:
    crowded = replace(GIVEN, jobs=40, load=3.0)
    fifo, filled = replayed(as_asked, backfill=False, given=crowded), replayed(as_asked, given=crowded)
    assert _waiting(filled) < _waiting(fifo)
    order = [each.uid for each in sorted(fifo, key=lambda each: (each.began, each.submitted))]
    assert order == [each.uid for each in sorted(fifo, key=lambda each: each.submitted)], "first come, first served"


def _waiting(results: list[Result]) -> float:
    return statistics.fmean(each.began - each.submitted for each in results)


def test_no_single_step_is_better_than_the_best_size() -> None:
    for kind in server_scene(GIVEN, 3, is_right=True).kinds:
        best = kind.best()

        def worth(size, kind=kind):  # type: ignore[no-untyped-def]
            return kind.speed(size, 0.5) / size.cores**0.5

        for change in (
            {"workers": best.workers + 1},
            {"workers": max(1, best.workers - 1)},
            {"worker_cores": best.worker_cores + 1},
            {"server_cores": tuple(cores + 1 for cores in best.server_cores)},
        ):
            assert worth(best._replace(**change)) <= worth(best) + 1e-12


def test_right_requests_are_near_the_best_and_wrong_ones_are_not() -> None:
    def errors(is_right: bool) -> list[float]:
        scene = server_scene(replace(GIVEN, jobs=60), 2, is_right=is_right)
        best = [kind.best().worker_memory for kind in scene.kinds]
        return [abs(order.size.worker_memory / best[order.kind] - 1) for order in scene.orders]

    assert max(errors(True)) <= 0.2
    assert statistics.median(errors(False)) > 0.2


def test_nodes_that_run_out_of_memory_come_back_with_more() -> None:
    results = replayed(as_asked)
    assert summary(results)["ooms"] > 0
    right = Cluster(server_scene(GIVEN, 1, is_right=True), as_asked, backfill=True, pause=2.0).run()
    assert summary(right)["ooms"] == 0


def test_worlds_share_a_room_and_all_end() -> None:
    scene = world_scene(replace(GIVEN, jobs=16, load=2.0), 1)
    for is_elastic in (False, True):
        results = WorldCluster(scene, is_elastic=is_elastic, pause=2.0).run()
        assert len(results) == 16
        assert all(each.submitted <= each.began < each.ended for each in results)
        assert WorldCluster(scene, is_elastic=is_elastic, pause=2.0).run() == results
