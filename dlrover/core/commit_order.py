"""
The commit order: what is staged becomes visible only when it is durable.

Validate, apply, append, commit, and only then release replies, effects and answers. This is that order
without the disk: the shell takes a batch, writes its records in one transaction, and hands it back to learn what it may
release. A simulator can crash between any two of these lines and run the same code.

A record is a command with its time, as it was applied. Replaying the records of a journal gives the same job bit for
bit; the last record of each batch carries a digest of the state, so that a difference is found where it arises. One costs
as much as the whole state: in large jobs several batches share one, and the simulator, which compares states in its own
way, asks for fewer still.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.core.job import Job
from dlrover.core.outcome import NotYet, Origin, Outcome
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import DLRoverError, Rejected, malformed
from dlrover.protocol.messages.job import (
    MAX_JOURNALLED_FAILURE_BYTES,
    BlockRendezvous,
    Command,
    LeaveJob,
    Micros,
    Query,
    ReportFailure,
    StopJob,
    WorkerFailure,
)
from dlrover.protocol.text import UNENCODABLE

DIGEST_BYTES = 8
"""Of the state's digest, in a record: enough to notice, small enough to repeat."""
NODES_PER_UNDIGESTED = 20
"""A digest costs microseconds for each node, 17 to 50 ms for ten thousand: for each so many nodes one more record shares it,
so that it costs no more than the commands themselves do (0.05 ms each). Small jobs have one in each batch."""
MAX_MESSAGE_BYTES_JOURNALLED = 1024
"""Of a one-line text."""
MAX_PATH_BYTES_JOURNALLED = 512


class CoreFault(Exception):
    """The core itself failed while it applied a command: the state of the job is unknown, rebuild it."""

    def __init__(self, command: Command) -> None:
        super().__init__(f"The core failed on {type(command).__name__}; the job must be rebuilt from the journal.")
        self.command = command


class BrokenQuestion(Rejected):
    """The core itself failed on a question. Nothing has changed; the cause says why."""

    def __init__(self, query: Query) -> None:
        super().__init__(
            f"{type(query).__name__} cannot be answered: an error of the master's.", code=ErrorCode.INTERNAL
        )


class JournalCorrupt(DLRoverError):
    """The journal does not lead to the state it claims."""


class Record(Struct, frozen=True, kw_only=True):
    """One accepted command in the journal."""

    number: int
    now: Micros
    master_epoch: int
    origin: Origin | None
    command: Command
    digest: bytes = b""
    """First bytes of the state's digest after this record; only the last record of a batch has it."""


class Released(Struct, frozen=True):
    """What may be seen now: the outcome of the stage call that returned this ticket."""

    ticket: int
    outcome: Outcome


class RecordBatch(Struct, frozen=True):
    """What was staged since the last take."""

    number: int
    """Batches are committed in the order of their numbers."""
    records: tuple[bytes, ...]
    """To append in one transaction. May be empty: queries and repeated commands leave no trace."""
    first_number: int
    """Of the first record; the others follow without a gap."""
    released: tuple[Released, ...]
    """For `committed` only: nothing of it may be seen before."""
    master_epoch: int
    """After the last record. Greater than the writer's own: to be raised in the same transaction."""


