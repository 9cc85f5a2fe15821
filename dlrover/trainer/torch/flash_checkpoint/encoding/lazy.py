"""
Copying while training goes on: what may wait, until when, and how we notice that the script did not keep to it.

Between a save and the next step of an optimizer nothing changes the parameters and the optimizer's state: forward and backward only read them. So
their copy may run meanwhile, and a hook that torch calls before each step of any optimizer waits for what is not copied yet.
Everything that other code may change (buffers, averages, schedulers, tensors that no optimizer owns) is copied before the save returns.

That is sure only for optimizers that we know and that really pass by the hook. For the rest there is a guard: some bytes of every block are
noted before the copy, and compared with the block and with its copy afterwards. Version counters would not do: fused
optimizers change tensors without counting.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlrover.protocol.errors import DLRoverError
from dlrover.trainer.torch.flash_checkpoint.encoding.tensors import is_dtensor

LAZY_FROM_BYTES = 64 * 1024
"""Smaller blocks are copied at once: altogether they are little, and each of them would cost a look."""
SAMPLE_BYTES = 64
MAX_SAMPLES = 128
"""Of all blocks together, but one of each at least."""
MAX_SAMPLES_PER_BLOCK = 8
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, fall evenly: each save looks at other places than the ones before."""

LAZY = (True, False, "auto")

Memory = tuple[int, int]
"""Address and number of bytes."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PLAIN_KINDS = frozenset(_PLAIN)


class Changed(DLRoverError):
    """A tensor was written to while it was copied."""


class StepWatch:
    """
    Knows the optimizers of this process, from the hook that torch calls before each of their steps.

    An optimizer that has not stepped since the last save has not shown that it passes by: a captured or compiled step does not.
    """

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._before_step = before_step
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._recent: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known: tuple[list[int], frozenset[Memory]] | None = None
        """The last survey: by what one sees that nothing has changed since, and its result."""
        self._hook: Any = register_optimizer_step_pre_hook(self._on_step)

    def after_save(self) -> None:
        self._recent = weakref.WeakSet()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """That have stepped since the last save."""
        return list(self._recent)

    def survey(self) -> tuple[str, frozenset[Memory]]:
        """Why nothing may be copied lazily now, or, if something may, the memory that only a step which we wait for changes."""
        if "deepspeed" in sys.modules:
            return "DeepSpeed changes parameters outside of torch's optimizers", frozenset()
        if not self._seen:
            return "no torch optimizer has made a step yet", frozenset()
        if not self._recent:
            return "no torch optimizer has made a step since the last save", frozenset()
        looked = [(optimizer, reason_against(optimizer), optimizer in self._recent) for optimizer in self._seen]
        key = [number for optimizer, reason, is_recent in looked for number in _key_of(optimizer, reason, is_recent)]
        if self._known is None or self._known[0] != key:
            self._known = (key, _owned(looked))
        owned = self._known[1]
        reasons = [reason for _, reason, _ in looked if reason]
        return ("" if owned else (reasons or ["no optimizer has a large state"])[0]), owned

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._before_step()
        self._recent.add(optimizer)
        self._seen.add(optimizer)


def reason_against(optimizer: torch.optim.Optimizer) -> str:
    """Why the tensors of this optimizer may not be copied lazily; empty: they may."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or getattr(torch.optim, kind.__name__, None) is not kind:
        return f"{kind.__module__}.{kind.__qualname__} is not an optimizer of torch.optim"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "a capturable optimizer may step from a CUDA graph, which dlrover cannot notice"
    for group in optimizer.param_groups:
        for param in group["params"]:
            if getattr(param, "_post_accumulate_grad_hooks", None) or hasattr(param, "_in_backward_optimizers"):
                return "a hook of a parameter may change it in the backward pass"
    return ""


def _key_of(optimizer: torch.optim.Optimizer, reason: str, is_recent: bool) -> list[int]:
    """Equal as long as the optimizer has the same tensors in the same memory; to ask this takes a third of what a survey does."""
    tensors = _tensors_of(optimizer)
    plain = tensors if _PLAIN_KINDS.issuperset(map(type, tensors)) else _plain(tensors)
    return [id(optimizer), bool(reason), is_recent, *map(id, tensors), *map(torch.Tensor.data_ptr, plain)]


