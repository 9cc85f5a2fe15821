"""
What the commands about platform nodes do: a function per command, and the table of them.

As everywhere, each function checks first and raises `Rejected`; below the empty line it only changes.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from dlrover.core.decision import Answers, Decision, Handlers
from dlrover.core.fleet import job_limits, life_cycle, parameter_servers, platform_news, reconcile, relaunch, targets
from dlrover.core.fleet.fleet import Fleet
from dlrover.core.fleet.replicas import FleetNode, Replicas
from dlrover.core.happenings import FleetDefined
from dlrover.core.outcome import NotYet
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.fleet import (
    AskClusterVersion,
    AskPsNodes,
    ClusterVersion,
    DefineFleet,
    ErrorLevel,
    FleetSpec,
    LaunchRefused,
    MigrateNode,
    NodeChanged,
    NodeExit,
    NodePhase,
    NodesListed,
    NodeType,
    PsNodes,
    PsReady,
    ReplicaSpec,
    ReportNodeError,
    Resource,
    RestartJob,
    ResumeJob,
    ScaleReplicas,
    SizeReplicas,
    Strategy,
    SuspendJob,
    UpdateClusterVersion,
    VersionType,
    exit_reason_told,
)
from dlrover.protocol.messages.job import Done, NodeId, PlatformId, Reply
from dlrover.protocol.messages.job_limits import excess_as_defined
from dlrover.protocol.messages.requests import MAX_REASON, RelaunchNode

T = TypeVar("T", FleetSpec, Resource)

MOST_NODES = 1_000_000
_ORDER = (NodeType.PS, NodeType.CHIEF, NodeType.WORKER, NodeType.EVALUATOR)
"""In which ids are given: servers first, because they are called by their address and people expect it to begin at 0."""
_CHECKED_MESSAGE = 2048
_LARGEST = 2**53
"""No counter of a platform comes near."""


def _define(command: DefineFleet, decision: Decision) -> Reply:
    state = decision.state
    check_spec(command.spec)
    known = state.fleet
    if known is not None and known.spec != command.spec:
        raise Rejected(
            "The fleet of this job is defined already, and otherwise. Scale the job, or start another one.",
            code=ErrorCode.FLEET_DIFFERS,
        )

    if known is None:
        state.fleet = _new_fleet(decision, as_decoded(command.spec))
        decision.rooms_changed()
        decision.is_unsettled = True
    return Done()


def _new_fleet(decision: Decision, spec: FleetSpec) -> Fleet:
    """All records at once; the platform is asked for them when it has said what it has."""
    fleet = Fleet(spec=spec, job_name=decision.state.job_name or "job")
    defined = FleetDefined(spec, dict(spec.replicas))
    decision.announce(decision.on.fleet_defined, defined)
    kinds = _with_chief(spec.strategy, defined.replicas)
    for node_type in _ORDER:
        replica = kinds.get(node_type)
        if replica is not None:
            fleet.replicas[node_type] = _replicas_of(decision, defined, node_type, replica)
    for node_type, replicas in fleet.replicas.items():
        for rank in range(replicas.target):
            node = targets.want_new(fleet, node_type, rank)
            node.is_first = node_type is NodeType.WORKER and rank < replicas.spec.count
            if node_type is NodeType.PS:
                fleet.servers.current.append(node.id)
    amounts = ", ".join(f"{replicas.target} {node_type.value}" for node_type, replicas in fleet.replicas.items())
    decision.say(f"The job wants these nodes of its platform: {amounts}.")
    return fleet


def _with_chief(strategy: Strategy, kinds: dict[NodeType, ReplicaSpec]) -> dict[NodeType, ReplicaSpec]:
    """A parameter-server job needs a chief; if the user named none, one of the workers is it."""
    kinds = dict(kinds)
    worker = kinds.get(NodeType.WORKER)
    has_chief = NodeType.CHIEF in kinds and kinds[NodeType.CHIEF].count > 0
    if strategy is Strategy.PS and not has_chief and worker is not None and worker.count:
        kinds[NodeType.CHIEF] = _with_count(worker, 1)
        kinds[NodeType.WORKER] = _with_count(worker, worker.count - 1)
    return kinds


def _with_count(spec: ReplicaSpec, count: int) -> ReplicaSpec:
    return ReplicaSpec(
        count=count,
        resource=spec.resource,
        max_relaunches=spec.max_relaunches,
        critical=spec.critical,
        priority=spec.priority,
    )


def _replicas_of(decision: Decision, defined: FleetDefined, node_type: NodeType, replica: ReplicaSpec) -> Replicas:
    spec = defined.spec
    is_of_world = node_type is NodeType.WORKER and spec.strategy is Strategy.ALLREDUCE
    num_standby = spec.standby if is_of_world else 0
    count = min(replica.count, defined.first_workers or replica.count) if is_of_world else replica.count
    replicas = Replicas(spec=replica, target=count + num_standby)
    budget = min(replica.max_relaunches, relaunch.MAX_BUDGET)
    if node_type is NodeType.WORKER:
        critical = relaunch.critical_ranks(replica.critical, replica.count, budget, spec.strategy)
        if critical is None:
            decision.say(
                f"No worker is critical: `critical` must be all, none, or rank:relaunches,... (got {replica.critical!r})."
            )
        replicas.budgets = critical or {}
    elif node_type is NodeType.PS and replica.critical.strip() == "all":
        replicas.budgets = dict.fromkeys(range(replica.count), budget)
    return replicas


def check_spec(spec: FleetSpec) -> None:
    """Raises `Rejected` for a fleet that no platform could bring."""
    odd = _odd_number(msgspec.to_builtins(spec))
    if odd:
        raise _bad(odd)
    if spec.failure_window < 0:
        raise _bad(f"failure_window {spec.failure_window:g}: give seconds, 0 or more")
    for node_type, replica in spec.replicas.items():
        if not 0 <= replica.count <= MOST_NODES or replica.max_relaunches < 0:
            raise _bad(f"{node_type.value}: give a count from 0 to {MOST_NODES} and 0 or more relaunches")
        if replica.resource.cpu < 0 or replica.resource.memory_mb < 0 or replica.resource.gpus < 0:
            raise _bad(f"{node_type.value}: resources must be at least 0 (got {replica.resource})")
        if not relaunch.has_only_numbers_up_to(MOST_NODES, replica.critical):
            raise _bad(f"{node_type.value}: critical has ranks and relaunches from 0 to {MOST_NODES}")
        if relaunch.priorities(replica.priority, replica.count) is None:
            raise _bad(
                f"the priority {replica.priority!r} of {node_type.value} is not high, low, or a share such as 0.5"
            )
    counts = {node_type: replica.count for node_type, replica in spec.replicas.items()}
    if NodeType.WORKER not in counts or counts[NodeType.WORKER] + counts.get(NodeType.CHIEF, 0) < 1:
        raise _bad("there is no worker")
    if spec.strategy in (Strategy.PS, Strategy.CUSTOM) and not counts.get(NodeType.PS):
        raise _bad(f"a job by {spec.strategy.value} needs at least one ps")
    if not 0 <= spec.standby <= MOST_NODES:
        raise _bad(f"standby {spec.standby}: give 0 or more")
    excess = excess_as_defined(spec)
    if excess:
        raise _bad(excess)
    affinity = spec.group_affinity
    if any(group < 0 or count < 1 for group, count in affinity.items()):
        raise _bad("group_affinity maps groups from 0 on to counts from 1 on")
    if affinity and sum(affinity.values()) != counts[NodeType.WORKER]:
        raise _bad(f"group_affinity places {sum(affinity.values())} workers, and there are {counts[NodeType.WORKER]}")


def _odd_number(value: object, name: str = "") -> str:
    """A number that is of no use in a calculation, or that no journal can hold, in words; empty: there is none."""
    if isinstance(value, dict):
        named = [(f"{name}.{key}" if name else str(key), key, item) for key, item in value.items()]
        found = [_odd_number(key, path) or _odd_number(item, path) for path, key, item in named]
        return next(filter(None, found), "")
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} {value}: give a finite number"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"{name}: give a whole number up to {_LARGEST}"
    return ""


def as_decoded(value: T) -> T:
    """As it comes out of a journal. Our own shell may write 900 where a float belongs, which is encoded otherwise."""
    return msgspec.convert(msgspec.to_builtins(value), type(value))


def _bad(what: str) -> Rejected:
    return Rejected(f"The fleet is not valid: {what}.", code=ErrorCode.BAD_FLEET)


def _nodes_listed(command: NodesListed, decision: Decision) -> Reply:
    _known_fleet(decision.state)
    if max(command.master_epoch, command.next_id) > _LARGEST:
        raise malformed(
            f"`master_epoch` and `next_id` must be at most {_LARGEST} (got {command.master_epoch} and {command.next_id})."
        )

    platform_news.hear_list(decision, command)
    decision.is_unsettled = True
    return Done()


def _node_changed(command: NodeChanged, decision: Decision) -> Reply:
    _known_fleet(decision.state)

    platform_news.hear_change(decision, command.kind, command.node)
    decision.is_unsettled = True
    return Done()


def _launch_refused(command: LaunchRefused, decision: Decision) -> Reply:
    _known_fleet(decision.state)

    platform_news.hear_refusal(decision, command.node, command.reason)
    decision.is_unsettled = True
    return Done()


def _scale_replicas(command: ScaleReplicas, decision: Decision) -> Reply:
    fleet = _running_fleet(decision.state)
    replicas = fleet.replicas.get(command.node_type)
    if replicas is None:
        raise Rejected(f"This job has no nodes of type {command.node_type.value}.", code=ErrorCode.BAD_SCALE)
    if fleet.spec.strategy is Strategy.ALLREDUCE and command.node_type is NodeType.WORKER:
        raise Rejected(
            "The workers of this job form one world: scale it with a minimum and a maximum (ScaleJob).",
            code=ErrorCode.BAD_SCALE,
        )
    if command.node_type is not NodeType.EVALUATOR and reconcile.is_training_over(fleet):
        raise Rejected(
            "The training is over: no node can be added to it, only to the evaluation.", code=ErrorCode.BAD_STAGE
        )
    least = 1 if command.node_type is NodeType.PS else 0
    if not least <= command.count <= MOST_NODES:
        raise Rejected(f"Give a count from {least} to {MOST_NODES}, not {command.count}.", code=ErrorCode.BAD_SCALE)

    _check_limits(job_limits.excess_if_scaled(fleet, command.node_type, command.count), ErrorCode.BAD_SCALE)
    if command.node_type is NodeType.PS:
        targets.scale_servers(decision, command.count)
    else:
        targets.scale_workers(decision, command.node_type, command.count)
    decision.announce(decision.on.person_decided)
    decision.is_unsettled = True
    return Done()


def _size_replicas(command: SizeReplicas, decision: Decision) -> Reply:
    fleet = _running_fleet(decision.state)
    replicas = fleet.replicas.get(command.node_type)
    if replicas is None:
        raise Rejected(f"This job has no nodes of type {command.node_type.value}.", code=ErrorCode.BAD_SCALE)
    _check_size(
        command.resource, f"Nodes of type {command.node_type.value}", "cannot have this size", ErrorCode.BAD_SCALE
    )
    resource = targets.given(replicas.spec.resource, as_decoded(command.resource))
    _check_limits(job_limits.excess_if_sized(fleet, command.node_type, resource), ErrorCode.BAD_SCALE)

    targets.size_later_nodes(decision, command.node_type, resource)
    decision.announce(decision.on.person_decided)
    return Done()


def _migrate(command: MigrateNode, decision: Decision) -> Reply:
    fleet = _running_fleet(decision.state)
    node = fleet.nodes.get(command.node)
    if node is None or not node.is_live or node.phase is NodePhase.INITIAL:
        raise Rejected(f"Node {command.node} is not there to be exchanged.", code=ErrorCode.BAD_MIGRATION)
    _check_size(command.resource, node.label, "cannot be exchanged so", ErrorCode.BAD_MIGRATION)
    if node.id in fleet.migrations or node.id in fleet.migrations.values():
        raise Rejected(f"{node.label} is being exchanged already.", code=ErrorCode.BAD_MIGRATION)
    if node.id in fleet.servers.dropped or node.is_finished:
        raise Rejected(f"{node.label} is about to go.", code=ErrorCode.BAD_MIGRATION)
    if node.is_critical and node.node_type is not NodeType.PS:
        raise Rejected(
            f"The job cannot do without {node.label}, not even for an exchange.", code=ErrorCode.BAD_MIGRATION
        )
    resource = as_decoded(command.resource)
    _check_limits(job_limits.excess_if_resized(fleet, node, resource), ErrorCode.BAD_MIGRATION)
    targets.migrate(decision, node, resource)
    decision.announce(decision.on.node_exchanged, node.label)
    decision.announce(decision.on.person_decided)
    decision.is_unsettled = True
    return Done()


def _check_size(resource: Resource, whose: str, refusal: str, code: ErrorCode) -> None:
    if odd := _odd_number(msgspec.to_builtins(resource)):
        raise Rejected(f"{whose} {refusal}: {odd}.", code=code)
    if resource.cpu < 0 or resource.memory_mb < 0 or resource.gpus < 0:
        raise Rejected(f"{whose}: resources must be at least 0 (got {resource}).", code=code)


def on_job_grows(decision: Decision, max_nodes: int) -> None:
    """Raises `Rejected` for more workers of a world than the job's limits allow."""
    fleet = life_cycle.fleet_of(decision)
    if fleet.spec.strategy is Strategy.ALLREDUCE:
        count = max_nodes + fleet.spec.standby
        _check_limits(job_limits.excess_if_scaled(fleet, NodeType.WORKER, count), ErrorCode.BAD_LIMITS)


