"""Layouts: names, ties and alignment of any nested state, told by an adapter that knows no tensor library."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dlrover.snapshot.memory.layout import (
    Layout,
    TensorFacts,
    decode_layout,
    encode_layout,
    layout_hash,
    plan_state,
    walk,
)
from dlrover.snapshot.memory.segment_format import SegmentInvalid


@dataclasses.dataclass(eq=False)
class Fake:
    """A tensor as far as a layout needs one."""

    num_bytes: int
    memory: object = None

    def __post_init__(self) -> None:
        self.memory = self.memory or self


class Fakes:
    def describe(self, value: object) -> TensorFacts | None:
        if not isinstance(value, Fake):
            return None
        return TensorFacts(id(value.memory), value.num_bytes, "uint8", (value.num_bytes,), (1,), 0)


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Box:
    left: object
    right: object


def names_of(state: object) -> list[str]:
    return [".".join(map(str, path)) for path, _ in walk(state, Fakes())]


def test_tensors_are_found_by_name_in_all_kinds_of_containers() -> None:
    state = {
        "model": OrderedDict(weight=Fake(8), bias=Fake(4)),
        "list": [Fake(1), (Fake(2), "text")],
        "point": Point(Fake(3), 5),
        "box": Box(Fake(1), {7: Fake(2), (1, 2): Fake(2), True: Fake(1)}),
        "set": {Fake(1)},
    }
    assert names_of(state) == [
        "model.weight",
        "model.bias",
        "list.0",
        "list.1.0",
        "point.x",
        "box.left",
        "box.right.7",
        "box.right.(1, 2)",
        "box.right.True",
    ]


def test_tied_tensors_are_stored_once() -> None:
    shared = Fake(100)
    plan = plan_state({"a": shared, "b": shared, "c": Fake(100, shared)}, Fakes())
    assert len(plan.layout.storages) == 1
    assert [tensor.storage for tensor in plan.layout.tensors] == [0, 0, 0]


def test_a_container_that_contains_itself_is_entered_once() -> None:
    state: dict[str, object] = {"a": Fake(1)}
    state["self"] = state
    assert names_of(state) == ["a"]


def test_nesting_deeper_than_the_stack_is_no_problem() -> None:
    state: object = Fake(1)
    for _ in range(2000):
        state = [state]
    assert len(list(walk(state, Fakes()))) == 1


@given(some.lists(some.one_of(some.integers(0, 5000), some.integers(1 << 20, 3 << 20)), max_size=30))
def test_storages_are_aligned_and_never_overlap(sizes: list[int]) -> None:
    layout = plan_state([Fake(size) for size in sizes], Fakes()).layout
    end = 0
    for entry, size in zip(layout.storages, sizes, strict=True):
        assert entry.num_bytes == size
        assert entry.offset >= end
        assert entry.offset % (4096 if size >= 1 << 20 else 64) == 0
        end = entry.offset + size
    assert layout.data_length == end
    assert decode_layout(encode_layout(layout)) == layout


def test_more_storages_go_behind_the_others() -> None:
    layout = plan_state([Fake(10), Fake(20)], Fakes()).layout
    longer = layout.extended([5, 2 << 20])
    assert longer.storages[:2] == layout.storages
    assert longer.storages[2].offset >= layout.data_length
    assert longer.storages[3].offset % 4096 == 0
    assert Layout().extended([]).data_length == 0


def test_any_change_of_structure_changes_the_hash() -> None:
    def hash_of(state: object) -> bytes:
        return layout_hash(encode_layout(plan_state(state, Fakes()).layout))

    base = hash_of({"a": Fake(10), "b": [Fake(20)]})
    assert base == hash_of({"a": Fake(10), "b": [Fake(20)]})
    shared = Fake(10)
    for other in (
        {"a": Fake(10), "c": [Fake(20)]},
        {"a": Fake(11), "b": [Fake(20)]},
        {"a": Fake(10), "b": [Fake(20), Fake(1)]},
        {"b": [Fake(20)], "a": Fake(10)},
        {"a": shared, "b": [shared]},
    ):
        assert hash_of(other) != base


def test_a_table_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(SegmentInvalid, match="tensor table"):
        decode_layout(b"\x93nonsense")
