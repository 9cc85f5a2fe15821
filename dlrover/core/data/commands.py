"""
Registering datasets, taking and returning shards, and streams that grow; and what rounds, lost workers and checkpoints mean for them.

A lease names a worker's life: its node, incarnation, round and local rank. Whatever a former life held goes back to the head of the
queue when its node is given up or a new round begins.

In a new round no worker gets a shard of a dataset whose records are in a model provisionally, before the ranks have said which
model they go on with; nor does a worker that has loaded a model itself, and whose word is still under way with another rank. A job that
tells the steps of its model and never says that would wait in vain, so after a while the shards are given out all the
same; then records may be read twice, and a sentence says so.
"""

from __future__ import annotations

from dlrover.core.data import progress
from dlrover.core.data.books import RESTORE_PATIENCE
from dlrover.core.data.checkpoint_text import write_checkpoint
from dlrover.core.data.dataset import Dataset
from dlrover.core.data.leases import LeaseHolder
from dlrover.core.data.progress import state_of
from dlrover.core.data.restoring import restore_topic, return_to, say_if_unread
from dlrover.core.data.rules import check_exchange, check_partitions, check_same, check_sender, check_spec
from dlrover.core.decision import Answers, Decision, Handlers
from dlrover.core.happenings import AllFinished, JobEnds
from dlrover.core.membership.nodes import Node
from dlrover.core.outcome import Deadline, NotYet
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
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
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import DeadlineKind, ExitReason, Micros, Reply, Round

LOOK_AGAIN = 1.0
"""Seconds after which a worker that got nothing shall ask again."""
QUICK_LOOK = 0.1
"""The same in a small world, if only the word about its model is missing. Workers of today wait for `AwaitRestore` instead."""


def _register(command: RegisterDataset, decision: Decision) -> Reply:
    check_sender(command, decision)
    check_spec(command.spec)
    books = decision.state.data
    known = books.datasets.get(command.spec.name)
    if known is not None:
        check_same(known.spec, command.spec)
        return state_of(known)
    if len(books.datasets) >= MAX_DATASETS:
        raise Rejected(f"A job has at most {MAX_DATASETS} datasets.", code=ErrorCode.DATA_FULL)

    dataset = new_dataset(command.spec, len(books.datasets) + 1)
    books.datasets[command.spec.name] = dataset
    if (told := books.awaited.pop(command.spec.name, None)) is not None:
        return_to(decision, dataset, told, command.round)
    elif dataset.spec.task_type is TaskType.TRAINING:
        say_if_unread(decision, dataset, books.restored.get(decision.state.rendezvous.round, NO_STEP))
    return state_of(books.datasets[command.spec.name])


def new_dataset(spec: DatasetSpec, number: int = 1) -> Dataset:
    dataset = Dataset(spec, number)
    if spec.storage is StorageKind.STREAM:
        dataset.offsets = dict(spec.partitions)
        dataset.num_left = spec.size
    return dataset


def _exchange(command: ExchangeShards, decision: Decision) -> Reply:
    check_sender(command, decision)
    books = decision.state.data
    dataset = books.find(command.dataset)
    known = dataset.reader(command.node, command.local_rank)
    is_same_life = known is not None and (known.incarnation, known.round) == (command.incarnation, command.round)
    new = LeaseHolder(command.node, command.local_rank, command.incarnation, command.round, decision.now)
    reader = known if known is not None and is_same_life else new
    check_exchange(command, dataset, reader)

    if known is not None and not is_same_life:
        dataset.end_leases([known])
    reader.heard_at = decision.now
    is_training = dataset.spec.task_type is TaskType.TRAINING
    if command.consumed or not dataset.pace:
        dataset.consumed_at = decision.now
    cluster = decision.state.cluster
    for each in command.consumed:
        step = each.step if cluster is None else cluster.cut
        dataset.consume(each.shard, each.count, step if is_training else NO_STEP)
    if cluster is not None and command.consumed:
        cluster.progress += 1
    for error in command.failed:
        if dataset.fail(error.shard, error.message[:MAX_ERROR_BYTES]):
            decision.say(
                f"A shard of {command.dataset!r} cannot be read and is set aside after {dataset.spec.max_errors + 1} tries: "
                f"{error.message[:200]}"
            )
    dataset.give_back(command.unused)
    if command.consumed or not dataset.pace:
        dataset.note_pace(decision.now)
    dataset.waived = command.waived[:MAX_ERROR_BYTES] or dataset.waived
    given = _give(command, dataset, reader, decision)
    if dataset.spec.task_type is not TaskType.TRAINING and dataset.spec.lease > 0 and dataset.num_readers:
        books.lease_looks.setdefault(dataset.number, Micros(decision.now + micros(dataset.spec.lease)))
    return given


