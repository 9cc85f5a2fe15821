"""From live torch tensors into a slot, into a file, and back: the same state, every time."""

from __future__ import annotations

import copy
import dataclasses
import io
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch's own code, for quantised tensors

from dlrover.snapshot.copy.copying import Copier  # noqa: E402
from dlrover.snapshot.files.direct_io import file_crc32  # noqa: E402
from dlrover.snapshot.files.torch_file import file_storages, torch_file_chunks, write_torch_file  # noqa: E402
from dlrover.snapshot.memory.contents import decode_contents  # noqa: E402
from dlrover.snapshot.memory.segment import Segment, SegmentWriter, SlotName, segment_paths  # noqa: E402
from dlrover.snapshot.memory.segment_format import Owner  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import make_skeleton  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import StateWriter, load_state  # noqa: E402


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier(2)
    yield made
    made.close()


@pytest.fixture
def writer(home: Path, owner: Owner, copier: Copier) -> Iterator[StateWriter]:
    segments = SegmentWriter(home, owner)
    yield StateWriter(segments, copier)
    segments.close()


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Setup:
    weight: Any
    note: str


class Custom:
    """An object of a user: its tensors can only be reached through its pickle."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def tied() -> dict[str, Any]:
    weight = torch.randn(300, 4)
    return {"embedding": weight, "head": weight, "row": weight[3], "flat": weight.view(-1)}


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 20)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "rng": torch.get_rng_state()}


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.randn(5, 5), 0.1, 2, torch.qint8)


STATES: dict[str, Callable[[], Any]] = {
    "trained": trained,
    "tied": tied,
    "empty": dict,
    "scalars": lambda: {"zero-dim": torch.tensor(3.5), "step": torch.tensor(4, dtype=torch.int64)},
    "no elements": lambda: {"a": torch.empty(0), "b": torch.empty(3, 0, 2), "c": torch.empty(0, dtype=torch.int8)},
    "non-contiguous": lambda: {
        "t": torch.randn(30, 20).t(),
        "step": torch.arange(100)[::3],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    },
    "dtypes": lambda: {
        str(dtype): (torch.randn(33) * 10).to(dtype)
        for dtype in (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int8,
            torch.int16,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
            torch.complex128,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
    },
    "views with a flag": lambda: {
        "conj": torch.randn(5, dtype=torch.complex64).conj(),
        "neg": torch.randn(3)._neg_view(),
    },
    "parameters": lambda: {"p": torch.nn.Parameter(torch.randn(5)), "frozen": torch.nn.Parameter(torch.ones(2), False)},
    "quantized": lambda: {"q": quantized()},
    "sparse": lambda: {"coo": torch.eye(5).to_sparse()},
    "containers": lambda: OrderedDict(
        tuple=(torch.ones(2), [torch.zeros(3), "x"]),
        pair=Pair(torch.ones(1), None),
        bag={1, 2},
        nested={1: {2.5: b"y"}},
    ),
    "dataclass": lambda: {"setup": Setup(torch.randn(9), "hello")},
    "opaque": lambda: {"user": Custom(torch.randn(1000)), "set": {torch.ones(3)}, "big": Custom(torch.randn(400_000))},
    "large": lambda: {"w": torch.randn(700_001), "v": torch.randn(1_300_003, dtype=torch.float64)[5:-5]},
    "only a number": lambda: 5,
    "only a tensor": lambda: torch.randn(4),
}


def equal(one: Any, other: Any) -> bool:
    """The same for torch.save's eyes: compare what torch.save would write, tensor by tensor."""
    if isinstance(one, torch.Tensor):
        same = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        same = same and one.layout == other.layout and one.requires_grad == other.requires_grad
        if not same:
            return False
        if one.layout is not torch.strided:
            return torch.equal(one.to_dense(), other.to_dense())
        if one.is_quantized:
            return torch.equal(one.int_repr(), other.int_repr()) and one.q_scale() == other.q_scale()
        if one.is_conj() or one.is_neg():
            return torch.equal(one, other) and one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()
        same_bytes = one.contiguous().view(-1).view(torch.uint8) if one.numel() else one
        other_bytes = other.contiguous().view(-1).view(torch.uint8) if other.numel() else other
        return one.stride() == other.stride() and torch.equal(same_bytes, other_bytes)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, (Custom, Setup)):
        return equal(vars(one), vars(other))
    if isinstance(one, set) and any(isinstance(item, torch.Tensor) for item in one):
        return equal(list(one), list(other))
    return bool(one == other)


