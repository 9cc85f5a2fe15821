"""
Worlds as their members live them: workers that start and end, peers that notice, and work that is done.
"""

from __future__ import annotations

from dlrover.agent.decisions.decisions import AgentTerms
from dlrover.protocol.messages.job import FailureKind, WorldSpec
from dlrover.simulator.parts import AgentPart, SimulationPart, VirtualGroup
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import SECOND, micros, span

MASTER_GRACE = micros(AgentTerms().master_grace)
PEER_LOST_ODDS = 0.3
"""How often a worker notices the end of a peer before its agent stops it."""
OVERLAP = 60 * SECOND
"""After so long a node that the master can reach has stopped the workers of a world that was replaced."""


def workers_starting(sim: SimulationPart, agent: AgentPart, world: WorldSpec) -> None:
    """Only in a world that is durable and has a place for this node."""
    members = sim.ledger.worlds.get((world.round, world.coordinator))
    if members is None or members.get(agent.id) != world.group_rank:
        raise Violation("I1", f"{agent.node.label} starts round {world.round}, in which it has no such place")
    if sim.shape.check is not None and (agent.life, agent.incarnation) not in sim.ledger.passed:
        raise Violation("check", f"{agent.node.label} starts round {world.round} and never passed the node check")


def node_joins(agent: AgentPart) -> None:
    """Only when it could start workers at once, and those of its former world no longer train."""
    if not agent.is_warm:
        raise Violation("warm-up", f"{agent.node.label} joins and could not start workers yet")
    if agent.workers.is_training:
        raise Violation("I1", f"{agent.node.label} joins another round while its workers train")


def life_began(agent: AgentPart) -> None:
    """The master has given up what the agent was before."""
    if agent.workers.is_training and not agent.me.is_leaving:
        raise Violation("I6", f"{agent.node.label} has a new life, and workers of its former one train")


def agent_woke(sim: SimulationPart, agent: AgentPart, away: int) -> None:
    """Others may have taken the places of its workers."""
    if agent.workers.is_training and away > micros(sim.shape.detection.lease):
        raise Violation("I1", f"{agent.node.label} stood still for {away / SECOND:.0f} s, and its workers go on")


def workers_ended(sim: SimulationPart, agent: AgentPart, group: VirtualGroup, kind: FailureKind | None) -> None:
    """Peers may notice before they are told."""
    coordinator = group.world.coordinator
    if not sim.training.ended(coordinator, agent.node.number):
        return
    for node in sim.machines.nodes:
        peer = node.agent
        if peer is None or peer is agent or not peer.workers.runs(coordinator):
            continue
        if sim.chance.nodes.random() < PEER_LOST_ODDS:
            if kind is FailureKind.STOPPED_BY_US:
                sim.ledger.charge(peer)
            sim.events.after(span(sim.chance.nodes, 0.02, 2.0), peer.workers.lose_peer, coordinator)


def began(sim: SimulationPart, coordinator: str) -> None:
    """An older world that still trains does so unheard, and not for ever."""
    sim.troubles.world_began()
    if sim.reading is not None:
        sim.reading.world_began(coordinator)
    others = [each for each in sim.training.worlds if each != coordinator and sim.training.is_training(each)]
    for world in [*others, coordinator] if others else []:  # who wakes up late may be the older one
        sim.events.after(OVERLAP, _check_overlap, sim, world)
        sim.events.after(MASTER_GRACE + OVERLAP, _check_overlap, sim, world)


def finish(sim: SimulationPart, coordinator: str) -> None:
    sim.note("the work is done")
    for node in sim.machines.nodes:
        if node.agent is not None and node.agent.workers.runs(coordinator):
            sim.events.after(span(sim.chance.nodes, 0.0, 0.3), node.agent.workers.finish, coordinator)


def _check_overlap(sim: SimulationPart, coordinator: str) -> None:
    if sim.is_over or not sim.training.is_training(coordinator):
        return
    newest = None if sim.masters.newest is None else sim.masters.newest.job.state.rendezvous.world
    if newest is not None and newest.coordinator == coordinator:
        return
    world, worlds = sim.training.worlds[coordinator], sim.training.worlds
    if newest is not None and (newest.coordinator not in worlds or worlds[newest.coordinator].began_at is None):
        return  # nobody trains beside it yet
    assert world.began_at is not None, "it trains"
    later = [each.began_at for each in worlds.values() if each.began_at is not None and each.began_at > world.began_at]
    if sim.events.now - min(later, default=world.began_at) < OVERLAP:
        return  # it was replaced only just now; when its successor began, another look was planned
    members = [
        node.agent for node in sim.machines.nodes if node.agent is not None and node.agent.workers.runs(coordinator)
    ]
    heard = [agent for agent in members if agent.channel.is_attached and _answers_now(sim, agent)]
    forgotten = [agent for agent in members if agent.channel.is_overdue()]
    if heard or forgotten:
        labels = ", ".join(agent.node.label for agent in [*heard, *forgotten])
        raise Violation(
            "I1", f"two worlds train at the same time, and {labels} could know: round {world.round} is over"
        )


def _answers_now(sim: SimulationPart, agent: AgentPart) -> bool:
    connection = agent.channel.connection
    return (
        connection is not None
        and agent.sleep.since is None
        and not connection.link.is_cut
        and connection.master is sim.masters.newest
        and connection.master.is_awake
    )
