"""
The commit order of any deterministic machine: what is staged becomes visible only when it is durable.

Validate, apply, append, commit, and only then release what came out. This is that order without the disk: the shell takes a batch, writes
its records in one transaction, and hands it back to learn what it may release. A simulator can crash between any two of these
lines and run the same code. `commit_order` is this order for a job; `unified.core` has another machine below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.core.outcome import Origin
from dlrover.protocol.errors import DLRoverError, Rejected, malformed
from dlrover.protocol.messages.identity import Micros
from dlrover.protocol.text import UNENCODABLE

DIGEST_BYTES = 8
"""Of the state's digest, in a record: enough to notice, small enough to repeat."""

C = TypeVar("C")
"""Commands of a machine."""
R = TypeVar("R")
"""Its outcomes."""
C_contra = TypeVar("C_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class DecidingMachine(Protocol[C_contra, R_co]):
    """Its state follows from its commands and their times alone."""

    @property
    def number(self) -> int:
        """Of the last applied command."""

    @property
    def master_epoch(self) -> int:
        """Fencing number of the shell that may drive it."""

    def apply(self, command: C_contra, now: Micros, origin: Origin | None = None) -> R_co:
        """Apply the command whole, or raise `Rejected` with nothing changed."""

    def digest(self) -> bytes:
        """Differs when anything in the state differs."""


class CoreFault(Exception):
    """The core itself failed while it applied a command: the state is unknown, rebuild it."""

    def __init__(self, command: Any) -> None:
        super().__init__(f"The core failed on {type(command).__name__}; the job must be rebuilt from the journal.")
        self.command = command


class JournalCorrupt(DLRoverError):
    """The journal does not lead to the state it claims."""


class MachineRecord(Struct, Generic[C], frozen=True, kw_only=True):
    """One accepted command in the journal."""

    number: int
    now: Micros
    master_epoch: int
    origin: Origin | None
    command: C
    digest: bytes = b""
    """First bytes of the state's digest after this record; only the last record of a batch has it."""


class MachineReleased(Struct, Generic[R], frozen=True):
    """What may be seen now: the outcome of the stage call that returned this ticket."""

    ticket: int
    outcome: R


class MachineBatch(Struct, Generic[R], frozen=True):
    """What was staged since the last take."""

    number: int
    """Batches are committed in the order of their numbers."""
    records: tuple[bytes, ...]
    """To append in one transaction. May be empty: queries and repeated commands leave no trace."""
    first_number: int
    """Of the first record; the others follow without a gap."""
    released: tuple[MachineReleased[R], ...]
    """For `committed` only: nothing of it may be seen before."""
    master_epoch: int
    """After the last record. Greater than the writer's own: to be raised in the same transaction."""


class MachineSequence(Generic[C, R]):
    """The one door through which a running shell changes its machine."""

    def __init__(self, machine: DecidingMachine[C, R], *, master_epoch: int, next_number: int) -> None:
        assert next_number == machine.number + 1, f"record {next_number} cannot follow command {machine.number}"
        self._machine = machine
        self._master_epoch = master_epoch
        self._next_ticket = 1
        self._next_batch = 1
        self._next_committed = 1
        self._records: list[bytes] = []
        self._newest: MachineRecord[C] | None = None  # the last of them
        self._num_undigested = 0  # records since the last digest
        self._released: list[MachineReleased[R]] = []
        self._is_faulty = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._released

    @property
    def is_settled(self) -> bool:
        """Whether all that was staged is committed: only then the state may be stored as a snapshot."""
        return self.is_empty and self._next_committed == self._next_batch and not self._is_faulty

    def stage(self, command: C, now: Micros, origin: Origin | None = None) -> int:
        """Apply, and return the ticket by which the outcome will be released.

        Raises `Rejected` with nothing changed, or `CoreFault`: then what was staged before may still be taken and
        committed, but nothing can be staged any more. Neither the record nor the reply is left to fail later, when it is
        not known any more which command it was.
        """
        assert not self._is_faulty, "the machine is in an unknown state: rebuild it from the journal"
        try:
            repeated = self._repeated(origin)
            if repeated is not None:
                return self._release_later(repeated)
            record, data = self._record(command, now, origin)
            outcome = self._machine.apply(record.command, now, origin)
            assert self._machine.number == record.number, f"command {self._machine.number} is record {record.number}"
            self._check_outcome(outcome, origin)
        except Rejected:
            raise
        except Exception as error:
            self._is_faulty = True
            raise CoreFault(command) from error
        self._records.append(data)
        self._newest = record
        self._num_undigested += 1
        self._master_epoch = max(self._master_epoch, self._machine.master_epoch)
        return self._release_later(outcome)

    def take(self) -> MachineBatch[R] | None:
        """What to write in the next transaction; None if nothing was staged."""
        if self.is_empty:
            return None
        last_number = self._machine.number if self._newest is None else self._newest.number
        first_number = last_number + 1 - len(self._records)
        if self._newest is not None and not self._is_faulty and self._is_digest_due():
            self._records[-1] = _ENCODER.encode(replace(self._newest, digest=self._machine.digest()[:DIGEST_BYTES]))
            self._num_undigested = 0
        batch = MachineBatch(
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

    def committed(self, batch: MachineBatch[R]) -> tuple[MachineReleased[R], ...]:
        """The batch is durable: its outcomes, in the order they were staged, may be seen."""
        assert batch.number == self._next_committed, f"batch {batch.number} before batch {self._next_committed}"
        self._next_committed += 1
        return batch.released

    # What a machine may have of its own.

    def _repeated(self, origin: Origin | None) -> R | None:
        """The outcome of a command that was applied before; None for a new one. May raise `Rejected`."""
        return None

    def _trimmed(self, command: C) -> C:
        """As the journal stores it, and so as it is applied."""
        return command

    def _check_outcome(self, outcome: R, origin: Origin | None) -> None:
        """Raises for one that can never be sent."""

    def _is_digest_due(self) -> bool:
        return True

    def _record(self, command: C, now: Micros, origin: Origin | None) -> tuple[MachineRecord[C], bytes]:
        """Of the next command. Raises `Rejected`."""
        number = self._machine.number + 1
        try:
            command = self._trimmed(command)
            record = MachineRecord(
                number=number, now=now, master_epoch=self._master_epoch, origin=origin, command=command
            )
            return record, _ENCODER.encode(record)
        except UNENCODABLE as error:
            raise malformed(f"{type(command).__name__} cannot be written: {error}.") from error

    def _release_later(self, outcome: R) -> int:
        ticket = self._next_ticket
        self._next_ticket += 1
        self._released.append(MachineReleased(ticket, outcome))
        return ticket


class MachineStep(Struct, Generic[C, R], frozen=True):
    """One record of a journal and what it led to."""

    record: MachineRecord[C]
    outcome: R


def walk_records(
    machine: DecidingMachine[C, R], records: Iterable[bytes], decode: Callable[[bytes], MachineRecord[C]]
) -> Iterator[MachineStep[C, R]]:
    """
    Apply the records to the machine one by one; those that it contains already are skipped.

    Raises `JournalCorrupt` naming the record where the journal contradicts itself.
    """
    for data in records:
        record = read_record(data, decode, after=machine.number)
        if record.number <= machine.number:
            continue
        if record.number != machine.number + 1:
            raise JournalCorrupt(
                f"Record {record.number} follows command {machine.number}: records between are missing."
            )
        try:
            outcome = machine.apply(record.command, record.now, record.origin)
        except Rejected as error:
            name = type(record.command).__name__
            raise JournalCorrupt(f"Record {record.number} ({name}) was accepted once, but now: {error}") from error
        if record.digest:
            digest = machine.digest()[: len(record.digest)]
            if digest != record.digest:
                raise JournalCorrupt(
                    f"After record {record.number} ({type(record.command).__name__}) the state's digest is "
                    f"{digest.hex()}, and was {record.digest.hex()} when it was written."
                )
        yield MachineStep(record, outcome)


def read_record(data: bytes, decode: Callable[[bytes], MachineRecord[C]], *, after: int) -> MachineRecord[C]:
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise JournalCorrupt(f"A record after record {after} cannot be read: {error}") from error


_ENCODER = msgspec.msgpack.Encoder()
