"""
A virtual master: the real core, the real commit order, and a shell that can die between any two of its lines.

One turn takes what gathered, lets the core decide, writes one transaction and releases what came of it. Where the real
desk awaits the disk, this one plans an event; whoever kills it meanwhile decides by chance whether the transaction had
reached the disk. The next life replays the journal, and what it finds must be what its predecessor had made durable.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dlrover.core.commit_order import CommitSequence, RecordBatch, Released
from dlrover.core.job import Job
from dlrover.core.outcome import Origin
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.checkpoint import AwaitSaveDuties
from dlrover.protocol.messages.fleet import AskPsNodes, LaunchNode, RemoveNode
from dlrover.protocol.messages.frames import Answer, Push, Refusal, Request
from dlrover.protocol.messages.job import (
    MAX_REQUESTS_IN_WORK,
    Attach,
    Attached,
    Command,
    DeadlinePassed,
    EndStream,
    FinishJob,
    Incarnation,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
    Query,
    TellNode,
)
from dlrover.protocol.messages.kv import KvQuery
from dlrover.protocol.messages.sync import SyncQuery
from dlrover.simulator.faults.network import CLOSE, PULSE, Downward, Upward, VirtualStream
from dlrover.simulator.masters import oversight
from dlrover.simulator.masters.journal import VirtualFenced
from dlrover.simulator.masters.lines import VirtualLine, VirtualLines
from dlrover.simulator.masters.master_time import MasterTime
from dlrover.simulator.virtual_time import SECOND, span

if TYPE_CHECKING:
    from dlrover.simulator.simulation import Simulation

COMING_BACK = 5 * SECOND
LONG_STALL = 5 * SECOND
AFTERMATH = 10 * SECOND
RETRY_PERIOD = SECOND
FENCE_PERIOD = 5 * SECOND
"""Between two looks of an idle master at the journal: is it still the newest?"""
NO_SPIN = 100_000
SERVICE_TIME = 0.0005
TURN = 100
"""Microseconds from the first request to the turn that takes it."""
SLOW_DISK = 300
"""Times slower."""


class CrashPoint(enum.Enum):
    """Between which two lines of a turn the master dies."""

    STAGED = "after staging"
    TAKEN = "after the batch was taken"
    TORN = "while it writes, and the transaction is lost"
    WRITTEN = "after the write, before anything is released"
    HALF_RELEASED = "when half of it is released"


class TurnWork:
    """One command on its way through a turn."""

    __slots__ = ("body", "id", "line", "origin")

    def __init__(
        self, body: Command | Query, line: VirtualLine | None = None, origin: Origin | None = None, id_: int = 0
    ) -> None:
        self.body = body
        self.line = line
        self.origin = origin
        self.id = id_


class VirtualMaster:
    """One life of the master."""

    def __init__(self, simulation: Simulation, job: Job, master_epoch: int) -> None:
        self.sim = simulation
        self.events = simulation.events
        self.journal = simulation.masters.journal
        self.master_epoch = master_epoch
        self.is_alive = True
        self.is_stalled = False
        self._stalled_since = 0
        self._blamed_until = 0
        self._backlog: list[tuple[VirtualStream, Upward]] = []
        """What the kernel keeps while the process stands still."""
        self.time = MasterTime(self.events, job.now)
        self.lines = VirtualLines(self)
        self._queue: list[TurnWork] = []
        self._num_in_work = 0
        self._num_refused = 0
        self._is_turn_planned = False
        self._is_writing = False
        self._wake_at: int | None = None
        self._has_begun = False
        self._is_failing = False
        """The journal cannot be written."""
        self._pending: RecordBatch | None = None
        """On its way to the disk."""
        self._backlogged_write: (
            tuple[RecordBatch | None, dict[int, TurnWork], list[tuple[TurnWork, Rejected]], bytes] | None
        ) = None
        self._snapshot_every = simulation.snapshot_every
        self.crash_point: CrashPoint | None = None
        """Dies there in the next turn that gets so far."""
        self.downtime = 0
        """How long there will be no master after it."""
        self.applied: dict[tuple[NodeId, Incarnation], int] = {}
        """Numbers of the commands that were applied and are not durable yet."""
        self._adopt(job)

    @property
    def job(self) -> Job:
        return self._job

    @property
    def is_awake(self) -> bool:
        """Whether it is there and answers."""
        return self.is_alive and not self.is_stalled

    def begin(self) -> None:
        """The first command of this life."""
        self._queue.append(TurnWork(MasterStarted(self.master_epoch, "a-job")))
        self._turn()

    # What arrives.

    def receive(self, connection: VirtualStream, parcel: Upward) -> None:
        if not self.is_alive:
            return
        if self.is_stalled:
            self._backlog.append((connection, parcel))
            return
        line = self.lines.get(connection)
        if line is None:
            if isinstance(parcel, Request) and isinstance(parcel.body, Attach) and connection.is_open_below:
                line = self.lines.open(connection)
            else:
                return  # of a stream that was ended here
        if isinstance(parcel, Request):
            self._accept(line, parcel)
        elif parcel is CLOSE:
            self.lines.closed(line, is_our_fault=self.events.now < self._blamed_until)
        elif parcel is PULSE and self.lines.is_current(line):
            self.lines.heard(line)

    def hear(self, word: Command | Query) -> None:
        """Of somebody who asks once and does not wait."""
        if self.is_alive:
            self._queue.append(TurnWork(word))
            self.plan_turn()

    def _accept(self, line: VirtualLine, request: Request) -> None:
        body = request.body
        if isinstance(body, Attach):
            if line.has_presented:
                return
            line.has_presented = True
            self._enqueue(TurnWork(body, line, None, request.id))
            return
        if line.node is None or line.incarnation is None:
            self._send(line, Refusal(id=request.id, code="not-attached", message=""))
            return
        if isinstance(body, KvQuery | SyncQuery | AwaitSaveDuties):
            self._enqueue(TurnWork(body, line, None, request.id))
            return
        assert not isinstance(body, MasterStarted), "agents send no such command"
        work = TurnWork(body, line, Origin(line.node, line.incarnation, request.sequence), request.id)
        if line.held and request.sequence > min(line.held):
            self._refuse_for_now(work, self._retry_after())
            return
        line.held.pop(request.sequence, None)
        self._enqueue(work)

    def _enqueue(self, work: TurnWork) -> None:
        if self._num_in_work >= MAX_REQUESTS_IN_WORK:
            self._num_refused += 1
            self._refuse_for_now(work, self._retry_after())
            return
        self._num_in_work += 1
        self._queue.append(work)
        self.plan_turn()

    def _retry_after(self) -> float:
        return max(0.05, self._num_refused * SERVICE_TIME)

    def _refuse_for_now(self, work: TurnWork, retry_after: float) -> None:
        line = work.line
        if line is None:
            self.sim.platform.word_lost(self, work.body)
            return
        if work.origin is not None:
            line.held[work.origin.sequence] = None
        elif isinstance(work.body, Attach):
            line.has_presented = False
        self._send(line, Refusal(id=work.id, code="unavailable", message="", retry_after=retry_after))

    # Turns.

    def plan_turn(self) -> None:
        if not self._is_turn_planned and not self._is_writing and not self.is_stalled:
            self._is_turn_planned = True
            self.events.after(TURN, self._turn)

    def plan_wake(self) -> None:
        """Be awake at the next deadline. An earlier wake that turns out to be needless plans the next one."""
        self._follow_job()
        deadlines = [
            at for at in (self._job.next_deadline(), self.lines.observations.next_deadline()) if at is not None
        ]
        if not deadlines or self._is_failing or self.is_stalled:
            return
        wake_at = self.time.event_at(min(deadlines))
        if self._wake_at is None or wake_at < self._wake_at or self._wake_at < self.events.now:
            self._wake_at = wake_at
            self.events.at(wake_at, self._wake, wake_at)

    def _wake(self, planned_for: int) -> None:
        if self.is_alive and self._wake_at == planned_for:
            self._wake_at = None
            if not self.is_stalled:
                self.plan_turn()

    def _turn(self) -> None:
        self._is_turn_planned = False
        if not self.is_alive or self.is_stalled or self._is_writing:
            return
        works, self._queue = self._queue, []
        if self._is_failing:
            for work in works:
                self._num_in_work -= work.line is not None
                self._refuse_for_now(work, 1.0)
            return
        self.applied = {}
        before = self._job.encode() if self.crash_point is not None or self.sim.masters.journal.is_full else b""
        staged: dict[int, TurnWork] = {}
        rejected: list[tuple[TurnWork, Rejected]] = []
        now = self.time.now()
        self.time.notice_stall()
        for work in self._in_order(works, now):
            try:
                if isinstance(work.body, KvQuery | SyncQuery | AwaitSaveDuties | AskPsNodes):
                    staged[self.sequence.stage_query(work.body)] = work
                else:
                    staged[oversight.stage(self.sim, self, work, now)] = work
            except Rejected as error:
                rejected.append((work, error))
        if self._dies_at(CrashPoint.STAGED, before):
            return
        batch = self.sequence.take()
        if batch is None and not rejected:
            self.plan_wake()
            return
        if self._dies_at(CrashPoint.TAKEN, before) or self._dies_at(CrashPoint.TORN, before):
            return
        self._is_writing = True
        self._pending = batch
        low, high = self.sim.shape.costs.commit
        duration = span(self.sim.chance.disk, low, high) * (SLOW_DISK if self.sim.masters.is_disk_slow else 1)
        self.events.after(duration, self._write, batch, staged, rejected, before)

    def _in_order(self, works: list[TurnWork], now: Micros) -> Iterator[TurnWork]:
        """What silence says, what was sent, and last what time says, as the desk does."""
        is_time_trusted = self.time.is_trusted()
        self._follow_job()
        if is_time_trusted:
            self.lines.look(now, self.time.end_grace())
        yield from [TurnWork(finding) for finding in self.lines.findings.values()]
        yield from works
        if is_time_trusted:
            next_deadline = self._job.next_deadline()
            if next_deadline is not None and next_deadline <= now:
                yield from [TurnWork(command) for command in self._job.due(now)]

    def _follow_job(self) -> None:
        """The job must not look at the observations; so they are told what it knows."""
        self.lines.observations.follow(self._job.detection, self._job.suspects())

    def _dies_at(self, point: CrashPoint, before: bytes) -> bool:
        """`before`: the state of which nothing was taken back when we die here."""
        if self.crash_point is not point or not before:
            return False
        self.sim.masters.died(self, durable=before, why=point.value)
        return True

    def _write(
        self,
        batch: RecordBatch | None,
        staged: dict[int, TurnWork],
        rejected: list[tuple[TurnWork, Rejected]],
        before: bytes,
    ) -> None:
        if not self.is_alive:
            return
        if self.is_stalled:
            self._backlogged_write = (batch, staged, rejected, before)
            return
        self._is_writing = False
        self._pending = None
        journal = self.journal
        try:
            if journal is not self.sim.masters.journal:
                raise VirtualFenced("The disk of this master is gone.")
            if batch is not None and batch.records:
                journal.append(batch, self.master_epoch)
                self.master_epoch = max(self.master_epoch, batch.master_epoch)
            else:
                journal.check_fence(self.master_epoch)
        except VirtualFenced:
            self.sim.masters.fenced(self)
            return
        except Unavailable:
            self._fall_back(before, [*staged.values(), *(work for work, _ in rejected)])
            return
        if self._dies_at(CrashPoint.WRITTEN, before and self._job.encode()):
            return
        self._release(batch, staged)
        if not self.is_alive:
            return
        for work, error in rejected:
            self._reject(work, error)
        if not self._queue:
            self._num_refused = 0
        if journal.num_since_snapshot >= self._snapshot_every and self.sequence.is_settled:
            journal.save_snapshot(self._job, self.master_epoch)
        self.plan_wake()
        if self._queue or self.lines.findings:
            self.plan_turn()

    def _release(self, batch: RecordBatch | None, staged: dict[int, TurnWork]) -> None:
        self._has_begun = True
        released = () if batch is None else self.sequence.committed(batch)
        oversight.release(self.sim, self, batch)
        frames: dict[VirtualStream, list[Downward]] = {}
        told: dict[NodeId, None] = {}
        ended: list[EndStream] = []
        is_over = False
        half = len(released) // 2 if self.crash_point is CrashPoint.HALF_RELEASED else -1
        for number, one in enumerate(released):
            if number == half:
                self._flush(frames)
                self.sim.masters.died(self, durable=self._job.encode(), why=CrashPoint.HALF_RELEASED.value)
                return
            is_over |= self._release_one(one, staged[one.ticket], frames, told)
            ended += [effect for effect in one.outcome.effects if isinstance(effect, EndStream)]
        for node in told:
            line = self.lines.current.get(node)
            if line is None:
                continue
            try:
                desired = self._job.desired(node)
            except Rejected:
                continue  # it left and was replaced in the very same batch
            if desired.number > line.told:
                line.told = desired.number
                frames.setdefault(line.connection, []).append(Push(desired))
        self._flush(frames)
        for effect in ended:  # behind what was sent on it
            self.lines.end(effect.node, effect.incarnation)
        if is_over:
            self.sim.job_over()

    def _release_one(
        self, one: Released, work: TurnWork, frames: dict[VirtualStream, list[Downward]], told: dict[NodeId, None]
    ) -> bool:
        """Returns whether the job is over and the master may go."""
        self._settle(work)
        reply, line = one.outcome.reply, work.line
        if isinstance(reply, Attached) and line is not None:
            self.lines.attach(line, reply)
        if line is not None:
            frames.setdefault(line.connection, []).append(Answer(id=work.id, body=reply))
        is_over = False
        for effect in one.outcome.effects:
            if isinstance(effect, TellNode):
                told[effect.node] = None
            elif isinstance(effect, FinishJob):
                is_over = True
            elif isinstance(effect, LaunchNode | RemoveNode):
                self.sim.platform.take(self, effect)
        if line is None:
            self.sim.people.answered(work.body)
            self.sim.beside.answered(work.body, reply)
        return is_over

    def _settle(self, work: TurnWork) -> None:
        if work.line is not None:
            self._num_in_work -= 1
        elif isinstance(work.body, NodeDisconnected | NodeSilent):
            self.lines.settle(work.body)

    def _reject(self, work: TurnWork, error: Rejected) -> None:
        self._settle(work)
        if work.line is not None:
            self._send(work.line, Refusal(id=work.id, code=error.code, message=str(error)))
            return
        self.sim.people.answered(work.body, error.code)
        if isinstance(work.body, DeadlinePassed):
            self.time.extend_grace(NO_SPIN)

    def _send(self, line: VirtualLine, parcel: Downward) -> None:
        self.sim.network.send_down(line.connection, (parcel,))

    def _flush(self, frames: dict[VirtualStream, list[Downward]]) -> None:
        for connection, parcels in frames.items():
            self.sim.network.send_down(connection, tuple(parcels))

    # When things go wrong.

    def _fall_back(self, before: bytes, works: list[TurnWork]) -> None:
        """Not durable, so it never happened: forget the state that saw it. A master that cannot even begin ends."""
        if not self._has_begun:
            self.downtime = span(self.sim.chance.disk, *self.sim.shape.costs.master_restart)
            self.sim.masters.died(self, durable=before or None, why="because it cannot write")
            return
        if not self._is_failing:
            self._is_failing = True
            self.time.stop()
            self.events.after(RETRY_PERIOD, self._try_again)
        job = self.journal.restore()
        if before:  # else the disk filled up only after this turn had begun
            oversight.compare_restored(job, before)
        self._adopt(job)
        late, self._queue = self._queue, []
        for work in [*works, *late]:
            self._num_in_work -= work.line is not None
            self._refuse_for_now(work, 1.0)

    def _try_again(self) -> None:
        if not self.is_alive:
            return
        if self.sim.masters.journal.is_full or self.is_stalled:
            self.events.after(RETRY_PERIOD, self._try_again)
            return
        self._is_failing = False
        self.time.go_on()
        self.time.extend_grace(COMING_BACK)
        self.plan_turn()

    def _adopt(self, job: Job) -> None:
        self._job = job
        self.sequence = CommitSequence(
            job, master_epoch=self.master_epoch, next_number=job.number + 1, digest_every=self.sim.digest_every
        )

    def stall(self) -> bool:
        if not self.is_alive or self.is_stalled:
            return False
        self.is_stalled = True
        self._stalled_since = self.events.now
        return True

    def resume(self) -> None:
        """It runs again, and first of all notices that it did not."""
        if not self.is_alive or not self.is_stalled:
            return
        self.is_stalled = False
        stalled = self.events.now - self._stalled_since
        self.time.add_stall(stalled)
        if stalled >= LONG_STALL:
            self._blamed_until = self.events.now + AFTERMATH
        write, self._backlogged_write = self._backlogged_write, None
        if write is not None:
            self._write(*write)
        backlog, self._backlog = self._backlog, []
        for connection, parcel in backlog:
            self.receive(connection, parcel)
        if self.is_alive:
            self.plan_turn()

    def look_at_the_fence(self) -> None:
        """What an idle master does now and then: without it, one that was replaced would keep its agents for ever."""
        if self.is_alive and not self.is_stalled and self.sim.masters.newest is not self:
            self.sim.masters.fenced(self)

    def die(self, *, is_seen: bool) -> None:
        """The process is gone; `is_seen`: a kernel is left to close its streams."""
        self.is_alive = False
        if self._pending is not None and self._pending.records and self.sim.chance.disk.random() < 0.5:
            # Killed while it wrote: whether the transaction reached the disk before, nobody can say.
            with contextlib.suppress(VirtualFenced, Unavailable):
                self.journal.append(self._pending, self.master_epoch)
        self.lines.die(is_seen=is_seen)
