"""
What changed between two checkpoints: tensors that came, went, changed their shape, their type or their values.

With torch the values are compared and the largest difference is told. Without it, or when asked for, the manifests alone are compared: names,
shapes, and whether the files are the same.
"""

from __future__ import annotations

import enum
from typing import Any

from msgspec import Struct

from dlrover.cli.checkpoint.listing import CheckpointPlace, open_place, read_manifest
from dlrover.cli.checkpoint.tensors import checkpoint_path, load_flat
from dlrover.host.edges import attempt
from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.storage.manifest import (
    GlobalManifest,
    TensorRecord,
    decode_rank_manifest,
    rank_manifest_name,
)
from dlrover.snapshot.storage.storage import join


class Change(enum.StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUES = "values"
    FILE = "file"
    """Its bytes differ; which tensors, only a comparison with torch can tell."""


class Difference(Struct, frozen=True, kw_only=True):
    name: str
    change: Change
    was: str = ""
    now: str = ""
    max_abs: float | None = None
    """Largest difference between two numbers in the same place; NaN if one of them is NaN and the other is not."""


class Comparison(Struct, frozen=True, kw_only=True):
    differences: tuple[Difference, ...]
    num_same: int
    is_by_manifest: bool = False


def compare(
    one: str,
    other: str,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    trusts_pickle: bool = False,
) -> Comparison:
    """Every tensor and every other value."""
    was = load_flat(one, trusts_pickle=trusts_pickle, step=steps[0])
    now = load_flat(other, trusts_pickle=trusts_pickle, step=steps[1])
    differences = [Difference(name=name, change=Change.REMOVED, was=_say(was[name])) for name in was if name not in now]
    differences += [Difference(name=name, change=Change.ADDED, now=_say(now[name])) for name in now if name not in was]
    num_same = 0
    for name in was:
        if name in now:
            difference = _compare_values(name, was[name], now[name])
            if difference is None:
                num_same += 1
            else:
                differences.append(difference)
    return Comparison(differences=tuple(differences), num_same=num_same)


def compare_manifests(one: str, other: str, *, steps: tuple[int | None, int | None] = (None, None)) -> Comparison:
    """Without torch and without reading any data."""
    was, now = _Described(one, steps[0]), _Described(other, steps[1])
    differences: list[Difference] = []
    num_same = 0
    for name in sorted(was.tensors.keys() | now.tensors.keys()):
        before, after = was.tensors.get(name), now.tensors.get(name)
        if before is None or after is None:
            record = after or before
            assert record is not None, "one of the two has the name"
            change = Change.ADDED if before is None else Change.REMOVED
            text = f"{record.dtype} {list(record.shape)}"
            differences.append(
                Difference(
                    name=name, change=change, was="" if before is None else text, now="" if after is None else text
                )
            )
        elif before.shape != after.shape:
            differences.append(
                Difference(name=name, change=Change.SHAPE, was=str(list(before.shape)), now=str(list(after.shape)))
            )
        elif before.dtype != after.dtype:
            differences.append(Difference(name=name, change=Change.DTYPE, was=before.dtype, now=after.dtype))
        else:
            num_same += 1
    sums = {file.path: file.crc32 for file in was.manifest.files}
    differences += [
        Difference(name=file.path, change=Change.FILE, was=f"{sums[file.path]:08x}", now=f"{file.crc32:08x}")
        for file in now.manifest.files
        if sums.get(file.path, file.crc32) != file.crc32
    ]
    return Comparison(differences=tuple(differences), num_same=num_same, is_by_manifest=True)


class _Described:
    """What the manifests of one checkpoint say."""

    def __init__(self, location: str, step: int | None) -> None:
        place = open_place(location)
        path = checkpoint_path(place, step)
        manifest = read_manifest(place, path) if place.is_directory(path) else None
        if manifest is None:
            raise ConfigError(
                f"{path} has no DLRover manifest, so this command needs torch to read it. Install it with: pip "
                "install torch"
            )
        self.manifest: GlobalManifest = manifest
        self.tensors = self._read(place, path)

    def _read(self, place: CheckpointPlace, path: str) -> dict[str, TensorRecord]:
        found = {}
        has_several = len(self.manifest.files) > 1
        for rank in self.manifest.ranks:
            content = place.storage.read(join(path, rank_manifest_name(rank.global_rank)))
            for tensor in decode_rank_manifest(content).tensors:
                found[f"{tensor.part}:{tensor.name}" if has_several else tensor.name] = tensor
        return found


def _compare_values(name: str, was: Any, now: Any) -> Difference | None:
    import torch

    if not (torch.is_tensor(was) and torch.is_tensor(now)):
        if torch.is_tensor(was) or torch.is_tensor(now) or type(was) is not type(now) or _differs(was, now):
            return Difference(name=name, change=Change.VALUES, was=_say(was), now=_say(now))
        return None
    if was.shape != now.shape:
        return Difference(name=name, change=Change.SHAPE, was=str(list(was.shape)), now=str(list(now.shape)))
    if was.dtype != now.dtype:
        return Difference(name=name, change=Change.DTYPE, was=str(was.dtype), now=str(now.dtype))
    if _is_bitwise_same(was, now):
        return None
    return Difference(name=name, change=Change.VALUES, was=_say(was), now=_say(now), max_abs=_largest(was, now))


def _is_bitwise_same(was: Any, now: Any) -> bool:
    """Bits, not numbers: NaN equals itself here, and 0.0 is not -0.0."""
    import torch

    if was.is_quantized or was.is_sparse:
        return bool(was.is_quantized == now.is_quantized and torch.equal(was, now))
    return bool(torch.equal(_as_bytes(was), _as_bytes(now)))


def _as_bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _largest(was: Any, now: Any) -> float | None:
    import torch

    try:
        kind = torch.complex128 if was.is_complex() else torch.float64
        return float((was.to(kind) - now.to(kind)).abs().max())
    except (RuntimeError, TypeError):
        return None  # a kind of tensor that cannot be subtracted


def _differs(was: Any, now: Any) -> bool:
    # An object of the user's brings its own comparison.
    return attempt(lambda: bool(was != now), lambda _error: True)


def _say(value: Any) -> str:
    import torch

    if torch.is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
