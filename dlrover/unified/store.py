"""
The journal of a multi-role job, in the key-value store of its cluster: so its conductor may die anywhere and come back anywhere.

One key for each record, put without overwriting: of two conductors that decide at once, one finds its place taken, and nothing of its decision
becomes visible. A conductor takes over by a number that no other had. A former one sees that number after its next put, and acts on nothing any more.

A small job has a snapshot after each record, before anything of the decision is released. So a conductor of an upgraded package, whose rules would
replay the records to another state, goes on from the newest snapshot and knows all that was ever asked for.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from dlrover.core.machine_journal import JournalCorrupt, MachineRecord, MachineSequence, walk_records
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.identity import Micros
from dlrover.unified.core.machine import EnsembleMachine
from dlrover.unified.core.messages import Command, ConductorTook, EnsembleOutcome
from dlrover.unified.core.state import ENSEMBLE_DECISIONS

SNAPSHOT_EVERY = 200
"""Records. A replay of so many takes a few milliseconds."""
SMALL_BYTES = 1 << 16
"""Of a snapshot that is put after each record: about 400 instances."""
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

    def __init__(
        self,
        store: KeyValues,
        job_uid: str,
        *,
        snapshot_every: int = SNAPSHOT_EVERY,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        self._store = store
        self._snapshot_every = snapshot_every
        self._small_bytes = small_bytes
        self._prefix = f"{job_uid}/ensemble/"
        self._newest_bytes = 0
        """Of the newest snapshot; 0: there is none."""

    def claim_epoch(self) -> int:
        """A number that no conductor of this job had before."""
        for number in range(len(self._store.keys(f"{self._prefix}epoch/")) + 1, MAX_CONDUCTORS):
            if self._store.put(f"{self._prefix}epoch/{number}", b"1", overwrite=False):
                return number
        raise AssertionError(f"the job has had {MAX_CONDUCTORS} conductors, which is the limit")

    def load(self) -> EnsembleMachine:
        """Raises `JournalCorrupt`."""
        # Records first: a snapshot that is put meanwhile contains what its conductor removes after it.
        keys = self._store.keys(f"{self._prefix}rec/")
        records = [data for key in keys if (data := self._store.get(key)) is not None]
        snapshot = self._newest_snapshot()
        self._newest_bytes = len(snapshot)
        try:
            machine = EnsembleMachine.decode(snapshot) if snapshot else EnsembleMachine()
        except msgspec.MsgspecError as error:
            raise JournalCorrupt(f"The conductor's stored state cannot be read: {error}") from error
        if snapshot and machine.state.decision_version == ENSEMBLE_DECISIONS:
            for _ in walk_records(machine, records, _RECORD.decode):
                pass
        else:
            self._drop_unreleased(machine)
        return machine

    def append(self, record: bytes, machine: EnsembleMachine, *, epoch: int) -> bool:
        """
        The newest record, which led to the state of the machine.

        False: another conductor drives the job, and the caller must act on nothing that it has decided. The record's place may be free again, because a newer
        conductor has put a snapshot in place of the records. So the fence is looked at last: a conductor claims its number before it reads, and reads before
        it removes.
        """
        if not self._store.put(self._record(machine.number), record, overwrite=False):
            return False
        is_each_kept = self._newest_bytes <= self._small_bytes  # by the snapshot that is there: a reader sees that one
        if (is_each_kept or machine.number % self._snapshot_every == 0) and not self._save_snapshot(machine):
            return False
        return self.is_newest(epoch)

    def is_newest(self, epoch: int) -> bool:
        return self._store.get(f"{self._prefix}epoch/{epoch + 1}") is None

    def clear(self) -> None:
        for key in self._store.keys(self._prefix):
            self._store.delete(key)

    def _save_snapshot(self, machine: EnsembleMachine) -> bool:
        """False: another conductor was here. Each has a key of its own, so that a late one of a former conductor replaces no newer one."""
        data = machine.encode()
        if not self._store.put(self._snapshot(machine.number), data, overwrite=False):
            return False
        self._newest_bytes = len(data)
        if machine.number % self._snapshot_every == 0:
            self._remove_up_to(machine.number)
        else:
            self._store.delete(self._snapshot(machine.number - 1))
        return True

    def _remove_up_to(self, number: int) -> None:
        """What the snapshot of this number contains, the oldest first: what stays follows the snapshot without a gap."""
        for key in self._store.keys(f"{self._prefix}rec/"):
            if key <= self._record(number):
                self._store.delete(key)
        for key in self._store.keys(f"{self._prefix}snap/"):
            if key < self._snapshot(number):
                self._store.delete(key)

    def _newest_snapshot(self) -> bytes:
        """Empty: there is none."""
        while keys := self._store.keys(f"{self._prefix}snap/"):
            data = self._store.get(max(keys))
            if data is not None:  # else a newer one has just replaced it
                return data
        return b""

    def _drop_unreleased(self, machine: EnsembleMachine) -> None:
        """
        Records after the newest snapshot of another decision version, or before the first snapshot: they would lead to another state.

        Raises `JournalCorrupt` if what they decided may have been done.
        """
        keys = [key for key in self._store.keys(f"{self._prefix}rec/") if key > self._record(machine.number)]
        has_snapshots_seldom = self._newest_bytes > self._small_bytes or (not self._newest_bytes and len(keys) > 1)
        if keys and has_snapshots_seldom:
            raise JournalCorrupt(
                f"Its journal was written by decision version {machine.state.decision_version}, and this dlrover decides by version "
                f"{ENSEMBLE_DECISIONS}. The job is too large to go on without its last {len(keys)} records. Submit it again: roles go on from "
                "their checkpoints."
            )
        for key in keys:
            self._store.delete(key)
        machine.state.decision_version = ENSEMBLE_DECISIONS
        self._newest_bytes = 0  # no snapshot is of this version: the next record gets one

    def _record(self, number: int) -> str:
        return f"{self._prefix}rec/{number:012}"

    def _snapshot(self, number: int) -> str:
        return f"{self._prefix}snap/{number:012}"


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
        [record] = batch.records
        if not self._journal.append(record, self.machine, epoch=self.epoch):
            raise ConductorFenced(
                f"Conductor {self.epoch} was replaced before it could write record {self.machine.number}."
            )
        [released] = self._order.committed(batch)
        return released.outcome

    def _adopt(self, machine: EnsembleMachine) -> None:
        self.machine = machine
        self._order: MachineSequence[Command, EnsembleOutcome] = MachineSequence(
            machine, master_epoch=self.epoch, next_number=machine.number + 1
        )


_RECORD = msgspec.msgpack.Decoder(MachineRecord[Command])
