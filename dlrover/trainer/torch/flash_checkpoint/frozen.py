"""
A state held still: its containers copied, its tensors only referred to.

A lazy save must not spend its call on what can be done later. Pickling a state takes longer than everything else together, and only needs
numbers and names that nobody changes: so the containers are copied in a fraction of the time, and pickled by a thread. On the way
the shape of the state is noted: one that looks exactly like the last one is not laid out anew.

Even to ask torch about a tensor takes its time, and a state has hundreds. The tensors of an optimizer's state are the same objects from save to save: of
those only what can change is asked, where their memory is and their shape.

Only plain containers and values are copied. A state that has anything else in it (an object of the user's, a subclass of
Tensor) is laid out anew each time, and pickled before the save returns.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

_ATOMS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout)
)
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))

Facts = tuple[int, torch.Size, object, int, int, tuple[int, ...]]
"""Of a tensor, all that decides about its place: address, shape, dtype, identity and length of its storage, stride."""


class Frozen(NamedTuple):
    parts: dict[str, Any]
    structure: list[object]
    """Of each container, in the order of a walk: its keys and the kinds of what is in it; for one that was met before, which."""
    facts: list[Facts]
    """Of each tensor, in that order."""
    tensors: list[torch.Tensor]
    seen: list[weakref.ref[torch.Tensor]]
    """The same, without keeping them alive."""

    def forgotten(self) -> Frozen:
        """What is needed to compare a later one with it, and nothing that keeps memory alive."""
        return self._replace(parts={}, tensors=[])


class _NotPlain(Exception):
    """There is something in the state that cannot be held still."""


class _Differs(Exception):
    """The state does not look like the last one."""


def freeze(parts: Mapping[str, object]) -> Frozen | None:
    """None: there is something in it that cannot be held still."""
    copying = _Copying()
    try:
        frozen = copying.copy(dict(parts))
    except (_NotPlain, RecursionError):
        return None
    return Frozen(frozen, copying.structure, copying.facts, copying.tensors, list(map(weakref.ref, copying.tensors)))


def freeze_again(parts: Mapping[str, object], last: Frozen) -> Frozen | None:
    """The same for a state that looks exactly like the last one, with less work. None: it does not."""
    copying = _CopyingAgain(last)
    try:
        frozen = copying.copy(dict(parts))
    except (_Differs, _NotPlain, RecursionError):
        return None
    is_whole = len(copying.structure) == len(last.structure) and len(copying.tensors) == len(last.facts)
    return Frozen(frozen, last.structure, last.facts, copying.tensors, last.seen) if is_whole else None


class _Copying:
    def __init__(self) -> None:
        self.structure: list[object] = []
        self.facts: list[Facts] = []
        self.tensors: list[torch.Tensor] = []
        self._known: dict[int, tuple[int, Any]] = {}
        """Containers that were met before: a state may refer to one of them twice, and the pickle shows it."""

    def copy(self, value: Any) -> Any:
        kind = type(value)
        known = self._known.get(id(value))
        if known is not None:
            self._enter(known[0])
            return known[1]
        made: Any
        if kind is dict or kind is OrderedDict:
            self._enter((kind, tuple(value), tuple(map(type, value.values()))))
            made = value.copy() if kind is dict else OrderedDict(value)
            self._known[id(value)] = (len(self._known), made)
            if kind is OrderedDict:
                made.__dict__.update(value.__dict__)  # a module's state has its versions there
            # Most of a state are tensors and numbers in dicts: without a call for each number.
            for key, child in value.items():
                its_kind = type(child)
                if its_kind in _TENSORS:
                    self._note(child)
                elif its_kind not in _ATOMS:
                    made[key] = self.copy(child)
            return made
        if kind is list or kind is tuple:
            self._enter((kind, tuple(map(type, value))))
            made = []
            if kind is list:
                self._known[id(value)] = (len(self._known), made)
            for child in value:
                its_kind = type(child)
                if its_kind in _TENSORS:
                    self._note(child)
                made.append(child if its_kind in _TENSORS or its_kind in _ATOMS else self.copy(child))
            return made if kind is list else tuple(made)
        raise _NotPlain

    def _enter(self, container: object) -> None:
        self.structure.append(container)

    def _note(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)
        self.facts.append(_facts_of(tensor))


class _CopyingAgain(_Copying):
    def __init__(self, last: Frozen) -> None:
        super().__init__()
        self._last = last
        self._expected = zip(last.seen, last.facts, strict=True)

    def _enter(self, container: object) -> None:
        structure, last = self.structure, self._last.structure
        if len(structure) >= len(last) or last[len(structure)] != container:
            raise _Differs
        structure.append(container)

    def _note(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)
        for seen, facts in self._expected:  # the next one
            is_it = seen() is tensor
            if is_it and facts[0] == tensor.data_ptr() and facts[1] == tensor.shape:
                return
            if facts == _facts_of(tensor):
                return
            break
        raise _Differs


def _facts_of(tensor: torch.Tensor) -> Facts:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.__dict__:
        raise _NotPlain
    storage = tensor.untyped_storage()
    return (tensor.data_ptr(), tensor.shape, tensor.dtype, storage._cdata, storage.nbytes(), tensor.stride())