def _check_limits(excess: str, code: ErrorCode) -> None:
    if excess:
        raise Rejected(f"Nothing was changed: {excess}.", code=code)


def _suspend(command: SuspendJob, decision: Decision) -> Reply:
    fleet = _running_fleet(decision.state)
    if fleet.is_suspended and (fleet.is_released or not command.is_releasing):
        raise Rejected("The job is suspended already.", code=ErrorCode.BAD_STAGE)
    if command.is_releasing and (fleet.spec.strategy is not Strategy.ALLREDUCE or NodeType.PS in fleet.replicas):
        raise Rejected(
            "Only a job whose workers form one world, without parameter servers, can release its nodes. Suspend it without "
            "that, or stop it.",
            code=ErrorCode.BAD_STAGE,
        )
    if command.is_releasing and (fleet.workers.finished or decision.state.rendezvous.finished):
        raise Rejected(
            "Some workers have finished, and the others are about to: this job cannot go on later with other nodes.",
            code=ErrorCode.BAD_STAGE,
        )

    reason = command.reason[:MAX_REASON]
    if not fleet.is_suspended:
        targets.suspend(decision, reason)
    if command.is_releasing:
        targets.release_all(decision, reason)
    decision.is_unsettled = True
    return Done()


def _resume(command: ResumeJob, decision: Decision) -> Reply:
    fleet = _running_fleet(decision.state)
    if not fleet.is_suspended:
        raise Rejected("The job is not suspended.", code=ErrorCode.BAD_STAGE)

    targets.resume(decision)
    decision.is_unsettled = True
    return Done()