def _give(command: ExchangeShards, dataset: Dataset, reader: LeaseHolder, decision: Decision) -> ShardsGiven:
    shards: list[LeasedShard] = []
    is_held_back = command.want > 0 and _is_held_back(command, dataset, decision)
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
            retry_after=_patience_for_word(decision),
            held_back_for=_held_back_for(decision),
        )
    if not reader.ids:
        dataset.recall()
        is_training = dataset.spec.task_type is TaskType.TRAINING
        if not is_training and (copy := dataset.take_copy(reader)) is not None:
            return ShardsGiven(supply=Supply.GIVEN, shards=(copy,), recalled=recalled)
    return ShardsGiven(supply=Supply.WAIT, recalled=recalled, retry_after=LOOK_AGAIN)


def _is_held_back(command: ExchangeShards, dataset: Dataset, decision: Decision) -> bool:
    """Whether it is not clear yet which of the consumed records the model of this round contains."""
    books = decision.state.data
    if not command.round or dataset.spec.task_type is not TaskType.TRAINING:
        return False
    if decision.state.cluster is not None:
        return False  # its processes begin to read when the model is there
    if command.round in books.restored:
        return False
    if not command.has_model and (dataset.restored_round >= command.round or not dataset.is_stepped):
        dataset.restored_round = max(dataset.restored_round, command.round)  # no model has anything to say about it
        return False
    if books.held_back_since is None:
        books.held_back_since = decision.now
    if decision.now - books.held_back_since < micros(RESTORE_PATIENCE):
        return True
    if dataset.restored_round < command.round:
        dataset.restored_round = command.round
        books.fold()
        decision.say(
            f"The ranks did not say in time which model round {command.round} goes on with. Everything that was reported of {command.dataset!r} counts as read."
        )
    return False


def _held_back_for(decision: Decision) -> float:
    """Seconds until the word about the model is waited for no longer."""
    since = decision.state.data.held_back_since
    assert since is not None, "who is held back waits since a moment"
    return max((since + micros(RESTORE_PATIENCE) - decision.now) / 1e6, 0.001)


def _patience_for_word(decision: Decision) -> float:
    """The word usually comes in a moment. All workers of the world wait for it: together they ask at most about a thousand times a second."""
    world = decision.state.rendezvous.world
    return min(LOOK_AGAIN, max(QUICK_LOOK, (world.world_size if world is not None else 1) / 1000))


def _extend_stream(command: ExtendStream, decision: Decision) -> Reply:
    check_sender(command, decision)
    dataset = decision.state.data.find(command.dataset)
    if not dataset.is_stream:
        raise malformed(f"{command.dataset!r} is no stream: it has no partitions.")
    check_partitions(command.partitions)
    check_partitions(command.ends)
    unknown = [part for part in command.ends if part not in dataset.offsets and part not in command.partitions]
    num_partitions = len(dataset.offsets | command.partitions)  # a restarted watch names known ones again
    if unknown or num_partitions > MAX_PARTITIONS:
        raise malformed(
            f"{command.dataset!r} has no partitions {unknown[:8]}."
            if unknown
            else f"A stream has at most {MAX_PARTITIONS} partitions."
        )
    if command.is_over and not dataset.spec.grows:
        raise malformed(f"{command.dataset!r} does not grow: say where its partitions end.")
    if dataset.spec.grows:
        _grow(command, dataset)
        return state_of(dataset)
    short = [part for part, end in command.ends.items() if end < dataset.offsets.get(part, 0)]
    if short:
        raise malformed(f"Partition {short[0]!r} cannot end before what was given out of it already.")

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
            code=ErrorCode.STREAM_OVER,
        )
    for part, offset in command.partitions.items():
        dataset.offsets.setdefault(part, offset)
    dataset.ends.update(more)
    dataset.is_over = dataset.is_over or command.is_over


def _ask_dataset(query: AskDataset, state: JobState) -> Reply | NotYet:
    return state_of(state.data.find(query.dataset))


