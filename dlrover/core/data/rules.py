"""
What a command about data has to fulfil. Nothing has changed when one of these fails.

What a former life of a worker says is refused, and so is a report about a shard that another holds.
"""

from __future__ import annotations

from dlrover.core.data.dataset import Dataset
from dlrover.core.data.leases import LeaseHolder
from dlrover.core.decision import Decision
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.data import (
    MAX_NAME_BYTES,
    MAX_PARTITIONS,
    MAX_SHARDS_AT_ONCE,
    NO_STEP,
    DatasetCommand,
    DatasetSpec,
    ExchangeShards,
    StorageKind,
)

LARGEST = 2**53
MOST_RECORDS = 2**63
"""Of all epochs together: no message can carry much more."""


def check_sender(command: DatasetCommand, decision: Decision) -> None:
    state = decision.state
    state.nodes.current(command.node, command.incarnation)
    newest = state.rendezvous.round if state.cluster is None else state.cluster.round_of(command.node)
    if command.round not in (0, newest):
        raise Rejected(
            f"A worker of round {command.round} asked for data, but the newest round is {newest}. Only workers of the newest round get "
            "data. Do nothing: the other workers stop.",
            code=ErrorCode.STALE_ROUND,
        )
    node = state.nodes.live[command.node]
    if not 0 <= command.local_rank < max(1, node.local_world_size):
        raise malformed(f"{node.label} has no local rank {command.local_rank}.")


def check_exchange(command: ExchangeShards, dataset: Dataset, reader: LeaseHolder) -> None:
    left: dict[int, int] = {}
    for each in command.consumed:
        left.setdefault(each.shard, _held_by(dataset, reader, each.shard))
        left[each.shard] -= each.count
        if each.count < 1 or left[each.shard] < 0:
            raise malformed(
                f"Shard {each.shard} of {command.dataset!r} has not so many records left: {each.count} more were reported."
            )
        if not NO_STEP <= each.step < LARGEST:
            raise malformed(f"`step` of a report must be from {NO_STEP} to {LARGEST - 1} (got {each.step}).")
    ended = [id_ for id_, count in left.items() if not count]
    for id_ in [*(error.shard for error in command.failed), *command.unused]:
        _held_by(dataset, reader, id_)
        ended.append(id_)
    if len(dict.fromkeys(ended)) != len(ended):
        raise malformed(f"A shard of {command.dataset!r} is reported in two ways at once.")
    if not 0 <= command.want <= MAX_SHARDS_AT_ONCE:
        raise malformed(f"Up to {MAX_SHARDS_AT_ONCE} shards can be taken at once, not {command.want}.")


def _held_by(dataset: Dataset, reader: LeaseHolder, id_: int) -> int:
    """Records left of a shard that the reader holds."""
    if id_ in dataset.outdone_of(reader.node, reader.local_rank):
        return dataset.outdone[id_].num_left
    if id_ not in reader.ids:
        holder = dataset.held.get(id_)
        whose = "no worker" if holder is None else f"local rank {holder.local_rank} of node {holder.node}"
        raise Rejected(
            f"Shard {id_} of {dataset.spec.name!r} is held by {whose}, not by the sender; it may have been given to another.",
            code=ErrorCode.STALE_LEASE,
        )
    return dataset.held[id_].range.size


def check_spec(spec: DatasetSpec) -> None:
    if not spec.name or len(spec.name.encode()) > MAX_NAME_BYTES:
        raise malformed(f"A dataset needs a name of 1 to {MAX_NAME_BYTES} bytes.")
    what = f"dataset {spec.name!r}"
    is_stream = spec.storage is StorageKind.STREAM
    if not is_stream and not 1 <= spec.size < LARGEST:
        raise malformed(f"{what} has {spec.size} records. Give a size of at least 1.")
    if spec.grows and not is_stream:
        raise malformed(f"{what} is no stream and cannot grow.")
    if len(spec.fingerprint.encode()) > MAX_NAME_BYTES:
        raise malformed(f"{what} has a fingerprint of more than {MAX_NAME_BYTES} bytes.")
    if is_stream and (spec.size < -1 or spec.size == 0 or not (spec.partitions or spec.grows)):
        raise malformed(f"{what} is a stream: give its partitions, and a size above 0 or -1.")
    if not 1 <= spec.shard_size < LARGEST or not 1 <= spec.batch_size < LARGEST:
        raise malformed(
            f"{what} has shards of {spec.shard_size} and batches of {spec.batch_size} records. Both must be at least 1."
        )
    if not is_stream and spec.batch_size > spec.size:
        raise malformed(f"{what} has {spec.size} records, fewer than one batch of {spec.batch_size}.")
    if is_stream and spec.shuffle:
        raise malformed(f"{what} is a stream, which cannot be shuffled.")
    is_error_count_sane = 0 <= spec.max_errors < LARGEST
    if (
        abs(spec.num_epochs) >= LARGEST
        or abs(spec.seed) >= 2**63
        or not is_error_count_sane
        or not 0 <= spec.lease < 1e9
    ):
        raise malformed(f"{what} has a number out of range in: {spec}.")
    if spec.size >= LARGEST or spec.size * spec.num_epochs >= MOST_RECORDS:
        raise malformed(
            f"{what} has {spec.size} records in {spec.num_epochs} epochs, more than can be counted. "
            "Without an end it has 0 epochs."
        )
    if len(spec.partitions) > MAX_PARTITIONS:
        raise malformed(f"A stream has at most {MAX_PARTITIONS} partitions.")
    check_partitions(spec.partitions)


def check_partitions(partitions: dict[str, int]) -> None:
    for part, offset in partitions.items():
        if not part or len(part.encode()) > MAX_NAME_BYTES or not 0 <= offset < LARGEST:
            raise malformed(
                f"A partition needs a name of 1 to {MAX_NAME_BYTES} bytes and an offset from 0 to {LARGEST - 1} (got {part[:64]!r} and {offset})."
            )


def check_same(known: DatasetSpec, told: DatasetSpec) -> None:
    differences = [
        f"{name} {getattr(known, name)!r} and {getattr(told, name)!r}"
        for name in known.__struct_fields__
        if getattr(known, name) != getattr(told, name)
    ]
    if len(differences) == 1 and known.fingerprint != told.fingerprint:
        raise Rejected(
            f"The data of {known.name!r} are not those that it was registered with ({differences[0]}): files were changed, or differ between "
            "nodes. Bring back the old ones, or use another name.",
            code=ErrorCode.DATASET_DIFFERS,
        )
    if differences:
        raise Rejected(
            f"Dataset {known.name!r} was registered before with other parameters: {'; '.join(differences)}. Use the same, or "
            "another name.",
            code=ErrorCode.DATASET_DIFFERS,
        )
