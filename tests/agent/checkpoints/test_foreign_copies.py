"""A peer that holds the job's token sends copies. Their words about storage count only if a trainer of the own node named the same."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.agent.checkpoints.saver import Saver, SaverConfig
from dlrover.protocol.messages.checkpoint import OpenSnapshots, SnapshotSaved
from dlrover.protocol.messages.job import NodeRank, Round, WorldSpec
from dlrover.snapshot.memory.mirror import copy_paths
from dlrover.snapshot.memory.segment import Segment, segment_paths
from dlrover.snapshot.storage.class_meta import ClassMeta
from dlrover.snapshot.storage.places import SavePlace, encode_place
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.snapshot.storage.user_storage import meta_for
from tests.agent.checkpoints.save_lab import CoreInHand
from tests.agent.lab import DEADLINE
from tests.agent.replicas.replica_lab import Lab, states_in
from tests.snapshot.storage.test_commit import attempt_at, save
from tests.snapshot.storage.user_classes import DrawerStorage


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path / "shm")
    yield lab
    lab.close()


@pytest.fixture
def savers(tmp_path: Path, lab: Lab) -> Iterator[Any]:
    made: list[Saver] = []

    def build(node: int, core: CoreInHand | None = None, place: SavePlace | None = None) -> Saver:
        """The saver of a node of the lab, which has a worker that saves at `place`."""
        (tmp_path / f"run-{node}").mkdir()
        saver = Saver(
            SaverConfig(
                root=str(lab.folder),
                job="job",
                launch="launch",
                runtime_dir=str(tmp_path / f"run-{node}"),
                is_saving_at_break_points=True,
            )
        )
        made.append(saver)
        if core is not None:
            saver.commits.report_to(core.relay_of("ab"[node]))
        assert saver.home_for(NodeRank(node)) == str(lab.homes[node])
        saver.enter(world(node))
        if place is not None:
            name_place(saver, lab.homes[node], place)
        return saver

    yield build
    for saver in made:
        saver.close()


def world(node: int) -> WorldSpec:
    return WorldSpec(
        round=Round(1),
        group_rank=node,
        group_world_size=2,
        first_global_rank=node,
        local_world_size=1,
        world_size=2,
        coordinator="here:1",
        restart_count=0,
    )


def name_place(saver: Saver, home: Path, place: SavePlace) -> None:
    saver.on_open(OpenSnapshots(home=str(home), place=encode_place(place)))


async def idle(saver: Saver) -> None:
    async with asyncio.timeout(DEADLINE):
        while saver._tasks:
            await asyncio.wait(saver._tasks)


def evil_module(tmp_path: Path) -> ClassMeta:
    """Importing it is enough."""
    (tmp_path / "evil").mkdir()
    code = f"open({str(tmp_path / 'mark')!r}, 'w').close()\nclass Storage: ...\n"
    (tmp_path / "evil" / "evil_storage_of_a_peer.py").write_text(code)
    return ClassMeta("evil_storage_of_a_peer", "Storage", search_path=str(tmp_path / "evil"))


def attacks(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str, bool]]:
    """By name: what the copies ask for, what the agent says, and whether the copies are written all the same."""
    mark = str(tmp_path / "mark")
    popen = ClassMeta("subprocess", "Popen", {"args": ["touch", mark]})
    elsewhere = str(tmp_path / "elsewhere")
    drawer = ClassMeta("tests.snapshot.storage.user_classes", "DrawerStorage", {"drawer": elsewhere})
    return {
        "command": ({"storage": popen}, "names subprocess.Popen", False),
        "module": ({"storage": evil_module(tmp_path)}, "names evil_storage_of_a_peer.Storage", False),
        "arguments": ({"storage": drawer}, f"DrawerStorage with {{'drawer': '{elsewhere}'}}", False),
        "directory": ({"directory": elsewhere}, "no trainer of this node saves there", False),
        "target": ({"target": ".."}, "cannot name a checkpoint", False),
        "replaced": ({"target": "sources"}, "exists and is not a checkpoint", False),
        "file": ({"path": "../../mark"}, "lies outside its checkpoint", False),
        "absolute": ({"path": mark}, "lies outside its checkpoint", False),
        "deletion": ({"deletion": popen}, "strategy of this node applies", True),
        "retention": ({"keep_latest": 1}, "", True),
        "link": ({"links": {"file-0": mark}}, "does not make the links", True),
        "tracker": ({"trackers": {"train.py": "raise SystemExit", "../mark": "x", "latest": "../../x"}}, "", True),
    }


ATTACKS = (
    *("absolute", "arguments", "command", "deletion", "directory", "file"),
    *("link", "module", "replaced", "retention", "target", "tracker"),
)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_copies_of_a_peer_direct_nothing_but_what_own_trainers_named(lab, savers, tmp_path, caplog, attack):
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "sources").mkdir(parents=True)
    (checkpoints / "sources" / "model.py").write_text("mine")
    (checkpoints / "train.py").write_text("mine")
    save(LocalStorage(), attempt_at(5, "a5", str(checkpoints)))
    asked, reason, is_written = attacks(tmp_path)[attack]
    core = CoreInHand("a", "b")
    for node in (0, 1):
        lab.start(node)
    drawer = meta_for(DrawerStorage(str(tmp_path / "drawer")))[0] if attack == "arguments" else None
    victim = savers(1, core, SavePlace(directory=str(checkpoints), storage=drawer))
    for node in (0, 1):
        await lab.enter(node)
    for shard in (0, 1):
        words = {"directory": str(checkpoints), "num_shards": 2, "is_committer": shard == 0, "path": f"file-{shard}"}
        await lab.push(0, lab.trainer(0, shard).save(10, **words | asked))
    assert len(copy_paths(lab.homes[1])) == 2, "the copies have arrived"

    core.scene.silent("a")
    victim.break_point()
    await idle(victim)

    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "elsewhere").exists()
    assert "evil_storage_of_a_peer" not in sys.modules
    assert str(tmp_path / "evil") not in sys.path
    assert reason in caplog.text
    assert (checkpoints / "sources" / "model.py").read_text() == "mine"
    assert (checkpoints / "train.py").read_text() == "mine"
    assert not (checkpoints / "latest").exists()
    assert (checkpoints / "5" / "sub" / "rank_0.pt").exists()
    assert (checkpoints / "10" / "file-0").exists() is is_written


async def test_a_replacement_writes_what_it_fetched_once_its_own_trainer_names_the_storage(
    lab, savers, tmp_path, caplog
):
    """Until then it neither imports nor calls the class. The search path of the peer is not used even then."""
    named, _ = meta_for(DrawerStorage(str(tmp_path / "drawer"), label="mine"))
    assert named is not None
    told = replace(named, search_path=str(tmp_path / "of the peer"))
    checkpoints = str(tmp_path / "checkpoints")
    lab.start(0)
    words = {"directory": checkpoints, "is_storage": True, "is_committer": True, "storage": told}
    lab.trainer(0, 0).save(10, num_shards=1, **words)
    await lab.enter(0)
    lab.start(2)
    lab.round = Round(2)
    await lab.enter(2)
    assert list(states_in(lab.homes[2], 0)) == [10], "fetched from the peer"

    saver = savers(2)
    await idle(saver)
    assert "no trainer of this node saves there" in caplog.text
    assert not list((tmp_path / "drawer").iterdir())
    name_place(
        saver, lab.homes[2], SavePlace(directory=checkpoints, storage=replace(named, kwargs={"drawer": checkpoints}))
    )
    await idle(saver)
    assert "The trainers of this node use tests.snapshot.storage.user_classes.DrawerStorage with" in caplog.text
    assert not list((tmp_path / "drawer").iterdir())

    name_place(saver, lab.homes[2], SavePlace(directory=checkpoints, storage=named))
    await idle(saver)
    commits = (tmp_path / "drawer" / "commits").read_text().splitlines()
    assert [json.loads(line) for line in commits] == [["mine", 10, True]]
    assert str(tmp_path / "of the peer") not in sys.path


async def test_a_trainer_that_saves_into_fetched_memory_is_obeyed(lab, savers, tmp_path):
    """The file came from a peer, the newest slot of it is of a worker of this node, which may name links of its own."""
    lab.start(0)
    lab.trainer(0, 0).save(10, num_shards=1)
    await lab.enter(0)
    lab.start(2)
    lab.round = Round(2)
    await lab.enter(2)
    saver = savers(2, place=SavePlace(directory=str(tmp_path / "checkpoints")))
    own = lab.trainer(2, 0)
    link = tmp_path / "model.pt"
    directory = str(tmp_path / "checkpoints")
    words = {"directory": directory, "is_storage": True, "is_committer": True, "links": {"file": str(link)}}
    name = own.save(11, num_shards=1, round_=0, **words)
    fetched = [path for path in segment_paths(lab.homes[2], 0) if str(path) == name.path]
    with Segment(fetched[0]) as segment:
        assert segment.owner.local_rank == -1, "the trainer goes on with the file that was fetched"
    saver.on_saved(SnapshotSaved(path=name.path, slot=name.slot, generation=name.generation, step=11, is_storage=True))
    await idle(saver)
    assert link.read_bytes() == (tmp_path / "checkpoints" / "11" / "file").read_bytes()
