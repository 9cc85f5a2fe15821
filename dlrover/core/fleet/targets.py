"""
What people want of the fleet, and what time wants: other numbers, other resources, a pause, a fresh start.

None of it costs a rank any of its relaunches. What is taken away is let go without blame, what is added has to be brought
by the platform; until it is there the job goes on with what it has.
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.decision import Decision
from dlrover.core.fleet import early_stop, life_cycle, parameter_servers, relaunch
from dlrover.core.fleet.fleet import Fleet, group_of
from dlrover.core.fleet.replicas import FleetNode, Replicas
from dlrover.core.happenings import PlanMade, TargetMoved
from dlrover.protocol.messages.fleet import NodePhase, NodeType, Resource, Strategy
from dlrover.protocol.messages.identity import MICROS_PER_SECOND
from dlrover.protocol.messages.job import ExitReason, PlatformId, Stage
from dlrover.protocol.messages.scaling import PlannedGroup, PlannedNode


def on_job_scaled(decision: Decision, max_nodes: int) -> None:
    """The job has other limits now: so many workers and the standbys shall be there. Who is dismissed leaves by itself."""
    fleet = life_cycle.fleet_of(decision)
    if fleet.spec.strategy is not Strategy.ALLREDUCE:
        return
    scale_workers(decision, NodeType.WORKER, max_nodes + fleet.spec.standby)


def on_target_moved(decision: Decision, moved: TargetMoved) -> None:
    """So many workers and the standbys shall be there."""
    on_job_scaled(decision, moved.target)


def on_plan_made(decision: Decision, made: PlanMade) -> None:
    """Other numbers and sizes of nodes, as if a person had asked for each. A node that is not there any more is left out."""
    fleet = life_cycle.fleet_of(decision)
    for group in made.plan.groups:
        replicas = fleet.replicas.get(group.node_type)
        if replicas is None:
            continue
        replicas.spec = replace(replicas.spec, resource=_sized(replicas.spec.resource, group))
        if group.count is not None and group.node_type is NodeType.PS:
            scale_servers(decision, group.count)
        elif group.count is not None:
            scale_workers(decision, group.node_type, group.count)
    for planned in made.plan.nodes:
        node = fleet.nodes.get(planned.platform_node)
        if node is not None and _may_be_exchanged(fleet, node):
            if planned.is_elsewhere:
                fleet.avoid(node.host)
            migrate(decision, node, _sized(node.resource, planned))
            decision.announce(decision.on.node_exchanged, node.label)


def on_exchange_called_off(decision: Decision, old: PlatformId) -> None:
    """Its successor goes, and it stays."""
    fleet = life_cycle.fleet_of(decision)
    new = fleet.migrations.get(old)
    if new is not None:
        life_cycle.let_go(decision, fleet.nodes[new], "its exchange is called off")


def _may_be_exchanged(fleet: Fleet, node: FleetNode) -> bool:
    """Critical nodes are not, except servers, which hand over what they hold."""
    is_moving = node.id in fleet.migrations or node.id in fleet.migrations.values() or node.id in fleet.servers.dropped
    is_bound = node.is_critical and node.node_type is not NodeType.PS
    return node.is_live and node.phase is NodePhase.RUNNING and not node.is_finished and not is_moving and not is_bound


def _sized(resource: Resource, planned: PlannedGroup | PlannedNode) -> Resource:
    cpu = resource.cpu if planned.cpu is None else planned.cpu
    memory_mb = resource.memory_mb if planned.memory_mb is None else planned.memory_mb
    return replace(resource, cpu=cpu, memory_mb=memory_mb)


def size_later_nodes(decision: Decision, node_type: NodeType, resource: Resource) -> None:
    """Of nodes that are added. Who is there keeps its size, and so does who takes its place."""
    replicas = life_cycle.fleet_of(decision).replicas[node_type]
    if replicas.spec.resource != resource:
        replicas.spec = replace(replicas.spec, resource=resource)
        decision.say(f"Nodes of type {node_type.value} that are added from now on have another size: {resource}.")


def given(resource: Resource, wanted: Resource) -> Resource:
    """The parts that are wanted, and the others as they are."""
    return Resource(
        cpu=wanted.cpu or resource.cpu,
        memory_mb=wanted.memory_mb or resource.memory_mb,
        gpus=wanted.gpus or resource.gpus,
        gpu_type=wanted.gpu_type or resource.gpu_type,
    )


def scale_workers(decision: Decision, node_type: NodeType, count: int) -> None:
    """More: the lowest free ranks. Fewer: first who does not run yet, then the highest ranks; never critical ones.

    Ranks whose work is done are not started again, so they count when nodes are added. They do no work either: it is those
    who still have some that shall be no more than the number.
    """
    fleet = life_cycle.fleet_of(decision)
    replicas = fleet.replicas[node_type]
    former, replicas.target = replicas.target, count
    if count != former:
        decision.say(f"The job wants {count} nodes of type {node_type.value} now, {former} before.")
    _part_with_dismissed(decision, replicas)
    at_work = [ranked for ranked in _nodes_by_rank(fleet, replicas) if not any(node.is_finished for node in ranked)]
    for node in [node for ranked in at_work for node in ranked]:
        node.is_critical = life_cycle.is_critical(fleet, node_type, node.rank)
    is_rendezvous_first = fleet.spec.strategy is Strategy.ALLREDUCE
    candidates = [
        ranked
        for ranked in at_work
        if not any(node.is_critical or (is_rendezvous_first and node.agent is not None) for node in ranked)
    ]
    candidates.sort(key=lambda ranked: (any(node.phase is NodePhase.RUNNING for node in ranked), -ranked[0].rank))
    for ranked in candidates[: max(0, len(at_work) - count)]:
        for node in ranked:
            life_cycle.let_go(decision, node, "the job was scaled down")
    for rank in replicas.lacking():
        want_new(fleet, node_type, rank)


def _part_with_dismissed(decision: Decision, replicas: Replicas) -> None:
    """Their agents leave, and then the platform may remove them; a node that was to take the place of one is not needed any more."""
    fleet = life_cycle.fleet_of(decision)
    for ranked in _nodes_by_rank(fleet, replicas):
        if any(_is_dismissed(decision, node) for node in ranked):
            for heir in ranked[:-1]:
                life_cycle.let_go(decision, heir, "the job was scaled down")
            fleet.release(ranked[-1], decision.now)


def _nodes_by_rank(fleet: Fleet, replicas: Replicas) -> list[list[FleetNode]]:
    """Of each rank that has a node; where one is being exchanged, the new node and then the old one."""
    exchanged = {new: old for old, new in fleet.migrations.items()}
    return [
        [fleet.nodes[node], *([fleet.nodes[exchanged[node]]] if node in exchanged else [])]
        for node in replicas.holders.values()
    ]


def scale_servers(decision: Decision, count: int) -> None:
    fleet = life_cycle.fleet_of(decision)
    replicas, servers = fleet.replicas[NodeType.PS], fleet.servers
    before = parameter_servers.plan_scale(fleet, count)
    for node in before.removed:
        life_cycle.let_go(decision, fleet.nodes[node], "the job was scaled down")
    # Who was only coming to take the place of a running one is gone; the running one may be too many as well.
    plan = parameter_servers.plan_scale(fleet, count)
    former, replicas.target = replicas.target, count
    decision.say(f"The job wants {count} parameter servers now, {former} before; the workers switch when they can.")
    for node in plan.taken_back:
        for member in _with_predecessor(fleet, node):
            servers.dropped.pop(member, None)
    for rank in plan.added_ranks:
        want_new(fleet, NodeType.PS, rank)
    for node in plan.dropped:
        servers.dropped.update(dict.fromkeys(_with_predecessor(fleet, node)))
    nothing = parameter_servers.ServerPlan()
    servers.is_changed = servers.is_changed or before != nothing or plan != nothing


def _with_predecessor(fleet: Fleet, node: PlatformId) -> list[PlatformId]:
    """A server, and the one that it is being exchanged for: they share a rank, and go or stay together."""
    return [node, *(old for old, new in fleet.migrations.items() if new == node)]


def migrate(decision: Decision, node: FleetNode, resource: Resource) -> None:
    """Another node with other resources is brought; the old one stays until it can be done without."""
    fleet = life_cycle.fleet_of(decision)
    address = "" if node.node_type is NodeType.PS else node.service_address
    new = fleet.want(
        node.node_type,
        node.rank,
        resource=resource,
        group=node.group,
        priority=node.priority,
        service_address=address,
        is_critical=node.is_critical,
    )
    fleet.migrations[node.id] = new.id
    if node.node_type is NodeType.PS:
        fleet.servers.is_changed = True
    decision.say(f"{life_cycle.capitalised(node.label)} is exchanged for {new.name}.")


def on_cluster_settled(decision: Decision, servers: list[PlatformId]) -> None:
    """The servers that are not among these may go, if these are what is wanted."""
    fleet = life_cycle.fleet_of(decision)
    wanted = [node.id for node in parameter_servers.next_cluster(fleet)]
    if fleet.servers.is_changed and wanted == servers and not parameter_servers.is_somebody_awaited(fleet):
        switch_servers(decision)


def switch_servers(decision: Decision) -> None:
    fleet = life_cycle.fleet_of(decision)
    for node in parameter_servers.switch(fleet):
        node.is_critical = False
        life_cycle.let_go(decision, node, "the workers have switched to other parameter servers")
    decision.say(f"The workers use {len(fleet.servers.current)} parameter servers from now on.")


def restart_job(decision: Decision, reason: str) -> None:
    """Every worker gets a new node, in one step: there is no time in between in which a worker could be lost."""
    fleet = life_cycle.fleet_of(decision)
    fleet.num_restarts += 1
    if fleet.num_restarts > fleet.spec.max_job_restarts:
        asked = f" It was asked for once more: {reason.rstrip('.')}." if reason else ""
        sentence = f"All {fleet.spec.max_job_restarts} restarts of the job are used up.{asked}"
        life_cycle.wants_end(decision, ExitReason.RESTART_OVER_LIMIT, sentence)
        return
    because = f": {reason.rstrip('.')}" if reason else ""
    why = f"the job restarts ({fleet.num_restarts} of at most {fleet.spec.max_job_restarts}){because}"
    decision.say(f"{life_cycle.capitalised(why)}.")
    _replace_workers(decision, why)


def on_workers_grown(decision: Decision, memory_mb: int) -> None:
    """All workers get new nodes with so much memory, at no cost of their budgets."""
    workers = life_cycle.fleet_of(decision).workers
    former = workers.spec.resource.memory_mb
    workers.spec = replace(workers.spec, resource=replace(workers.spec.resource, memory_mb=memory_mb))
    why = f"a worker ran out of memory, so all of them start again with {memory_mb} MiB instead of {former} MiB"
    decision.say(f"{life_cycle.capitalised(why)}.")
    _replace_workers(decision, why)


def _replace_workers(decision: Decision, why: str) -> None:
    state, fleet = decision.state, life_cycle.fleet_of(decision)
    stage, state.stage = state.stage, Stage.RESTARTING
    workers = fleet.workers
    former = [node for node in fleet.nodes.values() if node.node_type is NodeType.WORKER and not node.is_released]
    workers.start_over()
    for node in former:
        node.is_finished = False
        life_cycle.let_go(decision, node, "the job restarts")
    for rank in workers.lacking():
        new = want_new(fleet, NodeType.WORKER, rank)
        new.is_replacement = True
    decision.announce(decision.on.job_starts_over, why)
    state.stage = stage


def suspend(decision: Decision, reason: str) -> None:
    state, fleet = decision.state, life_cycle.fleet_of(decision)
    fleet.suspended_from, state.stage = state.stage, Stage.SUSPENDED
    because = f": {reason.rstrip('.')}" if reason else ""
    decision.say(f"The job is suspended and launches no node any more{because}.")


def release_all(decision: Decision, reason: str) -> None:
    """Every node saves and leaves, without any blame. Where no agent can be asked, the platform ends it."""
    fleet = life_cycle.fleet_of(decision)
    fleet.is_released = True
    because = f": {reason.rstrip('.')}" if reason else ""
    why = f"the job is suspended{because}"
    decision.say(f"All nodes save and leave, because {why}.")
    live = [node for kind in fleet.replicas for node in fleet.live_nodes(kind)]
    for node in sorted(live, key=lambda node: -node.id):  # whoever was to take the place of another one goes first
        if node.agent is None:
            life_cycle.let_go(decision, node, why)
        else:
            fleet.release(node, decision.now)  # it is removed when its agent has left
    decision.announce(decision.on.job_pauses, why)


def resume(decision: Decision) -> None:
    state, fleet = decision.state, life_cycle.fleet_of(decision)
    assert fleet.suspended_from is not None, "the job was not suspended"
    state.stage, fleet.suspended_from = fleet.suspended_from, None
    if fleet.is_released:
        fleet.is_released = False
        for node_type, replicas in fleet.replicas.items():
            for rank in replicas.lacking():
                want_new(fleet, node_type, rank)
    for node in [fleet.nodes[id_] for replicas in fleet.replicas.values() for id_ in replicas.pending]:
        node.asked_at = None if node.asked_at is None else decision.now  # nobody could do anything about it meanwhile
    decision.say("The job is resumed.")


def want_new(fleet: Fleet, node_type: NodeType, rank: int) -> FleetNode:
    """A node for a rank that has none, as the job defined it."""
    replicas = fleet.replicas[node_type]
    priorities = relaunch.priorities(replicas.spec.priority, max(replicas.target, rank + 1))
    is_grouped = node_type is NodeType.WORKER
    return fleet.want(
        node_type,
        rank,
        resource=replicas.spec.resource,
        group=group_of(rank, fleet.spec.group_affinity) if is_grouped else -1,
        priority="" if priorities is None else priorities[rank],
        is_critical=life_cycle.is_critical(fleet, node_type, rank),
    )


def make_smaller(decision: Decision, node_id: int) -> None:
    """A node that waits too long for its resources asks for half of them; if it cannot, it keeps its place in the queue."""
    fleet = decision.state.fleet
    if fleet is None:
        return
    for wait in early_stop.to_make_smaller(decision.state, fleet):
        less = early_stop.smaller_resource(decision.state, fleet, wait.node)
        if wait.node.id == node_id and wait.at <= decision.now and less is not None:
            old = wait.node
            seconds = (decision.now - (old.asked_at or 0)) / MICROS_PER_SECOND
            who = life_cycle.capitalised(old.label)
            decision.say(f"{who} has waited {seconds:.0f} s for {_amount(old.resource)}; it asks for {_amount(less)}.")
            _exchange_at_once(decision, old, less)
            return


def move_group(decision: Decision, node_id: int) -> None:
    """A relaunched node finds no room in its group: the whole group moves to where there is some, once."""
    fleet = decision.state.fleet
    if fleet is None:
        return
    stuck = [wait.node for wait in early_stop.groups_to_move(fleet) if wait.at <= decision.now]
    group = next((node.group for node in stuck if node.id == node_id), None)
    if group is None:
        return
    fleet.relaunched_groups[group] = None
    members = [node for node in fleet.live_nodes(NodeType.WORKER) if node.group == group and not node.is_finished]
    new_group, fleet.next_group = fleet.next_group, fleet.next_group + 1
    decision.say(f"Group {group} has no room for a replacement: its {len(members)} nodes move to group {new_group}.")
    for node in sorted(members, key=lambda node: node.rank):
        new = _exchange_at_once(decision, node, node.resource)
        new.group = new_group


def stop_waiting_for_server(decision: Decision, node_id: int) -> None:
    fleet = decision.state.fleet
    if fleet is None:
        return
    for wait in early_stop.unseen_servers(fleet):
        if wait.node.id == node_id and wait.at <= decision.now:
            wait.node.is_wait_over = True
            decision.say(
                f"{life_cycle.capitalised(wait.node.label)} did not come in time; the workers go on without it."
            )


def relaunch_node(decision: Decision, node: FleetNode, why: str, cordoned: str) -> None:
    """A new node for its rank, now. `cordoned`: the machine that shall get none any more; empty: whichever."""
    if cordoned:
        life_cycle.fleet_of(decision).avoid(cordoned)
    _exchange_at_once(decision, node, node.resource, why, cordoned)


def _exchange_at_once(
    decision: Decision,
    old: FleetNode,
    resource: Resource,
    why: str = "another node takes its place",
    cordoned: str = "",
) -> FleetNode:
    fleet = life_cycle.fleet_of(decision)
    was_in_use = old.id in fleet.servers.current
    was_running = old.phase is NodePhase.RUNNING
    life_cycle.let_go(decision, old, why, cordoned)
    heir = fleet.holder(old.node_type, old.rank)
    if heir is not None:
        return heir  # it was being exchanged anyway
    new = fleet.want_like(old, resource)
    if was_in_use:
        fleet.servers.replaced(old.id, new.id)
        if was_running:
            fleet.servers.lost()  # the address stays, the variables behind it do not
    return new


def _is_dismissed(decision: Decision, node: FleetNode) -> bool:
    agent = None if node.agent is None else decision.state.nodes.live.get(node.agent)
    return agent is not None and agent.dismissed is not None


def _amount(resource: Resource) -> str:
    return f"{resource.cpu:g} cores and {resource.memory_mb} MiB"
