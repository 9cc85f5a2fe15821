"""
The datasets of a job: who may take and return shards, and what rounds, restored models and checkpoints mean for them.

A lease names a worker's life: its node, incarnation, round and local rank. What a former life says is refused, and whatever it held goes back to
the head of the queue when its node is given up or a new round begins.

In a new round nobody gets a shard of a dataset whose records are in a model provisionally, before the ranks have said which
model they go on with; nor does a worker that has loaded a model itself, and whose word is still under way with another rank. A job that
tells the steps of its model and never says that would wait in vain, so after a while the shards are given out all the
same; then records may be read twice, and a sentence says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from dlrover.core.data_checkpoint import ToldStates, read_checkpoint, read_states, write_checkpoint, write_states
from dlrover.core.data_progress import state_of
from dlrover.core.datasets import Dataset, Reader
from dlrover.core.nodes import after_outage
from dlrover.core.turn import NotYet, micros
from dlrover.protocol.data_messages import (
    MAX_DATASETS,
    MAX_ERROR_BYTES,
    MAX_NAME_BYTES,
    MAX_PARTITIONS,
    MAX_SHARDS_AT_ONCE,
    MAX_STATE_BYTES,
    NO_STEP,
    AskDataCheckpoint,
    AskDataset,
    DataCheckpoint,
    DatasetCommand,
    DatasetSpec,
    ExchangeShards,
    ExtendStream,
    RegisterDataset,
    RestoreAgreed,
    RestoreDataset,
    Shard,
    ShardsGiven,
    Storage,
    Supply,
    TaskType,
)
from dlrover.protocol.errors import Rejected
from dlrover.protocol.identity import NodeId, Round
from dlrover.protocol.messages import Command, Done, Micros, Query, Reply

if TYPE_CHECKING:
    from dlrover.core.course import Course
    from dlrover.core.state import JobState

RESTORE_PATIENCE = 120.0
"""Seconds from the first worker that asks for which shards are held back until the ranks say which model they go on with."""
MAX_RESTORED = 64
LOOK_AGAIN = 1.0
"""Seconds after which a worker that got nothing shall ask again."""
QUICK_LOOK = 0.1
"""The same in a small world, if only the word about its model is missing."""
_LARGEST = 2**53


class DataBooks(Struct):
    datasets: dict[str, Dataset] = {}
    lease_looks: dict[int, Micros] = {}
    """When leases that run out by time are looked at next, by number of the dataset."""
    restored: dict[Round, int] = {}
    """
    The steps that the ranks of rounds restored, oldest first. Only those that tell how far two histories are shared: one that went back
    further makes all before it superfluous.
    """
    history_from: Round = Round(0)
    """The ranks of this round took up a model of another history. Nobody can tell what older rounds share with it, so nothing of theirs counts."""
    held_back_since: Micros | None = None
    """When somebody first had to wait in this round for the word about its model; None: nobody did."""
    folded: int = NO_STEP
    """The newest step of a checkpoint in storage: what its model contains is not listed any more."""
    late: dict[Round, int] = {}
    """The newest step in storage of each round whose checkpoints do not count yet."""
    awaited: dict[str, str] = {}
    """What the restored checkpoint says of datasets that nobody has registered yet."""

    def find(self, name: str) -> Dataset:
        dataset = self.datasets.get(name)
        if dataset is None:
            raise Rejected(
                f"There is no dataset {name!r}; register it first. Known: {', '.join(sorted(self.datasets)) or 'none'}.",
                code="unknown-dataset",
            )
        return dataset

    def note_restored(self, round_: Round, step: int) -> None:
        kept = {former: at for former, at in self.restored.items() if at < step}
        self.restored = kept | {round_: step}
        if len(self.restored) > MAX_RESTORED:
            # Of the oldest two the older step counts: then less is taken for shared than could be, never more.
            (_, least), (second, _), *others = self.restored.items()
            self.restored = {second: least} | dict(others)

    def last_shared(self, step: int, round_: Round) -> int:
        """The last step up to which a model of that step, trained in that round, has the history that counts now."""
        if round_ < self.history_from:
            return NO_STEP
        return min([step, *(at for later, at in self.restored.items() if later > round_)])

    def master_restarted(self, last_command_at: Micros, now: Micros) -> None:
        """Nobody could say anything meanwhile."""
        if self.held_back_since is not None:
            ends_at = after_outage(Micros(self.held_back_since + micros(RESTORE_PATIENCE)), last_command_at, now)
            self.held_back_since = Micros(ends_at - micros(RESTORE_PATIENCE))


# What happens around.


def round_began(course: Course, round_: Round) -> None:
    """Workers of older rounds are gone, and with them their leases."""
    books = course.state.data
    books.held_back_since = None
    for dataset in books.datasets.values():
        dataset.pace = []
        dataset.end_leases([reader for reader in dataset.all_readers() if reader.round < round_])


def workers_ended(course: Course, node: NodeId) -> None:
    """To be called whenever the workers of a node have ended for good."""
    for dataset in course.state.data.datasets.values():
        dataset.end_leases(dataset.readers_of(node))


def is_reading(state: JobState, node: NodeId) -> bool:
    """Whether workers of the node have something that they have not told the end of."""
    return any(node in dataset.readers for dataset in state.data.datasets.values())


def checkpoint_committed(course: Course, step: int, round_: Round) -> None:
    """
    A model of this step is in storage: what it contains is never read again. If it was saved before the ranks went back to an older
    step, only what both histories share counts.

    Of a former round: the ranks of this one may have looked into the storage before it was there. Then it counts when they have said
    what they found.
    """
    books, newest = course.state.data, course.state.rendezvous.round
    books.late[round_] = max(step, books.late.get(round_, NO_STEP))
    if round_ == newest or newest in books.restored:
        _fold(books)


def _fold(books: DataBooks) -> None:
    late, books.late = books.late, {}
    step = max((books.last_shared(step, round_) for round_, step in late.items()), default=NO_STEP)
    books.folded = max(books.folded, step)
    for dataset in books.datasets.values():
        if dataset.spec.task_type is TaskType.TRAINING:
            dataset.commit(step)


def state_for_manifest(state: JobState, step: int, round_: Round) -> str:
    """
    What the model of a save has still to read. Empty: the job reads no shards for training, the ranks went back behind that model, or
    a later one is in storage already, so that nobody can tell any more.
    """
    books = state.data
    if books.last_shared(step, round_) < step or step < books.folded:
        return ""
    datasets = [each for each in books.datasets.values() if each.spec.task_type is TaskType.TRAINING]
    return write_states(datasets, step) if datasets else ""


def end_overdue_leases(course: Course, number: int) -> str:
    """Workers that evaluate or predict and were not heard of for too long. The sentence that says so, if any."""
    books = course.state.data
    dataset = next((each for each in books.datasets.values() if each.number == number), None)
    if dataset is None or books.lease_looks.get(number, course.now + 1) > course.now:
        return ""
    lease = micros(dataset.spec.lease)
    overdue = [reader for reader in dataset.all_readers() if course.now - reader.heard_at >= lease]
    num_ended = dataset.end_leases(overdue)
    left = [reader.heard_at for reader in dataset.all_readers()]
    if left:
        books.lease_looks[number] = Micros(min(left) + lease)
    else:
        books.lease_looks.pop(number, None)
    if not overdue:
        return ""
    what = f"{num_ended} shards of {dataset.spec.name!r} go to others"
    return f"{what}: their workers were not heard of for {dataset.spec.lease:g} s."


# Commands.


def _register(command: RegisterDataset, course: Course) -> Reply:
    _check_sender(command, course)
    _check_spec(command.spec)
    books = course.state.data
    known = books.datasets.get(command.spec.name)
    if known is not None:
        _check_same(known.spec, command.spec)
        return state_of(known)
    if len(books.datasets) >= MAX_DATASETS:
        raise Rejected(f"A job has at most {MAX_DATASETS} datasets.", code="data-full")

    dataset = new_dataset(command.spec, len(books.datasets) + 1)
    books.datasets[command.spec.name] = dataset
    if (told := books.awaited.pop(command.spec.name, None)) is not None:
        _return_to(course, dataset, told, command.round)
    elif dataset.spec.task_type is TaskType.TRAINING:
        _say_if_unread(course, dataset, books.restored.get(course.state.rendezvous.round, NO_STEP))
    return state_of(books.datasets[command.spec.name])


def new_dataset(spec: DatasetSpec, number: int = 1) -> Dataset:
    dataset = Dataset(spec, number)
    if spec.storage is Storage.STREAM:
        dataset.offsets = dict(spec.partitions)
        dataset.num_left = spec.size
    return dataset


def _exchange(command: ExchangeShards, course: Course) -> Reply:
    _check_sender(command, course)
    books = course.state.data
    dataset = books.find(command.dataset)
    known = dataset.reader(command.node, command.local_rank)
    is_same_life = known is not None and (known.incarnation, known.round) == (command.incarnation, command.round)
    new = Reader(command.node, command.local_rank, command.incarnation, command.round, course.now)
    reader = known if known is not None and is_same_life else new
    _check_exchange(command, dataset, reader)

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


def _give(command: ExchangeShards, dataset: Dataset, reader: Reader, course: Course) -> ShardsGiven:
    shards: list[Shard] = []
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
        return ShardsGiven(supply=Supply.WAIT, recalled=recalled, retry_after=_patience_for_word(course))
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
        _fold(books)
        course.say(
            f"Nobody said which model round {command.round} goes on with: {command.dataset!r} counts everything as seen that was told so far."
        )
    return False


def _patience_for_word(course: Course) -> float:
    """The word usually comes in a moment. All workers of the world wait for it: together they ask at most about a thousand times a second."""
    world = course.state.rendezvous.world
    return min(LOOK_AGAIN, max(QUICK_LOOK, (world.world_size if world is not None else 1) / 1000))


def _restore_agreed(command: RestoreAgreed, course: Course) -> Reply:
    state = course.state
    state.nodes.current(command.node, command.incarnation)
    if command.round != state.rendezvous.round:
        raise Rejected(
            f"A worker of round {command.round} restored a model; the newest round is {state.rendezvous.round}.",
            code="stale-round",
        )
    known = state.data.restored.get(command.round)
    if known is not None and known != command.step:
        raise Rejected(
            f"The ranks of round {command.round} agreed on step {known} before, and now on step {command.step}.",
            code="restore-differs",
        )
    if not -1 <= command.step < _LARGEST:
        raise Rejected(f"A model of step {command.step} cannot be.", code="malformed")
    if len(command.data_state) > MAX_STATE_BYTES:
        raise Rejected(f"A data state has at most {MAX_STATE_BYTES} bytes.", code="malformed")
    if known is not None:
        return Done()

    books = state.data
    books.note_restored(command.round, command.step)
    states = _told_states(command, course)
    told, is_older = states.texts, states.step < command.step
    is_behind = command.step < books.folded
    books.folded = min(books.folded, command.step)
    books.awaited = {name: text for name, text in told.items() if name not in books.datasets}
    for name in books.awaited if is_older else ():
        _say_what_is_repeated(course, name, states.step, command.step)
    for name, dataset in list(books.datasets.items()):
        if dataset.spec.task_type is not TaskType.TRAINING:
            continue
        dataset.restored_round = command.round
        if name in told and is_older:
            # All that is left of a lost journal. Books that know anything know more than that.
            if not dataset.has_history and _return_to(course, dataset, told[name], command.round):
                books.history_from = command.round
                dataset = books.datasets[name]
                _say_what_is_repeated(course, name, states.step, command.step)
        elif name in told and (command.is_explicit or _is_other(dataset, told[name], command.step)):
            if _return_to(course, dataset, told[name], command.round):
                books.history_from = command.round
                continue
        elif is_behind and name not in told:
            course.say(
                f"The model of step {command.step} is older than a checkpoint in storage, and nothing tells what it had read of {name!r}: "
                "what was read up to that checkpoint is not read again."
            )
        elif name not in told and not command.claims:
            _say_if_unread(course, dataset, command.step)
        strange = dataset.restore(command.step, command.claims.get(name, ()), round_=command.round)
        if strange:
            course.say(
                f"The model of step {command.step} says that it has seen {len(strange)} ranges of {name!r} that were never given out: "
                "it was trained by other books. They may be read again."
            )
    _fold(books)
    course.model_restored()
    return Done()


def _say_if_unread(course: Course, dataset: Dataset, step: int) -> None:
    """A trained model and books of which nothing was ever read: the model is older than the books."""
    if step > 0 and not dataset.has_history:
        course.say(
            f"Nothing tells what the model of step {step} had read of {dataset.spec.name!r}: neither its checkpoint nor the journal. It is read "
            "from its beginning."
        )


def _say_what_is_repeated(course: Course, name: str, stored: int, step: int) -> None:
    course.say(
        f"The journal knows nothing of {name!r}, and the model of step {step} is newer than the checkpoint of step {stored} that tells of it: "
        "what was read in between is read again."
    )


def _told_states(command: RestoreAgreed, course: Course) -> ToldStates:
    """A state that cannot be read must not keep anybody from training: the sentence says what it means."""
    try:
        if command.data_state:
            return read_states(command.data_state)
    except Rejected as error:
        course.say(f"{error} The books of the datasets count instead.")
    return ToldStates(command.step, {})


def _is_other(dataset: Dataset, told: str, step: int) -> bool:
    """Whether the books, taken back to the step, would differ from what its checkpoint says."""
    try:
        said = read_checkpoint(told, dataset)
        ours = read_checkpoint(write_checkpoint(dataset, step, most_listed=0), dataset)
    except Rejected:
        return True
    if not said.advance_to(ours.epoch, ours.cursor, ours.offsets):
        return True
    if not ours.advance_to(said.epoch, said.cursor, said.offsets):
        return True
    return said.num_consumed != ours.num_consumed or said.places_left() != ours.places_left()


def _return_to(course: Course, known: Dataset, content: str, round_: Round) -> bool:
    """
    Let the dataset be as the text says; False, with the reason, if that cannot be. Workers of this round keep what they hold, unless the
    model has seen it.
    """
    try:
        restored = read_checkpoint(content, known)
    except Rejected as error:
        course.say(f"{error} Dataset {known.spec.name!r} goes on as its books say.")
        return False
    # Numbers are never used again: late words must not fit.
    restored.number, restored.last_id = known.number, known.last_id
    restored.restored_round, restored.num_returns = known.restored_round, known.num_returns + 1
    restored.is_stepped = known.is_stepped
    restored.take_over_leases(known, round_)
    course.state.data.datasets[known.spec.name] = restored
    course.say(
        f"Dataset {known.spec.name!r} goes back to where the restored model had read: {restored.num_consumed} records are in it, "
        f"{known.num_consumed} were read in the books."
    )
    return True


def _restore_dataset(command: RestoreDataset, course: Course) -> Reply:
    _check_sender(command, course)
    books = course.state.data
    known = books.find(command.dataset)
    restored = read_checkpoint(command.content, known)

    # Numbers are never used again: late words must not fit.
    restored.number, restored.last_id = known.number, known.last_id
    restored.restored_round, restored.num_returns = command.round, known.num_returns + 1
    restored.is_stepped = known.is_stepped
    books.datasets[command.dataset] = restored
    return state_of(restored)


def _extend_stream(command: ExtendStream, course: Course) -> Reply:
    _check_sender(command, course)
    dataset = course.state.data.find(command.dataset)
    if not dataset.is_stream:
        raise Rejected(f"{command.dataset!r} is no stream: it has no partitions.", code="malformed")
    _check_partitions(command.partitions)
    _check_partitions(command.ends)
    unknown = [part for part in command.ends if part not in dataset.offsets and part not in command.partitions]
    if unknown or len(dataset.offsets) + len(command.partitions) > MAX_PARTITIONS:
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


# Questions.


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


# Checks: nothing has changed when one of them fails.


def _check_sender(command: DatasetCommand, course: Course) -> None:
    state = course.state
    state.nodes.current(command.node, command.incarnation)
    if command.round not in (0, state.rendezvous.round):
        raise Rejected(
            f"A worker of round {command.round} asks for data; the newest round is {state.rendezvous.round}.",
            code="stale-round",
        )
    node = state.nodes.live[command.node]
    if not 0 <= command.local_rank < max(1, node.local_world_size):
        raise Rejected(f"{node.label} has no local rank {command.local_rank}.", code="malformed")


def _check_exchange(command: ExchangeShards, dataset: Dataset, reader: Reader) -> None:
    left: dict[int, int] = {}
    for each in command.consumed:
        left.setdefault(each.shard, _held_by(dataset, reader, each.shard))
        left[each.shard] -= each.count
        if each.count < 1 or left[each.shard] < 0:
            raise Rejected(
                f"Shard {each.shard} of {command.dataset!r} has not so many records left: {each.count} more were reported.",
                code="malformed",
            )
        if not NO_STEP <= each.step < _LARGEST:
            raise Rejected(f"Records cannot be in a model of step {each.step}.", code="malformed")
    ended = [id_ for id_, count in left.items() if not count]
    for id_ in [*(error.shard for error in command.failed), *command.unused]:
        _held_by(dataset, reader, id_)
        ended.append(id_)
    if len(dict.fromkeys(ended)) != len(ended):
        raise Rejected(f"A shard of {command.dataset!r} is reported in two ways at once.", code="malformed")
    if not 0 <= command.want <= MAX_SHARDS_AT_ONCE:
        raise Rejected(f"Up to {MAX_SHARDS_AT_ONCE} shards can be taken at once, not {command.want}.", code="malformed")


def _held_by(dataset: Dataset, reader: Reader, id_: int) -> int:
    """Records left of a shard that the reader holds."""
    if id_ in dataset.outdone_of(reader.node, reader.local_rank):
        return dataset.outdone[id_].num_left
    if id_ not in reader.ids:
        holder = dataset.held.get(id_)
        whose = "nobody" if holder is None else f"local rank {holder.local_rank} of node {holder.node}"
        raise Rejected(
            f"Shard {id_} of {dataset.spec.name!r} is held by {whose}, not by the sender; it may have been given to another.",
            code="stale-lease",
        )
    return dataset.held[id_].range.size


def _check_spec(spec: DatasetSpec) -> None:
    if not spec.name or len(spec.name.encode()) > MAX_NAME_BYTES:
        raise Rejected(f"A dataset needs a name of 1 to {MAX_NAME_BYTES} bytes.", code="malformed")
    what = f"dataset {spec.name!r}"
    is_stream = spec.storage is Storage.STREAM
    if not is_stream and not 1 <= spec.size < _LARGEST:
        raise Rejected(f"{what} has {spec.size} records. Give a size of at least 1.", code="malformed")
    if spec.grows and not is_stream:
        raise Rejected(f"{what} is no stream and cannot grow.", code="malformed")
    if len(spec.fingerprint.encode()) > MAX_NAME_BYTES:
        raise Rejected(f"{what} has a fingerprint of more than {MAX_NAME_BYTES} bytes.", code="malformed")
    if is_stream and (spec.size < -1 or spec.size == 0 or not (spec.partitions or spec.grows)):
        raise Rejected(f"{what} is a stream: give its partitions, and a size above 0 or -1.", code="malformed")
    if not 1 <= spec.shard_size < _LARGEST or not 1 <= spec.batch_size < _LARGEST:
        raise Rejected(
            f"{what} has shards of {spec.shard_size} and batches of {spec.batch_size} records. Both must be at least 1.",
            code="malformed",
        )
    if not is_stream and spec.batch_size > spec.size:
        raise Rejected(f"{what} has {spec.size} records, fewer than one batch of {spec.batch_size}.", code="malformed")
    if is_stream and spec.shuffle:
        raise Rejected(f"{what} is a stream, which cannot be shuffled.", code="malformed")
    if abs(spec.num_epochs) >= _LARGEST or abs(spec.seed) >= 2**63 or spec.max_errors < 0 or not 0 <= spec.lease < 1e9:
        raise Rejected(f"{what} has a number that makes no sense in: {spec}.", code="malformed")
    if len(spec.partitions) > MAX_PARTITIONS:
        raise Rejected(f"A stream has at most {MAX_PARTITIONS} partitions.", code="malformed")
    _check_partitions(spec.partitions)


def _check_partitions(partitions: dict[str, int]) -> None:
    for part, offset in partitions.items():
        if not part or len(part.encode()) > MAX_NAME_BYTES or not 0 <= offset < _LARGEST:
            raise Rejected(f"Partition {part[:64]!r} with offset {offset} cannot be.", code="malformed")


def _check_same(known: DatasetSpec, told: DatasetSpec) -> None:
    differences = [
        f"{name} {getattr(known, name)!r} and {getattr(told, name)!r}"
        for name in known.__struct_fields__
        if getattr(known, name) != getattr(told, name)
    ]
    if len(differences) == 1 and known.fingerprint != told.fingerprint:
        raise Rejected(
            f"The data of {known.name!r} are not those that it was registered with ({differences[0]}): files were changed, or differ between "
            "nodes. Bring back the old ones, or use another name.",
            code="dataset-differs",
        )
    if differences:
        raise Rejected(
            f"Dataset {known.name!r} was registered before with other parameters: {'; '.join(differences)}. Use the same, or "
            "another name.",
            code="dataset-differs",
        )


HANDLERS: dict[type[Command], Callable[[Any, Course], Reply]] = {
    RegisterDataset: _register,
    ExchangeShards: _exchange,
    RestoreAgreed: _restore_agreed,
    RestoreDataset: _restore_dataset,
    ExtendStream: _extend_stream,
}
ANSWERS: dict[type[Query], Callable[[Any, JobState], Reply | NotYet]] = {
    AskDataset: _ask_dataset,
    AskDataCheckpoint: _ask_checkpoint,
}
