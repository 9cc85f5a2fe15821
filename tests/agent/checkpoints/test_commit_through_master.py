"""Two nodes whose savers commit through the master: with real segments, real files and a real core."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrover.agent.checkpoints.saver import Saver, SaverConfig
from dlrover.protocol.messages.checkpoint import (
    CheckpointFailed,
    CheckpointSettled,
    OpenSnapshots,
    RequestSave,
    SaveRequested,
    ShardWritten,
    SnapshotFailed,
    SnapshotSaved,
    SnapshotsHeld,
    TrainerNews,
)
from dlrover.protocol.messages.job import LeaveJob, LeaveReason, LookAgain, NodeRank, Round, WorldSpec
from dlrover.snapshot.copy.copying import Copier
from dlrover.snapshot.memory.mirror import copy_path
from dlrover.snapshot.memory.segment import SegmentWriter, SlotName
from dlrover.snapshot.memory.segment_format import Owner
from dlrover.snapshot.storage.commit import read_global_manifest
from dlrover.snapshot.storage.persist import REQUEST, SaveRequest, encode_request
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import StateWriter
from tests.agent.checkpoints.save_lab import CoreInHand
from tests.agent.lab import DEADLINE
from tests.small_disk import mounted

TOO_MANY = 400_000


class Node:
    """One node's saver and the one worker that saves there."""

    def __init__(self, tmp_path: Path, shard: int, core: CoreInHand | None, num_shards: int, **options: Any) -> None:
        runtime_dir = tmp_path / f"run-{shard}"
        runtime_dir.mkdir()
        self.saver = Saver(
            SaverConfig(root=str(tmp_path / "shm"), job="job", launch="a", runtime_dir=str(runtime_dir), **options)
        )
        self.heard: list[TrainerNews] = []
        self.has_heard = asyncio.Event()
        self.saver.commits.tell_trainers = self.hear
        if core is not None:
            self.saver.commits.report_to(core.relay_of("ab"[shard]))
        self.shard, self.num_shards, self.directory = shard, num_shards, tmp_path / "checkpoints"
        home = self.saver.home_for(NodeRank(shard))
        self.saver.enter(world(shard))
        os.makedirs(home, exist_ok=True)
        self.saver.on_open(OpenSnapshots(home=home))
        owner = Owner(job="job", launch="a", node_rank=shard, global_rank=shard, local_rank=0, pid=os.getpid())
        self.copier = Copier(1)
        self.segments = SegmentWriter(home, owner)
        self.writer = StateWriter(self.segments, self.copier)

    def hear(self, news: TrainerNews) -> None:
        self.heard.append(news)
        self.has_heard.set()

    def save(
        self, step: int, *, is_storage: bool = True, shard: int | None = None, num_values: int = 1000, **changes: Any
    ) -> SlotName:
        shard = self.shard if shard is None else shard
        fields: dict[str, Any] = {
            "directory": str(self.directory),
            "target": str(step),
            "step": step,
            "attempt": f"life-{step}",
            "shard": shard,
            "num_shards": self.num_shards,
            "world_size": self.num_shards,
            "is_storage": is_storage,
            "is_writer": True,
            "is_committer": shard == 0,
        } | changes
        name = self.writer.save(
            {"model_states": {"step": torch.full((num_values,), step)}},
            step=step,
            round_=1,
            paths={"model_states": f"rank_{shard}.pt"},
            extra={REQUEST: encode_request(SaveRequest(**fields))},
        )
        assert name is not None
        self.saver.on_saved(
            SnapshotSaved(path=name.path, slot=name.slot, generation=name.generation, step=step, is_storage=is_storage)
        )
        return name

    def settled(self) -> list[tuple[int, bool]]:
        return [(news.step, news.is_committed) for news in self.heard if isinstance(news, CheckpointSettled)]

    async def idle(self) -> None:
        """Until nothing is being written or waited for."""
        async with asyncio.timeout(DEADLINE):
            while self.saver._tasks:
                await asyncio.wait(self.saver._tasks)

    def close(self) -> None:
        self.saver.close()
        self.segments.close()
        self.copier.close()


def world(group_rank: int) -> WorldSpec:
    return WorldSpec(
        round=Round(1),
        group_rank=group_rank,
        group_world_size=2,
        first_global_rank=group_rank,
        local_world_size=1,
        world_size=2,
        coordinator="here:1",
        restart_count=0,
    )


