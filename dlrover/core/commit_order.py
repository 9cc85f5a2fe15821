"""
The commit order of a job: `machine_journal` for commands of a job, with what only a job has.

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
from dlrover.core.machine_journal import CoreFault as CoreFault
from dlrover.core.machine_journal import JournalCorrupt as JournalCorrupt
from dlrover.core.machine_journal import (
    MachineBatch,
    MachineRecord,
    MachineReleased,
    MachineSequence,
    MachineStep,
    read_record,
    walk_records,
)
from dlrover.core.outcome import NotYet, Origin, Outcome
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    MAX_JOURNALLED_FAILURE_BYTES,
    BlockRendezvous,
    Command,
    LeaveJob,
    Query,
    ReportFailure,
    StopJob,
    WorkerFailure,
)

Record = MachineRecord[Command]
Step = MachineStep[Command, Outcome]
RecordBatch = MachineBatch[Outcome]
Released = MachineReleased[Outcome]

NODES_PER_UNDIGESTED = 20
"""A digest costs microseconds for each node, 17 to 50 ms for ten thousand: for each so many nodes one more record shares it,
so that it costs no more than the commands themselves do (0.05 ms each). Small jobs have one in each batch."""
MAX_MESSAGE_BYTES_JOURNALLED = 1024
"""Of a one-line text."""
MAX_PATH_BYTES_JOURNALLED = 512


class BrokenQuestion(Rejected):
    """The core itself failed on a question. Nothing has changed; the cause says why."""

    def __init__(self, query: Query) -> None:
        super().__init__(
            f"{type(query).__name__} cannot be answered: an internal error of the master.", code=ErrorCode.INTERNAL
        )


class CommitSequence(MachineSequence[Command, Outcome]):
    """The one door through which a running master changes its job."""

    def __init__(self, job: Job, *, master_epoch: int, next_number: int, digest_every: int = 1) -> None:
        """`digest_every`: so many batches share one digest; more than one only where a digest costs more than all else."""
        super().__init__(job, master_epoch=master_epoch, next_number=next_number)
        self._job = job
        self._digest_every = digest_every

    @property
    def job(self) -> Job:
        """With everything staged applied: for deadlines and decisions, not for showing."""
        return self._job

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

    def _repeated(self, origin: Origin | None) -> Outcome | None:
        answered = self._job.answered(origin)
        return None if answered is None else Outcome(answered)

    def _trimmed(self, command: Command) -> Command:
        return trimmed_for_journal(command)

    def _check_outcome(self, outcome: Outcome, origin: Origin | None) -> None:
        if origin is not None:
            _ENCODER.encode(outcome.reply)  # who asked gets this very reply, now or when asking again

    def _is_digest_due(self) -> bool:
        if self._next_batch % self._digest_every:
            return False
        return self._num_undigested >= len(self._job.state.nodes.live) // NODES_PER_UNDIGESTED


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
    return walk_records(job, records, _DECODER.decode)


def decode_record(data: bytes, *, after: int = 0) -> Record:
    return read_record(data, _DECODER.decode, after=after)


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
_DECODER = msgspec.msgpack.Decoder(MachineRecord[Command])
