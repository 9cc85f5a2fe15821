"""
The journal of a multi-role job, in the key-value store of its cluster: so its conductor may die anywhere and come back anywhere.

One key for each record, put without overwriting: of two conductors that decide at once, one finds its place taken, and nothing of its decision
becomes visible. A conductor takes over by a number that no other had. A former one sees that number after its next put, and acts on nothing any more.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from dlrover.core.machine_journal import JournalCorrupt, MachineRecord, MachineSequence, walk_records
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.identity import Micros
from dlrover.unified.core.machine import EnsembleMachine
from dlrover.unified.core.messages import Command, ConductorTook, EnsembleOutcome

SNAPSHOT_EVERY = 200
"""Records. A replay of so many takes a few milliseconds."""
MAX_CONDUCTORS = 100_000


class KeyValues(Protocol):
    """What a cluster's store offers. Each call happens whole or not at all."""

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """False: the key was there and was not overwritten."""

    def get(self, key: str) -> bytes | None: ...

    def delete(self, key: str) -> None: ...

    def keys(self, prefix: str) -> list[str]: ...


class ConductorFenced(DLRoverError):
    """Another conductor drives this job."""


class EnsembleJournal:
    """Records and the snapshot of one job."""

    def __init__(self, store: KeyValues, job_uid: str, *, snapshot_every: int = SNAPSHOT_EVERY) -> None:
        self._store = store
        self.snapshot_every = snapshot_every
        self._prefix = f"{job_uid}/ensemble/"

    def claim_epoch(self) -> int:
        """A number that no conductor of this job had before."""
        for number in range(len(self._store.keys(f"{self._prefix}epoch/")) + 1, MAX_CONDUCTORS):
            if self._store.put(f"{self._prefix}epoch/{number}", b"1", overwrite=False):
                return number
        raise AssertionError(f"the job has had {MAX_CONDUCTORS} conductors, which is the limit")

    def load(self) -> EnsembleMachine:
        """Raises `JournalCorrupt`."""
        # Keys first: a snapshot that is put meanwhile contains what its conductor removes after it.
        keys = self._store.keys(f"{self._prefix}rec/")
        records = [data for key in keys if (data := self._store.get(key)) is not None]
        snapshot = self._store.get(f"{self._prefix}snap")
        try:
            machine = EnsembleMachine() if snapshot is None else EnsembleMachine.decode(snapshot)
        except msgspec.MsgspecError as error:
            raise JournalCorrupt(f"The conductor's stored state cannot be read: {error}") from error
        for _ in walk_records(machine, records, _RECORD.decode):
            pass
        return machine

    def append(self, number: int, record: bytes, *, epoch: int) -> bool:
        """
        False: another conductor drives the job, and the caller must act on nothing that it has decided.

        Its place may be free again, because a newer conductor has put a snapshot in place of the records. So the fence is looked at after the put: a conductor
        claims its number before it reads, and reads before it removes.
        """
        is_written = self._store.put(self._record(number), record, overwrite=False)
        return is_written and self.is_newest(epoch)

    def is_newest(self, epoch: int) -> bool:
        return self._store.get(f"{self._prefix}epoch/{epoch + 1}") is None

    def save_snapshot(self, machine: EnsembleMachine) -> None:
        """The records that it contains go, the oldest first: what stays follows the snapshot without a gap."""
        self._store.put(f"{self._prefix}snap", machine.encode())
        newest = self._record(machine.number)
        for key in self._store.keys(f"{self._prefix}rec/"):
            if key <= newest:
                self._store.delete(key)

    def clear(self) -> None:
        for key in self._store.keys(self._prefix):
            self._store.delete(key)

    def _record(self, number: int) -> str:
        return f"{self._prefix}rec/{number:012}"


class DurableEnsemble:
    """The machine of a job and its journal: what `decide` gives is durable. Use `take_over`."""

    def __init__(self, journal: EnsembleJournal, epoch: int) -> None:
        self._journal = journal
        self.epoch = epoch
        self._adopt(journal.load())

    @classmethod
    def take_over(cls, journal: EnsembleJournal, now: Micros, *, first: Command | None = None) -> DurableEnsemble:
        """
        From every former conductor. `first`: begins the job, if nothing was written yet. `now` is at least the journal's own time.

        Raises `Fenced` if a newer conductor was faster.
        """
        ensemble = cls(journal, journal.claim_epoch())
        while True:
            try:
                if ensemble.machine.number == 0:
                    assert first is not None, "nothing was written, and nothing begins the job"
                    ensemble.decide(first, now)
                ensemble.decide(ConductorTook(ensemble.epoch), Micros(max(now, ensemble.machine.state.now)))
            except ConductorFenced:
                if not journal.is_newest(ensemble.epoch):
                    raise
                ensemble._adopt(journal.load())  # a former conductor wrote one record more, in time
                continue
            return ensemble

    def decide(self, command: Command, now: Micros) -> EnsembleOutcome:
        """Raises `Rejected` with nothing changed, or `Fenced`: then this conductor must do nothing any more."""
        self._order.stage(command, now)
        batch = self._order.take()
        assert batch is not None
        for place, record in enumerate(batch.records):
            number = batch.first_number + place
            if not self._journal.append(number, record, epoch=self.epoch):
                raise ConductorFenced(f"Conductor {self.epoch} was replaced before it could write record {number}.")
        [released] = self._order.committed(batch)
        if self.machine.number % self._journal.snapshot_every == 0:
            self._journal.save_snapshot(self.machine)
        return released.outcome

    def _adopt(self, machine: EnsembleMachine) -> None:
        self.machine = machine
        self._order: MachineSequence[Command, EnsembleOutcome] = MachineSequence(
            machine, master_epoch=self.epoch, next_number=machine.number + 1
        )


_RECORD = msgspec.msgpack.Decoder(MachineRecord[Command])
