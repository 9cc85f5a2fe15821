"""
The life of a platform's nodes: what follows when one runs, ends well, ends badly, or is not wanted any more.

Three tell about the same node: the platform (`sightings`), the agent on it (`fleet_agents`), and people (`fleet_wishes`).
The first report that it is over decides; a later one is heard, and changes nothing but the bill. One function
for each thing that can happen to a node says what follows, in order.

What is decided here only changes the state. `fleet_settling`, once at the end of each command, asks the platform for
what is wanted now, and ends the job if it has no future.
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.decision import Decision
from dlrover.core.fleet import job_limits, relaunch
from dlrover.core.fleet.fleet import MAX_MESSAGE, Fleet
from dlrover.core.fleet.replicas import REMOVAL_GRACE, FleetNode, Removal
from dlrover.core.happenings import AnotherNode
from dlrover.core.membership.nodes import Node
from dlrover.protocol.messages.fleet import NodeExit, NodePhase, NodeType, Strategy
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import ExitReason, Leave, Stage

TRAINING_BEGINS = 60.0
"""Seconds: a worker that has run so long has got beyond what a wrong script does, where no steps are reported."""
_FAULTY_HOST = (NodeExit.HARDWARE, NodeExit.CHECK_FAILED, NodeExit.DIAGNOSED)


def started(decision: Decision, node: FleetNode) -> None:
    fleet = fleet_of(decision)
    fleet.enter(node, NodePhase.RUNNING, decision.now)
    node.message = ""
    if node.node_type is NodeType.PS:
        node.is_wait_over = False
        if node.id not in fleet.servers.current:
            fleet.servers.is_changed = True
        return
    for old in [old for old, new in fleet.migrations.items() if new == node.id]:
        let_go(decision, fleet.nodes[old], f"{node.label} has taken its place")


def succeeded(decision: Decision, node: FleetNode) -> None:
    """Its processes ended well. The agent may have said so before, or its report was lost with it."""
    state, fleet = decision.state, fleet_of(decision)
    if _is_serving(fleet, node) and state.end is None and decision.ending is None:
        end_node(decision, node, NodePhase.SUCCEEDED, NodeExit.SUCCEEDED)
        return
    finished(decision, node)
    fleet.enter(node, NodePhase.SUCCEEDED, decision.now)
    node.exit_reason = NodeExit.SUCCEEDED
    agent = unlink(decision, node)
    if agent is not None:
        decision.announce(decision.on.node_succeeded, agent, f"{node.label} ended well")
    _release_ended(decision, node)
    is_beside_world = fleet.spec.strategy is Strategy.ALLREDUCE and node.node_type is not NodeType.WORKER
    is_work_done = node.is_critical and node.node_type is not NodeType.PS and not is_beside_world
    if is_work_done and state.end is None and not _is_critical_work_left(fleet):
        wants_end(decision, ExitReason.COMPLETED, "All nodes that the job cannot do without have done their work.")


def finished(decision: Decision, node: FleetNode) -> None:
    """Its work is done: a node that was to take its place has nothing to do there. A server serves on, with the next one."""
    fleet = fleet_of(decision)
    fleet.finish(node)
    heir = fleet.migrations.get(node.id)
    if heir is not None and node.node_type is not NodeType.PS:
        let_go(decision, fleet.nodes[heir], f"the work of {node.label} is done")


def end_node(
    decision: Decision, node: FleetNode, phase: NodePhase, exit_reason: NodeExit, *, is_presumed: bool = False
) -> None:
    """A live node ended, or is taken for ended, without having done its work: replace it, or see what that means."""
    fleet = fleet_of(decision)
    was_dropped = node.id in fleet.servers.dropped
    node.exit_reason = exit_reason
    node.is_presumed = is_presumed
    fleet.enter(node, phase, decision.now)
    agent = unlink(decision, node)
    if agent is not None:
        decision.announce(decision.on.node_released, agent, f"{node.label} ended ({exit_reason.value})")
    if node.is_finished:
        _release_ended(decision, node)
        return
    is_of_world = node.node_type is NodeType.WORKER and fleet.spec.strategy is Strategy.ALLREDUCE
    if exit_reason is NodeExit.OOM and is_of_world and decision.state.end is None:
        decision.announce(decision.on.memory_ran_out)  # all workers may get other nodes, this one among them
    heir = fleet.holder(node.node_type, node.rank)
    if heir is not None:
        node.exit_reason = NodeExit.RELAUNCHED if exit_reason is NodeExit.KILLED else exit_reason
        decision.say(f"{capitalised(node.label)} ended ({exit_reason.value}); {heir.label} has its rank.")
        relaunch_decision = relaunch.Relaunch(sentence="")
    elif was_dropped:
        relaunch_decision = relaunch.Relaunch(sentence="")
        fleet.servers.dropped.pop(node.id, None)
    else:
        relaunch_decision = relaunch.decide(facts_of(fleet, node), terms_now(decision))
        if decision.state.end is None:  # that nodes end with their job is no news
            decision.say(capitalised(relaunch_decision.sentence))
    num_failed = _count_failure(decision, fleet, node)
    if relaunch_decision.is_relaunched:
        _replace(decision, fleet, node, relaunch_decision)
    elif heir is None and not was_dropped:
        fleet.replicas[node.node_type].abandoned[node.rank] = None
    _after_end(decision, node, is_final=not relaunch_decision.is_relaunched and heir is None and not was_dropped)
    _check_rate(decision, fleet, num_failed)
    _release_ended(decision, node)


def let_go(decision: Decision, node: FleetNode, why: str, cordoned: str = "") -> None:
    """A node that is not wanted any more, without any blame: it is stopped, and never replaced."""
    fleet = fleet_of(decision)
    fleet.release(node, decision.now)
    agent = unlink(decision, node)
    if agent is not None:
        decision.announce(decision.on.node_released, agent, f"{node.label} is let go: {why}")
    fleet.remove(node, Removal(why, cordon_host=cordoned))


def hear_node_error(decision: Decision, node: FleetNode, exit_reason: NodeExit, message: str) -> None:
    """A look at the whole node says that it shall be replaced: by the same rules as any other end."""
    if node.is_live and not node.is_finished:
        node.message = message[:MAX_MESSAGE]
        end_node(decision, node, NodePhase.DELETED, exit_reason)


def on_another_node(decision: Decision, wanted: AnotherNode) -> None:
    """Whether another node takes over; if so and a reason is given, it is decided."""
    fleet, agent = fleet_of(decision), decision.state.nodes.holder(wanted.node_rank)
    node = None if agent is None else fleet.of_agent(agent.id)
    if agent is None or node is None or not node.is_live or node.is_finished:
        return
    if wanted.exit_reason is NodeExit.OOM and fleet.spec.strategy is Strategy.ALLREDUCE:
        return  # its workers lacked memory in each of their restarts: another node of that size is no cure
    facts = replace(facts_of(fleet, node), exit_reason=wanted.exit_reason)
    wanted.is_given = relaunch.decide(facts, terms_now(decision)).is_relaunched
    if wanted.is_given and wanted.why:
        unlink(decision, node)
        hear_node_error(decision, node, wanted.exit_reason, wanted.why)
        # It may be just attaching, so it stays for long enough to hear that it shall go. It exits with 0: the platform must not charge its end again.
        decision.announce(decision.on.node_dismissed, agent, Leave(f"{node.label} is replaced: {wanted.why}"))


def wants_end(decision: Decision, reason: ExitReason, sentence: str) -> None:
    """The job ends when everything that follows from the command is known."""
    if decision.ending is None and decision.state.end is None:
        decision.ending = (reason, sentence)


def unlink(decision: Decision, node: FleetNode) -> Node | None:
    """The live agent on the node, which does not stand for it any more."""
    agent, node.agent = node.agent, None
    if agent is None:
        return None
    fleet_of(decision).agents.pop(agent, None)
    return decision.state.nodes.live.get(agent)


def _replace(decision: Decision, fleet: Fleet, node: FleetNode, relaunch_decision: relaunch.Relaunch) -> FleetNode:
    replicas = fleet.replicas[node.node_type]
    if relaunch_decision.is_charged:
        fleet.charge(node)
    elif node.exit_reason is NodeExit.KILLED:
        replicas.evictions[node.rank] = replicas.evictions.get(node.rank, 0) + 1
    if node.exit_reason is NodeExit.CHECK_FAILED:
        fleet.avoid(node.host)
    new = fleet.want_like(node, relaunch_decision.resource)
    new.is_oom_replacement = node.exit_reason is NodeExit.OOM
    size = replicas.spec.resource
    if new.is_oom_replacement and new.resource.memory_mb > max(size.memory_mb, node.resource.memory_mb):
        grown = replace(size, memory_mb=new.resource.memory_mb)  # nodes that are added later would fail likewise
        replicas.spec = replace(replicas.spec, resource=grown)
    if node.node_type is NodeType.PS:
        fleet.servers.replaced(node.id, new.id)
    return new


def _after_end(decision: Decision, node: FleetNode, *, is_final: bool) -> None:
    """What the loss of a node means for the others. `is_final`: no node takes its place."""
    state, fleet = decision.state, fleet_of(decision)
    if node.node_type is NodeType.PS:
        fleet.servers.lost()
    if not is_final or state.end is not None or state.stage is Stage.RESTARTING:
        return
    if node.is_critical:
        _wants_end_for(
            decision, node, f"{capitalised(node.label)} cannot be replaced, and the job cannot do without it."
        )
        return
    if node.node_type is NodeType.PS and not _are_servers_left(fleet):
        _wants_end_for(
            decision, node, f"{capitalised(node.label)} cannot be replaced: there is no parameter server left."
        )
        return
    if node.node_type is not NodeType.WORKER or fleet.spec.strategy is not Strategy.ALLREDUCE or state.terms is None:
        return
    num_left = len(fleet.workers.holders) + fleet.workers.num_done
    if num_left < state.terms.limits.min_nodes:
        _wants_end_for(
            decision,
            node,
            f"{capitalised(node.label)} cannot be replaced, and the {num_left} workers left are fewer than the "
            f"{state.terms.limits.min_nodes} that a world needs.",
        )


def _are_servers_left(fleet: Fleet) -> bool:
    """Where workers train by servers: one that stays, once they have switched, or will come."""
    if fleet.spec.strategy not in (Strategy.PS, Strategy.CUSTOM):
        return True
    return any(node.id not in fleet.servers.dropped for node in fleet.live_nodes(NodeType.PS))


def _count_failure(decision: Decision, fleet: Fleet, node: FleetNode) -> int:
    if node.exit_reason is NodeExit.CHECK_FAILED and node.is_first:
        fleet.checks_failed[node.rank] = None
    is_counted = relaunch.is_failure(node.exit_reason) or node.is_presumed
    return fleet.note_failure(node, decision.now) if is_counted else 0


def _check_rate(decision: Decision, fleet: Fleet, num_failed: int) -> None:
    """One failure of each worker may be a bad day of the cluster; more in such a short time is not about nodes."""
    if fleet.spec.strategy is not Strategy.ALLREDUCE or decision.state.end is not None:
        return
    workers = fleet.workers
    allowed = max(workers.target, workers.budget(0))
    if num_failed > allowed:
        newest = fleet.nodes[fleet.failures[-1].node]
        _wants_end_for(
            decision,
            newest,
            f"{num_failed} nodes failed within {fleet.spec.failure_window:g} s, the last one {newest.label} "
            f"({newest.exit_reason.value}). A job of {workers.target} workers should not need so many: look at what they "
            "have in common.",
        )


def _wants_end_for(decision: Decision, node: FleetNode, sentence: str) -> None:
    reason = relaunch.reason_to_stop(node.node_type, node.exit_reason, has_training_begun=_has_training_begun(decision))
    said = f" It said: {node.message.rstrip('.')}." if node.message else ""
    wants_end(decision, reason, f"{sentence}{said}")


def _release_ended(decision: Decision, node: FleetNode) -> None:
    """Nothing is expected of an ended node. What we only took for ended must be stopped in any case."""
    fleet = fleet_of(decision)
    fleet.release(node, decision.now)
    if fleet.spec.remove_exited or not node.is_over:
        cordoned = node.host if fleet.spec.cordon_faulty and node.exit_reason in _FAULTY_HOST else ""
        fleet.remove(node, Removal(f"it ended ({node.exit_reason.value})", REMOVAL_GRACE, cordoned))


def _is_critical_work_left(fleet: Fleet) -> bool:
    """Parameter servers serve for ever: the job fails without them, but what they do is never done."""
    kinds = [kind for kind in fleet.replicas if kind is not NodeType.PS]
    return any(node.is_critical for kind in kinds for node in fleet.live_nodes(kind) if not node.is_finished)


def _is_serving(fleet: Fleet, node: FleetNode) -> bool:
    """A parameter server has no work of its own that could be done: it is needed as long as others train."""
    training = (other for kind in (NodeType.CHIEF, NodeType.WORKER) for other in fleet.live_nodes(kind))
    return node.node_type is NodeType.PS and any(not other.is_finished for other in training)


def is_critical(fleet: Fleet, node_type: NodeType, rank: int) -> bool:
    if node_type in (NodeType.CHIEF, NodeType.EVALUATOR):
        return True
    replicas = fleet.replicas[node_type]
    if rank in replicas.budgets:
        return True
    # Where all are critical, so are those that were added since; those that only stand by are not.
    is_worker_of_world = node_type is NodeType.WORKER and fleet.spec.strategy is Strategy.ALLREDUCE
    num_standby = fleet.spec.standby if is_worker_of_world else 0
    return replicas.spec.critical.strip() == "all" and rank < replicas.target - num_standby


def _has_training_begun(decision: Decision) -> bool:
    """Whether what failed had worked before: else the code is the first suspect."""
    state, fleet = decision.state, fleet_of(decision)
    if state.restarts.best_step is not None or state.rendezvous.round > 0:
        return True
    if any(node.step is not None for node in state.nodes.live.values()):
        return True
    began = [
        node.running_since
        for node in fleet.nodes.values()
        if node.running_since is not None and node.node_type in (NodeType.CHIEF, NodeType.WORKER)
    ]
    return bool(began) and decision.now - min(began) >= micros(TRAINING_BEGINS)


def facts_of(fleet: Fleet, node: FleetNode) -> relaunch.NodeEnd:
    replicas = fleet.replicas[node.node_type]
    return relaunch.NodeEnd(
        label=node.label,
        exit_reason=node.exit_reason,
        resource=node.resource,
        num_relaunches=replicas.spent.get(node.rank, 0),
        max_relaunches=replicas.budget(node.rank),
        most_memory_mb=job_limits.memory_left_to(fleet, node),
        is_serving=_is_serving(fleet, node),
    )


def terms_now(decision: Decision) -> relaunch.Terms:
    state, spec = decision.state, fleet_of(decision).spec
    return relaunch.Terms(
        strategy=spec.strategy,
        relaunch_always=spec.relaunch_always,
        is_stopping=state.end is not None or decision.ending is not None,
        is_restarting=state.stage is Stage.RESTARTING,
        most_memory_mb=state.scaling.terms.largest.memory_mb,
    )


def fleet_of(decision: Decision) -> Fleet:
    assert decision.state.fleet is not None, "this job has no platform"
    return decision.state.fleet


def capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
