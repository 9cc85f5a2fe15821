"""A pickle from a template is the pickle of that state, or there is none."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

torch = pytest.importorskip("torch")

from dlrover.snapshot.contents import decode_contents  # noqa: E402
from dlrover.snapshot.copying import Copier  # noqa: E402
from dlrover.snapshot.segment import Segment, SegmentWriter, SlotName  # noqa: E402
from dlrover.snapshot.segment_format import Owner  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint import describing  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.copying import StateWriter, load_state  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.frozen import Frozen, freeze, freeze_again  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.pickle_template import _MARK, Template, make_template  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.skeleton import make_skeleton, rebuild  # noqa: E402

TENSORS = [torch.arange(6.0), torch.ones(2, 3).bfloat16(), torch.nn.Parameter(torch.zeros(2))]
numbers = some.one_of(some.none(), some.booleans(), some.integers(), some.floats(allow_nan=False))
leaves = some.one_of(numbers, some.text(max_size=3), some.sampled_from(TENSORS))
states = some.recursive(
    leaves,
    lambda inside: some.one_of(
        some.lists(inside, max_size=3),
        some.tuples(inside, inside),
        some.dictionaries(some.text(max_size=3), inside, max_size=4),
        some.dictionaries(some.integers(), inside, max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


def template_of(state: object) -> tuple[Template | None, Frozen]:
    frozen = freeze({"part": state})
    assert frozen is not None
    return make_template(frozen, {"part": make_skeleton(frozen.parts["part"])}), frozen


def shown(content: bytes, state: object) -> str:
    """What a pickle holds; two that hold the same need not be equal."""
    storages = make_skeleton(state).storages
    return repr(rebuild(content, lambda number, num_bytes, location: storages[number]))


def with_other_numbers(value: Any, draw: Callable[[type], Any]) -> Any:
    """The same state, with another number of the same kind for each that a dict holds."""
    if isinstance(value, dict):
        changed = value.copy()
        for key, child in value.items():
            is_number = type(child) in (bool, int, float)
            changed[key] = draw(type(child)) if is_number else with_other_numbers(child, draw)
        return changed
    if type(value) in (list, tuple):
        return type(value)(with_other_numbers(child, draw) for child in value)
    return value


@settings(max_examples=150, deadline=None)
@given(states, some.data())
def test_other_numbers_make_the_pickle_of_that_state(state, data):
    template, frozen = template_of(state)
    assert template is not None
    of_kind = {bool: some.booleans(), int: some.integers(), float: some.floats()}
    other = with_other_numbers({"part": state}, lambda kind: data.draw(of_kind[kind]))
    again = freeze_again(other, frozen.looks)
    assert again is not None
    assert template.fill(again) == {"part": make_skeleton(again.parts["part"]).content}


@settings(max_examples=150, deadline=None)
@given(states, states)
def test_any_other_state_gets_its_own_pickle_or_none(state, other):
    template, frozen = template_of(state)
    assert template is not None
    again = freeze_again({"part": other}, frozen.looks)
    filled = None if again is None else template.fill(again)
    assert filled is None or shown(filled["part"], other) == shown(make_skeleton(other).content, other)


def state_of(weight: Any) -> dict[str, Any]:
    metadata = OrderedDict(layer={"version": 1})
    model = OrderedDict(weight=weight)
    model._metadata = metadata  # type: ignore[attr-defined]
    return {"model": model, "name": "a", "history": [0.0, 1], "groups": {0: {"lr": 0.5, "betas": (0.9, 0.99)}}}


def turn(state: dict[str, Any]) -> None:
    state["model"]["weight"].t_()


def want_gradient(state: dict[str, Any]) -> None:
    state["model"]["weight"].requires_grad_()


def hook(state: dict[str, Any]) -> None:
    state["model"]["weight"].requires_grad_().register_hook(lambda gradient: gradient)


def name_tensor(state: dict[str, Any]) -> None:
    state["model"]["weight"].note = "of the user"


def other_version(state: dict[str, Any]) -> None:
    state["model"]._metadata["layer"]["version"] = 2


def other_name(state: dict[str, Any]) -> None:
    state["name"] = "b"


def minus_zero(state: dict[str, Any]) -> None:
    state["history"][0] = -0.0


def true_for_one(state: dict[str, Any]) -> None:
    state["groups"] = {False: state["groups"][0]}


def other_storage(state: dict[str, Any]) -> None:
    state["model"]["weight"].untyped_storage().resize_(4 * 9 + 64)


CHANGES = (turn, want_gradient, hook, name_tensor, other_version, other_name, minus_zero, true_for_one, other_storage)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_else_changes_is_pickled_anew(change):
    state = state_of(torch.rand(3, 3))
    template, frozen = template_of(state)
    assert template is not None
    again = freeze_again({"part": state}, frozen.looks)
    assert again is not None
    assert template.fill(again) is not None
    change(state)
    changed = freeze_again({"part": state}, frozen.looks)
    assert changed is None or template.fill(changed) is None


@pytest.mark.parametrize(
    "state",
    [
        {"text": "\x8a\x08", "bytes": b"\x8a\x08" + (_MARK << 32).to_bytes(8, "little"), "step": 3},
        {"bytes": b"\x8a\x08" + (_MARK << 32 | 77).to_bytes(8, "little")},
    ],
    ids=["of a number that is there", "of one that is not"],
)
def test_bytes_that_look_like_a_marker_are_kept(state):
    template, frozen = template_of(state)
    content = make_skeleton(frozen.parts["part"]).content
    assert template is None or template.fill(frozen) == {"part": content}
    assert frozen.parts["part"] == state


def test_a_state_that_is_saved_again_is_not_pickled_again(home: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch):
    copier, segments = Copier(2), SegmentWriter(home, owner)
    writer = StateWriter(segments, copier)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def save(step: int) -> tuple[SlotName | None, dict[str, Any]]:
        model(torch.randn(8, 20)).sum().backward()
        optimizer.param_groups[0]["lr"] = 1e-3 / step
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        paths = {"part": f"{step}.pt"}
        return writer.save({"part": state}, step=step, paths=paths), copy.deepcopy(state)

    save(1)
    save(2)

    def refuse(part: object) -> None:
        raise AssertionError("it was pickled")

    monkeypatch.setattr(describing, "skeleton_of", refuse)
    for step in (3, 400, 70_000):
        name, expected = save(step)
        assert name is not None
        with Segment(name.path, private=True) as segment:
            pinned = segment.pin(name.slot, name.generation)
            assert pinned is not None
            with pinned:
                assert [entry.path for entry in decode_contents(pinned.sections()).files] == [f"{step}.pt"]
                restored = load_state(pinned, copier)["part"]
        assert restored["step"] == step
        assert math.isclose(restored["optimizer"]["param_groups"][0]["lr"], 1e-3 / step)
        for key, value in expected["model"].items():
            assert torch.equal(restored["model"][key], value)
        for number, moments in expected["optimizer"]["state"].items():
            for key, value in moments.items():
                assert torch.equal(restored["optimizer"]["state"][number][key], value)
    segments.close()
    copier.close()