def _restart(command: RestartJob, decision: Decision) -> Reply:
    fleet = _running_fleet(decision.state)
    if fleet.spec.strategy is not Strategy.ALLREDUCE:
        raise Rejected(
            "Only a job whose workers form one world can be restarted as a whole.", code=ErrorCode.BAD_RESTART
        )
    rdzv = decision.state.rendezvous
    if command.round and (rdzv.world is None or rdzv.round != command.round):
        return Done()  # another agent of that world was quicker, or its time has passed anyway
    if fleet.is_suspended:
        raise Rejected("The job is suspended: resume it before it restarts.", code=ErrorCode.BAD_STAGE)

    targets.restart_job(decision, command.reason[:MAX_REASON])
    decision.is_unsettled = True
    return Done()


def _report_node_error(command: ReportNodeError, decision: Decision) -> Reply:
    agent = decision.state.nodes.current(command.node, command.incarnation)

    message = command.message[:_CHECKED_MESSAGE]
    if command.level is not ErrorLevel.INFO:
        decision.say(f"{agent.label} tells of a {command.level.value}: {message}")
    node = None if decision.state.fleet is None else decision.state.fleet.of_agent(agent.id)
    if command.level is ErrorLevel.NODE and node is not None and decision.state.end is None:
        # Only the platform can say that a node was taken away; from others that would be a free ride for ever.
        told = command.exit_reason or exit_reason_told(message)
        reason = told if relaunch.is_failure(told) else NodeExit.UNKNOWN
        life_cycle.hear_node_error(decision, node, reason, message)
    decision.is_unsettled = True
    return Done()


