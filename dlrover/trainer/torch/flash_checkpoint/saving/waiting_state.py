"""
A state that waits for a slot, in memory of its own.

With `on_busy="latest"` a state that finds every slot busy is copied aside: it must be the state of its step when a slot gets free, and the live one
moves on. That costs one more state of memory while it waits, and only one ever does: a newer one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from dlrover.snapshot.copy.copying import Copier, CopySpan
from dlrover.snapshot.memory.contents import TORCH
from dlrover.snapshot.storage.persist import SaveRequest
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult
from dlrover.trainer.torch.flash_checkpoint.encoding.live import fresh_storage
from dlrover.trainer.torch.flash_checkpoint.encoding.parts import skeleton_of
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import Skeleton, rebuild


class WaitingState(NamedTuple):
    parts: Mapping[str, object]
    paths: Mapping[str, str]
    request: SaveRequest
    result: SaveResult
    """What the caller holds; it changes when the state gets its slot, or gives way to a newer one."""


def copy_aside(parts: Mapping[str, object], copier: Copier) -> dict[str, Any] | None:
    """The same parts in fresh memory of the host. None: there is one that only its own maker can put together."""
    skeletons = {name: skeleton_of(part) for name, part in parts.items()}
    if any(skeleton.kind != TORCH for skeleton in skeletons.values()):
        return None
    fresh: dict[int, torch.UntypedStorage] = {}
    spans = []
    with torch.no_grad():
        for skeleton in skeletons.values():
            for storage in skeleton.storages:
                if storage._cdata in fresh:
                    continue
                fresh[storage._cdata] = copied = fresh_storage(storage.nbytes())
                if storage.device.type == "cpu":
                    spans.append(CopySpan(copied.data_ptr(), storage.data_ptr(), storage.nbytes()))
                else:
                    copied.copy_(storage)
        copier.copy(spans)
        return {name: rebuild(skeleton.content, _chooser(skeleton, fresh)) for name, skeleton in skeletons.items()}


def _chooser(
    skeleton: Skeleton, fresh: Mapping[int, torch.UntypedStorage]
) -> Callable[[int, int, str], torch.UntypedStorage]:
    return lambda number, num_bytes, location: fresh[skeleton.storages[number]._cdata]
