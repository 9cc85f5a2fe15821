"""
The journal on a virtual disk: transactions that happen whole or not at all, and the fence between masters.

It promises what SQLite promises. A crash during a write leaves the transaction whole or absent, never in part; a
transaction of a master whose epoch is not the stored one is refused. And it can refuse every caller for a while, like a
full disk.
"""

from __future__ import annotations

import enum
import hashlib

from dlrover.core.commit_order import RecordBatch, replay
from dlrover.core.job import Job
from dlrover.protocol.errors import DLRoverError, Unavailable


class CrashPoint(enum.Enum):
    """Between which two lines of a turn the master dies."""

    STAGED = "after staging"
    TAKEN = "after the batch was taken"
    TORN = "while it writes, and the transaction is lost"
    WRITTEN = "after the write, before anything is released"
    HALF_RELEASED = "when half of it is released"


class VirtualFenced(DLRoverError):
    """Another master took over this journal."""


class VirtualJournal:
    """What is on the disk."""

    def __init__(self) -> None:
        self.master_epoch = 0
        self.is_full = False
        """Nothing can be written now."""
        self.last_number = 0
        self._snapshot: bytes | None = None
        self._records: list[bytes] = []
        """After the snapshot."""
        self.archive: list[bytes] = []
        """All records ever, for a replay from the beginning."""
        self._trace = hashlib.blake2b(digest_size=16)

    @property
    def num_since_snapshot(self) -> int:
        return len(self._records)

    @property
    def trace(self) -> str:
        """Differs if any record of two journals differs."""
        return self._trace.hexdigest()

    def take_over(self) -> int:
        """From here on no earlier master can write."""
        self.master_epoch += 1
        return self.master_epoch

    def append(self, batch: RecordBatch, writer: int) -> None:
        """Raises Fenced or Unavailable, and then nothing was written."""
        self.check_fence(writer)
        if self.is_full:
            raise Unavailable("The virtual disk is full.", 1.0)
        self.master_epoch = max(self.master_epoch, batch.master_epoch)
        self._records.extend(batch.records)
        self.archive.extend(batch.records)
        self.last_number = batch.first_number + len(batch.records) - 1
        for record in batch.records:
            self._trace.update(record)

    def check_fence(self, writer: int) -> None:
        if writer != self.master_epoch:
            raise VirtualFenced(f"The master of epoch {writer} was replaced by that of epoch {self.master_epoch}.")

    def save_snapshot(self, job: Job, writer: int) -> None:
        self.check_fence(writer)
        if self.is_full:
            raise Unavailable("The virtual disk is full.", 1.0)
        self._snapshot = job.encode()
        self._records = []

    def restore(self) -> Job:
        return replay(self._snapshot, self._records).job

    def restore_from_the_beginning(self) -> Job:
        return replay(None, self.archive).job
