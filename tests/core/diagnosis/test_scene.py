"""What the watch is told of the world, as the job says it."""

from __future__ import annotations

from dlrover.core.diagnosis.picture import Picture, scene_of
from tests.core.scene import Scene, failure, terms


def test_before_the_first_world_nobody_trains() -> None:
    scene = Scene(terms(2))
    found = scene_of(scene.job.state)
    assert (found.round, found.is_active, found.places, found.world_size) == (0, False, (), 0)


def test_the_places_of_a_world_and_when_it_began() -> None:
    scene = Scene(terms(2))
    scene.at(7).gather("a", "b", procs=3)
    found = scene_of(scene.job.state)
    assert (found.round, found.is_active, found.began_at, found.world_size) == (1, True, 7_000_000, 6)
    assert [(place.node, place.node_rank, place.host, place.first_rank, place.num_ranks) for place in found.places] == [
        (1, 0, "host-a", 0, 3),
        (2, 1, "host-b", 3, 3),
    ]


def test_a_world_is_not_active_while_a_round_is_open_or_the_job_ends() -> None:
    scene = Scene(terms(2))
    scene.gather("a", "b")
    scene.fail("a", failure())
    assert not scene_of(scene.job.state).is_active
    scene.rejoin("a", "b")
    assert scene_of(scene.job.state).is_active
    scene.silent("b")
    lost = scene_of(scene.job.state)
    assert [place.host for place in lost.places] == ["host-a", ""], "who is gone has no host any more"
    scene.stop()
    assert not scene_of(scene.job.state).is_active


def test_who_has_finished_is_watched_no_longer() -> None:
    scene = Scene(terms(2))
    scene.gather("a", "b")
    picture = Picture()
    picture.enter(scene_of(scene.job.state))
    assert list(picture.ranks) == [0, 1]
    scene.finish("a")
    picture.enter(scene_of(scene.job.state))
    assert list(picture.ranks) == [1]
