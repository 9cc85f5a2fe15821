"""
Pieces that lie in the memory of other nodes, brought by the ranks that run there now.

After a restart every node has ranks again, and they have a process group. So a rank that misses a piece asks the others: one of each node
says what lies there, every rank says what it misses, and a rank that has it sends it. Everything is a collective: all ranks call it for the same save,
and either all of them get what they need or all of them hear that one of them does not.

The bytes are checked where they are read; gloo carries them over TCP.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.files.dcp_file import DcpItem
from dlrover.snapshot.memory.layout import LINE_ALIGNMENT
from dlrover.snapshot.memory.segment_format import round_up
from dlrover.trainer.data import data_steps
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_reading import fit_to, index_of, metadata_of_items, plan_load
from dlrover.trainer.torch.flash_checkpoint.restoring.reshard import SavedState
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import Agreement

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

PATIENCE = timedelta(seconds=600)
"""For the bytes of one pair of ranks."""


class Summary(NamedTuple):
    """One save, as far as it lies on a node."""

    attempt: str
    step: int
    round: int
    num_shards: int
    shards: tuple[int, ...]


class Wanted(NamedTuple):
    """An item of a shard, by its position in the shard's table."""

    shard: int
    position: int


class Brought(NamedTuple):
    metadata: Metadata
    """Of everything that lies anywhere."""
    pieces: dict[MetadataIndex, tuple[DcpItem, memoryview]]
    """What did not lie here."""


def tell_saves(saves: dict[str, SavedState], home: str, agreement: Agreement) -> tuple[list[str], list[Summary]]:
    """Which node each rank is on, and all saves with the shards that lie anywhere."""
    own = [
        Summary(each.attempt, each.step, each.round, each.num_shards, tuple(sorted(each.shards)))
        for each in saves.values()
    ]
    found: list[Any] = _gather((home, own), agreement)
    joined: dict[str, Summary] = {}
    for _home, summaries in found:
        for each in summaries:
            before = joined.get(each.attempt, each)
            joined[each.attempt] = each._replace(shards=tuple(sorted({*before.shards, *each.shards})))
    return [where for where, _ in found], list(joined.values())


def newest_attempts(saves: Sequence[Summary]) -> dict[int, Summary]:
    """
    By step; of a step that was saved twice one that no rank has given up, of such the one that is whole, and of these the later one. The same on
    all ranks.
    """

    def worth(each: Summary) -> tuple[bool, bool, int, str]:
        is_present = not data_steps.is_given_up(each.step, each.round)
        return is_present, len(each.shards) == each.num_shards, each.round, each.attempt

    ordered = sorted(saves, key=lambda each: (each.step, worth(each)))
    return {each.step: each for each in ordered}


def bring(state: SavedState, wanted: dict[str, Any], homes: Sequence[str], agreement: Agreement) -> Brought | None:
    """What this rank needs of a save and does not lie on its node. None: some rank cannot have what it needs."""
    rank = agreement.ranks.global_rank
    is_speaker = homes.index(homes[rank]) == rank
    tables: list[dict[int, tuple[DcpItem, ...]]] = _gather(_tables(state) if is_speaker else {}, agreement)
    here = {index_of(item) for holding, _source in state.shards.values() for item in holding.items}
    where: dict[MetadataIndex, tuple[int, Wanted, DcpItem]] = {}
    for owner, table in enumerate(tables):
        for shard, items in table.items():
            for position, item in enumerate(items):
                where.setdefault(index_of(item), (owner, Wanted(shard, position), item))
    metadata = metadata_of_items(item for _owner, _wanted, item in where.values())
    requests: dict[int, list[Wanted]] = {}
    pieces: dict[MetadataIndex, tuple[DcpItem, memoryview]] = {}
    is_fine = True
    try:
        template = dict(wanted)
        fit_to(template, metadata)
        _planner, plan = plan_load(template, metadata)
        for index in sorted({item.storage_index for item in plan.items} - here, key=str):
            owner, request, item = where[index]
            pieces[index] = (item, memoryview(b""))
            if item.is_in_storage and item.num_bytes:
                requests.setdefault(owner, []).append(request)
    except DLRoverError as error:
        log.warning("Step %d is not complete in the memory of the nodes: %s", state.step, error)
        is_fine = False
    asked: list[dict[int, list[Wanted]]] = _gather(requests, agreement)
    parcels: dict[int, bytearray] = {}
    try:
        for requester, its in enumerate(asked):
            if rank in its:
                parcels[requester] = _pack(state, its[rank])
    except (OSError, DLRoverError) as error:
        log.warning("%s", error)
        is_fine = False
    if not agreement.have_all(is_fine):
        return None
    items_of = {(owner, request): item for owner, request, item in where.values()}
    for owner, content in _swap(parcels, requests, items_of, agreement).items():
        for request, (start, end) in zip(
            requests[owner], _places([items_of[owner, each].num_bytes for each in requests[owner]]), strict=True
        ):
            item = items_of[owner, request]
            pieces[index_of(item)] = (item, memoryview(content)[start:end])
    return Brought(metadata, pieces)


def _tables(state: SavedState) -> dict[int, tuple[DcpItem, ...]]:
    """Without the pickles of what lies in storages, which only files need."""
    return {
        shard: tuple(replace(item, prepared=b"") if item.is_in_storage else item for item in holding.items)
        for shard, (holding, _source) in state.shards.items()
    }


def _pack(state: SavedState, wanted: Sequence[Wanted]) -> bytearray:
    """The bytes of these items, one behind the other."""
    by_shard: dict[int, list[int]] = {}
    for each in wanted:
        by_shard.setdefault(each.shard, []).append(each.position)
    found: dict[Wanted, memoryview] = {}
    for shard, positions in by_shard.items():
        holding, source = state.shards[shard]
        views = source.fetch(holding, [holding.items[position] for position in positions])
        found.update((Wanted(shard, position), view) for position, view in zip(positions, views, strict=True))
    places = _places([found[each].nbytes for each in wanted])
    parcel = bytearray(places[-1][1])
    for each, (start, end) in zip(wanted, places, strict=True):
        parcel[start:end] = found[each]
    return parcel


def _places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    places = []
    end = 0
    for num_bytes in sizes:
        start = round_up(end, LINE_ALIGNMENT)
        end = start + num_bytes
        places.append((start, end))
    return places


def _swap(
    parcels: dict[int, bytearray],
    requests: dict[int, list[Wanted]],
    items_of: dict[tuple[int, Wanted], DcpItem],
    agreement: Agreement,
) -> dict[int, bytearray]:
    """Send what others asked for, and receive what we asked for, by owner."""
    arriving = {
        owner: bytearray(_places([items_of[owner, each].num_bytes for each in wanted])[-1][1])
        for owner, wanted in requests.items()
    }
    group = agreement.group
    works = [
        dist.isend(torch.frombuffer(parcel, dtype=torch.uint8), requester, group=group)
        for requester, parcel in sorted(parcels.items())
    ]
    works += [
        dist.irecv(torch.frombuffer(buffer, dtype=torch.uint8), owner, group=group)
        for owner, buffer in sorted(arriving.items())
    ]
    for work in works:
        work.wait(PATIENCE)
    return arriving


def _gather(value: Any, agreement: Agreement) -> list[Any]:
    if agreement.group is None:
        return [value]
    found: list[Any] = [None] * agreement.ranks.world_size
    dist.all_gather_object(found, value, group=agreement.group)
    return found
