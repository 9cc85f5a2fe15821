"""
Observations: what is known of the nodes right now and need not survive the master.

Heartbeats come far too often for a journal, and nothing may depend on them after a restart. So they are kept here,
apart from the job, and can only lead to a finding, which enters the job as an ordinary command with its evidence.

Silence is judged on the master's own clock, and a master that was itself asleep (swapped out, stopped, starved) must
not take its own absence for the nodes': each tick that comes late moves all deadlines by its lateness.

One witness alone needs long to be sure: a busy machine may stall for half a minute. But where the neighbours of a silent
node say that they lost a peer, two witnesses agree, and it is found sooner. Who is suspected so is the job's to say.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Detection, Heartbeat, Incarnation, Micros, NodeId, NodeSilent

_NEVER = Micros(2**62)


class LastHeard(Struct):
    """What was last heard of a node."""

    incarnation: Incarnation
    last_seen_at: Micros
    lateness_then: int
    """The master's own lateness up to that moment: what came later is granted on top."""
    step: int | None = None
    snapshot_step: int | None = None
    """What it has in memory now; unlike the step it may go back."""
    copied_step: int | None = None
    """What others keep of it."""


class Liveness:
    """Volatile. A new master starts with an empty one, so no node is suspected before a full window."""

    def __init__(self, started_at: Micros, detection: Detection | None = None) -> None:
        self._started_at = started_at
        self._detection = Detection() if detection is None else detection
        self._suspects: dict[NodeId, None] = {}
        self._seen: dict[NodeId, LastHeard] = {}
        self._lateness = 0
        """Microseconds by which all ticks together came late."""
        self._quiet_until: Micros | None = None
        """No node can be found silent before; None: unknown. What is heard only puts deadlines off, so this stays true
        until a new node has to be heard of or patience changes, and a turn of the master need not look at every node."""

    def follow(self, detection: Detection, suspects: Iterable[NodeId] = ()) -> None:
        """What the job says now: how patient to be, and with whom less."""
        suspected = dict.fromkeys(suspects)
        if (detection, suspected) != (self._detection, self._suspects):
            self._detection, self._suspects = detection, suspected
            self._quiet_until = None

    def attached(self, node: NodeId, incarnation: Incarnation, now: Micros) -> None:
        """From now on the node has to be heard of."""
        known = self._seen.get(node)
        step = known.step if known is not None and known.incarnation == incarnation else None
        self._seen[node] = seen = LastHeard(incarnation, now, self._lateness, step)
        if self._quiet_until is not None:
            self._quiet_until = min(self._quiet_until, self._silent_at(node, seen))

    def heard(self, heartbeat: Heartbeat, now: Micros) -> None:
        """Raises `Rejected` for a life that is over or was never attached to this master."""
        seen = self._seen.get(heartbeat.node)
        if seen is None or seen.incarnation != heartbeat.incarnation:
            raise Rejected(
                f"A heartbeat of node {heartbeat.node} in incarnation {heartbeat.incarnation}, which is not attached.",
                code=ErrorCode.STALE_INCARNATION,
            )
        is_nearer_possible = now < seen.last_seen_at or self._lateness != seen.lateness_then
        seen.last_seen_at = now
        seen.lateness_then = self._lateness
        if is_nearer_possible and self._quiet_until is not None:
            self._quiet_until = min(self._quiet_until, self._silent_at(heartbeat.node, seen))
        if heartbeat.step is not None and (seen.step is None or heartbeat.step > seen.step):
            seen.step = heartbeat.step
        seen.snapshot_step = heartbeat.snapshot_step
        seen.copied_step = heartbeat.copied_step

    def forget(self, node: NodeId) -> None:
        """Its stream broke or it left: the job has its own deadline for that."""
        self._seen.pop(node, None)

    def tick(self, now: Micros, due_at: Micros) -> list[NodeSilent]:
        """Who has been silent too long, each found once. `due_at` is when this tick should have come."""
        self._lateness += max(0, now - due_at)
        if now < self.quiet_until():
            return []
        self._quiet_until = None
        findings = [
            NodeSilent(node=node, incarnation=seen.incarnation, last_seen_at=seen.last_seen_at)
            for node, seen in sorted(self._seen.items())
            if self._silent_at(node, seen) <= now
        ]
        for finding in findings:
            del self._seen[finding.node]
        return findings

    def next_deadline(self) -> Micros | None:
        """When the next node will be found silent if nothing is heard of it."""
        return min((self._silent_at(node, seen) for node, seen in self._seen.items()), default=None)

    def quiet_until(self) -> Micros:
        """No node can be found silent before; perhaps none even then. Cheap, unlike `next_deadline`."""
        if self._quiet_until is None:
            next_deadline = self.next_deadline()
            self._quiet_until = _NEVER if next_deadline is None else next_deadline
        return self._quiet_until

    def step(self, node: NodeId) -> int | None:
        """The newest step the node told of; ask before it is forgotten, as evidence for `NodeDisconnected`."""
        seen = self._seen.get(node)
        return None if seen is None else seen.step

    def steps(self) -> dict[NodeId, int]:
        """The newest step each node told of."""
        return {node: seen.step for node, seen in sorted(self._seen.items()) if seen.step is not None}

    def last_heard(self) -> dict[NodeId, Micros]:
        """When each node was last heard of."""
        return {node: seen.last_seen_at for node, seen in self._seen.items()}

    def snapshot_steps(self) -> dict[NodeId, int]:
        """The newest step that each node has in memory."""
        return {node: seen.snapshot_step for node, seen in self._seen.items() if seen.snapshot_step is not None}

    def copied_steps(self) -> dict[NodeId, int]:
        """The newest step of each node of which others keep what it has."""
        return {node: seen.copied_step for node, seen in self._seen.items() if seen.copied_step is not None}

    def _silent_at(self, node: NodeId, seen: LastHeard) -> Micros:
        begins_at = max(seen.last_seen_at, self._started_at)
        patience = self._detection.suspicion if node in self._suspects else self._detection.silence
        return Micros(begins_at + micros(patience) + self._lateness - seen.lateness_then)
