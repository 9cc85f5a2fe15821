"""
How a script builds the state that it saves, found out from a state that it saved or restored.

A last step has to be saved in the shape in which the script restores it, and the script cannot be asked for it at that moment: its variables may be those
of the broken step already. So the shape is remembered: which piece was the state of which named object, and which number was the step. The pieces
are then taken from the objects anew. A piece that belongs to no named object is a doubt, unless it is a text, and then nothing is saved.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

_OPTIMIZER_KEYS = {"state", "param_groups"}


class DoubtError(Exception):
    """The state of the last step cannot be built with certainty; the message says why."""


class _Tensor:
    """Stands for one in a shape."""


_TENSOR = _Tensor()


def shape_of(tree: Any) -> Any:
    """The tree without its tensors: keys, numbers and texts."""
    if isinstance(tree, Mapping):
        return {key: shape_of(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [shape_of(value) for value in tree]
    return _TENSOR if isinstance(tree, torch.Tensor) else tree


class Sources:
    """The objects that the script named."""

    def __init__(self, model: Any, optimizer: Any, also: Sequence[Any] = ()) -> None:
        self.models = _as_list(model)
        self.optimizers = _as_list(optimizer)
        self.also = list(also)
        for each in (*self.models, *self.optimizers, *self.also):
            if not callable(getattr(each, "state_dict", None)):
                raise TypeError(f"{type(each).__name__} has no state_dict(). Give objects that have one.")

    def build(self, shape: Mapping[str, Any], old_step: int, step: int) -> dict[str, Any]:
        """A state of that shape, of now. Raises DoubtError."""
        states = [
            *(model.state_dict() for model in self.models),
            *(model.module.state_dict() for model in self.models if hasattr(model, "module")),
            *(each.state_dict() for each in self.also),
        ]
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            name: _build(part, states, optimizers, (old_step, step), path=name, is_top=True)
            for name, part in shape.items()
        }


def _build(
    shape: Any, states: list[Any], optimizers: list[Any], steps: tuple[int, int], *, path: str, is_top: bool = False
) -> Any:
    if isinstance(shape, dict):
        found = [state for state in states if isinstance(state, dict) and state.keys() == shape.keys()]
        if shape.keys() == _OPTIMIZER_KEYS:
            found = [each for each in optimizers if _num_parameters(each) == _num_parameters(shape)]
        if len(found) > 1:
            raise DoubtError(f"{path} could be the state of more than one of the given objects")
        if found and shape:
            return found[0]
        return {key: _build(value, states, optimizers, steps, path=f"{path}.{key}") for key, value in shape.items()}
    if isinstance(shape, bool | float | _Tensor | list):
        if isinstance(shape, list) and not shape:
            return []
        raise DoubtError(f"{path} belongs to none of the given objects")
    if isinstance(shape, int):
        if shape != steps[0]:
            raise DoubtError(f"{path} is {shape}. It is not the step, and it belongs to none of the given objects")
        return steps[1]
    if shape is None or isinstance(shape, str):
        return shape
    raise DoubtError(f"{path} ({type(shape).__name__}) belongs to none of the given objects")


def digest_of(state: Any, without: Collection[int] = ()) -> int:
    """
    64 bits of everything in it, in its order, but for tensors at the addresses `without`: buffers, such as the statistics of a batch norm, are
    each rank's own until the next forward pass.
    """
    total = hashlib.blake2b(digest_size=8)
    with torch.no_grad():
        _feed(total, state, without)
    return int.from_bytes(total.digest())


def piece_of(state: Any) -> int | None:
    """Which piece of its tensors this rank has, equal for replicas; None: it has them whole."""
    total = hashlib.blake2b(digest_size=8)
    is_cut = [_feed_place(total, value) for value in _tensors_of(state)]
    return int.from_bytes(total.digest()) if any(is_cut) else None


def _tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors_of(value)
    elif isinstance(tree, torch.Tensor):
        yield tree


def _feed_place(total: Any, tensor: torch.Tensor) -> bool:
    """Whether it is a piece of a larger one."""
    if not hasattr(tensor, "placements"):
        return False
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    total.update(f"{tuple(tensor.shape)}{tuple(shape)}{tuple(offset)}".encode())
    return tuple(shape) != tuple(tensor.shape)


def _feed(total: Any, tree: Any, without: Collection[int]) -> None:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            total.update(repr(key).encode())
            _feed(total, value, without)
    elif isinstance(tree, list | tuple):
        for value in tree:
            _feed(total, value, without)
    elif isinstance(tree, torch.Tensor):
        tree = tree.to_local() if hasattr(tree, "to_local") else tree  # of a DTensor what this rank has
        if tree.data_ptr() in without:
            return
        raw = tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        total.update(f"{tree.dtype}{tuple(tree.shape)}{zlib.crc32(raw.numpy())}".encode())
    else:
        total.update(repr(tree).encode())


def _num_parameters(optimizer_state: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in optimizer_state["param_groups"]]


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]
