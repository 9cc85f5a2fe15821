"""
A state held still: its containers copied, its tensors only referred to.

A lazy save must not spend its call on what can be done later. Pickling a state takes longer than everything else together, and only needs
numbers and names that do not change: so the containers are copied in a fraction of the time, and pickled by a thread. On the way
the shape of the state is noted: one that looks exactly like the last one is not laid out anew.

Even to ask torch about a tensor takes its time, and a state has hundreds. The tensors of an optimizer's state are the same objects from save to save: of
those only what can change is asked, where their memory is and their shape.

Only plain containers and values are copied. A state that has anything else in it (an object of the user's, a subclass of
Tensor) is laid out anew each time, and pickled before the save returns.

What is compared here decides about the place of each byte; whether the pickle may be used again as well is a matter of `pickle_template`.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from dlrover.host.edges import contained

NUMBERS = frozenset((type(None), bool, int, float))
_ATOMS = NUMBERS | {complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout}
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_shape_of = operator.attrgetter("shape")
_dtype_of = operator.attrgetter("dtype")

Facts = tuple[int, torch.Size, object, int, int, tuple[int, ...]]
"""Of a tensor, all that decides about its place: address, shape, dtype, identity and length of its storage, stride."""


class Looks(NamedTuple):
    """Of a state, what a later one is compared with; nothing that keeps the memory of its tensors alive, unless they are keys."""

    structure: list[object]
    """Of each container, in the order of a walk: its keys and the kinds of what is in it; for one that was met before, which."""
    facts: list[Facts]
    """Of each tensor, in that order."""
    addresses: list[int]
    shapes: list[torch.Size]
    dtypes: list[object]
    strides: list[tuple[int, ...]]
    """From the facts, to be compared all at once."""
    seen: list[weakref.ref[torch.Tensor]]


class Frozen(NamedTuple):
    parts: dict[str, Any]
    looks: Looks
    tensors: list[torch.Tensor]
    """In the order of the walk, as everything that follows."""
    dicts: list[dict[Any, Any]]
    """In `parts`, ours alone."""
    numbers: list[tuple[dict[Any, Any], Any]]
    """Which of them has a number where, or None."""
    others: list[object]
    """Names and other values that are no containers, and the numbers in lists and tuples."""


class _NotPlain(Exception):
    """There is something in the state that cannot be held still."""


class _Differs(Exception):
    """The state does not look like the last one."""


def freeze(parts: Mapping[str, object]) -> Frozen | None:
    """None: there is something in it that cannot be held still."""
    copying = _Copying()
    try:
        frozen = copying.copy(dict(parts))
        facts = list(map(_facts_of, copying.tensors))
    except (_NotPlain, RecursionError):
        return None
    looks = Looks(
        copying.structure,
        facts,
        [each[0] for each in facts],
        [each[1] for each in facts],
        [each[2] for each in facts],
        [each[5] for each in facts],
        list(map(weakref.ref, copying.tensors)),
    )
    return copying.ended(frozen, looks)


def freeze_again(parts: Mapping[str, object], last: Looks) -> Frozen | None:
    """The same for a state that looks exactly like the last one, with less work. None: it does not."""
    copying = _CopyingAgain(last)
    frozen: dict[str, Any] = {}
    is_alike = False
    # Errors: also what the questions to a tensor of another kind raise, or keys that cannot be compared.
    with contained(lambda _error: None):
        frozen = copying.copy(dict(parts))
        is_alike = len(copying.structure) == len(last.structure) and _are_alike(copying.tensors, last)
    return copying.ended(frozen, last) if is_alike else None


class _Copying:
    def __init__(self) -> None:
        self.structure: list[object] = []
        self.tensors: list[torch.Tensor] = []
        self._dicts: list[dict[Any, Any]] = []
        self._numbers: list[tuple[dict[Any, Any], Any]] = []
        self._others: list[object] = []
        self._known: dict[int, tuple[int, Any]] = {}
        """Containers that were met before: a state may refer to one of them twice, and the pickle shows it."""

    def ended(self, parts: dict[str, Any], looks: Looks) -> Frozen:
        return Frozen(parts, looks, self.tensors, self._dicts, self._numbers, self._others)

    def copy(self, value: Any) -> Any:
        kind = type(value)
        known = self._known.get(id(value))
        if known is not None:
            self._enter(known[0])
            return known[1]
        made: Any
        if kind is dict or kind is OrderedDict:
            kinds = tuple(map(type, value.values()))
            self._enter((kind, tuple(value), kinds))
            made = value.copy() if kind is dict else OrderedDict(value)
            self._known[id(value)] = (len(self._known), made)
            self._dicts.append(made)
            if kind is OrderedDict:
                made.__dict__.update(value.__dict__)  # a module's state has its versions there
            if _TENSORS.issuperset(kinds):  # as most are: without a look at each
                self.tensors += made.values()
            else:
                self._copy_values(made)
            return made
        if kind is list or kind is tuple:
            self._enter((kind, tuple(map(type, value))))
            made = []
            if kind is list:
                self._known[id(value)] = (len(self._known), made)
            for child in value:
                its_kind = type(child)
                if its_kind in _TENSORS:
                    self.tensors.append(child)
                elif its_kind in _ATOMS:
                    self._others.append(child)
                else:
                    child = self.copy(child)
                made.append(child)
            return made if kind is list else tuple(made)
        raise _NotPlain

    def _copy_values(self, made: dict[Any, Any]) -> None:
        for key, child in made.items():
            its_kind = type(child)
            if its_kind in _TENSORS:
                self.tensors.append(child)
            elif its_kind in NUMBERS:
                self._numbers.append((made, key))
            elif its_kind in _ATOMS:
                self._others.append(child)
            else:
                made[key] = self.copy(child)

    def _enter(self, container: object) -> None:
        self.structure.append(container)


class _CopyingAgain(_Copying):
    def __init__(self, last: Looks) -> None:
        super().__init__()
        self._last = last.structure

    def _enter(self, container: object) -> None:
        structure, last = self.structure, self._last
        if len(structure) >= len(last) or last[len(structure)] != container:
            raise _Differs
        structure.append(container)


def _are_alike(tensors: Sequence[torch.Tensor], last: Looks) -> bool:
    """Each has the place of the one before. All of them at once, for there are hundreds, and a save stands still for it."""
    if len(tensors) != len(last.facts) or list(map(torch.Tensor.data_ptr, tensors)) != last.addresses:
        return False
    if list(map(_shape_of, tensors)) != last.shapes or list(map(_dtype_of, tensors)) != last.dtypes:
        return False
    if list(map(torch.Tensor.stride, tensors)) != last.strides:
        return False
    is_another = list(map(operator.is_not, tensors, map(operator.call, last.seen)))
    if 0 in last.addresses:  # an empty tensor says nothing about its memory
        is_another = [is_new or not address for is_new, address in zip(is_another, last.addresses, strict=True)]
    facts = map(_facts_of, compress(tensors, is_another))
    return all(map(operator.eq, facts, compress(last.facts, is_another)))


def _facts_of(tensor: torch.Tensor) -> Facts:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.__dict__:
        raise _NotPlain
    storage = tensor.untyped_storage()
    if not tensor.numel() and storage.nbytes():
        raise _NotPlain  # its address does not tell where that memory is
    return (tensor.data_ptr(), tensor.shape, tensor.dtype, storage._cdata, storage.nbytes(), tensor.stride())
