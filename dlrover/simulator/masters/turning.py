"""
Where a turn of the master's loop meets a virtual disk and virtual streams, and can die between any two of its lines.

Where the real loop awaits the disk, an event is planned. A master that is killed meanwhile decides by chance whether the
transaction had reached the disk.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlrover.core.commit_order import RecordBatch
from dlrover.master.loop.turn import COMING_BACK, NO_SPIN, Turn, finding_of
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.frames import Answer, Push, Refusal
from dlrover.protocol.messages.job import Attached, DeadlinePassed, Micros, NodeId, Query
from dlrover.simulator.masters import oversight
from dlrover.simulator.masters.journal import CrashPoint, VirtualFenced
from dlrover.simulator.parts import Downward, MasterPart, VirtualStream, VirtualWork
from dlrover.simulator.virtual_time import SECOND, span

RETRY_PERIOD = SECOND
SLOW_DISK = 300
"""Times slower."""


class VirtualTurning:
    """Of one master."""

    def __init__(self, master: MasterPart) -> None:
        self._master = master
        self._sim = master.sim
        self._has_begun = False
        self.is_writing = False
        self.is_failing = False
        """The journal cannot be written."""
        self.pending: RecordBatch | None = None
        """On its way to the disk."""
        self._backlogged: tuple[RecordBatch | None, Turn[VirtualWork], bytes] | None = None

    def resume(self) -> None:
        """The process runs again: what the disk did meanwhile is seen now."""
        write, self._backlogged = self._backlogged, None
        if write is not None:
            self._write(*write)

    def turn(self) -> None:
        works = self._master.inbox.take()
        if self.is_failing:
            self._master.inbox.turn_away(works)
            return
        self._master.applied = {}
        before = (
            self._master.job.encode()
            if self._master.crash_point is not None or self._sim.masters.journal.is_full
            else b""
        )
        turn: Turn[VirtualWork] = Turn()
        self._master.time.notice_stall()
        self._decide(turn, works, self._master.time.now())
        if self._dies_at(CrashPoint.STAGED, before):
            return
        batch = self._master.sequence.take()
        if batch is None and not turn.rejected:
            self._master.plan_wake()
            return
        if self._dies_at(CrashPoint.TAKEN, before) or self._dies_at(CrashPoint.TORN, before):
            return
        self.is_writing = True
        self.pending = batch
        low, high = self._sim.shape.costs.commit
        duration = span(self._sim.chance.disk, low, high) * (SLOW_DISK if self._sim.masters.is_disk_slow else 1)
        self._sim.events.after(duration, self._write, batch, turn, before)

    def _decide(self, turn: Turn[VirtualWork], works: list[VirtualWork], now: Micros) -> None:
        is_time_trusted = self._master.time.is_trusted()
        self._master.follow_job()
        if is_time_trusted:
            self._master.lines.look(now, self._master.time.end_grace())

        def stage(work: VirtualWork) -> int:
            if isinstance(work.body, Query):
                return self._master.sequence.stage_query(work.body)
            return oversight.stage(self._sim, self._master, work, now)

        def due() -> Iterable[VirtualWork]:
            next_deadline = self._master.job.next_deadline()
            is_due = is_time_trusted and next_deadline is not None and next_deadline <= now
            return map(VirtualWork, self._master.job.due(now) if is_due else ())

        turn.decide(
            works, stage, findings=[VirtualWork(each) for each in self._master.lines.findings.values()], due=due
        )

    def _dies_at(self, point: CrashPoint, before: bytes) -> bool:
        """`before`: the state of which nothing was taken back when we die here."""
        if self._master.crash_point is not point or not before:
            return False
        self._sim.masters.died(self._master, durable=before, why=point.value)
        return True

    def _write(self, batch: RecordBatch | None, turn: Turn[VirtualWork], before: bytes) -> None:
        if not self._master.is_alive:
            return
        if self._master.is_stalled:
            self._backlogged = (batch, turn, before)
            return
        self.is_writing = False
        self.pending = None
        journal = self._master.journal
        try:
            if journal is not self._sim.masters.journal:
                raise VirtualFenced("The disk of this master is gone.")
            if batch is not None and batch.records:
                journal.append(batch, self._master.master_epoch)
                self._master.master_epoch = max(self._master.master_epoch, batch.master_epoch)
            else:
                journal.check_fence(self._master.master_epoch)
        except VirtualFenced:
            self._sim.masters.fenced(self._master)
            return
        except Unavailable:
            self._fall_back(before, turn.works)
            return
        if self._dies_at(CrashPoint.WRITTEN, before and self._master.job.encode()):
            return
        self._release(batch, turn)
        if not self._master.is_alive:
            return
        for work, error in turn.rejected:
            self._reject(work, error)
        self._master.inbox.end_turn()
        if journal.num_since_snapshot >= self._sim.snapshot_every and self._master.sequence.is_settled:
            journal.save_snapshot(self._master.job, self._master.master_epoch)
        self._master.plan_wake()
        if len(self._master.inbox) or self._master.lines.findings:
            self._master.plan_turn()

    def _release(self, batch: RecordBatch | None, turn: Turn[VirtualWork]) -> None:
        self._has_begun = True
        released = () if batch is None else self._master.sequence.committed(batch)
        oversight.release(self._sim, self._master, batch)
        frames: dict[VirtualStream, list[Downward]] = {}
        half = len(released) // 2 if self._master.crash_point is CrashPoint.HALF_RELEASED else -1
        for number, (work, outcome, intents) in enumerate(turn.release(released)):
            if number == half:
                self._flush(frames)
                self._sim.masters.died(
                    self._master, durable=self._master.job.encode(), why=CrashPoint.HALF_RELEASED.value
                )
                return
            self._settle(work)
            reply, line = outcome.reply, work.line
            if line is not None:
                if isinstance(reply, Attached):
                    self._master.lines.attach(line, reply)
                frames.setdefault(line.connection, []).append(Answer(id=work.id, body=reply))
            for intent in intents:
                self._sim.platform.take(self._master, intent)
            if line is None:
                self._sim.people.answered(work.body)
                self._sim.agentless.answered(work.body, reply)
        self._push(turn.told, frames)
        self._flush(frames)
        for effect in turn.ended:
            self._master.lines.end(effect.node, effect.incarnation)
        if turn.end is not None:
            self._sim.job_over()

    def _push(self, nodes: Iterable[NodeId], frames: dict[VirtualStream, list[Downward]]) -> None:
        for node in nodes:
            line = self._master.lines.current.get(node)
            if line is None:
                continue
            try:
                desired = self._master.job.desired(node)
            except Rejected:
                continue  # it left and was replaced in the very same batch
            if desired.number > line.told:
                line.told = desired.number
                frames.setdefault(line.connection, []).append(Push(desired))

    def _settle(self, work: VirtualWork) -> None:
        self._master.inbox.leave(work)
        finding = finding_of(work)
        if finding is not None:
            self._master.lines.settle(finding)

    def _reject(self, work: VirtualWork, error: Rejected) -> None:
        self._settle(work)
        if work.line is not None:
            self._master.send(work.line, Refusal(id=work.id, code=error.code, message=str(error)))
            return
        self._sim.people.answered(work.body, error.code)
        if isinstance(work.body, DeadlinePassed):
            self._master.time.extend_grace(NO_SPIN)

    def _flush(self, frames: dict[VirtualStream, list[Downward]]) -> None:
        for connection, parcels in frames.items():
            self._sim.network.send_down(connection, tuple(parcels))

    # When things go wrong.

    def _fall_back(self, before: bytes, works: list[VirtualWork]) -> None:
        """Not durable, so it never happened: forget the state that saw it. A master that cannot even begin ends."""
        if not self._has_begun:
            self._master.downtime = span(self._sim.chance.disk, *self._sim.shape.costs.master_restart)
            self._sim.masters.died(self._master, durable=before or None, why="because it cannot write")
            return
        if not self.is_failing:
            self.is_failing = True
            self._master.time.stop()
            self._sim.events.after(RETRY_PERIOD, self._try_again)
        job = self._master.journal.restore()
        if before:  # else the disk filled up only after this turn had begun
            oversight.compare_restored(job, before)
        self._master.adopt(job)
        self._master.inbox.turn_away([*works, *self._master.inbox.take()])

    def _try_again(self) -> None:
        if not self._master.is_alive:
            return
        if self._sim.masters.journal.is_full or self._master.is_stalled:
            self._sim.events.after(RETRY_PERIOD, self._try_again)
            return
        self.is_failing = False
        self._master.time.go_on()
        self._master.time.extend_grace(COMING_BACK)
        self._master.plan_turn()