def _update_version(command: UpdateClusterVersion, decision: Decision) -> Reply:
    fleet = _known_fleet(decision.state)
    if command.version < 0 or command.version >= 2**53 or not 0 <= command.rank <= MOST_NODES:
        raise malformed("A version is 0 or more, and so is a rank.")

    version = command.version
    if decision.state.cluster is not None and command.version_type is not VersionType.LOCAL:
        version = max(version, fleet.servers.version(command.version_type, command.node_type, command.rank))
    fleet.servers.set_version(command.version_type, command.node_type, command.rank, version)
    return Done()


def _ps_ready(command: PsReady, decision: Decision) -> Reply:
    fleet = _running_fleet(decision.state)
    if NodeType.PS not in fleet.replicas:
        raise Rejected("This job has no parameter servers.", code=ErrorCode.NO_SERVERS)
    if decision.state.cluster is not None:
        return Done()  # there the master itself knows when all have moved

    addresses = tuple(node.service_address for node in parameter_servers.next_cluster(fleet))
    if parameter_servers.is_somebody_awaited(fleet):
        decision.say(
            "The workers say that they have switched, but some of their next parameter servers are not there yet: "
            "no server is removed until they have switched to those."
        )
    elif command.addresses and command.addresses != addresses:
        decision.say(
            "The workers switched to parameter servers that have changed again since; they have to switch once more."
        )
    else:
        targets.switch_servers(decision)
    decision.is_unsettled = True
    return Done()


