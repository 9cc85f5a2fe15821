"""
Who keeps and who writes what, for all ranks of a save.

Pieces that several ranks hold (plain tensors, replicated dimensions of a mesh) are written once, by whichever of them has the least to write. In memory
one rank per node keeps them, so that a node can restore itself without asking others. The plan is made by rank 0 and stays valid as
long as no rank's state changes its structure; so a save in the steady state exchanges a few bytes.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from dlrover.snapshot.files.dcp_file import ELSEWHERE, next_place

METADATA_FILE = ".metadata"
_DCP_VERSION = "1.0.0"
"""Of the files' format, as torch writes it."""


def data_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


class RankShare(NamedTuple):
    """What one rank holds."""

    plan: SavePlan
    file_bytes: list[int]
    """By item, how long it is in a file."""
    num_bytes: list[int]
    """By item, how many bytes its tensor has."""
    node: str


class Assignment(NamedTuple):
    """What one rank shall do."""

    keep: list[bool]
    """By item: in memory."""
    places: list[int]
    """By item: in the file; `ELSEWHERE` for those that another rank writes."""
    ranks_here: list[int]
    """Who else is on the rank's node, itself included."""


class SharedPlan(NamedTuple):
    own: Assignment
    metadata: bytes
    """Content of `.metadata`; empty on all ranks but 0."""


def plan_together(claim: RankShare, group: Any, rank: int, world_size: int) -> SharedPlan:
    """Called by all ranks. `group` is one over gloo; None: this process is alone."""
    if group is None or world_size == 1:
        [own] = assign([claim])
        return SharedPlan(own, encode_metadata(metadata_of([claim], [own])))
    claims: list[RankShare] | None = [claim] * world_size if rank == 0 else None
    dist.gather_object(claim, claims, dst=0, group=group)
    answers: list[Any] = [None] * world_size
    metadata = b""
    if claims is not None:
        answers = list(assign(claims))
        metadata = encode_metadata(metadata_of(claims, answers))
    own_answer: list[Any] = [None]
    dist.scatter_object_list(own_answer, answers if rank == 0 else None, src=0, group=group)
    return SharedPlan(own_answer[0], metadata)


def assign(claims: Sequence[RankShare]) -> list[Assignment]:
    """Large pieces first, each to the rank that has the least so far; of equals to the lowest."""
    holders: dict[MetadataIndex, list[tuple[int, int]]] = {}
    for rank, claim in enumerate(claims):
        for position, item in enumerate(claim.plan.items):
            holders.setdefault(item.index, []).append((rank, position))
    writes = [[False] * len(claim.plan.items) for claim in claims]
    keeps = [[False] * len(claim.plan.items) for claim in claims]
    to_write, to_keep = [0] * len(claims), [0] * len(claims)

    def give(who: tuple[int, int], flags: list[list[bool]], load: list[int]) -> None:
        rank, position = who
        flags[rank][position] = True
        load[rank] += claims[rank].file_bytes[position]

    shared = []
    for found in holders.values():
        if len(found) == 1:
            give(found[0], writes, to_write)
            give(found[0], keeps, to_keep)
        else:
            shared.append(found)
    shared.sort(key=lambda found: -claims[found[0][0]].file_bytes[found[0][1]])
    for found in shared:
        writer = min(found, key=lambda who: (to_write[who[0]], who[0]))
        give(writer, writes, to_write)
        by_node: dict[str, list[tuple[int, int]]] = {}
        for who in found:
            by_node.setdefault(claims[who[0]].node, []).append(who)
        for node, on_node in by_node.items():
            is_writers = node == claims[writer[0]].node
            keeper = writer if is_writers else min(on_node, key=lambda who: (to_keep[who[0]], who[0]))
            give(keeper, keeps, to_keep)
    ranks_of: dict[str, list[int]] = {}
    for rank, claim in enumerate(claims):
        ranks_of.setdefault(claim.node, []).append(rank)
    return [
        Assignment(keep, place(claim.file_bytes, claim.num_bytes, write), ranks_of[claim.node])
        for keep, write, claim in zip(keeps, writes, claims, strict=True)
    ]


def place(file_bytes: Sequence[int], num_bytes: Sequence[int], writes: Sequence[bool]) -> list[int]:
    """One behind the other."""
    places = []
    end = 0
    for length, tensor_bytes, is_written in zip(file_bytes, num_bytes, writes, strict=True):
        at = next_place(end, tensor_bytes) if is_written else ELSEWHERE
        places.append(at)
        end = at + length if is_written else end
    return places


def metadata_of(claims: Sequence[RankShare], assignments: Sequence[Assignment]) -> Metadata:
    """What torch's reader wants to know about all files together."""
    written = [
        dataclasses.replace(
            claim.plan,
            items=[item for item, at in zip(claim.plan.items, given.places, strict=True) if at != ELSEWHERE],
        )
        for claim, given in zip(claims, assignments, strict=True)
    ]
    plans, metadata = create_default_global_save_plan(written)
    metadata.planner_data = {
        name: path for claim in reversed(claims) for name, path in (claim.plan.planner_data or {}).items()
    }
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    for rank, (plan, claim, given) in enumerate(zip(plans, claims, assignments, strict=True)):
        own = [(at, length) for at, length in zip(given.places, claim.file_bytes, strict=True) if at != ELSEWHERE]
        for item, (at, length) in zip(plan.items, own, strict=True):
            storage_data[item.index] = _StorageInfo(data_file(rank), at, length)
    return with_places(metadata, storage_data)


def with_places(metadata: Metadata, storage_data: dict[MetadataIndex, Any]) -> Metadata:
    found = dataclasses.replace(metadata, storage_data=storage_data)
    found.storage_meta = StorageMeta()
    found.version = _DCP_VERSION
    return found


def encode_metadata(metadata: Metadata) -> bytes:
    return pickle.dumps(metadata)
