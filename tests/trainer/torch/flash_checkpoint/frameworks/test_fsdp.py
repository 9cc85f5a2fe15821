"""States that are cut over ranks: saved and loaded by real processes, in the files of torch's distributed checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

from dlrover.snapshot.memory.segment import Segment  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer  # noqa: E402
from tests.trainer.torch.flash_checkpoint.any_front import ShardedFront  # noqa: E402
from tests.trainer.torch.flash_checkpoint.frameworks import fsdp_scenes as scenes  # noqa: E402
from tests.trainer.torch.flash_checkpoint.frameworks.fsdp_lab import Node, Ranks  # noqa: E402


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(4)
    yield made
    made.close()


@pytest.fixture
def node(ranks: Ranks, tmp_path: Path) -> Iterator[Node]:
    made = Node(ranks, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=[FsdpShardCheckpointer, ShardedFront], ids=["fsdp", "any model"])
def either(request: pytest.FixtureRequest, ranks: Ranks, tmp_path: Path) -> Iterator[Node]:
    """A node whose scenes use the front end of FSDP, or `dlrover.Checkpointer` behind its calls."""
    made = Node(ranks, tmp_path, request.param)
    yield made
    made.close()


def test_a_state_comes_back_from_memory_and_its_files_are_those_of_torch(either: Node, tmp_path: Path) -> None:
    found = either.play(scenes.save_round_trip)
    for each in found:
        assert [each[what] for what in ("saved", "memory", "goes on the same", "not aliased")] == [True] * 4
        assert each["step"] == 3
        assert each["extra"] == ([0, 1, 2], {"step": 3, "note": "all of it"})
    directory = tmp_path / "run" / "5"
    assert {name for name in os.listdir(directory) if name != ".dlrover"} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    }
    assert (tmp_path / "run" / "dlrover_latest.txt").read_text() == "5"
    for loaded in either.play(scenes.load_plainly, 3):
        assert loaded == found[0]["whole"], "torch alone reads other values"
    dcp_to_torch_save(directory, tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=False)
    assert one["step"] == 5
    assert one["model"]["first.weight"].shape == (7, 5)


def test_worlds_of_other_sizes_restore_the_same_bits(either: Node) -> None:
    """4 ranks, then 3, then 4 again: from memory, and the same from storage."""
    saved = either.play(scenes.load_and_go_on, 4)
    assert {first for _, first in saved} == {0}
    in_memory = either.play(scenes.load_newest, 3)
    with either.without_memory():
        stored = either.play(scenes.load_newest, 3)
    assert {step for _, step, _ in (*in_memory, *stored)} == {2}
    states = {state for state, *_ in (*saved, *in_memory, *stored)}
    assert len(states) == 1, "memory and storage, 3 and 4 ranks, do not agree"

    smaller = either.play(scenes.load_and_go_on, 3)
    assert {first for _, first in smaller} == {2}
    left = sorted(path.name[:10] for path in either.home.iterdir())
    assert left == ["rank-00000", "rank-00001", "rank-00002"], "the fourth rank's memory is of no use to anybody"
    larger = either.play(scenes.load_newest, 4)
    with either.without_memory():
        stored = either.play(scenes.load_newest, 4)
    assert {step for _, step, _ in (*larger, *stored)} == {4}
    assert len({state for state, *_ in (*larger, *stored, *smaller)}) == 1


def test_ranks_that_change_places_get_their_own_pieces(node: Node) -> None:
    assert all(node.play(scenes.save_numbers))
    for found, _old, new, is_rest_fine in node.play(scenes.load_numbers_in_another_order):
        assert found == new, "from memory"
        assert is_rest_fine
    with node.without_memory():
        for found, old, _new, is_rest_fine in node.play(scenes.load_numbers_in_another_order):
            assert found == old, "from storage"
            assert is_rest_fine
    assert (node.folder / "run" / "one" / ".metadata").exists()


def test_pieces_come_from_other_nodes_memory(node: Node) -> None:
    """Every rank on a node of its own. Step 2 is in memory only: if one shard of it is nowhere, step 1 in storage is the newest."""
    assert all(node.play_apart(scenes.save_numbers, "abcd"))
    assert node.play_apart(scenes.load_newest_numbers, "abcd") == [(2, True)] * 4
    assert node.play_apart(scenes.load_newest_numbers, "bdca") == [(2, True)] * 4, "the nodes have changed places"
    assert node.play_apart(scenes.load_newest_numbers, "cab") == [(1, True)] * 3, "a node is lost, with its memory"
    [segment] = (node.home / "d").glob("rank-00003.*")
    segment.rename(node.home / "b" / segment.name.replace("rank", "copy"))
    assert node.play_apart(scenes.load_newest_numbers, "cab") == [(2, True)] * 3, "another node has a copy of it"
    _flip_newest(next((node.home / "b").glob("copy-*")))
    assert node.play_apart(scenes.load_newest_numbers, "cab") == [(1, True)] * 3, "the copy is damaged"


def test_replicated_pieces_are_written_once_and_kept_for_every_cut(either: Node) -> None:
    assert all(either.play(scenes.save_hybrid_and_load_as, 4))
    sizes = [(either.folder / "run" / "2" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) < 0.5 * sum(sizes), "one rank writes nearly all of what four hold"


def test_fsdp_of_the_first_generation(either: Node) -> None:
    for found in either.play(scenes.round_trip_of_fsdp1):
        assert all(found), found


def test_scripts_for_the_first_versions_of_the_original(node: Node) -> None:
    for found in node.play(scenes.follow_the_old_guide):
        assert all(found), found


def test_scripts_that_call_torch_themselves(node: Node) -> None:
    for found in node.play(scenes.use_torch_functions):
        assert all(found), found


def test_checkpoints_that_others_wrote(node: Node) -> None:
    for found in node.play(scenes.read_what_others_wrote):
        assert all(found), found


def test_damage_leads_to_the_next_older_step(either: Node) -> None:
    [older, *_] = either.play(scenes.save_steps)
    with either.without_memory():
        file = either.folder / "run" / "2" / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[content.index(b"archive/data/0") + 80] ^= 1
        file.write_bytes(content)
        (either.folder / "run" / "dlrover_latest.txt").unlink()  # decision 46: no beginning either
        for state, step, extra in either.play(scenes.load_newest):
            assert (step, extra) == (1, {"step": 1})
            assert state == older
    for path in either.home.iterdir():
        _flip_newest(path)
    for state, step, _extra in either.play(scenes.load_newest):
        assert step == 1
        assert state == older


def test_states_may_change_their_structure(node: Node) -> None:
    for found in node.play(scenes.change_the_structure):
        assert all(found), found


def test_an_optimizer_before_its_first_step_stays_as_it_is(node: Node) -> None:
    for found in node.play(scenes.save_before_the_first_step):
        assert all(found), found


def test_saves_in_a_rhythm(node: Node) -> None:
    for found in node.play(scenes.save_when_due):
        assert all(found), found


def test_a_state_that_all_ranks_have_goes_on_in_worlds_of_other_sizes(node: Node) -> None:
    """As under DDP: 4 ranks, 3 from memory, 3 from storage, 4 again."""
    expected = [[1.0] * 4, [2.5] * 4, [4.25] * 4, [6.125] * 4]
    for step, size in ((1, 4), (2, 4), (3, 3)):
        assert node.play(scenes.resize_a_copied_state, size) == [(step, expected[step - 1])] * size
    with node.without_memory():
        assert node.play(scenes.resize_a_copied_state, 3) == [(3, expected[2])] * 3
    assert node.play(scenes.resize_a_copied_state, 4) == [(4, expected[3])] * 4


def test_the_whole_state_in_one_file(node: Node) -> None:
    for found in node.play(scenes.round_trip_in_one_file):
        assert all(found), found
    state = torch.load(node.folder / "run" / "2" / "rank_0.pt", weights_only=False)
    assert state["model"]["second.weight"].shape == (9, 7)
    assert set(state) == {"model", "optimizer", "step"}
    for found in node.play(scenes.round_trip_of_fsdp1_in_one_file):
        assert all(found), found


def _flip_newest(path: Path) -> None:
    """One bit of the newest slot's data, after its sums were made."""
    with Segment(path) as segment:
        newest = segment.complete_slots()[-1]
        with segment.pin(newest.slot, newest.generation) as pinned:
            pinned.store_sums()
            place = segment.geometry.data_at(newest.slot) + pinned.record.data_length // 2
    with path.open("r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
