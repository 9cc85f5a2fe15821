"""
The pickle of a state that looks like the one before, without pickling it.

From save to save nothing changes in a state but the bytes of its tensors, which are not in the pickle, and some numbers: the step, a learning rate.
So the pickle is made once with a marker in the place of each number; later ones are its pieces with the numbers of the day between them. To
pickle a few hundred tensors takes milliseconds in which no other thread of the trainer runs Python; this takes a small part of it.

A template is only used for a state of which everything else is the same, and only after it has reproduced the pickle that it was made with, byte for byte.
"""

from __future__ import annotations

import hashlib
import io
import operator
import pickle
import re
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from dlrover.trainer.torch.flash_checkpoint.encoding.frozen import Frozen
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import PICKLE_PROTOCOL, Skeleton, make_skeleton

_MARK = 0x5DAB_91C3
"""Upper half of a marker. Eight bytes, the highest bit unset: pickle writes such a number in one way only."""
_MARKER = re.compile(rb"\x8a\x08(.{4})" + re.escape(_MARK.to_bytes(4, "little")), re.DOTALL)
_KEYS = frozenset((str, int))
_requires_grad = operator.attrgetter("requires_grad")
_hooks_of = operator.attrgetter("_backward_hooks")


class _Fixed(NamedTuple):
    """What a pickle depends on beside the looks of the state and its numbers."""

    others: bytes
    """Digest of what is neither number nor tensor, pickled: that tells 0.0 from -0.0 and 1 from True."""
    kinds_of_keys: list[tuple[type, ...]]
    firsts: list[int]
    """Of each tensor: where the same object came first."""
    requires_grad: list[bool]
    storages: list[tuple[int, int]]
    """Identity and length."""


class Template:
    def __init__(self, fixed: _Fixed, pieces: dict[str, list[bytes]], holes: dict[str, list[int]]) -> None:
        """Of each part: its pieces, and between them which numbers of the state."""
        self._fixed, self._pieces, self._holes = fixed, pieces, holes

    def fill(self, frozen: Frozen) -> dict[str, bytes] | None:
        """The pickles of the parts. None: something else has changed as well."""
        if _fixed_of(frozen) != self._fixed:
            return None
        return self._filled(frozen)

    def _filled(self, frozen: Frozen) -> dict[str, bytes]:
        numbers = [_pickled(container[key]) for container, key in frozen.numbers]
        pickles = {}
        for name, pieces in self._pieces.items():
            between = [numbers[index] for index in self._holes[name]]
            pickles[name] = b"".join([part for pair in zip(pieces, [*between, b""], strict=True) for part in pair])
        return pickles


def make_template(frozen: Frozen, skeletons: dict[str, Skeleton]) -> Template | None:
    """From a state and its pickles. None: this state cannot have one."""
    fixed = _fixed_of(frozen)
    if fixed is None or any(_MARKER.search(skeleton.content) for skeleton in skeletons.values()):
        return None
    values = [container[key] for container, key in frozen.numbers]
    try:
        for index, (container, key) in enumerate(frozen.numbers):
            container[key] = _MARK << 32 | index
        marked = {name: make_skeleton(part).content for name, part in frozen.parts.items()}
    finally:
        for (container, key), value in zip(frozen.numbers, values, strict=True):
            container[key] = value
    pieces: dict[str, list[bytes]] = {}
    holes: dict[str, list[int]] = {}
    for name, content in marked.items():
        split = _MARKER.split(content)
        pieces[name] = split[::2]
        holes[name] = [int.from_bytes(index, "little") for index in split[1::2]]
    made = Template(fixed, pieces, holes)
    is_right = made._filled(frozen) == {name: skeleton.content for name, skeleton in skeletons.items()}
    return made if is_right else None


def _fixed_of(frozen: Frozen) -> _Fixed | None:
    """None: there is something that has to be pickled."""
    tensors = frozen.tensors
    if any(map(vars, tensors)) or any(map(_hooks_of, tensors)):
        return None
    if any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors)):
        return None
    kinds_of_keys = [tuple(map(type, each)) for each in frozen.dicts]
    if not all(map(_KEYS.issuperset, kinds_of_keys)):
        return None
    attributes = [vars(each) for each in frozen.dicts if type(each) is OrderedDict]
    others = io.BytesIO()
    try:
        _WithoutTensors(others, PICKLE_PROTOCOL).dump((frozen.others, attributes))
    except Exception:  # whatever the user's objects do there
        return None
    known: dict[int, int] = {}
    return _Fixed(
        hashlib.blake2b(others.getbuffer()).digest(),
        kinds_of_keys,
        [known.setdefault(id(tensor), index) for index, tensor in enumerate(tensors)],
        list(map(_requires_grad, tensors)),
        [(storage._cdata, storage.nbytes()) for storage in map(torch.Tensor.untyped_storage, tensors)],
    )


class _WithoutTensors(pickle.Pickler):
    """Refuses tensors: an attribute of a container may be one, and its bytes are not for here."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            raise pickle.PicklingError("a tensor")
        return NotImplemented


def _pickled(number: float | bool | None) -> bytes:
    """As it stands inside of a pickle: without the begin, which is two bytes, and the end."""
    return pickle.dumps(number, PICKLE_PROTOCOL)[2:-1]