Make = Callable[..., list[Node]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Node] = []

    def build(core: CoreInHand | None, num_shards: int = 2, **options: Any) -> list[Node]:
        made.extend(Node(tmp_path, shard, core, num_shards, **options) for shard in (0, 1))
        return made

    yield build
    for node in made:
        node.close()


def tracker(node: Node) -> str:
    path = node.directory / "dlrover_latest.txt"
    return path.read_text() if path.exists() else ""


async def test_the_last_writer_makes_the_set_complete_and_one_commits(make: Make) -> None:
    core = CoreInHand("a", "b")
    first, second = make(core)
    first.save(3)
    second.save(3)
    await first.idle()
    await second.idle()
    assert tracker(first) == "3"
    assert core.kinds().count("CheckpointCommitted") == 1
    assert first.settled() == second.settled() == [(3, True)]
    news = first.heard[-1]
    assert isinstance(news, CheckpointSettled)
    assert news.seconds > 0
    assert core.scene.job.status().checkpoints.committed[0].step == 3


async def test_the_committer_may_be_any_writer(make: Make) -> None:
    core = CoreInHand("a", "b")
    first, second = make(core)
    first.save(3)
    await core.until_told(ShardWritten)
    core.scene.silent("a")  # the machine is gone after its shard was written
    first.close()
    second.save(3)
    await second.idle()
    assert tracker(second) == "3"
    assert second.settled() == [(3, True)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[None]:
    """Checkpoints go to a file system that has no room for `TOO_MANY` values."""
    with mounted(tmp_path / "checkpoints"):
        yield


@pytest.mark.usefixtures("small_disk")
async def test_a_full_disk_is_reported_once_and_the_others_need_not_wait(make: Make) -> None:
    core = CoreInHand("a", "b")
    first, second = make(core)
    first.save(3)
    second.save(3, num_values=TOO_MANY)
    await first.idle()
    await second.idle()
    assert tracker(first) == ""
    trouble = core.scene.job.status().checkpoints.trouble
    assert trouble is not None
    assert "No space left" in trouble.reason
    assert first.settled()[-1] == second.settled()[-1] == (3, False)
    assert not list(first.directory.glob("3.tmp*")), "the staged files of a save that was given up are removed"
    first.save(4)
    second.save(4)
    await first.idle()
    await second.idle()
    assert tracker(first) == "4"
    assert core.scene.job.status().checkpoints.trouble is None


@pytest.mark.usefixtures("small_disk")
async def test_a_save_that_began_before_a_failure_does_not_have_it_reported_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It was written while storage was well, and waited for the other node since."""
    core = CoreInHand("a", "b")
    first, second = make(core)
    first.save(3)
    await core.until_told(ShardWritten)
    first.save(4, num_values=TOO_MANY)
    await core.until_told(CheckpointFailed)
    second.save(3)
    await first.idle()
    assert tracker(first) == "3"
    first.save(5, num_values=TOO_MANY)
    await first.idle()
    assert [record.getMessage()[:24] for record in caplog.records if record.levelname == "ERROR"] == [
        "the checkpoint of step 4"
    ]


async def test_without_a_master_the_files_decide(make: Make) -> None:
    core = CoreInHand("a", "b")
    first, second = make(core)
    core.go_away()
    first.save(3, data_state="the rest")
    second.save(3)
    await first.idle()
    await second.idle()
    assert tracker(first) == "3"
    manifest = read_global_manifest(LocalStorage(), str(first.directory / "3"))
    assert manifest is not None
    assert manifest.data_state == "the rest", "what the master said when the snapshot was taken"
    assert core.told == []
    assert first.settled()[-1] == (3, True)


async def test_a_master_that_goes_away_while_shards_are_missing_is_done_without(make: Make) -> None:
    core = CoreInHand("a", "b")
    first, second = make(core)
    first.save(3)
    await core.until_told(ShardWritten)
    core.go_away()
    second.save(3)
    await first.idle()
    assert tracker(first) == "3"


async def test_after_a_break_the_newest_common_step_is_written_by_both(make: Make) -> None:
    core = CoreInHand("a", "b")
    first, second = make(core, is_saving_at_break_points=True)
    for step in (10, 11):
        first.save(step, is_storage=False)
    for step in (9, 10):
        second.save(step, is_storage=False)
    core.scene.fail("a")
    first.saver.break_point()
    second.saver.break_point()
    await first.idle()
    await second.idle()
    assert tracker(first) == "10"
    assert sorted(path.name for path in (first.directory / "10").glob("*.pt")) == ["rank_0.pt", "rank_1.pt"]


async def test_a_copy_on_another_node_is_written_in_place_of_a_dead_writers(make: Make) -> None:
    """The state is the same everywhere, and the node that would have written it is gone."""
    core = CoreInHand("a", "b")
    _first, second = make(core, num_shards=1, is_saving_at_break_points=True)
    second.save(10, is_storage=False, shard=0, is_writer=False)
    core.scene.silent("a")
    second.saver.break_point()
    await second.idle()
    assert tracker(second) == "10"


async def test_a_copy_kept_for_a_dead_node_is_written_with_the_rest(make: Make) -> None:
    core = CoreInHand("a", "b")
    first, second = make(core, is_saving_at_break_points=True)
    name = first.save(10, is_storage=False)
    second.save(10, is_storage=False)
    shutil.copy(name.path, copy_path(Path(second.saver.home_for(NodeRank(1))), 0, 1))
    core.scene.silent("a")
    second.saver.break_point()
    await second.idle()
    assert tracker(second) == "10"
    assert sorted(path.name for path in (second.directory / "10").glob("*.pt")) == ["rank_0.pt", "rank_1.pt"]


async def test_a_node_that_is_taken_away_writes_its_part_while_it_goes(make: Make) -> None:
    core = CoreInHand("a", "b", min_nodes=1)
    first, second = make(core, is_saving_at_break_points=True)
    for node in (first, second):
        node.save(10, is_storage=False)
    agent = core.scene.agents["b"]
    promised = second.saver.promise()
    assert [each.shard for each in promised] == [1]
    second.save(11, is_storage=False)  # its workers are still being stopped
    core.scene.send(
        "b",
        LeaveJob(node=agent.node, incarnation=agent.incarnation, reason=LeaveReason.PREEMPTED, held=promised),
    )
    first.saver.break_point()
    second.saver.break_point()  # the master hears nothing of it any more
    await first.idle()
    assert tracker(first) == "10"
    await second.saver.drain(is_hurried=True)


async def test_without_a_word_of_the_master_each_writes_what_it_has(make: Make) -> None:
    core = CoreInHand("a", "b")
    first, second = make(core, is_saving_at_break_points=True)
    for node in (first, second):
        node.save(10, is_storage=False)
    core.scene.fail("a")
    first.saver.break_point()
    await core.until_told(SnapshotsHeld)  # the other node tells nothing, and the master waits for it
    core.go_away()
    second.saver.break_point()
    await first.idle()
    await second.idle()
    assert tracker(first) == "10"


async def test_a_state_that_could_not_even_be_copied_is_shown_by_the_master(make: Make) -> None:
    core = CoreInHand("a", "b")
    first, _second = make(core)
    first.saver.on_failed(SnapshotFailed(directory="/shared/run", step=4, reason="no room in /dev/shm"))
    await first.idle()
    trouble = core.scene.job.status().checkpoints.trouble
    assert trouble is not None
    assert (trouble.step, trouble.reason, trouble.host) == (4, "no room in /dev/shm", "host-a")


async def test_a_requested_save_reaches_the_trainers(make: Make) -> None:
    core = CoreInHand("a", "b")
    first, _second = make(core)
    await asyncio.sleep(0)
    outcome = core.scene.do(RequestSave(reason="maintenance"))
    for effect in outcome.effects:
        assert isinstance(effect, LookAgain)
        core.wake(*effect.topics)
    await asyncio.wait_for(first.has_heard.wait(), DEADLINE)
    news = first.heard[0]
    assert isinstance(news, SaveRequested)
    assert news.reason == "maintenance"


async def test_the_newest_step_in_memory_is_that_of_all_local_shards(make: Make) -> None:
    (first, _second) = make(None)
    assert first.saver.newest_step is None
    first.save(5, is_storage=False)
    assert first.saver.newest_step == 5
    first.saver.enter(world(0))
    assert first.saver.newest_step is None