def read_back(name: SlotName, copier: Copier, **options: Any) -> Any:
    with Segment(name.path, private=True) as segment:
        pinned = segment.pin(name.slot, name.generation)
        assert pinned is not None
        with pinned:
            return load_state(pinned, copier, **options)


@pytest.mark.parametrize("kind", STATES)
def test_every_kind_of_state_comes_back_from_memory(kind: str, writer: StateWriter, copier: Copier) -> None:
    state = STATES[kind]()
    name = writer.save({"state": state}, step=3)
    assert name is not None
    assert equal(read_back(name, copier)["state"], state)


@pytest.mark.parametrize("kind", STATES)
def test_every_kind_of_state_becomes_a_file_that_torch_reads(kind: str, writer: StateWriter, tmp_path: Path) -> None:
    """Written as the agent does it: from the mapping and the pickle, without torch."""
    state = STATES[kind]()
    name = writer.save({"other": {"x": torch.ones(3)}, "state": state}, step=3)
    assert name is not None
    path = tmp_path / "state.pt"
    with Segment(name.path) as segment:
        pinned = segment.pin(name.slot)
        assert pinned is not None
        with pinned:
            contents = decode_contents(pinned.sections())
            storages = file_storages(contents, "state", pinned.data)
            written = write_torch_file(path, contents.pickles["state"], storages)
            streamed, chunks = torch_file_chunks(contents.pickles["state"], storages)
            assert b"".join(chunks) == path.read_bytes()
            del storages, chunks
    assert written == streamed == file_crc32(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    reference = io.BytesIO()
    torch.save(state, reference)
    reference.seek(0)
    assert equal(torch.load(path, weights_only=False), torch.load(reference, weights_only=False))
    with torch.serialization.safe_globals([Pair]):
        if kind not in ("opaque", "dataclass"):
            assert equal(torch.load(path, weights_only=True), state)
            assert equal(torch.load(path, weights_only=True, map_location="cpu"), state)
    if kind not in ("quantized",):
        assert equal(torch.load(path, weights_only=False, mmap=True), state)


def test_the_pickle_is_the_one_of_torch_save() -> None:
    for kind in ("trained", "tied", "dtypes", "containers"):
        state = STATES[kind]()
        buffer = io.BytesIO()
        torch.save(state, buffer)
        with zipfile.ZipFile(buffer) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
            assert make_skeleton(state).content == archive.read(name), kind


def test_ties_survive_and_nothing_aliases_the_segment(writer: StateWriter, copier: Copier) -> None:
    state = tied()
    name = writer.save({"state": state}, step=1)
    assert name is not None
    restored = read_back(name, copier)["state"]
    restored["embedding"].fill_(5)
    assert torch.all(restored["head"] == 5)
    assert torch.all(restored["row"] == 5)
    assert equal(read_back(name, copier)["state"], state), "the change of the restored tensors reached the segment"


def test_restoring_into_live_tensors_fills_them_in_place(writer: StateWriter, copier: Copier) -> None:
    state = trained()
    wanted = copy.deepcopy(state)
    name = writer.save({"state": state}, step=1)
    assert name is not None
    for tensor in state["model"].values():
        tensor.zero_()
    addresses = {key: tensor.data_ptr() for key, tensor in state["model"].items()}
    restored = read_back(name, copier, into={"state": state})["state"]
    assert equal(state["model"], wanted["model"])
    assert equal(restored, wanted)
    assert {key: tensor.data_ptr() for key, tensor in restored["model"].items()} == addresses


def test_live_tensors_that_share_memory_where_the_saved_ones_did_not_are_left_alone(
    writer: StateWriter, copier: Copier
) -> None:
    """Also the first ones, under keys of any kind, and beside others that fit."""
    saved = {(0, 1): torch.full((3,), 1.0), True: torch.full((3,), 2.0), "c": [torch.full((3,), 3.0)]}
    name = writer.save({"state": saved}, step=1)
    assert name is not None
    shared, fitting = torch.zeros(3), torch.zeros(3)
    restored = read_back(name, copier, into={"state": {(0, 1): shared, True: shared, "c": [fitting]}})["state"]
    assert equal(restored, saved)
    assert equal(shared, torch.zeros(3))
    assert restored["c"][0].data_ptr() == fitting.data_ptr()


def test_live_tensors_that_do_not_fit_are_left_alone(writer: StateWriter, copier: Copier) -> None:
    name = writer.save(
        {"state": {"a": torch.ones(10), "b": torch.ones(4), "c": torch.ones(3), "d": torch.ones(3)}}, step=1
    )
    assert name is not None
    shared = torch.zeros(3)
    live = {
        "a": torch.zeros(11),
        "b": torch.zeros(4, dtype=torch.int32),
        "c": shared,
        "d": shared,
        "new": torch.zeros(2),
    }
    restored = read_back(name, copier, into={"state": live})["state"]
    assert all(torch.all(tensor == 1) for tensor in restored.values())
    assert all(torch.all(tensor == 0) for tensor in live.values()), "also c and d: tied here, apart in the snapshot"


def test_storages_that_two_files_share_lie_in_the_slot_once(writer: StateWriter, copier: Copier) -> None:
    weight = torch.randn(1000)
    name = writer.save({"model": {"w": weight}, "copy": {"v": weight}}, step=1)
    assert name is not None
    with Segment(name.path) as segment:
        pinned = segment.pin(name.slot)
        assert pinned is not None
        with pinned:
            assert pinned.record.data_length == 4000
    assert equal(read_back(name, copier, names=["copy"]), {"copy": {"v": weight}})


def test_a_save_that_nothing_can_pickle_leaves_the_last_one(writer: StateWriter, copier: Copier) -> None:
    name = writer.save({"state": {"a": torch.ones(3)}}, step=1)
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        writer.save({"state": {"a": torch.zeros(3), "f": lambda: None}}, step=2)
    assert writer.segments.complete_slots() == [name]
    assert writer.save({"state": {"a": torch.zeros(3)}}, step=2) is not None


def test_the_data_after_the_call_may_change(writer: StateWriter, copier: Copier) -> None:
    state = {"a": torch.ones(1_000_000)}
    name = writer.save({"state": state}, step=1)
    assert name is not None
    state["a"].zero_()
    assert torch.all(read_back(name, copier)["state"]["a"] == 1)


def test_memory_seen_as_two_dtypes_is_refused_as_torch_does(writer: StateWriter) -> None:
    base = torch.zeros(8)
    with pytest.raises(RuntimeError, match="Clone one of them"):
        writer.save({"state": {"a": base, "b": base.view(torch.int32)}}, step=1)


shapes = some.lists(some.integers(0, 40), max_size=3)
tensors = some.builds(
    lambda shape, dtype, seed: torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    shapes,
    some.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    some.integers(0, 1000),
)
leaves = some.one_of(tensors, some.integers(), some.text(max_size=5), some.none(), some.floats(allow_nan=False))
states = some.recursive(
    leaves,
    lambda inner: some.one_of(
        some.dictionaries(some.one_of(some.text(max_size=4), some.integers(0, 9)), inner, max_size=4),
        some.lists(inner, max_size=4),
        some.tuples(inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some.lists(states, min_size=1, max_size=4))
def test_states_whose_structure_changes_between_saves(
    home: Path, owner: Owner, copier: Copier, sequence: list[Any]
) -> None:
    segments = SegmentWriter(home, owner)
    writer = StateWriter(segments, copier)
    previous: tuple[SlotName, Any] | None = None
    for step, state in enumerate(sequence):
        name = writer.save({"state": state}, step=step)
        assert name is not None
        assert equal(read_back(name, copier)["state"], state)
        if previous is not None and previous[0].path == name.path:
            assert equal(read_back(previous[0], copier)["state"], previous[1]), "the save before was harmed"
        previous = name, state
    segments.close()
    for path in segment_paths(home):
        path.unlink()


DTENSOR = """
import torch
from torch.distributed.tensor import DTensor, Shard, Replicate, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from dlrover.snapshot.memory.layout import plan_state
from dlrover.trainer.torch.flash_checkpoint.encoding.tensors import TorchTensors
torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
sharded = DTensor.from_local(torch.ones(3, 10), mesh, [Shard(0), Shard(1)], run_check=False)
copied = DTensor.from_local(torch.ones(3), mesh, [Replicate(), Replicate()], run_check=False)
one, two = plan_state({"w": sharded, "b": copied}, TorchTensors()).layout.tensors
print(one.name, one.shape, one.global_shape, one.global_offset)
print(two.name, two.shape, two.global_shape, two.global_offset)
torch.distributed.destroy_process_group()
"""


def test_the_place_of_a_piece_in_its_global_tensor_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", DTENSOR], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["w (3, 10) (6, 20) (3, 10)", "b (3,) (3,) (0,)"]
