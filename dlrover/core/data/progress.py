"""
How far the reading of the data is, for people; and whether a job whose workers have all ended well has read what it was to read.

A job that leaves training data unread without saying so has failed, however well its processes ended: the model is not the one that was
asked for. Who stops early on purpose says so (`stop_early` of the client, or a dataset that need not be finished).
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.data.books import DataBooks
from dlrover.core.data.dataset import Dataset
from dlrover.protocol.messages.data import DatasetState, TaskType

MOST_NAMED = 16


def state_of(dataset: Dataset) -> DatasetState:
    returned = sum(each.size for each in dataset.returned)
    num_doing = sum(each.size for each in dataset.held_ranges())
    num_todo = dataset.num_fresh + returned
    num_total, left = _num_total(dataset), _num_left(dataset, num_todo + num_doing)
    speed = dataset.speed
    return DatasetState(
        spec=dataset.spec,
        epoch=dataset.epoch,
        num_shards=dataset.num_shards,
        num_todo=num_todo,
        num_doing=num_doing,
        num_consumed=dataset.num_consumed,
        num_committed=dataset.num_committed,
        num_set_aside=sum(each.range.size for each in dataset.set_aside),
        is_complete=dataset.is_complete,
        set_aside=tuple(
            f"records {each.range.start} to {each.range.end} of epoch {each.range.epoch}: {each.message}"
            for each in dataset.set_aside[:MOST_NAMED]
        ),
        num_total=num_total,
        num_readers=dataset.num_readers,
        speed=speed,
        remaining=left / speed if num_total >= 0 and speed > 0 else None,
        consumed_at=dataset.consumed_at,
        waived=dataset.waived,
    )


def progress(books: DataBooks) -> tuple[DatasetState, ...]:
    """Of all datasets, without what may be long."""
    states = (state_of(dataset) for dataset in books.datasets.values())
    return tuple(replace(state, spec=replace(state.spec, partitions={})) for state in states)


def unfinished(books: DataBooks) -> str:
    """What the workers of a job should have read and have not; empty: nothing."""
    return " ".join(sentence for dataset in books.datasets.values() if (sentence := _complaint(dataset)))


def left_out(books: DataBooks) -> str:
    """What was not read, and need not be; empty: nothing."""
    sentences = []
    for dataset in books.datasets.values():
        name, num_left = repr(dataset.spec.name), _num_unread(dataset)
        if num_left and not _complaint(dataset) and (dataset.num_consumed or dataset.waived):
            why = f": {dataset.waived}" if dataset.waived else ""
            sentences.append(f"{num_left} records of dataset {name} were left unread{why}.")
        if dataset.set_aside and not _complaint(dataset):
            num_bad = sum(each.range.size for each in dataset.set_aside)
            sentences.append(f"{num_bad} records of dataset {name} could not be read and were skipped.")
    return " ".join(sentences)


def _complaint(dataset: Dataset) -> str:
    spec = dataset.spec
    is_required = spec.task_type is TaskType.TRAINING if spec.is_required is None else spec.is_required
    num_left = _num_unread(dataset)
    if is_required and num_left and not dataset.waived:
        return (
            f"Dataset {spec.name!r} was not read to its end: {num_left} of {_num_total(dataset)} records were never reported as done. "
            "Report every batch (report_batch_done). If the rest is left out on purpose, call stop_early() of its client, or make that "
            "with must_finish=False."
        )
    if is_required and dataset.set_aside and not spec.is_bad_data_skipped:
        num_bad, first = sum(each.range.size for each in dataset.set_aside), dataset.set_aside[0]
        return (
            f"{num_bad} records of dataset {spec.name!r} could not be read in {spec.max_errors + 1} tries and are not in the model; the "
            f"first are {first.range.start} to {first.range.end - 1} of epoch {first.range.epoch}: {first.message[:200].rstrip('.')}. "
            "Mend them, or make the client with skip_bad_data=True."
        )
    return ""


def _num_unread(dataset: Dataset) -> int:
    """Records that are to be read and were not, all epochs together; 0 for what has no end."""
    if _num_total(dataset) < 0:
        return 0
    under_way = sum(each.size for each in dataset.held_ranges())
    return _num_left(dataset, dataset.num_fresh + sum(each.size for each in dataset.returned) + under_way)


def _num_left(dataset: Dataset, num_of_epoch: int) -> int:
    if dataset.is_stream:
        return num_of_epoch
    return num_of_epoch + max(0, dataset.spec.num_epochs - dataset.epoch - 1) * dataset.spec.size


def _num_total(dataset: Dataset) -> int:
    spec = dataset.spec
    if not dataset.is_stream:
        return spec.size * spec.num_epochs if spec.num_epochs > 0 else -1
    if spec.size >= 0:
        return spec.size
    if not dataset.offsets or any(part not in dataset.ends for part in dataset.offsets):
        return -1
    return sum(max(0, dataset.ends[part] - spec.partitions.get(part, 0)) for part in dataset.offsets)