class CommitSequence:
    """The one door through which a running master changes its job."""

    def __init__(self, job: Job, *, master_epoch: int, next_number: int, digest_every: int = 1) -> None:
        """`digest_every`: so many batches share one digest; more than one only where a digest costs more than all else."""
        assert next_number == job.number + 1, f"record {next_number} cannot follow command {job.number} of the job"
        self._job = job
        self._master_epoch = master_epoch
        self._digest_every = digest_every
        self._next_ticket = 1
        self._next_batch = 1
        self._next_committed = 1
        self._records: list[bytes] = []
        self._newest: Record | None = None  # the last of them
        self._num_undigested = 0  # records since the last digest
        self._released: list[Released] = []
        self._is_faulty = False

    @property
    def job(self) -> Job:
        """With everything staged applied: for deadlines and decisions, not for showing."""
        return self._job

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._released

    @property
    def is_settled(self) -> bool:
        """Whether all that was staged is committed: only then the job's state may be stored as a snapshot."""
        return self.is_empty and self._next_committed == self._next_batch and not self._is_faulty

    def stage(self, command: Command, now: Micros, origin: Origin | None = None) -> int:
        """Apply, and return the ticket by which the outcome will be released.

        Raises `Rejected` with nothing changed, or `CoreFault`: then what was staged before may still be taken and
        committed, but nothing can be staged any more. Neither the record nor the reply is left to fail later, when nobody
        can tell any more which command it was.
        """
        assert not self._is_faulty, "the job is in an unknown state: rebuild it from the journal"
        try:
            answered = self._job.answered(origin)
            if answered is not None:
                return self._release_later(Outcome(answered))
            record, data = self._record(command, now, origin)
            outcome = self._job.apply(record.command, now, origin)
            assert self._job.number == record.number, f"command {self._job.number} is record {record.number}"
            if origin is not None:
                _ENCODER.encode(outcome.reply)  # who asked gets this very reply, now or when asking again
        except Rejected:
            raise
        except Exception as error:
            self._is_faulty = True
            raise CoreFault(command) from error
        self._records.append(data)
        self._newest = record
        self._num_undigested += 1
        self._master_epoch = max(self._master_epoch, self._job.master_epoch)
        return self._release_later(outcome)

    def stage_query(self, query: Query) -> int:
        """Answer from the state as it is now; the answer is released together with what it saw. May raise `Rejected`."""
        answer = self.try_query(query)
        if isinstance(answer, int):
            return answer
        if isinstance(answer.otherwise, Rejected):
            raise answer.otherwise
        return self._release_later(Outcome(answer.otherwise))

    def try_query(self, query: Query) -> int | NotYet:
        """The same, for who is willing to wait."""
        assert not self._is_faulty, "the job is in an unknown state: rebuild it from the journal"
        try:
            answer = self._job.ask(query)
        except Rejected:
            raise
        except Exception as error:  # a bug; asking changes nothing, so nothing but the answer is lost
            raise BrokenQuestion(query) from error
        return answer if isinstance(answer, NotYet) else self._release_later(Outcome(answer))

    def take(self) -> RecordBatch | None:
        """What to write in the next transaction; None if nothing was staged."""
        if self.is_empty:
            return None
        last_number = self._job.number if self._newest is None else self._newest.number
        first_number = last_number + 1 - len(self._records)
        if self._newest is not None and self._is_digest_due():
            self._records[-1] = _ENCODER.encode(replace(self._newest, digest=self._job.digest()[:DIGEST_BYTES]))
            self._num_undigested = 0
        batch = RecordBatch(
            number=self._next_batch,
            records=tuple(self._records),
            first_number=first_number,
            released=tuple(self._released),
            master_epoch=self._master_epoch,
        )
        self._next_batch += 1
        self._records = []
        self._newest = None
        self._released = []
        return batch

    def committed(self, batch: RecordBatch) -> tuple[Released, ...]:
        """The batch is durable: its outcomes, in the order they were staged, may be seen."""
        assert batch.number == self._next_committed, f"batch {batch.number} before batch {self._next_committed}"
        self._next_committed += 1
        return batch.released

    def _record(self, command: Command, now: Micros, origin: Origin | None) -> tuple[Record, bytes]:
        """Of the next command. Raises `Rejected`."""
        number = self._job.number + 1
        try:
            command = trimmed_for_journal(command)
            record = Record(number=number, now=now, master_epoch=self._master_epoch, origin=origin, command=command)
            return record, _ENCODER.encode(record)
        except UNENCODABLE as error:
            raise malformed(f"{type(command).__name__} cannot be written: {error}.") from error

    def _is_digest_due(self) -> bool:
        if not self._records or self._is_faulty or self._next_batch % self._digest_every:
            return False
        return self._num_undigested >= len(self._job.state.nodes.live) // NODES_PER_UNDIGESTED

    def _release_later(self, outcome: Outcome) -> int:
        ticket = self._next_ticket
        self._next_ticket += 1
        self._released.append(Released(ticket, outcome))
        return ticket


