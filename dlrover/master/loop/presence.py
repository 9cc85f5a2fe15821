"""
Who is there, and when that may be judged: what heartbeats, silence and the ends of streams say about nodes.

They are judged on the master's own time, which can be lost: a master that stood still, or that no node could reach, has
not read what was sent in time. Then no node is given up and no deadline passes, until what was sent has had the time to
come. What is found is kept until it is durable, because the turn that should tell the job of it may fail.
"""

from __future__ import annotations

import contextlib
import logging

from msgspec.structs import replace

from dlrover.core.membership.liveness import Liveness
from dlrover.core.outcome import micros
from dlrover.master.clock import MasterClock
from dlrover.master.journal.durable_job import DurableJob
from dlrover.master.loop.isolation import Isolation
from dlrover.master.loop.stalls import AFTERMATH, LONG_STALL, NEVER, Grace, LoopWatch
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    Attached,
    Detection,
    Heartbeat,
    JobStatus,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
)

log = logging.getLogger(__name__)


class Presence:
    def __init__(self, durable: DurableJob, clock: MasterClock, stalls: LoopWatch | None = None) -> None:
        """`stalls`: one that tests control."""
        self._durable = durable
        self._clock = clock
        self._observations = Liveness(clock.now())
        self._findings: dict[NodeId, NodeDisconnected | NodeSilent] = {}  # kept until they are durable
        self._stalls = LoopWatch() if stalls is None else stalls
        self._isolation = Isolation()
        self._blamed_until = 0  # elapsed microseconds until which the end of a stream may be our own doing
        self._stalled = 0  # microseconds that the observations have not been told of
        self._grace = Grace()  # no deadline passes before `MasterStarted` has moved it by the outage

    def begin(self) -> None:
        """From here on deadlines pass."""
        self._grace.begin(self._clock.now())

    def start(self) -> None:
        """Measure how long we stand still, until `stop`."""
        self._stalls.start()

    def stop(self) -> None:
        self._stalls.stop()

    @property
    def patience(self) -> Detection:
        return self._durable.job.state.detection

    def last_heard(self) -> dict[NodeId, Micros]:
        """When each attached node was last heard of, by the job's clock."""
        return self._observations.last_heard()

    def with_steps(self, status: JobStatus) -> JobStatus:
        """The job knows the steps of reports only; heartbeats know newer ones."""
        steps = self._observations.steps()
        nodes = (replace(node, step=steps.get(node.node, node.step)) for node in status.nodes)
        in_memory = self._observations.snapshot_steps().values()
        copied = self._observations.copied_steps().values()
        checkpoints = replace(
            status.checkpoints, snapshot_step=min(in_memory, default=None), copied_step=min(copied, default=None)
        )
        return replace(status, nodes=tuple(nodes), checkpoints=checkpoints)

    # What is heard.

    def reached(self, now: Micros) -> None:
        """If no node could for a while, the others are on their way too: none is given up before they had the time."""
        lost = self._isolation.heard(self._clock.elapsed(), self.patience)
        if lost:
            self._stalled += lost
            self._grace.extend(now, min(lost, micros(self.patience.silence)))
            log.warning(
                "the master was cut off from all nodes for_seconds=%.1f: no node counts as lost for this", lost / 1e6
            )

    def heard(self, heartbeat: Heartbeat, now: Micros) -> None:
        with contextlib.suppress(Rejected):  # found silent a moment ago: the core decides, not the beat
            self._observations.heard(heartbeat, now)

    def came(self, attached: Attached, now: Micros) -> None:
        self._findings.pop(attached.node, None)  # of an older stream
        self._observations.attached(attached.node, attached.incarnation, now)
        self._isolation.came(attached.node)

    def came_and_went(self, attached: Attached) -> None:
        """Its stream ended before its attach was durable."""
        self._findings.pop(attached.node, None)  # of an older stream
        self._findings[attached.node] = NodeDisconnected(node=attached.node, incarnation=attached.incarnation)

    def went(self, finding: NodeDisconnected) -> None:
        """Its stream ended."""
        self.note_stalls(self._clock.now())  # the end of a stream may be the first that we see after one
        elapsed = self._clock.elapsed()
        is_cut_off = self._isolation.is_cut_off(elapsed, self.patience)
        self._isolation.left(finding.node, elapsed, self.patience)
        finding = replace(finding, is_our_fault=is_cut_off or elapsed < self._blamed_until)
        # How far the node had come goes with it: without it a job whose agents die now and then seems to stand still.
        self._findings[finding.node] = replace(finding, step=self._observations.step(finding.node))
        self._observations.forget(finding.node)

    # What it means.

    def note_stalls(self, now: Micros) -> None:
        """If we stood still, what others sent in time may be unread: give it that time before a node is given up."""
        stalled = self._stalls.take()
        if stalled:
            self._stalled += stalled
            self._grace.extend(now, stalled)
            self._isolation.stood_still(stalled)
            log.warning("the master was paused for_seconds=%.1f: deadlines are extended by this time", stalled / 1e6)
            if stalled >= LONG_STALL:
                self._blamed_until = self._clock.elapsed() + AFTERMATH

    def look(self, now: Micros) -> bool:
        """Find who has been silent too long. False: time cannot be trusted now, so no node was, and no deadline passes."""
        is_time_trusted = self._grace.is_over(now) and not self._is_cut_off()
        self._follow_job()
        if is_time_trusted:
            stalled, self._stalled = self._stalled, 0
            for finding in self._observations.tick(now, Micros(now - stalled)):
                self._findings[finding.node] = finding
        return is_time_trusted

    def findings(self) -> list[NodeDisconnected | NodeSilent]:
        """All that the job does not know durably yet."""
        return list(self._findings.values())

    def settle(self, finding: NodeDisconnected | NodeSilent) -> None:
        """The job knows it, or does not want to: it need not be found again."""
        if self._findings.get(finding.node) == finding:
            del self._findings[finding.node]
        if isinstance(finding, NodeSilent):
            self._isolation.left(finding.node, self._clock.elapsed(), self.patience)

    def hold_deadlines(self, duration: int) -> None:
        """For so many microseconds from now, because what would meet them is on its way."""
        self._grace.extend(self._clock.now(), duration)

    def quiet_until(self) -> Micros:
        """Neither silence nor a deadline of the job has anything to say before."""
        if self._is_cut_off():
            return NEVER
        self._follow_job()
        at = self._observations.quiet_until()
        if (deadline := self._durable.job.next_deadline()) is not None:
            at = min(at, deadline)
        return max(at, self._grace.until)

    def _is_cut_off(self) -> bool:
        return self._isolation.is_cut_off(self._clock.elapsed(), self.patience)

    def _follow_job(self) -> None:
        """The job must not look at the observations; so they are told what it knows."""
        self._observations.follow(self.patience, self._durable.job.suspects())
