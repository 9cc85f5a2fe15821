"""
The text of a dataset checkpoint: what a model of some step has still to read.

It is JSON with the five keys of the original DLRover, so that either side reads what the other wrote, and with more beside them. The original
lists every shard of the epoch that is not done; so do we up to `MOST_LISTED` shards, and say where the cursor stands in any case: a
billion records need no list.

A text of the original (no `version`) means: `doing` first, then `todo`, then the epochs after `epoch`, which counts from 1. It may name
the records of a shard one by one, when they were shuffled by an order that cannot be computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from dlrover.core.data.dataset import Dataset
from dlrover.core.data.leases import SetAside
from dlrover.core.data.ranges import Range
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.data import MAX_STATE_BYTES, NO_STEP

VERSION = 2
MOST_LISTED = 50_000


class _Written(Struct, kw_only=True):
    """Ours."""

    dataset_name: str
    todo: list[list[int]]
    doing: list[list[int]]
    epoch: int
    """The original's counter: 1 while the first epoch runs."""
    splitter: dict[str, Any] | None = None
    version: int = VERSION
    dataset_size: int = 0
    shard_size: int = 0
    batch_size: int = 0
    num_epochs: int = 0
    shuffle: bool = False
    seed: int = 0
    storage_type: str = ""
    step: int = NO_STEP
    cursor: int = 0
    ranges: list[Range] = []
    """Everything that is to be read before what is fresh, in the order of reading."""
    offsets: dict[str, int] = {}
    ends: dict[str, int] = {}
    num_left: int = -1
    is_over: bool = False
    num_consumed: int = 0
    listings: dict[str, list[int]] = {}
    set_aside: list[SetAside] = []


class _States(Struct, kw_only=True):
    """Of all datasets, as a checkpoint's manifest carries it."""

    version: int = 1
    step: int
    datasets: dict[str, msgspec.Raw]


def write_states(datasets: Iterable[Dataset], step: int) -> str:
    """What a model of this step has not seen of any of them; empty if that is too long to be kept."""
    texts = {each.spec.name: write_checkpoint(each, step, most_listed=0) for each in datasets}
    raw = {name: msgspec.Raw(text.encode()) for name, text in texts.items()}
    whole = msgspec.json.encode(_States(step=step, datasets=raw))
    return whole.decode() if len(whole) <= MAX_STATE_BYTES else ""


class ToldStates(Struct, frozen=True):
    """What a manifest says: of which step, and the dataset checkpoints by name."""

    step: int
    texts: dict[str, str]


def read_states(content: str) -> ToldStates:
    """Raises Rejected."""
    try:
        states = msgspec.json.decode(content, type=_States)
    except msgspec.MsgspecError as error:
        raise malformed(f"The data state of the checkpoint cannot be read: {error}.") from error
    return ToldStates(states.step, {name: bytes(raw).decode() for name, raw in states.datasets.items()})


def write_checkpoint(dataset: Dataset, step: int = NO_STEP, *, most_listed: int = MOST_LISTED) -> str:
    """What a model of this step has not seen; -1: of the newest."""
    later = [each for at in sorted(dataset.provisional) if NO_STEP < step < at for each in dataset.provisional[at]]
    doing = sorted([*later, *dataset.held_ranges()], key=dataset.reading_order)
    ranges = [*doing, *reversed(dataset.returned)]
    todo = [each for each in reversed(dataset.returned) if each.epoch == dataset.epoch]
    fresh = dataset.num_shards - dataset.cursor
    if fresh + len(ranges) <= most_listed:
        todo += dataset.fresh_ranges()
    spec = dataset.spec
    written = _Written(
        dataset_name=spec.name,
        todo=[[each.start, each.end] for each in todo],
        doing=[[each.start, each.end] for each in doing if each.epoch == dataset.epoch],
        epoch=dataset.epoch + 1,
        dataset_size=spec.size,
        shard_size=spec.shard_size,
        batch_size=spec.batch_size,
        num_epochs=spec.num_epochs,
        shuffle=spec.shuffle,
        seed=spec.seed,
        storage_type=spec.storage.value,
        step=step,
        cursor=dataset.cursor,
        ranges=ranges,
        offsets=dataset.offsets,
        ends=dataset.ends,
        num_left=dataset.num_left,
        is_over=dataset.is_over,
        num_consumed=dataset.num_consumed - sum(each.size for each in later),
        listings={str(number): list(records) for number, records in dataset.listings.items()},
        set_aside=dataset.set_aside,
    )
    return msgspec.json.encode(written).decode()


