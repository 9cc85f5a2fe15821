"""
The job in memory and the journal behind it: here they are kept together.

Between two turns the state is exactly what is durable. When the journal cannot be written, the undurable decisions are
thrown away with the state that holds them, and the state is read again from the journal, which is then tried once a
second. A command that broke the core has done so in the middle of a change: the state is read again too, and that
command is refused from then on, by this master and by those after it.
"""

from __future__ import annotations

import logging

import msgspec

from dlrover.core.commit_order import CommitSequence, CoreFault, RecordBatch
from dlrover.core.job import Job
from dlrover.core.outcome import Origin
from dlrover.master.clock import MasterClock
from dlrover.master.journal.journal_thread import JournalThread
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.job import Command, Desired, Micros, NodeId
from dlrover.protocol.text import UNENCODABLE

log = logging.getLogger(__name__)

RETRY_PERIOD = 1_000_000
"""Microseconds between two attempts to write a journal that could not be written."""


class DurableJob:
    """`job` and `sequence` are others after `fall_back` and `quarantine`: do not keep them."""

    def __init__(self, journal_thread: JournalThread, job: Job, clock: MasterClock) -> None:
        self._journal_thread = journal_thread
        self._clock = clock
        self._poison: set[bytes] = set()  # commands that broke the core once
        self._failed_bytes = 0  # size of what could not be written; 0 while the journal works
        self.blocked = ""
        """Why nothing can be decided now, and what to do about it, for people; empty: it can."""
        self._retry_at = 0  # elapsed microseconds at which the journal is tried again
        self._adopt(job)

    async def begin(self) -> None:
        """Raises what the journal raises."""
        self._poison = await self._journal_thread.quarantined()

    def desired(self, node: NodeId) -> Desired | None:
        """None: it left and was replaced in the very batch that had something to tell it."""
        try:
            return self.job.desired(node)
        except Rejected:
            return None

    def stage(self, command: Command, now: Micros, origin: Origin | None) -> int:
        """The ticket of its outcome. Raises `Rejected` or `CoreFault`."""
        if self._is_poison(command):
            raise Rejected(
                f"{type(command).__name__} is rejected, because it made the master fail before.",
                code=ErrorCode.INTERNAL,
            )
        return self.sequence.stage(command, now, origin)

    def due(self, now: Micros) -> list[Command]:
        """What time says, without what broke the core."""
        return [command for command in self.job.due(now) if not self._is_poison(command)]

    def is_poison_due(self, now: Micros) -> bool:
        """Whether a deadline is due that broke the core once: it stays due."""
        return bool(self._poison) and any(self._is_poison(command) for command in self.job.due(now))

    def _is_poison(self, command: Command) -> bool:
        if not self._poison:
            return False
        try:
            return msgspec.msgpack.encode(command) in self._poison
        except UNENCODABLE:
            return False  # the core refuses it before it applies it

    async def write(self, batch: RecordBatch | None, *, cpu_time: float = 0.0) -> None:
        """
        Durable when it returns; without anything to write, a look whether we were replaced. `cpu_time`: of the decisions.

        Raises Unavailable: call `fall_back`.
        """
        if batch is not None and batch.records:
            self._journal_thread.spent(cpu_time)  # a replay need not answer the questions
            await self._journal_thread.append(batch)
        else:
            await self._journal_thread.check_fence()

    async def save_snapshot(self) -> None:
        """Between two turns, when it is time."""
        if not self._journal_thread.wants_snapshot or self._clock.elapsed() < self._retry_at:
            return
        try:
            assert self.sequence.is_settled, "a snapshot of what is not durable"
            await self._journal_thread.save_snapshot(self.job.number + 1, self.job.encode())
        except Unavailable as error:
            self._retry_at = self._clock.elapsed() + RETRY_PERIOD
            log.warning("snapshot not written reason=%s", error)

    # When things go wrong.

    @property
    def is_failing(self) -> bool:
        """The journal could not be written, and cannot yet: no command may be decided."""
        return self._failed_bytes > 0

    async def fall_back(self, error: Unavailable, batch: RecordBatch | None) -> None:
        """Not durable, so it never happened: forget the state that saw it."""
        if not self._failed_bytes:
            log.error("journal cannot be written; commands are rejected until it can: %s", error)
            self._retry_at = self._clock.elapsed() + RETRY_PERIOD  # later failures must not put it off
            self._clock.stop()  # nothing can be decided, so no deadline comes nearer
        self._block(error)
        self._failed_bytes = max(64 * 1024, sum(map(len, batch.records)) if batch is not None else 0)
        self._adopt(await self._journal_thread.restore())

    def nap_until_retry(self) -> float:
        """Seconds."""
        return max(0.0, (self._retry_at - self._clock.elapsed()) / 1e6)

    async def try_again(self) -> bool:
        """If it is time: whether the journal can be written again after it could not."""
        if not self._failed_bytes or self._clock.elapsed() < self._retry_at:
            return False
        try:
            await self._journal_thread.probe(self._failed_bytes)
        except Unavailable as error:
            self._block(error)
            self._retry_at = self._clock.elapsed() + RETRY_PERIOD
            return False
        self._failed_bytes, self.blocked = 0, ""
        self._clock.go_on()
        log.warning("journal can be written again")
        return True

    async def quarantine(self, fault: CoreFault) -> None:
        """The core failed in the middle of a command: its state is worth nothing, read it again without that one."""
        log.error("core fault command=%s", type(fault.command).__name__, exc_info=fault)
        command = msgspec.msgpack.encode(fault.command)
        self._poison.add(command)
        try:
            await self._journal_thread.quarantine(command, repr(fault.__cause__ or fault))
        except Unavailable as error:
            log.warning("quarantine not written reason=%s", error)
        self._adopt(await self._journal_thread.restore())

    def refusal(self) -> Unavailable:
        """For every command, while nothing can be decided."""
        return Unavailable(self.blocked, RETRY_PERIOD / 1e6, code=ErrorCode.BLOCKED)

    def _block(self, error: Unavailable) -> None:
        self.blocked = (
            f"{error} Until then the master makes no decisions and rejects commands. Running workers keep running."
        )

    def _adopt(self, job: Job) -> None:
        self.job = job
        self.sequence = CommitSequence(job, master_epoch=self._journal_thread.master_epoch, next_number=job.number + 1)