class Step(Struct, frozen=True):
    """One record of a journal and what it led to."""

    record: Record
    outcome: Outcome


class Replayed(Struct, frozen=True):
    job: Job
    next_number: int
    num_records: int
    """Replayed on top of the snapshot."""


def replay(snapshot: bytes | None, records: Iterable[bytes]) -> Replayed:
    """The job after the last record. Raises `JournalCorrupt` naming the record where the journal contradicts itself."""
    job = load(snapshot)
    num_records = sum(1 for _ in walk(job, records))
    return Replayed(job=job, next_number=job.number + 1, num_records=num_records)


def load(snapshot: bytes | None) -> Job:
    """The job of a snapshot (`Job.encode`), or a new one."""
    if snapshot is None:
        return Job()
    try:
        return Job.decode(snapshot)
    except msgspec.MsgspecError as error:
        raise JournalCorrupt(f"The snapshot cannot be read: {error}") from error


def walk(job: Job, records: Iterable[bytes]) -> Iterator[Step]:
    """Apply the records to the job one by one; those that the job contains already are skipped."""
    for data in records:
        record = decode_record(data, after=job.number)
        if record.number <= job.number:
            continue
        if record.number != job.number + 1:
            raise JournalCorrupt(f"Record {record.number} follows command {job.number}: records between are missing.")
        try:
            outcome = job.apply(record.command, record.now, record.origin)
        except Rejected as error:
            name = type(record.command).__name__
            raise JournalCorrupt(f"Record {record.number} ({name}) was accepted once, but now: {error}") from error
        if record.digest:
            digest = job.digest()[: len(record.digest)]
            if digest != record.digest:
                raise JournalCorrupt(
                    f"After record {record.number} ({type(record.command).__name__}) the state's digest is "
                    f"{digest.hex()}, and was {record.digest.hex()} when it was written."
                )
        yield Step(record, outcome)


def decode_record(data: bytes, *, after: int = 0) -> Record:
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise JournalCorrupt(f"A record after record {after} cannot be read: {error}") from error


def trimmed_for_journal(command: Command) -> Command:
    """The command with its texts cut to what the journal stores; of a text that grows, the tail tells most.

    Applied before the command is, so that a replay sees exactly what was decided upon. Trimming again changes nothing.
    """
    match command:
        case ReportFailure():
            return replace(command, failures=tuple(_trimmed_failure(failure) for failure in command.failures))
        case LeaveJob() | StopJob():
            return replace(command, message=_head(command.message, MAX_MESSAGE_BYTES_JOURNALLED))
        case BlockRendezvous():
            return replace(command, reason=_head(command.reason, MAX_MESSAGE_BYTES_JOURNALLED))
        case _:
            return command


def _trimmed_failure(failure: WorkerFailure) -> WorkerFailure:
    message = _head(failure.message, MAX_MESSAGE_BYTES_JOURNALLED)
    log_file = _head(failure.log_file, MAX_PATH_BYTES_JOURNALLED)
    error_file = _head(failure.error_file, MAX_PATH_BYTES_JOURNALLED)
    room = MAX_JOURNALLED_FAILURE_BYTES - sum(_size(text) for text in (message, log_file, error_file))
    # The traceback says more than the log around it: it gets what the log does not need, and at least three quarters.
    traceback = _tail(failure.traceback, max(room * 3 // 4, room - _size(failure.log_tail)))
    log_tail = _tail(failure.log_tail, room - _size(traceback))
    return replace(
        failure, message=message, log_file=log_file, error_file=error_file, traceback=traceback, log_tail=log_tail
    )


def _size(text: str) -> int:
    return len(text.encode())


def _head(text: str, limit: int) -> str:
    data = text.encode()
    return text if len(data) <= limit else data[:limit].decode(errors="ignore")


def _tail(text: str, limit: int) -> str:
    data = text.encode()
    return text if len(data) <= limit else data[len(data) - limit :].decode(errors="ignore")


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Record)
