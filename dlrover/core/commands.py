"""
What each command does: a function per command, and the table of them.

Each function checks first and raises `Rejected`; below the empty line it only changes, and cannot refuse any more. So a
command is applied whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from dlrover.core.check import commands as check_commands
from dlrover.core.check import pre_check
from dlrover.core.checkpoints import break_points, commits
from dlrover.core.data import books as data_books
from dlrover.core.data import commands as data_commands
from dlrover.core.data import restoring as data_restoring
from dlrover.core.decision import Course
from dlrover.core.desired import is_running
from dlrover.core.exchange import kv_store, sync_points
from dlrover.core.failures import blame, hangs, incidents
from dlrover.core.fleet import agents as fleet_agents
from dlrover.core.fleet import commands as fleet_commands
from dlrover.core.fleet import reconcile, targets
from dlrover.core.goodput import accountant
from dlrover.core.membership import adoption, requests
from dlrover.core.membership.nodes import NodeLife, after_outage
from dlrover.core.membership.rendezvous import Joined, RoundBlock
from dlrover.core.membership.rounds import EXIT_RENDEZVOUS_TIMEOUT
from dlrover.core.membership.waiting import gone_times, pend_timeouts
from dlrover.core.outcome import Origin, micros
from dlrover.core.state import JobState
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.check import ReportCheck
from dlrover.protocol.messages.checkpoint import CheckpointCommand
from dlrover.protocol.messages.data import DataCommand
from dlrover.protocol.messages.fleet import NodeExit, ReportNodeError, ScaleJob
from dlrover.protocol.messages.job import (
    NODE_CHECK_RENDEZVOUS,
    TRAINING_RENDEZVOUS,
    Attach,
    Attached,
    AwaitOrder,
    BlockRendezvous,
    Command,
    DeadlineKind,
    DeadlinePassed,
    Done,
    ExitReason,
    FinishJob,
    FirstFailure,
    JobTerms,
    JoinRendezvous,
    Leave,
    LeaveJob,
    LeaveReason,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
    NodesOrdered,
    Reply,
    ReportFailure,
    ReportFinished,
    Stage,
    StopJob,
    UnblockRendezvous,
)
from dlrover.protocol.messages.kv import KvCommand
from dlrover.protocol.messages.sync import SyncCommand

_LARGEST = 2**53
"""No counter of an agent comes near; beyond it is rubbish, and adding to it must not overflow the encoding."""
_MOST_NODES = 1_000_000
_DEEPEST_PLACE = 8
_LONGEST_NAME = 256
LONGEST_BLOCK = 3600.0
"""Seconds: who needs longer says so again."""
_MOST_WORKERS = 65_536
"""On one node. No machine has so many devices, and the sum over all nodes must not overflow the encoding either."""


def check_sender(command: Command, origin: Origin | None) -> None:
    """What a command says of its node must be what the stream says of its sender."""
    if origin is None or not isinstance(command, _FROM_A_NODE):
        return
    if (command.node, command.incarnation) != (origin.node, origin.incarnation):
        raise Rejected(
            f"Node {origin.node} in incarnation {origin.incarnation} may not speak for node {command.node} in "
            f"incarnation {command.incarnation}.",
            code="wrong-sender",
        )


def _master_started(command: MasterStarted, course: Course) -> Reply:
    state = course.state
    if command.master_epoch <= state.master_epoch:
        raise Rejected(
            f"Master epoch {command.master_epoch} is not beyond {state.master_epoch}: another master took over.",
            code="old-epoch",
        )
    if command.job_name and state.job_name and command.job_name != state.job_name:
        raise Rejected(
            f"The journal belongs to job {state.job_name!r}, not to {command.job_name!r}.", code="job-differs"
        )

    state.master_epoch = command.master_epoch
    state.job_name = state.job_name or command.job_name
    state.user = state.user or command.user
    state.nodes.master_restarted(course.now, state.detection)
    if state.terms is not None:
        state.rendezvous.master_restarted(state.terms.limits, state.now, course.now)
    if state.restarts.incident is not None:
        state.restarts.incident.master_restarted(course.now - state.now)
    state.sync.master_restarted(state.now, course.now)
    state.check.master_restarted(state.now, course.now)
    state.checkpoints.master_restarted(state.now, course.now)
    state.data.master_restarted(state.now, course.now)
    if state.drains_at is not None:
        state.drains_at = after_outage(state.drains_at, state.now, course.now)
    if state.fleet is not None:
        reconcile.master_restarted(course)
    # When the newest world began stays as it is: its workers train on without a master.
    course.touch_all()
    if state.end is not None and state.stage is Stage.STOPPED:
        # The former master may have died between its commit and its exit.
        reconcile.issue(course)
        course.effects.append(FinishJob(state.end))
    return Done()


def _attach(command: Attach, course: Course) -> Reply:
    state, nodes = course.state, course.state.nodes
    _check_attach(command)
    fleet_agents.check_attach(state, command)
    command = fleet_agents.rank_for(state, command)
    _check_terms(command, state.terms, is_scaled=state.limits_version > 0)
    if command.master_epoch > max(state.master_epoch, _LARGEST):
        raise Rejected(f"There never was a master epoch {command.master_epoch}.", code="malformed")
    node = nodes.of_launch(command.launch)
    is_older = node is not None and 0 < command.incarnation < node.incarnation
    # The same process, so nobody acts under the newer incarnation yet: its answer was lost on the way.
    is_unheard = is_older and node is not None and command.life != "" and command.life == node.process
    if node is not None and is_older and not is_unheard:
        raise Rejected(
            f"Incarnation {command.incarnation} of {node.label} is over; {node.incarnation} is the newest.",
            code="stale-incarnation",
        )
    holder = None
    if node is None and command.node_rank is not None:
        holder = nodes.holder(command.node_rank)
        is_alive = holder is not None and nodes.is_connected(holder.id)
        # A platform that counts relaunches has given the rank to another node, whatever still seems to be alive.
        is_relaunched = holder is not None and 0 <= holder.foreign_node < command.foreign_node
        is_taken_over = holder is not None and (is_relaunched or fleet_agents.is_taken_over(state, holder, command))
        if holder is not None and is_alive and not is_taken_over:
            raise Rejected(
                f"Node rank {command.node_rank} is asked for by {command.host} and held by {holder.host}, which is "
                "alive. Give each node its own --node-rank, or none.",
                code="rank-held",
            )

    if state.terms is None:
        state.terms = command.terms
    is_life_of_another = node is None and state.rendezvous.world is None and command.world is not None
    if command.master_epoch > state.master_epoch - is_life_of_another:
        # Our journal was lost. Wishes of an epoch below the newest that agents have seen would be refused as outdated;
        # so would those of the same epoch, to a life that goes on and has heard greater numbers of it.
        state.master_epoch = command.master_epoch + 1
        course.touch_all()
    if holder is not None:
        exit_reason = fleet_agents.exit_of_predecessor(state, holder, command)
        fleet_agents.part_with(state, holder, command)
        why = f"{holder.label} is replaced by {command.host}"
        course.send_away(holder, why, exit_reason=exit_reason, is_presumed=True)
    if node is None:
        node = course.admit(command)
    elif node.life is NodeLife.ALIVE and (is_unheard or command.incarnation == node.incarnation):
        course.reattach(node, command)
    else:
        course.renew(node, command)
    fleet_agents.agent_attached(course, node, command)
    course.touch(node.id)
    course.advance()
    return Attached(
        node=node.id,
        node_rank=node.rank,
        incarnation=node.incarnation,
        master_epoch=state.master_epoch,
        job_name=state.job_name,
        now=course.now,
        desired=node.desired,  # `apply` puts in the newest when all wishes are known
    )


def _join(command: JoinRendezvous, course: Course) -> Reply:
    rdzv = course.state.rendezvous
    _check_rendezvous(command)
    node = course.state.nodes.current(command.node, command.incarnation)
    if course.state.end is not None:
        raise Rejected(f"The job has ended: {course.state.end.message}", code="job-ended")
    if node.dismissed is not None:
        raise Rejected(f"{node.label} shall leave: {node.dismissed.reason}.", code="dismissed")
    if not 1 <= command.local_world_size <= _MOST_WORKERS or not command.offer:
        raise Rejected(f"A join needs from 1 to {_MOST_WORKERS} workers and an offer of host:port.", code="malformed")
    if command.name == NODE_CHECK_RENDEZVOUS:
        return check_commands.join(command, course, node)
    if node.id in course.state.check.needed:
        raise Rejected(f"{node.label} must pass the node check before it joins a round.", code="not-checked")
    if command.round != rdzv.next_round or (rdzv.opening is None and rdzv.is_member(node.id)):
        state = "open" if rdzv.opening is not None else "not open"
        raise Rejected(
            f"{node.label} wants to join round {command.round}; round {rdzv.next_round} is next and {state}.",
            code="stale-round",
        )
    if node.finished_round:
        raise Rejected(f"{node.label} has finished in round {node.finished_round}.", code="finished")
    if rdzv.is_offer_used(node.id, command.offer) and not command.is_offer_reused:
        raise Rejected(
            f"{command.offer} served an earlier round; a port is never used for two. Bind another.",
            code="offer-used",
        )

    node.local_world_size = command.local_world_size
    if node.id in rdzv.take_up.claims:
        adoption.give_up_claims(course, f"{node.label} does not run in it any more")
    joined = Joined(node.rank, command.local_world_size, command.offer, node.place, node.group)
    rdzv.join(node.id, joined, course.now, is_connected=course.state.nodes.is_connected(node.id))
    course.touch(node.id)
    course.advance()
    return Done()


def _report_failure(command: ReportFailure, course: Course) -> Reply:
    rdzv, restarts = course.state.rendezvous, course.state.restarts
    node = course.state.nodes.current(command.node, command.incarnation)
    if not command.failures:
        raise Rejected("A failure report names at least one failure.", code="malformed")
    if command.round > rdzv.round or command.round < 1:
        raise Rejected(f"There was no round {command.round} yet; the newest is {rdzv.round}.", code="unknown-round")

    # A step that begins anew in each epoch is no sign of how far the node came; its accounts tell the model step.
    node.reached(None if command.reach.is_counting_anew else command.step)
    lived = command.lived if math.isfinite(command.lived) else 0.0
    first = FirstFailure(
        failure=blame.first_of(command.failures),
        node_rank=node.rank,
        host=node.host,
        round=command.round,
        step=command.step,
    )
    incident = restarts.incident
    if incident is not None and incident.round == command.round:
        incidents.hear_more(course, incident, first, lived, command.failures, reach=command.reach)
    elif is_running(course.state, node) and command.round == rdzv.round:
        incidents.begin(course, first, lived, command.failures, reach=command.reach)
    elif node.id in rdzv.take_up.claims and command.round == rdzv.round:
        adoption.give_up_claims(course, f"a worker of {node.label} failed")
    course.advance()
    return Done()


def _report_finished(command: ReportFinished, course: Course) -> Reply:
    rdzv = course.state.rendezvous
    node = course.state.nodes.current(command.node, command.incarnation)
    if command.round > rdzv.round or command.round < 1:
        raise Rejected(f"There was no round {command.round} yet; the newest is {rdzv.round}.", code="unknown-round")

    node.reached(command.step)
    course.finish_node(node, command.round)
    course.advance()
    return Done()


def _leave(command: LeaveJob, course: Course) -> Reply:
    state = course.state
    node = state.nodes.current(command.node, command.incarnation)

    break_points.promise(course, node.id, command.held)
    why = f"{node.label} left ({command.reason.value})" + (f": {command.message}" if command.message else "")
    is_final = command.reason in (LeaveReason.STOPPED_BY_USER, LeaveReason.FAILED, LeaveReason.JOB_ENDED)
    if state.end is None and list(state.nodes.live) == [node.id] and is_final and state.fleet is None:
        by_user = command.reason is LeaveReason.STOPPED_BY_USER
        # Before it is lost: an end that somebody wanted is no fault that the job would have to recover from.
        course.end_job(
            ExitReason.STOPPED_BY_USER if by_user else ExitReason.WORKER_ERROR,
            f"{why[0].upper()}{why[1:]}, and no other node is there.",
        )
    fault = accountant.STOPPED if command.reason is LeaveReason.STOPPED_BY_USER else "node"
    course.lose(node, NodeLife.LEFT, why, exit_reason=fleet_agents.exit_of_leave(command.reason), fault=fault)
    course.advance()
    return Done()


def _node_disconnected(command: NodeDisconnected, course: Course) -> Reply:
    nodes = course.state.nodes
    node = nodes.current(command.node, command.incarnation)

    node.reached(command.step)
    if nodes.is_connected(node.id):
        nodes.stream_broke(node, course.now, course.detection, is_our_fault=command.is_our_fault)
        course.state.rendezvous.stream_broke(node.id)
    return Done()


def _node_silent(command: NodeSilent, course: Course) -> Reply:
    node = course.state.nodes.current(command.node, command.incarnation)

    silence = (course.now - command.last_seen_at) / micros(1.0)
    why = f"{node.label} was silent for {silence:.0f} s"
    course.lose(node, NodeLife.GONE, why, exit_reason=NodeExit.NO_HEARTBEAT, ended_at=command.last_seen_at)
    course.advance()
    return Done()


def _deadline_passed(command: DeadlinePassed, course: Course) -> Reply:
    """A deadline that is no longer due (somebody joined, came back) is a harmless no-op."""
    state = course.state
    match command.kind:
        case DeadlineKind.NODE_GONE:
            node = state.nodes.live.get(NodeId(command.id))
            gone_at = None if node is None else gone_times(state, [node.id]).get(node.id)
            if node is not None and gone_at is not None and gone_at <= course.now:
                course.give_up(node)
        case DeadlineKind.DRAIN:
            if state.drains_at is not None and state.drains_at <= course.now:
                for _, node in sorted(state.nodes.live.items()):
                    course.lose(node, NodeLife.GONE, f"{node.label} did not leave in time")
        case DeadlineKind.SYNC_TIMEOUT:
            sync_points.expire(course, command.id)
        case DeadlineKind.SAVE_TIMEOUT:
            sentence = commits.expire(course, command.id)
            if sentence:
                course.say(sentence)
        case DeadlineKind.DATA_LEASE:
            sentence = data_books.end_overdue_leases(course, command.id)
            if sentence:
                course.verdicts.append(sentence)
        case DeadlineKind.BREAK_POINT:
            break_points.expire(course, command.id)
        case DeadlineKind.PEND_TIMEOUT:
            leaves_at = pend_timeouts(state).get(NodeId(command.id))
            if leaves_at is not None and leaves_at <= course.now:
                course.dismiss(state.nodes.live[NodeId(command.id)], _too_many(state))
        case DeadlineKind.SMALLER_NODE | DeadlineKind.GROUP_PENDING | DeadlineKind.PS_WAIT if state.fleet is not None:
            targets.hear_deadline(course, command)
        case _:
            pass  # the rendezvous looks at the clock itself, just below
    course.advance()
    return Done()


def _stop_job(command: StopJob, course: Course) -> Reply:
    if course.state.end is None:
        why = f": {command.message}" if command.message else "."
        course.end_job(ExitReason.STOPPED_BY_USER, f"The job was stopped on request{why}")
        course.advance()
    return Done()


def _scale_job(command: ScaleJob, course: Course) -> Reply:
    state = course.state
    if state.end is not None:
        raise Rejected(f"The job has ended: {state.end.message}", code="job-ended")
    if state.terms is None:
        raise Rejected("No node has come yet, and the first one says how many there shall be.", code="not-begun")
    former = state.terms.limits
    try:
        limits = replace(former, min_nodes=command.min_nodes, max_nodes=command.max_nodes)
    except ValueError as error:
        raise Rejected(f"The job cannot be scaled: {error}.", code="bad-limits") from error
    if limits.max_nodes > _MOST_NODES:
        raise Rejected(f"The job cannot have more than {_MOST_NODES} nodes.", code="bad-limits")

    if limits != former:
        state.terms = replace(state.terms, limits=limits)
        state.limits_version += 1
        course.rescale(former)
        course.advance()
    return Done()


def _block(command: BlockRendezvous, course: Course) -> Reply:
    rdzv = course.state.rendezvous
    node = course.state.nodes.current(command.node, command.incarnation)
    if course.state.end is not None:
        raise Rejected(f"The job has ended: {course.state.end.message}", code="job-ended")
    if not command.reason.strip() or not 0 < command.lease <= LONGEST_BLOCK:
        raise Rejected(
            f"A block needs a reason and a lease of up to {LONGEST_BLOCK:g} s, not {command.lease:g}.", code="malformed"
        )

    rdzv.blocks[node.id] = RoundBlock(Micros(course.now + micros(command.lease)), node.label, command.reason.strip())
    course.say(f"The rendezvous is blocked by {node.label} for up to {command.lease:g} s: {command.reason.strip()}.")
    course.advance()
    return Done()


def _unblock(command: UnblockRendezvous, course: Course) -> Reply:
    node = course.state.nodes.current(command.node, command.incarnation)

    if course.state.rendezvous.blocks.pop(node.id, None) is not None:
        course.say(f"The rendezvous is blocked by {node.label} no longer.")
    course.advance()
    return Done()


def _await_order(command: AwaitOrder, course: Course) -> Reply:
    if not 0 < command.limit <= LONGEST_BLOCK:
        raise Rejected(
            f"An order can be awaited for up to {LONGEST_BLOCK:g} s, not {command.limit:g}.", code="malformed"
        )

    if course.state.end is None:
        course.state.rendezvous.order_awaited_until = Micros(course.now + micros(command.limit))
    return Done()


def _nodes_ordered(command: NodesOrdered, course: Course) -> Reply:
    if len(command.ranks) > _MOST_NODES or any(not 0 <= rank <= _LARGEST for rank in command.ranks):
        raise Rejected("The order of the nodes names ranks that cannot be.", code="malformed")

    rdzv = course.state.rendezvous
    rdzv.order = tuple(dict.fromkeys(command.ranks))
    rdzv.order_awaited_until = None
    course.advance()
    return Done()


def _too_many(state: JobState) -> Leave:
    assert state.terms is not None, "somebody waits for a world before anybody came"
    limits = state.terms.limits
    return Leave(
        f"a world has at most {limits.max_nodes} nodes, and none had room for this one within {limits.pend_timeout:g} s "
        "(--rdzv-conf pend_timeout). Allow more nodes with --nnodes, or keep it warm with --standby",
        EXIT_RENDEZVOUS_TIMEOUT,
    )


def _check_rendezvous(command: JoinRendezvous) -> None:
    if command.name not in (TRAINING_RENDEZVOUS, NODE_CHECK_RENDEZVOUS):
        raise Rejected(
            f"There is no rendezvous {command.name!r}. Known are {TRAINING_RENDEZVOUS} and {NODE_CHECK_RENDEZVOUS}.",
            code="unknown-rendezvous",
        )


def _check_attach(command: Attach) -> None:
    counters = (command.incarnation, command.running_round, command.node_rank or 0, command.former_rank or 0)
    is_size_sane = 1 <= command.local_world_size <= _MOST_WORKERS
    if not command.launch or not is_size_sane or min(counters) < 0 or max(counters) > _LARGEST:
        raise Rejected(
            f"An attach needs a launch, from 1 to {_MOST_WORKERS} workers, and no negative or absurd number in "
            "node_rank, incarnation and running_round.",
            code="malformed",
        )
    is_place_sane = len(command.place) <= _DEEPEST_PLACE and all(len(name) <= _LONGEST_NAME for name in command.place)
    are_names_sane = all(len(name) <= _LONGEST_NAME for name in (command.peer, command.name, command.node_ip))
    are_numbers_sane = max(abs(command.group), abs(command.foreign_node)) <= _LARGEST
    if not (is_place_sane and are_names_sane and are_numbers_sane):
        raise Rejected(
            f"A place has at most {_DEEPEST_PLACE} levels. Its names, the node's name and addresses have at most "
            f"{_LONGEST_NAME} characters, and group and number of a node are small.",
            code="malformed",
        )


def _check_terms(command: Attach, terms: JobTerms | None, *, is_scaled: bool) -> None:
    """A differing shutdown timeout harms nobody: each agent stops its own workers by its own.

    Nor do the numbers of nodes once somebody has scaled the job: nodes come with those of the command line.
    """
    if terms is None:
        return
    free = {"shutdown_timeout", "min_nodes", "max_nodes"} if is_scaled else {"shutdown_timeout"}
    differences = _differences(terms, command.terms, free)
    if differences:
        raise Rejected(
            f"{command.host} was started with other options than the job: {'; '.join(differences)}. Start all nodes "
            "alike.",
            code="terms-differ",
        )


def _differences(ours: Struct, theirs: Struct, free: Container[str]) -> list[str]:
    """In words, field by field; those in `free` may differ."""
    found: list[str] = []
    for field in ours.__struct_fields__:
        here, there = getattr(ours, field), getattr(theirs, field)
        if isinstance(here, Struct) and type(here) is type(there):
            found += _differences(here, there, free)
        elif here != there and field not in free:
            found.append(f"{field} is {here!r} in the job and {there!r} there")
    return found


_FROM_A_NODE = (
    JoinRendezvous,
    ReportFailure,
    ReportFinished,
    LeaveJob,
    BlockRendezvous,
    UnblockRendezvous,
    ReportNodeError,
    KvCommand,
    SyncCommand,
    DataCommand,
    ReportCheck,
    CheckpointCommand,
)
"""Commands that name the node which sends them."""

HANDLERS: dict[type[Command], Callable[[Any, Course], Reply]] = {
    MasterStarted: _master_started,
    Attach: _attach,
    JoinRendezvous: _join,
    ReportFailure: _report_failure,
    ReportFinished: _report_finished,
    LeaveJob: _leave,
    NodeDisconnected: _node_disconnected,
    NodeSilent: _node_silent,
    DeadlinePassed: _deadline_passed,
    StopJob: _stop_job,
    ScaleJob: _scale_job,
    BlockRendezvous: _block,
    UnblockRendezvous: _unblock,
    AwaitOrder: _await_order,
    NodesOrdered: _nodes_ordered,
    **fleet_commands.HANDLERS,
    **kv_store.HANDLERS,
    **check_commands.HANDLERS,
    **sync_points.HANDLERS,
    **commits.HANDLERS,
    **data_commands.HANDLERS,
    **data_restoring.HANDLERS,
    **accountant.HANDLERS,
    **hangs.HANDLERS,
    **requests.HANDLERS,
    **pre_check.HANDLERS,
}
"""A test holds it against the union of commands."""
