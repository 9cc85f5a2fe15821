"""
The journal's thread: the loop awaits here what the disk does there.

SQLite blocks, so everything that touches the file runs in one thread of its own, one call after the other, with
values in and values out. A cancelled caller does not stop a write that has begun; no other thread writes meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from dlrover.core.commit_order import JournalCorrupt, RecordBatch, replay
from dlrover.core.job import DECISION_VERSION, Job
from dlrover.master.journal.filesystem import network_filesystem
from dlrover.master.journal.journal import ADVICE, BUSY_TIMEOUT, Journal, JournalError, Stored
from dlrover.protocol.errors import Unavailable

T = TypeVar("T")

REPLAY_BUDGET = 0.3
"""Seconds of CPU that a replay may cost before a snapshot is taken, so that a killed master serves again within one."""


class JournalThread:
    """Use `open`."""

    def __init__(self, thread: ThreadPoolExecutor, journal: Journal) -> None:
        self._thread = thread
        self._journal = journal
        self._is_local = network_filesystem(journal.path) is None
        self._replay_seconds = 0.0
        self.on_commit: Callable[[float], None] | None = None
        """Hears how many seconds each commit took."""

    @classmethod
    async def open(
        cls, path: Path, *, job_name: str, max_pages: int = 0, busy_timeout: float = BUSY_TIMEOUT
    ) -> JournalThread:
        """Takes the journal over from every earlier master. Raises Unavailable or JournalError."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

        def start() -> Journal:
            return Journal(
                path,
                job_name=job_name,
                decision_version=DECISION_VERSION,
                max_pages=max_pages,
                busy_timeout=busy_timeout,
            )

        try:
            return cls(thread, await asyncio.get_running_loop().run_in_executor(thread, start))
        except BaseException:
            thread.shutdown(wait=False)
            raise

    @property
    def master_epoch(self) -> int:
        return self._journal.master_epoch

    @property
    def journal_uid(self) -> str:
        return self._journal.uid

    @property
    def wants_snapshot(self) -> bool:
        return self._journal.wants_snapshot or self._replay_seconds >= REPLAY_BUDGET

    def spent(self, seconds: float) -> None:
        """CPU time that decisions took: a replay will need it again."""
        self._replay_seconds += seconds

    async def restore(self) -> Job:
        """The state as the journal has it. Raises JournalError if it cannot be believed."""

        def read() -> tuple[Job, float]:
            began_at = time.thread_time()
            try:
                stored = self._journal.load()
            except Unavailable:
                self._journal.reopen()
                stored = self._journal.load()
            return rebuild(stored, self._journal.path), time.thread_time() - began_at

        job, self._replay_seconds = await self._run(read)
        return job

    async def append(self, batch: RecordBatch) -> None:
        began_at = time.monotonic()
        await self._run(
            lambda: self._journal.append(batch.first_number, batch.records, master_epoch=batch.master_epoch)
        )
        if self.on_commit is not None:
            self.on_commit(time.monotonic() - began_at)

    async def check_fence(self) -> None:
        if self._is_local:
            # A look at memory that is mapped already, 7 us: handing it to the thread, which is idle now, costs 100.
            self._journal.check_fence()
        else:
            await self._run(self._journal.check_fence)

    async def save_snapshot(self, number: int, data: bytes) -> None:
        await self._run(lambda: self._journal.save_snapshot(number, data))
        self._replay_seconds = 0.0

    async def quarantine(self, command: bytes, error: str) -> None:
        await self._run(lambda: self._journal.quarantine(command, error))

    async def quarantined(self) -> set[bytes]:
        return set(await self._run(self._journal.quarantined))

    async def probe(self, size_bytes: int) -> None:
        await self._run(lambda: self._journal.probe(size_bytes))

    async def close(self) -> None:
        await self._run(self._journal.close)
        self._thread.shutdown(wait=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def rebuild(stored: Stored, path: Path) -> Job:
    try:
        return replay(stored.snapshot, stored.records).job
    except JournalCorrupt as error:
        raise JournalError(f"The journal {path} is damaged: {error}. {ADVICE}") from error