def _ask_checkpoint(query: AskDataCheckpoint, state: JobState) -> Reply | NotYet:
    dataset = state.data.find(query.dataset) if query.dataset else None
    if query.round not in (0, state.rendezvous.round) and state.cluster is None:
        raise Rejected(
            f"A worker of round {query.round} asks what its model has not seen, but the newest round is {state.rendezvous.round}. Do "
            "nothing: workers of other rounds stop.",
            code=ErrorCode.STALE_ROUND,
        )
    if dataset is None:
        return DataCheckpoint(state.data.state_for_manifest(query.step, state.rendezvous.round))
    return DataCheckpoint(write_checkpoint(dataset, query.step))


def _await_restore(query: AwaitRestore, state: JobState) -> Reply | NotYet:
    if query.round != state.rendezvous.round or query.round in state.data.restored:
        return RestoreState(True)
    return NotYet((restore_topic(query.round),), RestoreState(False))


def on_round_completed(decision: Decision) -> None:
    _begin_round(decision, decision.state.rendezvous.round)


def on_job_starts_over(decision: Decision, _: str) -> None:
    _begin_round(decision, Round(decision.state.rendezvous.round + 1))


def _begin_round(decision: Decision, round_: Round) -> None:
    """Workers of older rounds are gone, and with them their leases. What the new ones may go on with is settled now."""
    books = decision.state.data
    books.held_back_since = None
    decision.state.rendezvous.turns = books.turns()
    for dataset in books.datasets.values():
        dataset.pace = []
        dataset.end_leases([reader for reader in dataset.all_readers() if reader.round < round_])


def on_workers_ended(decision: Decision, node: Node) -> None:
    for dataset in decision.state.data.datasets.values():
        dataset.end_leases(dataset.readers_of(node.id))


def on_all_finished(decision: Decision, finished: AllFinished) -> None:
    finished.is_reading = any(map(decision.state.data.is_reading, decision.state.rendezvous.finished))


def on_job_ends(decision: Decision, ends: JobEnds) -> None:
    """Processes that ended well are not all that a job is about."""
    books = decision.state.data
    if ends.reason is not ExitReason.COMPLETED:
        return
    if missing := progress.unfinished(books):
        ends.reason, ends.sentence = ExitReason.DATA_UNFINISHED, f"{ends.sentence} {missing}"
    else:
        ends.sentence = f"{ends.sentence} {progress.left_out(books)}".rstrip()


def on_checkpoint_counts(decision: Decision, step: int, round_: Round) -> None:
    """
    A model of this step is in storage: what it contains is never read again. If it was saved before the ranks went back to an older
    step, only what both histories share counts.

    Of a former round: the ranks of this one may have looked into the storage before it was there. Then it counts when they have said
    what they found.
    """
    books, newest = decision.state.data, decision.state.rendezvous.round
    books.late[round_] = max(step, books.late.get(round_, NO_STEP))
    if round_ == newest or newest in books.restored:
        books.fold()


def on_master_restarted(decision: Decision) -> None:
    decision.state.data.master_restarted(decision.state.now, decision.now)


def deadlines(state: JobState) -> list[Deadline]:
    return [Deadline(at, DeadlineKind.DATA_LEASE, number) for number, at in state.data.lease_looks.items()]


def end_overdue_leases(decision: Decision, number: int) -> None:
    """Of workers that evaluate or predict and were not heard of for too long."""
    books = decision.state.data
    dataset = next((each for each in books.datasets.values() if each.number == number), None)
    if dataset is None or books.lease_looks.get(number, decision.now + 1) > decision.now:
        return
    lease = micros(dataset.spec.lease)
    overdue = [reader for reader in dataset.all_readers() if decision.now - reader.heard_at >= lease]
    num_ended = dataset.end_leases(overdue)
    left = [reader.heard_at for reader in dataset.all_readers()]
    if left:
        books.lease_looks[number] = Micros(min(left) + lease)
    else:
        books.lease_looks.pop(number, None)
    if overdue:
        what = f"{num_ended} shards of {dataset.spec.name!r} go to others"
        decision.say(f"{what}: their workers were not heard of for {dataset.spec.lease:g} s.")


HANDLERS: Handlers = {
    RegisterDataset: _register,
    ExchangeShards: _exchange,
    ExtendStream: _extend_stream,
}
ANSWERS: Answers = {
    AskDataset: _ask_dataset,
    AskDataCheckpoint: _ask_checkpoint,
    AwaitRestore: _await_restore,
}
