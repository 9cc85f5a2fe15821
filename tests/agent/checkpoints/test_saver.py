"""The agent's saver with real segments and a real directory: what it writes, keeps, adopts and leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest
import torch

from dlrover.agent.checkpoints.saver import Saver, SaverConfig
from dlrover.protocol.messages.checkpoint import OpenSnapshots, SnapshotSaved
from dlrover.snapshot.copy.copying import Copier
from dlrover.snapshot.memory.homes import reap_orphans
from dlrover.snapshot.memory.segment import Segment, SegmentWriter, SlotName
from dlrover.snapshot.memory.segment_format import Owner
from dlrover.snapshot.storage.persist import REQUEST, SaveRequest, encode_request, finish
from dlrover.snapshot.storage.retention import KeepTotal
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import StateWriter
from tests.agent.lab import DEADLINE


class Trainer:
    """Saves states of one shard into the home that the saver names."""

    def __init__(self, saver: Saver, directory, shard: int = 0, num_shards: int = 1) -> None:
        home = saver.home_for(0)
        os.makedirs(home, exist_ok=True)
        saver.on_open(OpenSnapshots(home=home))
        owner = Owner(job="job", launch="a", node_rank=0, global_rank=shard, local_rank=shard, pid=os.getpid())
        self.copier = Copier(1)
        self.segments = SegmentWriter(home, owner)
        self.writer = StateWriter(self.segments, self.copier)
        self.directory, self.shard, self.num_shards = str(directory), shard, num_shards

    def save(
        self, step: int, *, is_storage: bool, num_elements: int = 50_000, is_committer: bool = True, **changes
    ) -> SlotName | None:
        request = SaveRequest(
            directory=self.directory,
            target=str(step),
            step=step,
            attempt=f"try-{step}",
            shard=self.shard,
            num_shards=self.num_shards,
            world_size=self.num_shards,
            is_storage=is_storage,
            is_writer=True,
            is_committer=self.shard == 0 and is_committer,
            **changes,
        )
        return self.writer.save(
            {"model_states": {"step": torch.full((num_elements,), step)}},
            step=step,
            round_=1,
            paths={"model_states": f"rank_{self.shard}.pt"},
            extra={REQUEST: encode_request(request)},
        )

    def close(self) -> None:
        self.segments.close()
        self.copier.close()


def news(name: SlotName, *, is_storage: bool) -> SnapshotSaved:
    return SnapshotSaved(
        path=name.path, slot=name.slot, generation=name.generation, step=name.step, is_storage=is_storage
    )


@pytest.fixture
def make(tmp_path):
    made = []

    def build(**options) -> Saver:
        (tmp_path / "run").mkdir(exist_ok=True)
        config = SaverConfig(
            root=str(tmp_path / "shm"), job="job", launch="a", runtime_dir=str(tmp_path / "run"), **options
        )
        made.append(Saver(config))
        return made[-1]

    yield build
    for saver in made:
        saver.close()


@pytest.fixture
def start(tmp_path):
    made = []

    def build(saver: Saver, *arguments) -> Trainer:
        made.append(Trainer(saver, tmp_path / "checkpoints", *arguments))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()


def committed(tmp_path) -> str:
    return (tmp_path / "checkpoints" / "dlrover_latest.txt").read_text()


async def test_a_storage_save_is_written_and_committed(make, start, tmp_path):
    saver = make()
    name = start(saver).save(3, is_storage=True)
    taken = saver.on_saved(news(name, is_storage=True))
    assert taken is not None
    assert taken.generation == name.generation
    await saver.drain(is_hurried=False)
    assert committed(tmp_path) == "3"
    assert torch.equal(torch.load(tmp_path / "checkpoints/3/rank_0.pt")["step"], torch.full((50_000,), 3))
    assert not (tmp_path / "run" / "saving").exists()


async def test_a_limit_of_the_bandwidth_ends_with_the_job(make, start, tmp_path):
    saver = make(bytes_per_second=1000.0, patience_at_signal=DEADLINE)
    name = start(saver).save(3, is_storage=True, num_elements=2_500_000)
    saver.on_saved(news(name, is_storage=True))
    await asyncio.wait_for(saver.drain(is_hurried=True), DEADLINE)  # by the limit more than an hour
    assert committed(tmp_path) == "3"


async def test_a_memory_save_is_summed_and_not_written(make, start, tmp_path):
    saver = make()
    name = start(saver).save(3, is_storage=False)
    assert saver.on_saved(news(name, is_storage=False)) is None
    await asyncio.wait_for(saver.sums.wait(), DEADLINE)
    with Segment(name.path) as segment, segment.pin(name.slot) as pinned:
        assert pinned.verify()
    assert not (tmp_path / "checkpoints").exists()


async def test_it_tells_whether_the_memory_of_another_node_is_needed(make, start):
    saver = make()
    assert saver.has_whole_state(), "nobody has saved anything"
    first = start(saver, 0, 2)
    assert saver.has_whole_state(), "nobody has saved anything"
    first.save(3, is_storage=False)
    assert not saver.has_whole_state(), "another node has the other piece"
    start(saver, 1, 2).save(3, is_storage=False)
    assert saver.has_whole_state()
    first.save(4, is_storage=False)
    assert saver.has_whole_state(), "step 3 is whole"


async def test_replicas_need_no_memory_of_another_node(make, start):
    saver = make()
    start(saver).save(3, is_storage=False)
    assert saver.has_whole_state()


async def test_a_save_nobody_told_us_of_is_written_before_the_end(make, start, tmp_path):
    saver = make()
    start(saver).save(4, is_storage=True)
    await saver.drain(is_hurried=False)
    assert committed(tmp_path) == "4"


async def test_a_new_agent_finishes_what_a_killed_one_was_asked_for(make, start, tmp_path):
    first = make()
    trainer = start(first)
    trainer.save(5, is_storage=True)
    trainer.close()
    first.close()  # as the kernel does it: locks gone, segments there
    second = make()
    second.home_for(0)
    await second.drain(is_hurried=False)
    assert committed(tmp_path) == "5"


async def test_a_new_agent_does_not_write_what_is_committed(make, start, tmp_path):
    saver = make()
    trainer = start(saver)
    saver.on_saved(news(trainer.save(5, is_storage=True), is_storage=True))
    await saver.drain(is_hurried=False)
    before = (tmp_path / "checkpoints/5/.dlrover/manifest.json").stat().st_ino
    saver.close()
    trainer.close()
    second = make()
    second.home_for(0)
    await second.drain(is_hurried=False)
    assert (tmp_path / "checkpoints/5/.dlrover/manifest.json").stat().st_ino == before


async def test_a_break_point_writes_the_newest_snapshot_if_asked_for(make, start, tmp_path):
    silent, saver = make(), make(is_saving_at_break_points=True)
    trainer = start(saver)
    trainer.save(7, is_storage=False)
    trainer.save(8, is_storage=False)
    silent.break_point()
    saver.break_point()
    await saver.drain(is_hurried=True)
    assert committed(tmp_path) == "8"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["8", "dlrover_latest.txt"]


async def test_the_commit_waits_for_all_shards(make, start, tmp_path):
    saver = make()
    one, other = start(saver, 0, 2), start(saver, 1, 2)
    saver.on_saved(news(one.save(6, is_storage=True), is_storage=True))
    await asyncio.wait(saver._tasks, timeout=0.2)
    assert not (tmp_path / "checkpoints" / "dlrover_latest.txt").exists()
    saver.on_saved(news(other.save(6, is_storage=True), is_storage=True))
    await saver.drain(is_hurried=False)
    assert committed(tmp_path) == "6"
    assert (tmp_path / "checkpoints/6/rank_1.pt").exists()


async def test_a_job_that_ends_has_carried_out_its_deletions(make, start, tmp_path):
    """Step 8 is committed after step 10, because a shard of it was slow: it goes again before the agent ends."""
    saver = make()
    first, second = start(saver, 0, 2), start(saver, 1, 2)
    rule = {"is_storage": True, "keep": KeepTotal(1)}
    early = [first.save(8, **rule), first.save(10, **rule), second.save(8, **rule), second.save(10, **rule)]
    for name in (early[0], early[1], early[3]):
        saver.on_saved(news(name, is_storage=True))
    async with asyncio.timeout(DEADLINE):
        while not (tmp_path / "checkpoints/dlrover_latest.txt").exists():  # noqa: ASYNC110 (a file tells nobody)
            await asyncio.sleep(0.02)
    assert committed(tmp_path) == "10"
    saver.on_saved(news(early[2], is_storage=True))
    await saver.drain(is_hurried=False)
    assert committed(tmp_path) == "10"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["10"]


async def test_a_commit_that_is_not_the_newest_carries_out_its_deletions(make, start, tmp_path):
    """As the master tells the committer of a late save: the trackers stay, and the rule holds for it, too."""
    saver = make()
    trainer = start(saver)
    rule = {"is_storage": True, "keep": KeepTotal(1)}
    for step, is_committer in ((10, True), (8, False)):
        saver.on_saved(news(trainer.save(step, is_committer=is_committer, **rule), is_storage=True))
        await saver.drain(is_hurried=False)
    assert committed(tmp_path) == "10"
    late = finish(read_request_of(trainer, step=8, keep=KeepTotal(1)), is_newest=False)
    assert late.manifest.step == 8
    assert committed(tmp_path) == "10"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["10"]


async def test_links_leave_nothing_behind(make, start, tmp_path, caplog):
    """Of a process that died over it, of a file that has the name already, and of a link that cannot be made."""
    saver = make()
    trainer = start(saver)
    links = tmp_path / "links"
    (links / "taken" / "by a directory").mkdir(parents=True)
    (links / "last.pt.new-1").write_text("of a dead one")
    for step, link in ((1, "last.pt"), (2, "taken")):
        name = trainer.save(step, is_storage=True, links={"rank_0.pt": str(links / link)})
        saver.on_saved(news(name, is_storage=True))
        await saver.drain(is_hurried=False)
    assert "could not be made" in caplog.text
    assert sorted(path.name for path in links.iterdir()) == ["last.pt", "taken"]
    request = read_request_of(trainer, step=1, links={"rank_0.pt": str(links / "last.pt")})
    finish(request)
    assert sorted(path.name for path in links.iterdir()) == ["last.pt", "taken"], "committed twice"


def read_request_of(trainer: Trainer, *, step: int, **changes) -> SaveRequest:
    return SaveRequest(
        directory=trainer.directory,
        target=str(step),
        step=step,
        attempt=f"try-{step}",
        shard=0,
        num_shards=1,
        world_size=1,
        is_storage=True,
        is_writer=True,
        is_committer=True,
        **changes,
    )


async def test_a_shard_that_never_comes_ends_the_attempt_in_time(make, start, tmp_path, caplog):
    saver = make()
    name = start(saver, 0, 2).save(6, is_storage=True, save_timeout=0.1)
    saver.on_saved(news(name, is_storage=True))
    await saver.drain(is_hurried=False)
    assert "only 1 of 2 shards" in caplog.text
    assert os.listdir(tmp_path / "checkpoints") == []


async def test_storage_that_fails_is_reported_once_and_healed_by_the_next_save(make, start, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    saver = make()
    trainer = start(saver)
    (tmp_path / "checkpoints").write_text("in the way")
    for step in (1, 2):
        saver.on_saved(news(trainer.save(step, is_storage=True), is_storage=True))
        await asyncio.wait(saver._tasks)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "Training continues" in errors[0].message
    (tmp_path / "checkpoints").unlink()
    saver.on_saved(news(trainer.save(3, is_storage=True), is_storage=True))
    await saver.drain(is_hurried=False)
    assert committed(tmp_path) == "3"


async def test_slow_storage_does_not_keep_a_leaving_agent(make, start, tmp_path, caplog):
    """Nobody writes the second shard: as slow as storage can be."""
    saver = make(patience_at_signal=0.2)
    saver.on_saved(news(start(saver, 0, 2).save(6, is_storage=True), is_storage=True))
    await asyncio.wait_for(saver.drain(is_hurried=True), DEADLINE)
    assert "are lost" in caplog.text


async def test_a_slot_being_written_is_not_overwritten(make, start, tmp_path):
    saver = make()
    trainer = start(saver)
    saver.on_saved(news(trainer.save(1, is_storage=True), is_storage=True))  # pinned; its task has not begun yet
    assert trainer.save(2, is_storage=False) is not None
    assert trainer.save(3, is_storage=False) is None
    await saver.drain(is_hurried=False)
    assert trainer.save(4, is_storage=False) is not None
    assert torch.load(tmp_path / "checkpoints/1/rank_0.pt")["step"][0] == 1


async def test_a_foreign_path_is_not_looked_at(make, start, tmp_path):
    saver = make()
    start(saver)
    strange = SnapshotSaved(path=str(tmp_path / "elsewhere"), slot=0, generation=1, step=1, is_storage=True)
    assert saver.on_saved(strange) is None
    await saver.drain(is_hurried=False)


async def test_a_living_agents_home_is_not_reaped_and_a_removed_one_leaves_nothing(make, start, tmp_path):
    saver = make()
    trainer = start(saver)
    trainer.save(1, is_storage=False)
    trainer.close()
    assert reap_orphans(tmp_path / "shm", 1e12, grace=0) == []
    saver.close(is_removing=True)
    assert not (tmp_path / "shm").exists()