def _owned(looked: Sequence[tuple[torch.optim.Optimizer, str, bool]]) -> frozenset[Memory]:
    owned: set[Memory] = set()
    others: set[Memory] = set()
    for optimizer, reason, is_recent in looked:
        (owned if is_recent and not reason else others).update(_memory_of(optimizer))
    return frozenset(owned - others)


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its parameters and its state."""
    tensors = [param for group in optimizer.param_groups for param in group["params"]]
    for state in optimizer.state.values():
        if isinstance(state, dict):
            tensors += state.values()
    if _PLAIN_KINDS.issuperset(map(type, tensors)):  # without a question for each of them
        return tensors
    return [value for value in tensors if isinstance(value, torch.Tensor)]


def _memory_of(optimizer: torch.optim.Optimizer) -> list[Memory]:
    """
    Of its parameters and its state: where each begins, and its length.

    A storage whose begin and length are those of such a tensor belongs to the optimizer as a whole. One that it only has a part of does
    not: other code may change the rest.
    """
    return [
        (tensor.data_ptr(), tensor.nbytes)
        for tensor in _plain(_tensors_of(optimizer))
        if tensor.layout is torch.strided
    ]


def _plain(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Themselves, or their local parts; without those that we do not know."""
    found = (each if type(each) in _PLAIN else _local_part(each) for each in tensors)
    return [tensor for tensor in found if tensor is not None]


def _local_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Of a DTensor, as FSDP2 has them: its step changes this one in place. None: a subclass that we do not know."""
    local = getattr(tensor, "_local_tensor", None) if is_dtensor(tensor) else None
    return local if type(local) in _PLAIN else None


class MovingStorage(NamedTuple):
    """A storage on its way: where it is, where it goes, and what to call it."""

    source: int
    target: int
    num_bytes: int
    number: int


class Guard:
    """Notes some bytes of each block; `check` compares them with the block and with its copy."""

    def __init__(self, blocks: Sequence[MovingStorage], turn: int = 0) -> None:
        self._blocks = blocks
        self._places = list(_places(blocks, turn))
        self._noted = [ctypes.string_at(block.source + at, length) for block, at, length in self._places]

    def check(self) -> int | None:
        """The number of a block that has changed meanwhile; None: none that we could see."""
        for (block, at, length), noted in zip(self._places, self._noted, strict=True):
            if (
                ctypes.string_at(block.source + at, length) != noted
                or ctypes.string_at(block.target + at, length) != noted
            ):
                return block.number
        return None


def _places(blocks: Sequence[MovingStorage], turn: int) -> Iterator[tuple[MovingStorage, int, int]]:
    if not blocks:
        return
    num_each = max(1, min(MAX_SAMPLES_PER_BLOCK, MAX_SAMPLES // len(blocks)))
    shift = turn * _GOLDEN % 1.0
    parts = [(index + shift) / num_each for index in range(num_each)]
    for block in blocks:
        num_bytes = block.num_bytes
        length = SAMPLE_BYTES if num_bytes >= SAMPLE_BYTES else num_bytes
        for part in parts:
            yield block, int((num_bytes - length) * part), length


class Staging:
    """
    A lazy save between its call and the moment when it counts.

    A thread brings it to its end, and so does the thread that needs it to be at its end: the training thread before a step. `settle` runs once,
    when everything is copied.
    """

    def __init__(self, help_copying: Callable[[], None], settle: Callable[[], None]) -> None:
        self._help, self._settle = help_copying, settle
        self._lock = threading.Lock()
        """Guards `is_done`: the thread and the training may come at the same time, and one of them has to wait for the other."""
        self.is_done = False

    def finish(self) -> None:
        with contextlib.suppress(
            Exception
        ):  # it comes again where `settle` deals with it, not in a step of the training
            self._help()
        with self._lock:
            if not self.is_done:
                try:
                    self._settle()
                finally:
                    self.is_done = True