def _relaunch_node(command: RelaunchNode, decision: Decision) -> Reply:
    decision.state.check_running()
    node = _node_of_platform(command, decision)

    because = command.reason[:MAX_REASON].rstrip(".")
    why = f"it was requested{f' ({because})' if because else ''}"
    cordoned = node.host if command.is_cordoned else ""
    machine = f"; its machine {cordoned} is avoided from now on" if cordoned else ""
    decision.say(f"{node.label[:1].upper()}{node.label[1:]} is exchanged, because {why}{machine}.")
    targets.relaunch_node(decision, node, why, cordoned)
    decision.is_unsettled = True
    return Done()


def _node_of_platform(command: RelaunchNode, decision: Decision) -> FleetNode:
    state = decision.state
    node = _of_agent(command.node, decision) if command.node >= 0 else _of_platform(command.platform_node, decision)
    assert state.fleet is not None, "a node of a platform"
    if state.fleet.is_suspended:
        raise Rejected("The job is suspended and launches no node: resume it first.", code=ErrorCode.BAD_STAGE)
    is_leaving = node.id in state.fleet.migrations or node.id in state.fleet.servers.dropped
    if not node.is_live or node.is_finished or is_leaving:
        raise Rejected(f"{node.label} is about to go already.", code=ErrorCode.BAD_STAGE)
    return node


def _of_agent(id_: NodeId, decision: Decision) -> FleetNode:
    state = decision.state
    agent = state.nodes.live.get(id_)
    if agent is None:
        raise Rejected(f"Node {id_} is not part of the job any more.", code=ErrorCode.UNKNOWN_NODE)
    node = None if state.fleet is None else state.fleet.of_agent(agent.id)
    if node is None:
        raise Rejected(
            f"{agent.label[:1].upper()}{agent.label[1:]} was started by hand: no platform could start another in its place. Stop it "
            "there; the job goes on with the others, or with one that you start instead.",
            code=ErrorCode.NO_PLATFORM,
        )
    return node


def _of_platform(id_: PlatformId, decision: Decision) -> FleetNode:
    fleet = decision.state.fleet
    node = None if fleet is None else fleet.nodes.get(id_)
    if node is None:
        raise Rejected(f"The platform has no node {id_} of this job.", code=ErrorCode.UNKNOWN_NODE)
    return node


def _known_fleet(state: JobState) -> Fleet:
    if state.fleet is None:
        raise Rejected(
            "The nodes of this job are started by hand: it has no platform that could start, end or exchange any. Start the "
            "job with one (`dlrover local`, `dlrover master --fleet FILE`), or do it by hand.",
            code=ErrorCode.NO_PLATFORM,
        )
    return state.fleet


def _running_fleet(state: JobState) -> Fleet:
    fleet = _known_fleet(state)
    state.check_running()
    return fleet


def _answer_version(query: AskClusterVersion, state: JobState) -> Reply | NotYet:
    if state.fleet is None:
        return ClusterVersion()
    servers = state.fleet.servers
    version = servers.version(query.version_type, query.node_type, query.rank)
    if state.cluster is not None and query.version_type is not VersionType.LOCAL:
        # What scripts tell changes nothing in the course of a cluster.
        is_restored = state.cluster.restored_step is not None
        newest = state.cluster.version if query.version_type is VersionType.GLOBAL or is_restored else 0
        version = max(version, newest)
    return ClusterVersion(version=version)


def _answer_nodes(query: AskPsNodes, state: JobState) -> Reply | NotYet:
    if state.fleet is None or NodeType.PS not in state.fleet.replicas:
        return PsNodes(is_ready=True)
    return parameter_servers.ps_nodes(state.fleet)


HANDLERS: Handlers = {
    DefineFleet: _define,
    NodesListed: _nodes_listed,
    NodeChanged: _node_changed,
    LaunchRefused: _launch_refused,
    ScaleReplicas: _scale_replicas,
    SizeReplicas: _size_replicas,
    MigrateNode: _migrate,
    SuspendJob: _suspend,
    ResumeJob: _resume,
    RestartJob: _restart,
    ReportNodeError: _report_node_error,
    UpdateClusterVersion: _update_version,
    PsReady: _ps_ready,
    RelaunchNode: _relaunch_node,
}
"""`ScaleJob` is a matter of the rendezvous first, and is not here."""

ANSWERS: Answers = {
    AskClusterVersion: _answer_version,
    AskPsNodes: _answer_nodes,
}
