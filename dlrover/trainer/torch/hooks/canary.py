"""
The canary against silent corruption: every so many steps a digest of the parameters that all replicas should have alike.

Cheap and blind to nothing: each parameter's bits are summed as integers, so that one flipped bit changes the sum, and the sums are
hashed. Replicas that trained on the same gradients have the same digest; the master compares them. Parameters that are sharded over
ranks are left out.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

from dlrover.trainer import phases

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Canary:
    def __init__(self, every: int) -> None:
        """A digest each `every` steps."""
        self._every = every

    def after_step(self, optimizer: Any, count: int) -> None:
        writer = phases.current()
        if writer is None or count % self._every:
            return
        digest = digest_of(_parameters(optimizer))
        if digest:
            writer.set_digest(digest, count)


def digest_of(tensors: Iterator[Any]) -> str:
    """16 hexadecimal digits; empty if there is no tensor."""
    import torch

    sums = []
    with torch.no_grad():
        for tensor in tensors:
            flat = tensor.detach()
            flat = flat if flat.is_contiguous() else flat.contiguous()
            kind = getattr(torch, _INTEGERS[flat.element_size()])
            # In 64 bits and modulo 2**64: the order of addition does not matter, so neither do threads.
            sums.append(flat.view(-1).view(kind).sum(dtype=torch.int64))
        if not sums:
            return ""
        # One transfer for all: on a device each would wait for it.
        totals = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
    return hashlib.blake2b(struct.pack(f"<{len(totals)}q", *totals), digest_size=8).hexdigest()


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _is_replicated(parameter):
                yield parameter


def _is_replicated(parameter: Any) -> bool:
    if parameter.numel() == 0 or parameter.element_size() not in _INTEGERS or parameter.is_sparse:
        return False
    is_sharded = (
        hasattr(parameter, "placements")  # a DTensor
        or type(parameter).__name__ == "FlatParameter"
        or getattr(parameter, "tensor_model_parallel", False)
    )
    return not is_sharded
