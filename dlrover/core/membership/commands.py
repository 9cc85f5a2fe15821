"""
What nodes and people say of rounds and of coming and going: a function per command, and the table of them.
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.decision import Decision, Handlers
from dlrover.core.happenings import STOPPED
from dlrover.core.membership import adoption
from dlrover.core.membership.attaching import LARGEST, MOST_WORKERS
from dlrover.core.membership.departures import finish, give_up, lose
from dlrover.core.membership.forming import is_offer_used
from dlrover.core.membership.nodes import NodeLife, after_outage
from dlrover.core.membership.rendezvous import Joined, RoundBlock
from dlrover.core.membership.rounds import EXIT_RENDEZVOUS_TIMEOUT, make_room, restart_workers, span_of
from dlrover.core.membership.waiting import gone_times, pend_timeouts
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.fleet import NodeExit, ScaleJob
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import (
    NODE_CHECK_RENDEZVOUS,
    TRAINING_RENDEZVOUS,
    AwaitOrder,
    BlockRendezvous,
    Done,
    ExitReason,
    FinishJob,
    JoinRendezvous,
    Leave,
    LeaveJob,
    LeaveReason,
    Limits,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
    NodesOrdered,
    Reply,
    ReportFinished,
    Stage,
    StopJob,
    UnblockRendezvous,
)
from dlrover.protocol.messages.requests import MAX_REASON, RestartWorkers

MOST_NODES = 1_000_000
LONGEST_BLOCK = 3600.0
"""Seconds: who needs longer says so again."""


def _master_started(command: MasterStarted, decision: Decision) -> Reply:
    state = decision.state
    if command.master_epoch <= state.master_epoch:
        raise Rejected(
            f"Master epoch {command.master_epoch} is not beyond {state.master_epoch}: another master took over.",
            code=ErrorCode.OLD_EPOCH,
        )
    if command.job_name and state.job_name and command.job_name != state.job_name:
        raise Rejected(
            f"The journal belongs to job {state.job_name!r}, not to {command.job_name!r}.", code=ErrorCode.JOB_DIFFERS
        )

    state.master_epoch = command.master_epoch
    state.job_name = state.job_name or command.job_name
    state.user = state.user or command.user
    decision.announce(decision.on.master_restarted)
    decision.is_all_touched = True
    if state.end is not None and state.stage is Stage.STOPPED:
        # The former master may have died between its commit and its exit.
        decision.effects.append(FinishJob(state.end))
    return Done()


def on_master_restarted(decision: Decision) -> None:
    """When the newest world began stays as it is: its workers train on without a master."""
    state = decision.state
    state.nodes.master_restarted(decision.now, state.detection)
    if state.terms is not None:
        state.rendezvous.master_restarted(state.limits, state.now, decision.now)
    if state.drains_at is not None:
        state.drains_at = after_outage(state.drains_at, state.now, decision.now)


def _join(command: JoinRendezvous, decision: Decision) -> Reply:
    rdzv = decision.state.rendezvous
    _check_rendezvous(command)
    node = decision.state.nodes.current(command.node, command.incarnation)
    decision.state.check_running()
    if decision.state.cluster is not None:
        raise Rejected("A parameter-server job has no rendezvous.", code=ErrorCode.UNKNOWN_RENDEZVOUS)
    if node.dismissed is not None:
        raise Rejected(f"{node.label} shall leave: {node.dismissed.reason}.", code=ErrorCode.DISMISSED)
    if not 1 <= command.local_world_size <= MOST_WORKERS or not command.offer:
        raise malformed(f"A join needs from 1 to {MOST_WORKERS} workers and an offer of host:port.")
    if command.name == NODE_CHECK_RENDEZVOUS:
        decision.announce(decision.on.joins_check, node, command)
        return Done()
    if node.id in decision.state.check.needed:
        raise Rejected(f"{node.label} must pass the node check before it joins a round.", code=ErrorCode.NOT_CHECKED)
    if command.round != rdzv.next_round or (rdzv.opening is None and rdzv.is_member(node.id)):
        state = "open" if rdzv.opening is not None else "not open"
        raise Rejected(
            f"{node.label} wants to join round {command.round}; round {rdzv.next_round} is next and {state}.",
            code=ErrorCode.STALE_ROUND,
        )
    if node.finished_round:
        raise Rejected(f"{node.label} has finished in round {node.finished_round}.", code=ErrorCode.FINISHED)
    if is_offer_used(rdzv, node.id, command.offer) and not command.is_offer_reused:
        raise Rejected(
            f"{command.offer} served an earlier round; a port is never used for two. Bind another.",
            code=ErrorCode.OFFER_USED,
        )

    node.local_world_size = command.local_world_size
    if node.id in rdzv.take_up.claims:
        adoption.give_up_claims(decision, f"{node.label} does not run in it any more")
    joined = Joined(node.rank, command.local_world_size, command.offer, node.place, node.group)
    rdzv.join(node.id, joined, decision.now, is_connected=decision.state.nodes.is_connected(node.id))
    decision.touch(node.id)
    decision.is_unsettled = True
    return Done()


def report_finished(command: ReportFinished, decision: Decision) -> Reply:
    rdzv = decision.state.rendezvous
    node = decision.state.nodes.current(command.node, command.incarnation)
    if command.round > rdzv.round or command.round < 1:
        raise Rejected(
            f"There was no round {command.round} yet; the newest is {rdzv.round}.", code=ErrorCode.UNKNOWN_ROUND
        )

    node.reached(command.step)
    finish(decision, node, command.round)
    decision.is_unsettled = True
    return Done()


def _leave(command: LeaveJob, decision: Decision) -> Reply:
    state = decision.state
    node = state.nodes.current(command.node, command.incarnation)

    decision.announce(decision.on.node_leaves, node, command.held)
    why = f"{node.label} left ({command.reason.value})" + (f": {command.message}" if command.message else "")
    is_final = command.reason in (LeaveReason.STOPPED_BY_USER, LeaveReason.FAILED, LeaveReason.JOB_ENDED)
    if state.end is None and list(state.nodes.live) == [node.id] and is_final and state.fleet is None:
        by_user = command.reason is LeaveReason.STOPPED_BY_USER
        # Before it is lost: an end that somebody wanted is no fault that the job would have to recover from.
        reason = ExitReason.STOPPED_BY_USER if by_user else ExitReason.WORKER_ERROR
        decision.end_job(reason, f"{why[0].upper()}{why[1:]}, and no other node is there.")
    fault = STOPPED if command.reason is LeaveReason.STOPPED_BY_USER else "node"
    lose(decision, node, NodeLife.LEFT, why, exit_reason=_exit_of_leave(command.reason), fault=fault)
    decision.is_unsettled = True
    return Done()


def _node_disconnected(command: NodeDisconnected, decision: Decision) -> Reply:
    nodes = decision.state.nodes
    node = nodes.current(command.node, command.incarnation)

    node.reached(command.step)
    if nodes.is_connected(node.id):
        nodes.stream_broke(node, decision.now, decision.state.detection, is_our_fault=command.is_our_fault)
        decision.state.rendezvous.stream_broke(node.id)
    return Done()


def _node_silent(command: NodeSilent, decision: Decision) -> Reply:
    node = decision.state.nodes.current(command.node, command.incarnation)

    silence = (decision.now - command.last_seen_at) / micros(1.0)
    why = f"{node.label} was silent for {silence:.0f} s"
    lose(decision, node, NodeLife.GONE, why, exit_reason=NodeExit.NO_HEARTBEAT, ended_at=command.last_seen_at)
    decision.is_unsettled = True
    return Done()


def _stop_job(command: StopJob, decision: Decision) -> Reply:
    if decision.state.end is None:
        why = f": {command.message}" if command.message else "."
        decision.end_job(ExitReason.STOPPED_BY_USER, f"The job was stopped on request{why}")
        decision.is_unsettled = True
    return Done()


def _scale_job(command: ScaleJob, decision: Decision) -> Reply:
    state = decision.state
    state.check_running()
    if state.terms is None:
        raise Rejected(
            "No node has come yet, and the first one says how many there shall be.", code=ErrorCode.NOT_BEGUN
        )
    former = state.terms.limits
    try:
        limits = replace(former, min_nodes=command.min_nodes, max_nodes=command.max_nodes)
    except ValueError as error:
        raise Rejected(f"The job cannot be scaled: {error}.", code=ErrorCode.BAD_LIMITS) from error
    if limits.max_nodes > MOST_NODES:
        raise Rejected(f"The job cannot have more than {MOST_NODES} nodes.", code=ErrorCode.BAD_LIMITS)
    if limits.max_nodes > former.max_nodes:
        decision.announce(decision.on.job_grows, limits.max_nodes)

    if limits != former:
        state.terms = replace(state.terms, limits=limits)
        state.limits_version += 1
        decision.announce(decision.on.bounds_moved)
        _rescale(decision, former, limits)
        decision.is_unsettled = True
    decision.announce(decision.on.person_decided)
    return Done()


def _block(command: BlockRendezvous, decision: Decision) -> Reply:
    rdzv = decision.state.rendezvous
    node = decision.state.nodes.current(command.node, command.incarnation)
    decision.state.check_running()
    if not command.reason.strip() or not 0 < command.lease <= LONGEST_BLOCK:
        raise malformed(f"A block needs a reason and a lease of up to {LONGEST_BLOCK:g} s, not {command.lease:g}.")

    rdzv.blocks[node.id] = RoundBlock(Micros(decision.now + micros(command.lease)), node.label, command.reason.strip())
    decision.say(f"The rendezvous is blocked by {node.label} for up to {command.lease:g} s: {command.reason.strip()}.")
    decision.is_unsettled = True
    return Done()


def _unblock(command: UnblockRendezvous, decision: Decision) -> Reply:
    node = decision.state.nodes.current(command.node, command.incarnation)

    if decision.state.rendezvous.blocks.pop(node.id, None) is not None:
        decision.say(f"The rendezvous is blocked by {node.label} no longer.")
    decision.is_unsettled = True
    return Done()


def _await_order(command: AwaitOrder, decision: Decision) -> Reply:
    if not 0 < command.limit <= LONGEST_BLOCK:
        raise malformed(f"An order can be awaited for up to {LONGEST_BLOCK:g} s, not {command.limit:g}.")

    if decision.state.end is None:
        decision.state.rendezvous.order_awaited_until = Micros(decision.now + micros(command.limit))
    return Done()


def _nodes_ordered(command: NodesOrdered, decision: Decision) -> Reply:
    if len(command.ranks) > MOST_NODES or any(not 0 <= rank <= LARGEST for rank in command.ranks):
        raise malformed(f"The order of the nodes must have at most {MOST_NODES} ranks from 0 to {LARGEST}.")

    rdzv = decision.state.rendezvous
    rdzv.order = tuple(dict.fromkeys(command.ranks))
    rdzv.order_awaited_until = None
    decision.is_unsettled = True
    return Done()


def _check_rendezvous(command: JoinRendezvous) -> None:
    if command.name not in (TRAINING_RENDEZVOUS, NODE_CHECK_RENDEZVOUS):
        raise Rejected(
            f"There is no rendezvous {command.name!r}. Known are {TRAINING_RENDEZVOUS} and {NODE_CHECK_RENDEZVOUS}.",
            code=ErrorCode.UNKNOWN_RENDEZVOUS,
        )


def _rescale(decision: Decision, former: Limits, limits: Limits) -> None:
    """The limits are other ones now: who is too many goes, and a world that is too large makes room at once.

    A world below a raised minimum goes on until enough nodes are there: stopping it would not help.
    """
    rdzv = decision.state.rendezvous
    sentence = f"the job was scaled from {span_of(former)} to {span_of(limits)} nodes"
    decision.say(f"{sentence[0].upper()}{sentence[1:]}.")
    if rdzv.take_up.size > limits.max_nodes:
        adoption.give_up_claims(decision, sentence)
    if limits.max_nodes < former.max_nodes:  # growing is the rendezvous's own matter
        make_room(decision, sentence)
    decision.announce(decision.on.job_scaled, limits.max_nodes)


def _restart_workers(command: RestartWorkers, decision: Decision) -> Reply:
    rdzv = decision.state.rendezvous
    decision.state.check_running()
    if not rdzv.is_active:
        raise Rejected("No workers run now: the next round is open already.", code=ErrorCode.BAD_STAGE)
    if rdzv.is_held:
        raise Rejected(
            "The rendezvous is blocked: workers that stop now could not start again.", code=ErrorCode.BLOCKED
        )
    if rdzv.finished:
        raise Rejected(
            f"{len(rdzv.finished)} nodes have finished their work and are not started again; the others end by themselves.",
            code=ErrorCode.FINISHED,
        )

    because = command.reason[:MAX_REASON].rstrip(".")
    restart_workers(decision, f"a user asked for a restart of the workers{f': {because}' if because else ''}")
    decision.is_unsettled = True
    return Done()


def end_break(decision: Decision, id_: int) -> None:
    """The deadline of a node whose stream is broken."""
    node = decision.state.nodes.live.get(NodeId(id_))
    gone_at = None if node is None else gone_times(decision.state, [node.id]).get(node.id)
    if node is not None and gone_at is not None and gone_at <= decision.now:
        give_up(decision, node)


def end_drain(decision: Decision, _: int) -> None:
    """The deadline of those who have not left after the end."""
    state = decision.state
    if state.drains_at is not None and state.drains_at <= decision.now:
        for _, node in sorted(state.nodes.live.items()):
            lose(decision, node, NodeLife.GONE, f"{node.label} did not leave in time")


def end_pending(decision: Decision, id_: int) -> None:
    """The deadline of a node that waits beside the world and is too many."""
    leaves_at = pend_timeouts(decision.state).get(NodeId(id_))
    if leaves_at is not None and leaves_at <= decision.now:
        node = decision.state.nodes.live[NodeId(id_)]
        decision.announce(decision.on.node_dismissed, node, _too_many(decision.state))


def _exit_of_leave(reason: LeaveReason) -> NodeExit:
    """What a farewell says about the node."""
    match reason:
        case LeaveReason.PREEMPTED | LeaveReason.STOPPED_BY_USER:
            return NodeExit.KILLED
        case LeaveReason.FAILED:
            return NodeExit.UNKNOWN
        case LeaveReason.DISMISSED | LeaveReason.JOB_ENDED:
            return NodeExit.NONE


def _too_many(state: JobState) -> Leave:
    assert state.terms is not None, "a node waits for a world before any node came"
    limits = state.limits
    return Leave(
        f"a world has at most {limits.max_nodes} nodes, and none had room for this one within {limits.pend_timeout:g} s "
        "(--rdzv-conf pend_timeout). Allow more nodes with --nnodes, or keep it warm with --standby",
        EXIT_RENDEZVOUS_TIMEOUT,
    )


HANDLERS: Handlers = {
    MasterStarted: _master_started,
    JoinRendezvous: _join,
    ReportFinished: report_finished,
    LeaveJob: _leave,
    NodeDisconnected: _node_disconnected,
    NodeSilent: _node_silent,
    StopJob: _stop_job,
    ScaleJob: _scale_job,
    BlockRendezvous: _block,
    UnblockRendezvous: _unblock,
    AwaitOrder: _await_order,
    NodesOrdered: _nodes_ordered,
    RestartWorkers: _restart_workers,
}
