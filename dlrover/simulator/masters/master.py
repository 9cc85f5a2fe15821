"""
A virtual master: the real core, the real commit order, and a shell that can die between any two of its lines.

Its turns are those of the shipped loop (`turning.py`). The next life replays the journal, and what it finds must be what its predecessor had made durable.
"""

from __future__ import annotations

import contextlib

from dlrover.core.commit_order import CommitSequence
from dlrover.core.job import Job
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.frames import Request
from dlrover.protocol.messages.job import (
    Attach,
    Command,
    Incarnation,
    MasterStarted,
    NodeId,
    Query,
)
from dlrover.simulator.masters.inbox import VirtualInbox
from dlrover.simulator.masters.journal import CrashPoint, VirtualFenced
from dlrover.simulator.masters.lines import VirtualLines
from dlrover.simulator.masters.master_time import MasterTime
from dlrover.simulator.masters.turning import VirtualTurning
from dlrover.simulator.parts import CLOSE, PULSE, Downward, SimulationPart, Upward, VirtualLine, VirtualStream
from dlrover.simulator.virtual_time import SECOND

LONG_STALL = 5 * SECOND
AFTERMATH = 10 * SECOND
FENCE_PERIOD = 5 * SECOND
"""Between two looks of an idle master at the journal: is it still the newest?"""
TURN = 100
"""Microseconds from the first request to the turn that takes it."""


class VirtualMaster:
    """One life of the master."""

    def __init__(self, simulation: SimulationPart, job: Job, master_epoch: int) -> None:
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
        self.inbox = VirtualInbox(self)
        self._is_turn_planned = False
        self._wake_at: int | None = None
        self._turning = VirtualTurning(self)
        self.crash_point: CrashPoint | None = None
        """Dies there in the next turn that gets so far."""
        self.downtime = 0
        """How long there will be no master after it."""
        self.applied: dict[tuple[NodeId, Incarnation], int] = {}
        """Numbers of the commands that were applied and are not durable yet."""
        self.adopt(job)

    @property
    def job(self) -> Job:
        return self._job

    @property
    def is_awake(self) -> bool:
        """Whether it is there and answers."""
        return self.is_alive and not self.is_stalled

    def begin(self) -> None:
        """The first command of this life."""
        self.inbox.put(MasterStarted(self.master_epoch, "a-job"))
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
            self.inbox.accept(line, parcel)
        elif parcel is CLOSE:
            self.lines.closed(line, is_our_fault=self.events.now < self._blamed_until)
        elif parcel is PULSE and self.lines.is_current(line):
            self.lines.heard(line)

    def hear(self, word: Command | Query) -> None:
        """Of a client that asks once and does not wait."""
        if self.is_alive:
            self.inbox.put(word)
            self.plan_turn()

    # Turns.

    def plan_turn(self) -> None:
        if not self._is_turn_planned and not self._turning.is_writing and not self.is_stalled:
            self._is_turn_planned = True
            self.events.after(TURN, self._turn)

    def _turn(self) -> None:
        self._is_turn_planned = False
        if self.is_awake and not self._turning.is_writing:
            self._turning.turn()

    def plan_wake(self) -> None:
        """Be awake at the next deadline. An earlier wake that turns out to be needless plans the next one."""
        self.follow_job()
        deadlines = [
            at for at in (self._job.next_deadline(), self.lines.observations.next_deadline()) if at is not None
        ]
        if not deadlines or self._turning.is_failing or self.is_stalled:
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

    def follow_job(self) -> None:
        """The job must not look at the observations; so they are told what it knows."""
        self.lines.observations.follow(self._job.state.detection, self._job.suspects())

    def send(self, line: VirtualLine, parcel: Downward) -> None:
        self.sim.network.send_down(line.connection, (parcel,))

    def adopt(self, job: Job) -> None:
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
        self._turning.resume()
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
        pending = self._turning.pending
        if pending is not None and pending.records and self.sim.chance.disk.random() < 0.5:
            # Killed while it wrote: whether the transaction reached the disk before, nobody can say.
            with contextlib.suppress(VirtualFenced, Unavailable):
                self.journal.append(pending, self.master_epoch)
        self.lines.die(is_seen=is_seen)
