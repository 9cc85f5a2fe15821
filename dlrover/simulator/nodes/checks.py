"""
The tasks of the node check, as virtual nodes run them: small groups that meet at a port and fail together.

A node that cannot compute fails always, one with a bad link whenever it has a partner, and both spoil it for their group.
So does a member that dies, sleeps or never comes. A slow one makes all of its group slow.
"""

from __future__ import annotations

from dlrover.protocol.messages.check import ExitClass, ReportCheck
from dlrover.protocol.messages.job import Round, WorldSpec
from dlrover.simulator.parts import AgentPart, CheckGroup, SimulationPart
from dlrover.simulator.virtual_time import micros, span

TASK = (2.0, 3.0)
"""Seconds that a healthy group takes."""
SLOWER = 5
FAILING = (3.0, 30.0)
"""Seconds until a task notices that a collective will not complete."""


class CheckRuns:
    """Owned by the simulation; agents enter and leave."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self._groups: dict[tuple[Round, str], CheckGroup] = {}
        """By round and coordinator: an agent that restarts may get the port of its former check again."""

    def enter(self, agent: AgentPart, world: WorldSpec) -> None:
        chance = self._sim.chance.nodes
        group = self._groups.setdefault((world.round, world.coordinator), CheckGroup(world))
        group.members.append(agent)
        agent.check = group
        if len(group.members) < world.group_world_size:
            self._sim.events.after(span(chance, *FAILING), self._end_alone, group, agent)
            return
        is_slow = any(member.node.is_sluggish for member in group.members)
        is_bad = any(member.node.breakage is not None for member in group.members)
        duration = span(chance, *(FAILING if is_bad else TASK)) * (SLOWER if is_slow else 1)
        terms = self._sim.shape.check
        assert terms is not None, "a check runs"
        timeout = micros(terms.timeout)
        group.is_late = duration >= timeout
        group.seconds = duration / 1e6
        self._sim.events.after(min(duration, timeout), self._end, group)

    def leave(self, agent: AgentPart) -> None:
        """Its task is stopped, or it died with it."""
        agent.check = None

    def _end_alone(self, group: CheckGroup, agent: AgentPart) -> None:
        """Partners that have not come until now will not come."""
        if len(group.members) < group.world.group_world_size and agent.check is group:
            self._report(group, agent, ExitClass.SETUP)

    def _end(self, group: CheckGroup) -> None:
        group.is_over = True
        del self._groups[group.world.round, group.world.coordinator]
        is_complete = not group.is_late and all(
            member.check is group and member.sleep.since is None for member in group.members
        )
        has_partners = len(group.members) > 1
        bad = [member for member in group.members if self._is_failing(member, has_partners=has_partners)]
        for member in group.members:
            breakage = member.node.breakage
            if member in bad and breakage is not None:
                self._report(group, member, breakage)
            else:
                self._report(group, member, ExitClass.OK if is_complete and not bad else ExitClass.COMMUNICATION)

    def _is_failing(self, member: AgentPart, *, has_partners: bool) -> bool:
        return member.node.breakage is ExitClass.COMPUTE or (member.node.breakage is not None and has_partners)

    def _report(self, group: CheckGroup, agent: AgentPart, exit_class: ExitClass) -> None:
        if agent.check is not group or not agent.is_alive:
            return
        agent.check = None
        is_ok = exit_class is ExitClass.OK
        if is_ok:
            self._sim.ledger.passed[(agent.life, agent.incarnation)] = self._sim.events.now
        if not is_ok or agent.node.is_sluggish:
            self._sim.ledger.fail_node(agent.node.fleet_rank)
        agent.outbox.tell_soon(
            ReportCheck(
                node=agent.id,
                incarnation=agent.incarnation,
                round=group.world.round,
                exit_class=exit_class,
                elapsed_ms=group.seconds * 1000 if is_ok else 0.0,
                bandwidth_gbps=10.0 if is_ok else 0.0,
                message="" if is_ok else "a virtual task failed",
            )
        )
