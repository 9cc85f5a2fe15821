"""
Parts of a state that do not become a `torch.save` file.

A part is anything that can be pickled, and usually just that happens. One that says itself what its file shall be has a method `skeleton`: the
bytes that it prepares for the agent, the storages they speak of, and the kind of file. Its tensors are found by walking it, as
those of any other part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from dlrover.snapshot.memory.contents import RAW, TORCH
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import Skeleton, make_skeleton, rebuild


@runtime_checkable
class SelfMadePart(Protocol):
    def skeleton(self) -> Skeleton: ...


class RawPart:
    """A file with these bytes, as they are: JSON, a tokenizer, another program's format."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def skeleton(self) -> Skeleton:
        return Skeleton(self.content, [], RAW)


def skeleton_of(part: object) -> Skeleton:
    return part.skeleton() if isinstance(part, SelfMadePart) else make_skeleton(part)


def restore_part(kind: str, content: bytes, storage: Callable[[int, int, str], torch.UntypedStorage]) -> Any:
    """What was saved; of a self-made part the bytes that it prepared."""
    return rebuild(content, storage) if kind == TORCH else content
