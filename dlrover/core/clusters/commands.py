"""
The cluster in its job: what commands, lost nodes and time mean for it.

`cluster` decides from values; here they are gathered before each look, and what follows is announced to the rooms of data and platform. A job has a
cluster if its terms say so; the rendezvous has nothing to do in it.
"""

from __future__ import annotations

from collections.abc import Callable

from dlrover.core.clusters.cluster import Cluster, Seat, Surroundings, TaskProcess, check_saver, seats_of
from dlrover.core.decision import Answers, Decision, Handlers
from dlrover.core.happenings import AgentComes, ClusterLooks, CutTaking, ModelReturns
from dlrover.core.membership.nodes import Node
from dlrover.core.outcome import Deadline, NotYet
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.cluster import (
    FRESH,
    MAX_ADDRESS,
    MAX_REASON,
    NO_CUT,
    AskCluster,
    ClusterCommand,
    CutTaken,
    ModelRestored,
    ModelSaved,
    ParkForSave,
    ProcessParked,
    RenewVersion,
    ServerBound,
    TakeCut,
    VersionView,
)
from dlrover.protocol.messages.data import MAX_STATE_BYTES
from dlrover.protocol.messages.fleet import NodeType, Strategy
from dlrover.protocol.messages.identity import Round
from dlrover.protocol.messages.job import (
    DeadlineKind,
    Done,
    ExitReason,
    FailureKind,
    FirstFailure,
    LookAgain,
    Reply,
    ReportFailure,
    ReportFinished,
    Stage,
)

TOPIC = "cluster"
_LARGEST = 2**53
_ERRORS = {
    NodeType.PS: ExitReason.PS_ERROR,
    NodeType.CHIEF: ExitReason.WORKER_ERROR,
    NodeType.WORKER: ExitReason.WORKER_ERROR,
    NodeType.EVALUATOR: ExitReason.EVALUATOR_ERROR,
}


def on_agent_comes(decision: Decision, comes: AgentComes) -> None:
    """Raises `Rejected` for a node that has no place in a cluster."""
    state, command = decision.state, comes.command
    if command.terms.strategy is Strategy.PS and (state.fleet is None or command.platform_node < 0):
        raise Rejected(
            f"{command.host} was started by hand for a parameter-server job. Such a job needs a platform that starts its nodes: "
            "use `dlrover local --ps N`.",
            code=ErrorCode.NODE_TYPE,
        )


def on_terms_set(decision: Decision) -> None:
    terms = decision.state.terms
    if terms is not None and terms.strategy is Strategy.PS:
        decision.state.cluster = Cluster(since=decision.now, began_at=decision.now)


def on_master_restarted(decision: Decision) -> None:
    if decision.state.cluster is not None:
        decision.state.cluster.master_restarted(decision.now - decision.state.now)


def advance(decision: Decision) -> bool:
    """After each command: look, and announce what follows."""
    state, cluster = decision.state, decision.state.cluster
    if cluster is None or state.end is not None:
        return False
    looks = ClusterLooks()
    decision.announce(decision.on.cluster_looks, looks)
    around = Surroundings(
        seats=_seats(state), servers=looks.servers, is_complete=looks.is_complete, num_workers=looks.num_workers
    )
    _carry(decision, cluster, lambda: cluster.look(around, decision.now))
    if cluster.is_settled:
        decision.announce(decision.on.cluster_settled, cluster.servers)
    if cluster.restored_step is not None and state.stage is Stage.INIT:
        state.enter_running()
    if cluster.is_complete(decision.now) and decision.ending is None:
        decision.ending = (ExitReason.COMPLETED, "The chief and the workers have ended well.")
    return False


def expire(decision: Decision, _version: int) -> None:
    cluster = decision.state.cluster
    if cluster is not None and decision.state.end is None:
        _carry(decision, cluster, lambda: cluster.expire(decision.now))


def deadlines(state: JobState) -> list[Deadline]:
    at = None if state.cluster is None else state.cluster.deadline()
    return (
        [] if at is None or state.cluster is None else [Deadline(at, DeadlineKind.CLUSTER_PHASE, state.cluster.version)]
    )


