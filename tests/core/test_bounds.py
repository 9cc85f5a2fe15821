"""What is remembered is bounded, and what is forgotten is the oldest: each limit at its edge."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dlrover.core.checkpoints.break_points import MAX_HELD
from dlrover.core.checkpoints.commits import MAX_DIRECTORIES, MAX_SETTLED, MAX_UNDER_WAY
from dlrover.core.data.dataset import MOST_RECALLED, PACE_MARKS
from dlrover.core.fleet.fleet import NUM_FORMER
from dlrover.core.goodput.accountant import MAX_FAULTS
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import CheckpointCommitted, HeldSnapshot, ShardWritten, SnapshotsHeld
from dlrover.protocol.messages.data import (
    MAX_DATASETS,
    Consumption,
    DatasetSpec,
    ExchangeShards,
    RegisterDataset,
    ShardsGiven,
)
from dlrover.protocol.messages.fleet import NodeExit
from dlrover.protocol.messages.job import Round
from dlrover.protocol.messages.sync import MAX_NAMES, JoinSync, NotifyBarrier
from tests.core.fleet.fleet_scene import FleetScene
from tests.core.scene import Scene, failure, terms


def written(scene: Scene, number: int, directory: str = "/ck") -> None:
    agent = scene.agents["a"]
    scene.send(
        "a",
        ShardWritten(
            node=agent.node,
            incarnation=agent.incarnation,
            directory=directory,
            target=f"{directory}/{number}",
            step=number,
            attempt=f"k{number}",
            shard=0,
            num_shards=2 if directory == "/ck" else 1,
            round=Round(1),
            digest="d",
        ),
    )


def committed(scene: Scene, number: int, directory: str) -> None:
    agent = scene.agents["a"]
    scene.send(
        "a",
        CheckpointCommitted(
            node=agent.node,
            incarnation=agent.incarnation,
            directory=directory,
            attempt=f"k{number}",
            step=number,
            round=Round(1),
        ),
    )


@pytest.fixture
def alone() -> Scene:
    scene = Scene(terms(1))
    scene.gather("a", procs=2)
    return scene


def test_one_save_more_than_may_be_under_way_gives_up_the_oldest(alone: Scene) -> None:
    for number in range(1, MAX_UNDER_WAY + 1):
        written(alone, number)
    assert len(alone.job.state.checkpoints.attempts) == MAX_UNDER_WAY
    assert alone.job.state.checkpoints.settled == []
    written(alone, MAX_UNDER_WAY + 1)
    checkpoints = alone.job.state.checkpoints
    assert [each.step for each in checkpoints.attempts.values()] == list(range(2, MAX_UNDER_WAY + 2))
    (given_up,) = checkpoints.settled
    assert (given_up.step, given_up.is_committed) == (1, False)
    assert str(MAX_UNDER_WAY) in given_up.reason


def test_outcomes_and_directories_are_kept_up_to_a_limit(alone: Scene) -> None:
    most = max(MAX_SETTLED, MAX_DIRECTORIES)
    for number in range(most + 1):
        written(alone, number, f"/d{number}")
        committed(alone, number, f"/d{number}")
        checkpoints = alone.job.state.checkpoints
        kept = range(max(0, number + 1 - MAX_DIRECTORIES), number + 1)
        assert list(checkpoints.committed) == [f"/d{each}" for each in kept]
        kept = range(max(0, number + 1 - MAX_SETTLED), number + 1)
        assert [each.step for each in checkpoints.settled] == list(kept)


def test_a_node_may_hold_so_many_snapshots_and_not_one_more(alone: Scene) -> None:
    agent = alone.agents["a"]
    alone.fail("a", failure())

    def tell(count: int) -> None:
        held = tuple(HeldSnapshot(directory=f"/{n}", attempt="k", step=1, shard=0, num_shards=1) for n in range(count))
        alone.send("a", SnapshotsHeld(node=agent.node, incarnation=agent.incarnation, round=Round(1), held=held))

    with pytest.raises(Rejected) as refused:
        tell(MAX_HELD + 1)
    assert refused.value.code == ErrorCode.MALFORMED
    tell(MAX_HELD)
    assert len(alone.job.state.checkpoints.breaks.decisions) == MAX_HELD


def test_the_newest_faults_are_told_and_all_are_counted() -> None:
    scene = Scene(terms(1))
    scene.gather("a")
    for number in range(1, MAX_FAULTS + 2):
        scene.at(10 * number).fail("a", failure(at=10 * number), step=number)
        scene.rejoin("a")
        told = scene.job.goodput(scene.now)
        assert told.num_faults == number
        assert [fault.number for fault in told.faults] == list(range(max(1, number - MAX_FAULTS + 1), number + 1))


def test_so_many_datasets_and_not_one_more(alone: Scene) -> None:
    agent = alone.agents["a"]

    def register(number: int) -> None:
        spec = DatasetSpec(name=f"d{number}", size=1, shard_size=1)
        command = RegisterDataset(node=agent.node, incarnation=agent.incarnation, dataset=spec.name, spec=spec)
        alone.job.apply(command, alone.now)

    for number in range(MAX_DATASETS):
        register(number)
    register(0)
    with pytest.raises(Rejected) as refused:
        register(MAX_DATASETS)
    assert refused.value.code == ErrorCode.DATA_FULL


@pytest.mark.parametrize("kind", [JoinSync, NotifyBarrier])
def test_so_many_names_of_sync_points_and_barriers(alone: Scene, kind: type[JoinSync | NotifyBarrier]) -> None:
    agent = alone.agents["a"]

    def use(number: int) -> None:
        command = kind(node=agent.node, incarnation=agent.incarnation, name=f"n{number}", round=Round(1))
        alone.job.apply(command, alone.now)

    for number in range(MAX_NAMES):
        use(number)
    use(0)
    with pytest.raises(Rejected) as refused:
        use(MAX_NAMES)
    assert refused.value.code == ErrorCode.SYNC_FULL


class TestData:
    def exchange(self, scene: Scene, local_rank: int, want: int = 0, *consumed: Consumption) -> ShardsGiven:
        agent = scene.agents["a"]
        command = ExchangeShards(
            node=agent.node,
            incarnation=agent.incarnation,
            round=Round(1),
            dataset="t",
            local_rank=local_rank,
            want=want,
            consumed=consumed,
        )
        reply = scene.send("a", command).reply
        assert isinstance(reply, ShardsGiven)
        return reply

    def register(self, scene: Scene, size: int) -> None:
        agent = scene.agents["a"]
        spec = DatasetSpec(name="t", size=size, shard_size=1)
        scene.send("a", RegisterDataset(node=agent.node, incarnation=agent.incarnation, dataset="t", spec=spec))

    def test_at_most_so_many_shards_are_asked_back_at_once(self, alone: Scene) -> None:
        self.register(alone, 5 * MOST_RECALLED)
        held: list[int] = []
        while len(held) < 5 * MOST_RECALLED:
            held += [shard.id for shard in self.exchange(alone, 0, 1024).shards]
        assert self.exchange(alone, 1, 1).retry_after > 0
        assert self.exchange(alone, 0).recalled == tuple(held[-MOST_RECALLED:]), "those it would come to last"
        dataset = alone.job.state.data.datasets["t"]
        assert (dataset.num_recalled, dataset.num_unbegun) == (MOST_RECALLED, len(held))

    def test_half_of_a_few_is_asked_back(self, alone: Scene) -> None:
        self.register(alone, 5)
        held: list[int] = []
        while len(held) < 5:
            held += [shard.id for shard in self.exchange(alone, 0, 1024).shards]
        self.exchange(alone, 1, 1)
        assert self.exchange(alone, 0).recalled == tuple(held[2:])
        assert self.exchange(alone, 0, 0, Consumption(held[4], 1, 1)).recalled == tuple(held[2:4]), "it was begun"

    def test_the_speed_is_that_of_the_last_minute(self, alone: Scene) -> None:
        self.register(alone, 100)
        (first, *_) = self.exchange(alone, 0, 100).shards
        for number in range(PACE_MARKS + 3):
            alone.at(5 * (number + 1))
            self.exchange(alone, 0, 0, Consumption(first.id + number, 1, 1))
        marks = alone.job.state.data.datasets["t"].pace
        assert [mark.at // 5_000_000 for mark in marks] == list(range(4, PACE_MARKS + 4))

    def test_the_counts_of_a_snapshot_without_them_are_made_anew(self, alone: Scene) -> None:
        self.register(alone, 8)
        while self.exchange(alone, 0, 4).shards:
            pass
        self.exchange(alone, 1, 4)
        dataset = alone.job.state.data.datasets["t"]
        before = dataset.num_unbegun, dataset.num_recalled
        assert 0 not in before
        dataset.num_unbegun = dataset.num_recalled = 0
        restored = type(alone.job).decode(alone.job.encode()).state.data.datasets["t"]
        assert (restored.num_unbegun, restored.num_recalled) == before


class TestFleet:
    def test_nodes_that_are_gone_are_forgotten_oldest_first(self) -> None:
        scene = FleetScene.of(1)
        sizes = []
        for number in range(5 * NUM_FORMER):
            scene.at(number).run(number)
            scene.vanish(number, exit_reason=NodeExit.KILLED)
            sizes.append(len(scene.fleet.nodes) - 1)
        assert max(sizes) == 2 * NUM_FORMER - 1
        trimmed = [size for before, size in pairwise(sizes) if size < before]
        assert trimmed
        assert set(trimmed) == {NUM_FORMER}
        assert list(scene.fleet.nodes)[-1] == 5 * NUM_FORMER
        assert list(scene.fleet.nodes) == sorted(scene.fleet.nodes), "the oldest went first"
