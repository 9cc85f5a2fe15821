"""
Registering datasets, taking and returning shards, and streams that grow.

In a new round nobody gets a shard of a dataset whose records are in a model provisionally, before the ranks have said which
model they go on with; nor does a worker that has loaded a model itself, and whose word is still under way with another rank. A job that
tells the steps of its model and never says that would wait in vain, so after a while the shards are given out all the
same; then records may be read twice, and a sentence says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlrover.core.data.books import RESTORE_PATIENCE, fold, state_for_manifest
from dlrover.core.data.checkpoint_text import write_checkpoint
from dlrover.core.data.dataset import Dataset
from dlrover.core.data.leases import LeaseHolder
from dlrover.core.data.progress import state_of
from dlrover.core.data.restoring import restore_topic, return_to, say_if_unread
from dlrover.core.data.rules import check_exchange, check_partitions, check_same, check_sender, check_spec
from dlrover.core.outcome import NotYet, micros
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.data import (
    MAX_DATASETS,
    MAX_ERROR_BYTES,
    MAX_PARTITIONS,
    NO_STEP,
    AskDataCheckpoint,
    AskDataset,
    AwaitRestore,
    DataCheckpoint,
    DatasetSpec,
    ExchangeShards,
    ExtendStream,
    LeasedShard,
    RegisterDataset,
    RestoreState,
    ShardsGiven,
    StorageKind,
    Supply,
    TaskType,
)
from dlrover.protocol.messages.job import Command, Micros, Query, Reply

if TYPE_CHECKING:
    from dlrover.core.decision import Course
    from dlrover.core.state import JobState

LOOK_AGAIN = 1.0
"""Seconds after which a worker that got nothing shall ask again."""
QUICK_LOOK = 0.1
"""The same in a small world, if only the word about its model is missing. Workers of today wait for `AwaitRestore` instead."""


def _register(command: RegisterDataset, course: Course) -> Reply:
    check_sender(command, course)
    check_spec(command.spec)
    books = course.state.data
    known = books.datasets.get(command.spec.name)
    if known is not None:
        check_same(known.spec, command.spec)
        return state_of(known)
    if len(books.datasets) >= MAX_DATASETS:
        raise Rejected(f"A job has at most {MAX_DATASETS} datasets.", code="data-full")

    dataset = new_dataset(command.spec, len(books.datasets) + 1)
    books.datasets[command.spec.name] = dataset
    if (told := books.awaited.pop(command.spec.name, None)) is not None:
        return_to(course, dataset, told, command.round)
    elif dataset.spec.task_type is TaskType.TRAINING:
        say_if_unread(course, dataset, books.restored.get(course.state.rendezvous.round, NO_STEP))
    return state_of(books.datasets[command.spec.name])


def new_dataset(spec: DatasetSpec, number: int = 1) -> Dataset:
    dataset = Dataset(spec, number)
    if spec.storage is StorageKind.STREAM:
        dataset.offsets = dict(spec.partitions)
        dataset.num_left = spec.size
    return dataset


def _exchange(command: ExchangeShards, course: Course) -> Reply:
    check_sender(command, course)
    books = course.state.data
    dataset = books.find(command.dataset)
    known = dataset.reader(command.node, command.local_rank)
    is_same_life = known is not None and (known.incarnation, known.round) == (command.incarnation, command.round)
    new = LeaseHolder(command.node, command.local_rank, command.incarnation, command.round, course.now)
    reader = known if known is not None and is_same_life else new
    check_exchange(command, dataset, reader)

    if known is not None and not is_same_life:
        dataset.end_leases([known])
    reader.heard_at = course.now
    is_training = dataset.spec.task_type is TaskType.TRAINING
    if command.consumed or not dataset.pace:
        dataset.consumed_at = course.now
    for each in command.consumed:
        dataset.consume(each.shard, each.count, each.step if is_training else NO_STEP)
    for error in command.failed:
        if dataset.fail(error.shard, error.message[:MAX_ERROR_BYTES]):
            course.say(
                f"A shard of {command.dataset!r} cannot be read and is set aside after {dataset.spec.max_errors + 1} tries: "
                f"{error.message[:200]}"
            )
    dataset.give_back(command.unused)
    if command.consumed or not dataset.pace:
        dataset.note_pace(course.now)
    dataset.waived = command.waived[:MAX_ERROR_BYTES] or dataset.waived
    given = _give(command, dataset, reader, course)
    if dataset.spec.task_type is not TaskType.TRAINING and dataset.spec.lease > 0 and dataset.num_readers:
        books.lease_looks.setdefault(dataset.number, Micros(course.now + micros(dataset.spec.lease)))
    return given


def _give(command: ExchangeShards, dataset: Dataset, reader: LeaseHolder, course: Course) -> ShardsGiven:
    shards: list[LeasedShard] = []
    is_held_back = command.want > 0 and _is_held_back(command, dataset, course)
    if command.want and not is_held_back:
        shards = dataset.take(reader, command.want)
    recalled = (*reader.recalled, *dataset.outdone_of(reader.node, reader.local_rank))
    if shards or not command.want:
        return ShardsGiven(supply=Supply.GIVEN, shards=tuple(shards), recalled=recalled)
    if dataset.is_exhausted and not dataset.returned and len(dataset.held) == len(reader.ids):
        return ShardsGiven(
            supply=Supply.END, recalled=recalled
        )  # the rest is the asker's own: it would wait for itself
    if is_held_back:
        return ShardsGiven(
            supply=Supply.WAIT,
            recalled=recalled,
            retry_after=_patience_for_word(course),
            held_back_for=_held_back_for(course),
        )
    if not reader.ids:
        dataset.recall()
        is_training = dataset.spec.task_type is TaskType.TRAINING
        if not is_training and (copy := dataset.take_copy(reader)) is not None:
            return ShardsGiven(supply=Supply.GIVEN, shards=(copy,), recalled=recalled)
    return ShardsGiven(supply=Supply.WAIT, recalled=recalled, retry_after=LOOK_AGAIN)


def _is_held_back(command: ExchangeShards, dataset: Dataset, course: Course) -> bool:
    """Whether it is not clear yet which of the consumed records the model of this round contains."""
    books = course.state.data
    if not command.round or dataset.spec.task_type is not TaskType.TRAINING:
        return False
    if command.round in books.restored:
        return False
    if not command.has_model and (dataset.restored_round >= command.round or not dataset.is_stepped):
        dataset.restored_round = max(dataset.restored_round, command.round)  # no model has anything to say about it
        return False
    if books.held_back_since is None:
        books.held_back_since = course.now
    if course.now - books.held_back_since < micros(RESTORE_PATIENCE):
        return True
    if dataset.restored_round < command.round:
        dataset.restored_round = command.round
        fold(books)
        course.say(
            f"Nobody said which model round {command.round} goes on with: {command.dataset!r} counts everything as seen that was told so far."
        )
    return False


def _held_back_for(course: Course) -> float:
    """Seconds until the word about the model is waited for no longer."""
    since = course.state.data.held_back_since
    assert since is not None, "who is held back waits since a moment"
    return max((since + micros(RESTORE_PATIENCE) - course.now) / 1e6, 0.001)


def _patience_for_word(course: Course) -> float:
    """The word usually comes in a moment. All workers of the world wait for it: together they ask at most about a thousand times a second."""
    world = course.state.rendezvous.world
    return min(LOOK_AGAIN, max(QUICK_LOOK, (world.world_size if world is not None else 1) / 1000))


def _extend_stream(command: ExtendStream, course: Course) -> Reply:
    check_sender(command, course)
    dataset = course.state.data.find(command.dataset)
    if not dataset.is_stream:
        raise Rejected(f"{command.dataset!r} is no stream: it has no partitions.", code="malformed")
    check_partitions(command.partitions)
    check_partitions(command.ends)
    unknown = [part for part in command.ends if part not in dataset.offsets and part not in command.partitions]
    num_partitions = len(dataset.offsets | command.partitions)  # a restarted watch names known ones again
    if unknown or num_partitions > MAX_PARTITIONS:
        raise Rejected(
            f"{command.dataset!r} has no partitions {unknown[:8]}."
            if unknown
            else f"A stream has at most {MAX_PARTITIONS} partitions.",
            code="malformed",
        )
    if command.is_over and not dataset.spec.grows:
        raise Rejected(f"{command.dataset!r} does not grow: say where its partitions end.", code="malformed")
    if dataset.spec.grows:
        _grow(command, dataset)
        return state_of(dataset)
    short = [part for part, end in command.ends.items() if end < dataset.offsets.get(part, 0)]
    if short:
        raise Rejected(f"Partition {short[0]!r} cannot end before what was given out of it already.", code="malformed")

    for part, offset in command.partitions.items():
        dataset.offsets.setdefault(part, offset)
    dataset.ends.update(command.ends)
    return state_of(dataset)


def _grow(command: ExtendStream, dataset: Dataset) -> None:
    """Several may watch the same source and be late by turns: the furthest end counts, and what is over stays so."""
    known = {part: dataset.ends.get(part, at) for part, at in (dataset.offsets | command.partitions).items()}
    more = {part: end for part, end in command.ends.items() if end > known[part]}
    if dataset.is_over and more:
        raise Rejected(
            f"{command.dataset!r} is over; partition {next(iter(more))!r} cannot grow any more. Read what came later as another dataset.",
            code="stream-over",
        )
    for part, offset in command.partitions.items():
        dataset.offsets.setdefault(part, offset)
    dataset.ends.update(more)
    dataset.is_over = dataset.is_over or command.is_over


def _ask_dataset(query: AskDataset, state: JobState) -> Reply | NotYet:
    return state_of(state.data.find(query.dataset))


def _ask_checkpoint(query: AskDataCheckpoint, state: JobState) -> Reply | NotYet:
    dataset = state.data.find(query.dataset) if query.dataset else None
    if query.round not in (0, state.rendezvous.round):
        raise Rejected(
            f"A worker of round {query.round} asks what its model has not seen; the newest round is {state.rendezvous.round}.",
            code="stale-round",
        )
    if dataset is None:
        return DataCheckpoint(state_for_manifest(state, query.step, state.rendezvous.round))
    return DataCheckpoint(write_checkpoint(dataset, query.step))


def _await_restore(query: AwaitRestore, state: JobState) -> Reply | NotYet:
    if query.round != state.rendezvous.round or query.round in state.data.restored:
        return RestoreState(True)
    return NotYet((restore_topic(query.round),), RestoreState(False))


HANDLERS: dict[type[Command], Callable[[Any, Course], Reply]] = {
    RegisterDataset: _register,
    ExchangeShards: _exchange,
    ExtendStream: _extend_stream,
}


ANSWERS: dict[type[Query], Callable[[Any, JobState], Reply | NotYet]] = {
    AskDataset: _ask_dataset,
    AskDataCheckpoint: _ask_checkpoint,
    AwaitRestore: _await_restore,
}