def _seats(state: JobState) -> tuple[Seat, ...]:
    fleet = state.fleet
    seats = []
    for agent in state.nodes.live.values():
        node = None if fleet is None else fleet.of_agent(agent.id)
        if node is None or node.is_released or agent.dismissed is not None:
            continue
        seats.append(
            Seat(
                node=agent.id,
                incarnation=agent.incarnation,
                node_type=node.node_type,
                rank=node.rank,
                platform=node.id,
            )
        )
    return seats_of(seats)


def on_task_finished(decision: Decision, node: Node, round_: Round) -> None:
    """The report may have been lost with the stream."""
    cluster = _cluster(decision)
    _carry(decision, cluster, lambda: cluster.ended_well(node.id, round_, decision.now))


def report_finished(command: ReportFinished, decision: Decision) -> Reply:
    node = decision.state.nodes.current(command.node, command.incarnation)
    cluster = _cluster(decision)

    _carry(decision, cluster, lambda: cluster.ended_well(node.id, command.round, decision.now))
    decision.is_unsettled = True
    return Done()


def report_failure(command: ReportFailure, decision: Decision) -> Reply:
    state, cluster = decision.state, _cluster(decision)
    node = state.nodes.current(command.node, command.incarnation)
    if not command.failures:
        raise Rejected("A failure report names at least one failure.", code=ErrorCode.MALFORMED)

    assert state.terms is not None, "a process failed before any node came"
    policy = state.terms.restarts
    process = cluster.processes.get(node.id)
    counts: list[int] = []

    def fail() -> list[str]:
        said, count = cluster.failed(
            node.id, command.round, decision.now, is_long_life=command.lived >= policy.lived_long
        )
        counts.append(count)
        return said

    _carry(decision, cluster, fail)
    if counts[0] and process is not None:
        state.restarts.num_restarts += 1
        limit = policy.max_without_progress if policy.max_restarts is None else policy.max_restarts
        failure = command.failures[0]
        if counts[0] > limit or failure.kind is FailureKind.BAD_SCRIPT:
            _give_up(decision, process, FirstFailure(
                failure=failure, node_rank=node.rank, host=node.host, round=command.round, step=command.step
            ), limit)  # fmt: skip
    decision.is_unsettled = True
    return Done()


def _give_up(decision: Decision, process: TaskProcess, first: FirstFailure, limit: int) -> None:
    kind, label = process.seat.node_type, process.seat.label
    is_untrained = _cluster(decision).progress == 0
    reason = ExitReason.CODE_ERROR if is_untrained else _ERRORS[kind]
    if first.failure.kind is FailureKind.BAD_SCRIPT:
        why = f"{label} cannot run its script, and no restart can change that."
    else:
        why = (
            f"{label} failed {limit + 1} times in a row without progress in between; at most {limit} restarts are made."
        )
    decision.end_job(reason, why, first=first)


def _bound(command: ServerBound, decision: Decision) -> Reply:
    cluster, process = _current(command, decision)
    if len(command.address) > MAX_ADDRESS or (process.seat.node_type is NodeType.PS and not command.address):
        raise Rejected(
            f"{process.seat.label} reported no address that other processes can reach.", code=ErrorCode.MALFORMED
        )
    if command.is_coordinator and process.seat.node_type is not NodeType.CHIEF:
        raise Rejected(f"{process.seat.label} cannot coordinate; only the chief does.", code=ErrorCode.MALFORMED)

    number = cluster.number
    cluster.bound(process, command.address, is_coordinator=command.is_coordinator)
    if cluster.number != number:
        _tell(decision)  # a coordinator waits for its workers
    decision.is_unsettled = True
    return Done()


def _restored(command: ModelRestored, decision: Decision) -> Reply:
    cluster, process = _current(command, decision)
    _check_step(command.step)
    _check_step(command.cut)
    if len(command.data_state) > MAX_STATE_BYTES:
        raise Rejected(f"A data state has at most {MAX_STATE_BYTES} bytes.", code=ErrorCode.MALFORMED)
    is_first = cluster.restored_step is None
    said = cluster.restored(process, command.step, decision.now)

    for sentence in said:
        decision.say(sentence)
    if is_first:
        returns = ModelReturns(command.step, command.cut, command.data_state, command.is_data_kept)
        decision.announce(decision.on.model_returns, returns)
        cluster.returned_to(command.cut)
    _tell(decision)
    decision.is_unsettled = True
    return Done()


