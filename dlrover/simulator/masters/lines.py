"""
The master's ends of all streams: who is attached on which, who has fallen silent, and what was found out about it.

A finding stays until the job has settled it; a node that attaches meanwhile refutes it.
"""

from __future__ import annotations

from dlrover.core.membership.liveness import Liveness
from dlrover.protocol.messages.job import (
    Attached,
    Heartbeat,
    Incarnation,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
)
from dlrover.simulator.parts import CLOSE, Finding, MasterPart, VirtualLine, VirtualStream


class VirtualLines:
    """Owned by the master."""

    def __init__(self, master: MasterPart) -> None:
        self._master = master
        self._network = master.sim.network
        self._lines: dict[VirtualStream, VirtualLine] = {}
        self.current: dict[NodeId, VirtualLine] = {}
        """On which each attached node speaks."""
        self.findings: dict[NodeId, Finding] = {}
        self.observations = Liveness(master.time.now())

    def get(self, connection: VirtualStream) -> VirtualLine | None:
        """None: it was ended here, or never begun."""
        return self._lines.get(connection)

    def open(self, connection: VirtualStream) -> VirtualLine:
        line = self._lines[connection] = VirtualLine(connection)
        return line

    def is_current(self, line: VirtualLine) -> bool:
        return line.node is not None and self.current.get(line.node) is line

    # Silence.

    def heard(self, line: VirtualLine) -> None:
        """Heartbeats come again, or came once and stopped again."""
        assert line.node is not None, "only attached nodes beat"
        if line.connection.agent.channel.is_beating(line.connection):
            self.observations.forget(line.node)
        else:
            self.watch(line.connection, 0)

    def watch(self, connection: VirtualStream, silent_for: int) -> None:
        """No heartbeat comes from there any more: from now on silence is measured."""
        line = self._lines.get(connection)
        if line is None or line.node is None or not self.is_current(line):
            return
        assert line.incarnation is not None, "attached without an incarnation"
        seen_at = Micros(max(line.attached_at, self._master.time.now() - silent_for))
        self.observations.attached(line.node, line.incarnation, seen_at)
        step = connection.agent.workers.told_step()
        self.observations.heard(Heartbeat(node=line.node, incarnation=line.incarnation, step=step), seen_at)
        self._master.plan_wake()

    def look(self, now: Micros, stalled: int) -> None:
        """Who has been silent for too long, of the time in which the master could hear."""
        for finding in self.observations.tick(now, Micros(now - stalled)):
            self.findings[finding.node] = finding

    # Coming and going.

    def attach(self, line: VirtualLine, attached: Attached) -> None:
        self.findings.pop(attached.node, None)
        if line.connection not in self._lines:
            self.findings[attached.node] = NodeDisconnected(node=attached.node, incarnation=attached.incarnation)
            return
        older = self.current.get(attached.node)
        line.node, line.incarnation = attached.node, attached.incarnation
        line.told = attached.desired.number
        line.attached_at = self._master.time.now()
        self.current[attached.node] = line
        if older is not None:
            self._end(older)
        self.heard(line)

    def closed(self, line: VirtualLine, *, is_our_fault: bool) -> None:
        del self._lines[line.connection]
        node = line.node
        if node is None or not self.is_current(line):
            return
        del self.current[node]
        assert line.incarnation is not None, "attached without an incarnation"
        step = self.observations.step(node)
        step = line.connection.agent.workers.told_step() if step is None else step
        self.findings[node] = NodeDisconnected(
            node=node, incarnation=line.incarnation, step=step, is_our_fault=is_our_fault
        )
        self.observations.forget(node)
        self._master.plan_turn()

    def settle(self, finding: Finding) -> None:
        """The job knows it now."""
        if self.findings.get(finding.node) == finding:
            del self.findings[finding.node]
        if isinstance(finding, NodeSilent):
            self.end(finding.node, finding.incarnation)

    def end(self, node: NodeId, incarnation: Incarnation) -> None:
        """Close the stream of this life of the node, if it has one."""
        line = self.current.get(node)
        if line is not None and line.incarnation == incarnation:
            self._end(line)

    def _end(self, line: VirtualLine) -> None:
        """Close our end of the stream; the agent may come back on another one."""
        if self._lines.pop(line.connection, None) is None:
            return
        self._network.send_down(line.connection, (CLOSE,))
        if line.node is not None and self.is_current(line):
            del self.current[line.node]
            assert line.incarnation is not None, "attached without an incarnation"
            self.findings[line.node] = NodeDisconnected(node=line.node, incarnation=line.incarnation)
            self.observations.forget(line.node)
            self._master.plan_turn()

    def die(self, *, is_seen: bool) -> None:
        """With the process; `is_seen`: a kernel is left to close them."""
        for line in list(self._lines.values()):
            if is_seen:
                self._network.send_down(line.connection, (CLOSE,))
            else:
                line.connection.agent.channel.keepalive_soon()
        self._lines.clear()
        self.current.clear()
