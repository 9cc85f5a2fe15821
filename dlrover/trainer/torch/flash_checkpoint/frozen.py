"""
A state held still: its containers copied, its tensors only referred to.

A lazy save must not spend its call on what can be done later. Pickling a state takes longer than everything else together, and only needs
numbers and names that nobody changes: so the containers are copied in a fraction of the time, and pickled by a thread. On the way
the shape of the state is noted: one that looks exactly like the last one is not laid out anew.

Only plain containers and values are copied. A state that has anything else in it (an object of the user's, a subclass of
Tensor) is pickled before the save returns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

_ATOMS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout)
)
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


class Frozen(NamedTuple):
    parts: dict[str, Any]
    structure: list[object]
    """Keys and kinds in the order of a walk."""
    facts: list[tuple[object, ...]]
    """Of each tensor, in that order: all that decides about its place."""
    storages: dict[int, torch.UntypedStorage]
    """By identity."""

    def looks_like(self, other: Frozen | None) -> bool:
        return other is not None and self.structure == other.structure and self.facts == other.facts

    def forgotten(self) -> Frozen:
        """What is needed to compare a later one with it, and nothing that keeps memory alive."""
        return self._replace(parts={}, storages={})


class _NotPlain(Exception):
    pass


def freeze(parts: Mapping[str, object]) -> Frozen | None:
    """None: there is something in it that cannot be held still."""
    frozen = Frozen({}, [], [], {})
    try:
        frozen.parts.update(_Copying(frozen).copy(dict(parts)))
    except (_NotPlain, RecursionError):
        return None
    return frozen


class _Copying:
    def __init__(self, frozen: Frozen) -> None:
        _, self._structure, self._facts, self._storages = frozen
        self._known: dict[int, tuple[int, Any]] = {}
        """Containers that were met before: a state may refer to one of them twice, and the pickle shows it."""

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _TENSORS:
            self._note(value)
            return value
        if kind in _ATOMS:
            self._structure.append(None)
            return value
        known = self._known.get(id(value))
        if known is not None:
            self._structure.append(known[0])
            return known[1]
        if kind is dict or kind is OrderedDict:
            made: Any = kind()
            self._known[id(value)] = (len(self._known), made)
            self._structure.append(tuple(value))
            if kind is OrderedDict:
                made.__dict__.update(value.__dict__)  # a module's state has its versions there
            # Most of a state are tensors and numbers in dicts: without a call for each number.
            for key, child in value.items():
                if type(child) in _ATOMS:
                    self._structure.append(None)
                    made[key] = child
                else:
                    made[key] = self.copy(child)
            return made
        if kind is list:
            made = []
            self._known[id(value)] = (len(self._known), made)
            self._structure.append(len(value))
            made.extend(map(self.copy, value))
            return made
        if kind is tuple:
            self._structure.append((kind, len(value)))
            return tuple(map(self.copy, value))
        raise _NotPlain

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.__dict__:
            raise _NotPlain
        storage = tensor.untyped_storage()
        identity = storage._cdata
        self._storages[identity] = storage
        self._structure.append("tensor")
        self._facts.append((identity, tensor.data_ptr(), storage.nbytes(), tensor.shape, tensor.stride(), tensor.dtype))