def _renew(command: RenewVersion, decision: Decision) -> Reply:
    cluster, process = _current(command, decision)
    if not 0 < len(command.reason) <= MAX_REASON:
        raise Rejected(f"A reason has 1 to {MAX_REASON} characters.", code=ErrorCode.MALFORMED)

    _carry(decision, cluster, lambda: cluster.renew(process, command.reason, decision.now))
    decision.is_unsettled = True
    return Done()


def _parked(command: ProcessParked, decision: Decision) -> Reply:
    cluster, process = _current(command, decision)
    _check_step(command.step)

    cluster.parked(process)
    decision.is_unsettled = True
    return Done()


def _park_for_save(command: ParkForSave, decision: Decision) -> Reply:
    cluster, process = _current(command, decision)

    cluster.park_for_save(process, decision.now)
    _tell(decision)
    decision.is_unsettled = True
    return Done()


def _take_cut(command: TakeCut, decision: Decision) -> Reply:
    cluster, process = _current(command, decision)

    taking = CutTaking(cluster.take_cut(process))
    decision.announce(decision.on.cut_taken, taking)
    return CutTaken(cut=taking.cut, data_state=taking.data_state)


def _saved(command: ModelSaved, decision: Decision) -> Reply:
    cluster, process = _current(command, decision)
    check_saver(process)
    _check_step(command.step)
    if not NO_CUT <= command.cut < cluster.cut:
        raise Rejected(f"There was no cut {command.cut} yet.", code=ErrorCode.MALFORMED)

    if command.cut != NO_CUT:
        decision.announce(decision.on.cut_counts, command.cut)
    if command.step > 0:
        cluster.progress += 1  # the save of a fresh model shows nothing of its program
    _carry(decision, cluster, lambda: cluster.saved(process, command.step, decision.now))
    _tell(decision)
    decision.is_unsettled = True
    return Done()


def _current(command: ClusterCommand, decision: Decision) -> tuple[Cluster, TaskProcess]:
    node = decision.state.nodes.current(command.node, command.incarnation)
    cluster = decision.state.cluster
    if cluster is None:
        raise Rejected("This job has no parameter servers.", code=ErrorCode.NO_SERVERS)
    return cluster, cluster.current(node.id, command.round)


def _check_step(step: int) -> None:
    if not FRESH <= step < _LARGEST:
        raise Rejected(f"`step` must be from -1 to {_LARGEST - 1} (got {step}).", code=ErrorCode.MALFORMED)


def _cluster(decision: Decision) -> Cluster:
    cluster = decision.state.cluster
    assert cluster is not None, "only for jobs with a cluster"
    return cluster


def _carry(decision: Decision, cluster: Cluster, act: Callable[[], list[str]]) -> None:
    """Whatever the cluster decides: sentences are said, ended processes lose their leases, nodes and questions hear of it."""
    number, before = cluster.number, {node: cluster.round_of(node) for node in cluster.processes}
    for sentence in act():
        decision.say(sentence)
    for node, round_ in before.items():
        live = decision.state.nodes.live.get(node)
        if cluster.round_of(node) != round_ and live is not None:
            decision.announce(decision.on.workers_ended, live)
    if cluster.number != number:
        _tell(decision)


def _tell(decision: Decision) -> None:
    decision.is_all_touched = True
    decision.effects.append(LookAgain((TOPIC,)))


def _answer(query: AskCluster, state: JobState) -> Reply | NotYet:
    view = VersionView() if state.cluster is None else state.cluster.view()
    return view if view.number != query.seen else NotYet((TOPIC,), view)


HANDLERS: Handlers = {
    ServerBound: _bound,
    ModelRestored: _restored,
    ProcessParked: _parked,
    ParkForSave: _park_for_save,
    TakeCut: _take_cut,
    ModelSaved: _saved,
    RenewVersion: _renew,
}

ANSWERS: Answers = {AskCluster: _answer}