def read_checkpoint(content: str, known: Dataset) -> Dataset:
    """The books as the text says, for the same dataset. Raises Rejected, and then nothing has changed."""
    try:
        raw = msgspec.json.decode(content)
        version = raw.get("version", 1) if isinstance(raw, dict) else 0
        if version > VERSION:
            raise malformed(
                f"The dataset checkpoint is of format {version}; this version reads up to {VERSION}. Update dlrover."
            )
        restored = _read_ours(content, known) if version >= 2 else _read_originals(raw, known)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise malformed(
            f"The dataset checkpoint of {known.spec.name!r} cannot be read ({type(error).__name__}: {error}). Nothing has changed."
        ) from error
    for each in [*restored.returned, *(aside.range for aside in restored.set_aside)]:
        _check_range(each, restored)
    return restored


def _read_ours(content: str, known: Dataset) -> Dataset:
    written = msgspec.json.decode(content, type=_Written)
    spec = known.spec
    said = (written.dataset_name, written.dataset_size, written.shard_size, written.shuffle, written.seed)
    ours = (spec.name, spec.size, spec.shard_size, spec.shuffle, spec.seed)
    if said != ours or written.storage_type != spec.storage.value:
        raise Rejected(
            f"The checkpoint is of a dataset with (name, size, shard size, shuffle, seed) {said}, the registered one has {ours}. Register it "
            "as it was.",
            code=ErrorCode.DATASET_DIFFERS,
        )
    if not 0 <= written.cursor <= known.num_shards or written.epoch < 1:
        raise ValueError(f"cursor {written.cursor} in epoch {written.epoch - 1}")
    restored = Dataset(
        spec,
        epoch=written.epoch - 1,
        cursor=written.cursor,
        offsets=written.offsets,
        ends=written.ends,
        num_left=written.num_left,
        is_over=written.is_over,
        returned=list(reversed(written.ranges)),
        num_consumed=written.num_consumed,
        num_committed=written.num_consumed,
        set_aside=written.set_aside,
    )
    restored.listings = {int(number): tuple(records) for number, records in written.listings.items()}
    return restored


def _read_originals(raw: dict[str, Any], known: Dataset) -> Dataset:
    if raw["dataset_name"] != known.spec.name:
        raise Rejected(
            f"The checkpoint is of dataset {raw['dataset_name']!r}, not of {known.spec.name!r}.",
            code=ErrorCode.DATASET_DIFFERS,
        )
    epoch = int(raw["epoch"]) - 1
    if epoch < -1 or known.is_stream:
        raise ValueError(f"epoch {epoch + 1} of the original's format")
    listings: dict[int, tuple[int, ...]] = {}
    ranges = []
    for entry in [*raw["doing"], *raw["todo"]]:
        start, end, *records = entry
        if records and records[0]:
            listings[len(listings) + 1] = tuple(int(record) for record in records[0])
            ranges.append(Range(max(epoch, 0), 0, len(records[0]), "", len(listings)))
        else:
            ranges.append(Range(max(epoch, 0), int(start), int(end)))
    # Epoch 0 of the original: none has begun. Otherwise all shards of the epoch that are not done are listed.
    cursor = 0 if epoch < 0 else known.num_shards
    restored = Dataset(
        known.spec, epoch=max(epoch, 0), cursor=cursor, returned=list(reversed(ranges)), listings=listings
    )
    left = sum(each.size for each in ranges)
    done = 0 if epoch < 0 else (epoch + 1) * known.spec.size - left
    restored.num_consumed = restored.num_committed = max(0, done)
    return restored


def _check_range(each: Range, restored: Dataset) -> None:
    size = len(restored.listings.get(each.listing, ())) if each.listing else restored.spec.size
    is_inside = 0 <= each.start < each.end and (restored.is_stream or each.end <= size)
    if not is_inside or not 0 <= each.epoch <= restored.epoch:
        raise malformed(
            f"The dataset checkpoint names records {each.start} to {each.end} of epoch {each.epoch}; {restored.spec.name!r} has {size} and is "
            f"in epoch {restored.epoch}."
        )
