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

from dlrover.snapshot.copy.copying import Copier  # noqa: E402
from dlrover.snapshot.memory.contents import decode_contents  # noqa: E402
from dlrover.snapshot.memory.segment import Segment, SegmentWriter, SlotName  # noqa: E402
from dlrover.snapshot.memory.segment_format import Owner  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.frozen import Frozen, freeze, freeze_again  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.pickle_template import _MARK, Template, make_template  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import make_skeleton, rebuild  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import StateWriter, load_state  # noqa: E402

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


def shown(content: bytes, storages: list[Any]) -> str:
    """What a pickle holds; two that hold the same need not be equal. Objects that come several times are told from equal ones."""
    known: dict[int, int] = {}

    def show(value: Any) -> str:
        if isinstance(value, dict):
            inside = ", ".join(f"{key!r}: {show(child)}" for key, child in value.items())
            return f"{type(value).__name__} {known.setdefault(id(value), len(known))} {{{inside}}}"
        if isinstance(value, list | tuple):
            return f"{type(value).__name__} ({', '.join(map(show, value))})"
        if isinstance(value, torch.Tensor):
            number = known.setdefault(id(value), len(known))
            return f"{value!r} {number} {value.stride()} {value.untyped_storage().data_ptr()}"
        return repr(value)

    rebuilt = rebuild(content, lambda number, num_bytes, location: storages[number])
    return show(rebuilt)


def with_others(value: Any, draw: Callable[[Any], Any], *, only_numbers: bool) -> Any:
    """A state of the same form, with other leaves of the same kinds; or only with other numbers where a dict holds them."""
    if isinstance(value, dict):
        changed = value.copy()
        for key, child in value.items():
            is_leaf = type(child) in (bool, int, float) or (
                not only_numbers and not isinstance(child, dict | list | tuple)
            )
            changed[key] = draw(child) if is_leaf else with_others(child, draw, only_numbers=only_numbers)
        return changed
    if type(value) in (list, tuple):
        return type(value)(with_others(child, draw, only_numbers=only_numbers) for child in value)
    return value if only_numbers else draw(value)


OF_KIND = {bool: some.booleans(), int: some.integers(), float: some.floats(), str: some.text(max_size=3)}


@settings(max_examples=150, deadline=None)
@given(states, some.data())
def test_other_numbers_make_the_pickle_of_that_state(state, data):
    template, frozen = template_of(state)
    assert template is not None
    other = with_others({"part": state}, lambda leaf: data.draw(OF_KIND[type(leaf)]), only_numbers=True)
    again = freeze_again(other, frozen.looks)
    assert again is not None
    assert template.fill(again) == {"part": make_skeleton(again.parts["part"]).content}


@settings(max_examples=300, deadline=None)
@given(states, some.data())
def test_any_other_state_gets_its_own_pickle_or_none(state, data):
    def another(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return data.draw(some.sampled_from([leaf, leaf.detach(), *TENSORS]))
        return data.draw(some.one_of(some.just(leaf), OF_KIND[type(leaf)])) if type(leaf) in OF_KIND else leaf

    template, frozen = template_of(state)
    assert template is not None
    other = with_others(state, another, only_numbers=False)
    again = freeze_again({"part": other}, frozen.looks)
    filled = None if again is None else template.fill(again)
    if filled is not None:
        expected = make_skeleton(other)
        assert shown(filled["part"], expected.storages) == shown(expected.content, expected.storages)


def state_of(weight: Any) -> dict[str, Any]:
    metadata = OrderedDict(layer={"version": 1})
    model = OrderedDict(weight=weight, tied=weight)
    model._metadata = metadata  # type: ignore[attr-defined]
    return {
        "model": model,
        "waves": torch.ones(2, dtype=torch.complex64),
        "name": "a",
        "history": [0.0, 1],
        "groups": {0: {"lr": 0.5, "betas": (0.9, 0.99)}},
    }


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


def false_for_zero(state: dict[str, Any]) -> None:
    state["groups"] = {False: state["groups"][0]}


def two_for_one(state: dict[str, Any]) -> None:
    state["model"]["tied"] = state["model"]["weight"].detach()


def tensor_in_attribute(state: dict[str, Any]) -> None:
    state["model"].extra = torch.zeros(2)


def conjugate(state: dict[str, Any]) -> None:
    weight = state["waves"]
    weight.data = weight.conj()


def other_storage(state: dict[str, Any]) -> None:
    state["model"]["weight"].untyped_storage().resize_(4 * 9 + 64)


CHANGES = (
    turn,
    want_gradient,
    hook,
    name_tensor,
    other_version,
    other_name,
    minus_zero,
    false_for_zero,
    other_storage,
    two_for_one,
    tensor_in_attribute,
    conjugate,
)


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


NUMBER = _MARK << 32


@pytest.mark.parametrize(
    "state",
    [
        {"step": NUMBER, "list": [NUMBER]},
        {"step": NUMBER | 77},
    ],
    ids=["in a list", "as a number that is not there"],
)
def test_a_state_with_a_marker_in_it_has_no_template(state):
    template, frozen = template_of(state)
    assert template is None
    assert frozen.parts["part"] == state


def test_an_empty_tensor_tells_nothing_of_its_memory():
    large, small = torch.zeros(1000), torch.zeros(10)
    empty = torch.empty(0)
    frozen = freeze({"part": {"empty": empty}})
    assert frozen is not None
    empty.data = small[10:]
    assert freeze_again({"part": {"empty": empty}}, frozen.looks) is None
    assert freeze({"part": {"empty": large[1000:]}}) is None


@pytest.mark.parametrize("other", [torch.eye(3).to_sparse(), torch.eye(3, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_of_another_kind_does_not_look_the_same(other):
    frozen = freeze({"part": {"weight": torch.eye(3)}})
    assert frozen is not None
    assert freeze_again({"part": {"weight": other}}, frozen.looks) is None


def test_parameters_as_keys_are_compared_without_an_error():
    state = {"part": {torch.nn.Parameter(torch.ones(3)): {"step": 1}}}
    frozen = freeze(state)
    assert frozen is not None
    assert make_template(frozen, {"part": make_skeleton(frozen.parts["part"])}) is None
    assert freeze_again({"part": {torch.nn.Parameter(torch.ones(3)): {"step": 1}}}, frozen.looks) is None


def test_a_tensor_that_got_another_storage_at_the_same_address_is_pickled_anew():
    memory = bytearray(64)
    weight = torch.frombuffer(memory, dtype=torch.float32, count=4)
    template, frozen = template_of({"weight": weight})
    assert template is not None
    weight.data = torch.frombuffer(memory, dtype=torch.float32, count=8)[:4]
    again = freeze_again({"part": {"weight": weight}}, frozen.looks)
    assert again is not None, "address, shape and stride are the same"
    assert template.fill(again) is None


def test_a_square_tensor_that_was_turned_is_laid_out_anew():
    weight = torch.rand(3, 3)
    frozen = freeze({"part": {"weight": weight}})
    assert frozen is not None
    weight.t_()
    assert freeze_again({"part": {"weight": weight}}, frozen.looks) is None


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

    def refuse(tensor: torch.Tensor, protocol: int) -> None:
        raise AssertionError("it was pickled")

    for step in (3, 400, 70_000):
        with monkeypatch.context() as unpicklable:
            unpicklable.setattr(torch.Tensor, "__reduce_ex__", refuse)
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
