"""
Machines and what becomes of them: networks that are cut, workers that start and end, agents that are killed and come again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover.protocol.messages import FailureKind, WorldSpec
from dlrover.simulator.events import span
from dlrover.simulator.invariants import Violation

if TYPE_CHECKING:
    from dlrover.simulator.agents import VirtualAgent, VirtualNode
    from dlrover.simulator.simulation import Simulation
    from dlrover.simulator.workers import Group

PEER_LOST_ODDS = 0.3
"""How often a worker notices the end of a peer before its agent stops it."""


def cut_off(sim: Simulation, node: VirtualNode, *, up: bool, down: bool, duration: int, is_deep: bool) -> None:
    """Hold what the node and the master say to each other. Deep: its workers are cut off from their peers, too."""
    link, agent = node.link, node.agent
    sim.ledger.fail_node(node.fleet_rank)
    link.num_cuts_up += up
    link.num_cuts_down += down
    coordinator = None
    if agent is not None:
        if up and agent.channel.connection is not None and agent.sleep.since is None:
            sim.network.mute(agent.channel.connection)
        agent.channel.keepalive_soon()
        group = agent.workers.group
        if is_deep and group is not None and group.is_up and not group.is_stopping:
            coordinator = group.world.coordinator
            sim.training.froze(coordinator)
            sim.events.after(span(sim.chance.nodes, 10.0, 120.0), _time_out, sim, node, coordinator)

    def heal() -> None:
        link.num_cuts_up -= up
        link.num_cuts_down -= down
        node.disturbed_at = sim.events.now
        if coordinator is not None:
            sim.training.thawed(coordinator)
        if link.is_cut:
            return
        for connection in link.connections:
            sim.network.healed(connection)
        agent = node.agent
        if agent is not None and agent.channel.connection is not None and agent.sleep.since is None:
            agent.channel.pulse()
        if agent is not None and agent in sim.seekers:
            del sim.seekers[agent]
            sim.events.after(span(sim.chance.network, 0.0, 5.0), agent.channel.attempt)

    sim.troubles.pass_by(duration, heal)


def _time_out(sim: Simulation, node: VirtualNode, coordinator: str) -> None:
    """Collectives with an unreachable node give up after a while, on all its peers."""
    world = sim.training.worlds.get(coordinator)
    if world is not None and not world.is_over and node.link.is_cut:
        for peer in sim.nodes:
            agent = peer.agent
            if agent is not None and agent.workers.runs(coordinator):
                sim.ledger.charge(agent)
                sim.events.after(span(sim.chance.nodes, 0.0, 2.0), agent.workers.lose_peer, coordinator)


def workers_starting(sim: Simulation, agent: VirtualAgent, world: WorldSpec) -> None:
    """Only in a world that is durable and has a place for this node."""
    members = sim.ledger.worlds.get(world.coordinator)
    if members is None or members.get(agent.id) != world.group_rank:
        raise Violation("I1", f"{agent.node.label} starts round {world.round}, in which it has no such place")
    if sim.shape.check is not None and (agent.life, agent.incarnation) not in sim.ledger.passed:
        raise Violation("check", f"{agent.node.label} starts round {world.round} and never passed the node check")


def workers_ended(sim: Simulation, agent: VirtualAgent, group: Group, kind: FailureKind | None) -> None:
    """Peers may notice before anybody tells them."""
    coordinator = group.world.coordinator
    if not sim.training.ended(coordinator, agent.node.number):
        return
    for node in sim.nodes:
        peer = node.agent
        if peer is None or peer is agent or not peer.workers.runs(coordinator):
            continue
        if sim.chance.nodes.random() < PEER_LOST_ODDS:
            if kind is FailureKind.STOPPED_BY_US:
                sim.ledger.charge(peer)
            sim.events.after(span(sim.chance.nodes, 0.02, 2.0), peer.workers.lose_peer, coordinator)


def finish_world(sim: Simulation, coordinator: str) -> None:
    sim.note("the work is done")
    for node in sim.nodes:
        if node.agent is not None and node.agent.workers.runs(coordinator):
            sim.events.after(span(sim.chance.nodes, 0.0, 0.3), node.agent.workers.finish, coordinator)


def check_overlap(sim: Simulation, coordinator: str) -> None:
    if sim.is_over or not sim.training.is_training(coordinator):
        return
    newest = None if sim.master is None else sim.master.job.state.rendezvous.world
    if newest is not None and newest.coordinator == coordinator:
        return
    round_ = sim.training.worlds[coordinator].round
    members = [node.agent for node in sim.nodes if node.agent is not None and node.agent.workers.runs(coordinator)]
    heard = [agent for agent in members if agent.channel.is_attached and _answers_now(sim, agent)]
    forgotten = [agent for agent in members if agent.departure.is_overdue()]
    if heard or forgotten:
        labels = ", ".join(agent.node.label for agent in [*heard, *forgotten])
        raise Violation("I1", f"two worlds train at the same time, and {labels} could know: round {round_} is over")


def _answers_now(sim: Simulation, agent: VirtualAgent) -> bool:
    connection = agent.channel.connection
    return (
        connection is not None
        and agent.sleep.since is None
        and not connection.link.is_cut
        and connection.master is sim.master
        and connection.master.is_awake
    )


def lose_machine(sim: Simulation, node: VirtualNode, *, is_seen: bool) -> None:
    if node.agent is not None:
        node.agent.die(is_seen=is_seen)
    _remove(sim, node)


def exited(sim: Simulation, agent: VirtualAgent) -> None:
    sim.note(f"{agent.node.label} leaves")
    agent.node.exit_code = agent.departure.exit_code
    _remove(sim, agent.node)


def _remove(sim: Simulation, node: VirtualNode) -> None:
    if not node.is_powered:
        return
    sim.count_nodes()
    node.is_powered = False
    sim.nodes.remove(node)
    if sim.ended_at is None or sim.shape.fleet is not None:
        sim.troubles.add()
        sim.platform.replace(node)
