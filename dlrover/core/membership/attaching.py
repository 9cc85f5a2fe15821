"""
Agents that come: an unknown launch, the same life on a new stream, or a new life of a known one.
"""

from __future__ import annotations

from collections.abc import Container

from msgspec import Struct

from dlrover.core.decision import Decision, Handlers
from dlrover.core.happenings import AgentComes, RankContested, WorkersFailed
from dlrover.core.membership import adoption
from dlrover.core.membership.departures import finish, send_away
from dlrover.core.membership.nodes import Node, NodeLife
from dlrover.core.membership.rounds import expect, open_round
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    FailureKind,
    FirstFailure,
    JobTerms,
    NodeRank,
    Reply,
    StopCause,
    WorkerFailure,
)

MOST_WORKERS = 65_536
"""On one node. No machine has so many devices, and the sum over all nodes must not overflow the encoding either."""
LARGEST = 2**53
"""No counter of an agent comes near; beyond it is rubbish, and adding to it must not overflow the encoding."""
_DEEPEST_PLACE = 8
_LONGEST_NAME = 256
_SIGKILL = 9


def _attach(command: Attach, decision: Decision) -> Reply:
    state, nodes = decision.state, decision.state.nodes
    _check_attach(command)
    coming = AgentComes(command)
    decision.announce(decision.on.agent_comes, coming)
    command = coming.command
    _check_terms(command, state.terms, is_scaled=state.limits_version > 0)
    if command.master_epoch > max(state.master_epoch, LARGEST):
        raise malformed(f"There never was a master epoch {command.master_epoch}.")
    node = nodes.of_launch(command.launch)
    is_older = node is not None and 0 < command.incarnation < node.incarnation
    # The same process, so nobody acts under the newer incarnation yet: its answer was lost on the way.
    is_unheard = is_older and node is not None and command.life != "" and command.life == node.process
    if node is not None and is_older and not is_unheard:
        raise Rejected(
            f"Incarnation {command.incarnation} of {node.label} is over; {node.incarnation} is the newest.",
            code=ErrorCode.STALE_INCARNATION,
        )
    holder = None
    if node is None and command.node_rank is not None:
        holder = nodes.holder(command.node_rank)
        is_alive = holder is not None and nodes.is_connected(holder.id)
        # A platform that counts relaunches has given the rank to another node, whatever still seems to be alive.
        is_relaunched = holder is not None and 0 <= holder.foreign_node < command.foreign_node
        if holder is not None and is_alive and not is_relaunched and not _is_taken_over(decision, holder, command):
            raise Rejected(
                f"Node rank {command.node_rank} is asked for by {command.host} and held by {holder.host}, which is "
                "alive. Give each node its own --node-rank, or none.",
                code=ErrorCode.RANK_HELD,
            )

    if state.terms is None:
        state.terms = command.terms
        decision.rooms_changed()
        decision.announce(decision.on.terms_set)
    is_life_of_another = node is None and state.rendezvous.world is None and command.world is not None
    if command.master_epoch > state.master_epoch - is_life_of_another:
        # Our journal was lost. Wishes of an epoch below the newest that agents have seen would be refused as outdated;
        # so would those of the same epoch, to a life that goes on and has heard greater numbers of it.
        state.master_epoch = command.master_epoch + 1
        decision.is_all_touched = True
    if holder is not None:
        why = f"{holder.label} is replaced by {command.host}"
        send_away(decision, holder, why, is_presumed=True, successor=command.platform_node)
    if node is None:
        node = _admit(decision, command)
    elif node.life is NodeLife.ALIVE and (is_unheard or command.incarnation == node.incarnation):
        _reattach(decision, node, command)
    else:
        _renew(decision, node, command)
    decision.announce(decision.on.agent_attached, node, command)
    decision.touch(node.id)
    decision.is_unsettled = True
    return Attached(
        node=node.id,
        node_rank=node.rank,
        incarnation=node.incarnation,
        master_epoch=state.master_epoch,
        job_name=state.job_name,
        now=decision.now,
        desired=node.desired,  # `apply` puts in the newest when all wishes are known
    )


def _is_taken_over(decision: Decision, holder: Node, command: Attach) -> bool:
    contested = RankContested(holder, command)
    decision.announce(decision.on.rank_contested, contested)
    return contested.is_taken_over


def _admit(decision: Decision, command: Attach) -> Node:
    """An unknown launch becomes a node, and is asked to join."""
    state, nodes, rdzv = decision.state, decision.state.nodes, decision.state.rendezvous
    rank = command.node_rank if command.node_rank is not None else _rank_for(decision, command)
    former = nodes.former.get(rank)
    if former is not None:
        state.replay_guard.forget(former.id)
    claim = None if state.cluster is not None else adoption.hear_claim(decision, command, rank)
    node = nodes.admit(command, rank, is_continued=claim is not None)
    if claim is not None:
        rdzv.take_up.add(node.id, claim)
    state.replay_guard.begin(node.id, node.incarnation)
    if state.end is None and state.cluster is None:
        _hear_finished(decision, node, command)
        if not node.finished_round and claim is None:
            expect(decision, node)
        _open_first(decision)
    return node


def _open_first(decision: Decision) -> None:
    """No node has a world, so there is none that would have to lose it before a round opens."""
    rdzv = decision.state.rendezvous
    if rdzv.world is None and rdzv.opening is None:
        open_round(decision, StopCause.MEMBERSHIP, "the job begins")


def _rank_for(decision: Decision, command: Attach) -> NodeRank:
    """The one it had before, if no other node has it by now."""
    nodes, former = decision.state.nodes, command.former_rank
    if former is not None and former not in nodes.holders and former not in nodes.former:
        return former
    return nodes.lowest_free_rank()


def _reattach(decision: Decision, node: Node, command: Attach) -> None:
    """The same life on a new stream: nothing restarts. Or one that never heard of its new incarnation."""
    decision.state.nodes.broken.pop(node.id, None)
    decision.state.rendezvous.stream_back(node.id)
    node.host = command.host
    node.peer = command.peer
    node.process = command.life
    _hear_finished(decision, node, command)


def _renew(decision: Decision, node: Node, command: Attach) -> None:
    """A new life of the agent: the workers of the old one are dead."""
    state, rdzv = decision.state, decision.state.rendezvous
    was_running = decision.is_running(node)
    # It was asked back and has not come: as far as anybody knows its workers ran until the agent died.
    was_stopping = node.id in rdzv.expected and rdzv.is_member(node.id)
    state.nodes.renew(node, command)
    decision.announce(decision.on.agent_gone, node)
    decision.announce(decision.on.node_unexpected, node)
    state.replay_guard.begin(node.id, node.incarnation)
    rdzv.blocks.pop(node.id, None)
    if state.end is not None or node.dismissed is not None or state.cluster is not None:
        return
    _hear_finished(decision, node, command)
    if node.finished_round:
        return
    if node.id in rdzv.take_up.claims:
        adoption.give_up_claims(decision, f"the agent of {node.label} was restarted, its workers are dead")
    has_incident = state.restarts.open_incident(rdzv.round) is not None
    if not was_running:
        expect(decision, node)
        _open_first(decision)  # all were lost while the job was begun anew
    if was_running or (was_stopping and has_incident):  # others may have told first that they lost this one
        failure = WorkerFailure(
            global_rank=rdzv.spec(node.id).first_global_rank,
            local_rank=0,
            pid=0,
            kind=FailureKind.SIGNAL,
            signal=_SIGKILL,
            exited_at=decision.now,
            message="the agent of the node was restarted and its workers died with the old one",
        )
        first = FirstFailure(failure=failure, node_rank=node.rank, host=node.host, round=rdzv.round, step=node.step)
        decision.announce(
            decision.on.workers_failed,
            WorkersFailed(first, (decision.now - rdzv.completed_at) / micros(1.0), (failure,)),
        )


def _hear_finished(decision: Decision, node: Node, command: Attach) -> None:
    """The report may have been lost with the stream, or with a journal."""
    if command.is_finished and command.running_round and decision.state.cluster is not None:
        decision.announce(decision.on.task_finished, node, command.running_round)
    elif command.is_finished and command.running_round:
        finish(decision, node, command.running_round, has_more_to_say=True)


def _check_attach(command: Attach) -> None:
    counters = (command.incarnation, command.running_round, command.node_rank or 0, command.former_rank or 0)
    is_size_sane = 1 <= command.local_world_size <= MOST_WORKERS
    if not command.launch or not is_size_sane or min(counters) < 0 or max(counters) > LARGEST:
        raise malformed(
            f"An attach needs a launch, from 1 to {MOST_WORKERS} workers, and no negative or too large number in "
            "node_rank, incarnation and running_round."
        )
    is_place_sane = len(command.place) <= _DEEPEST_PLACE and all(len(name) <= _LONGEST_NAME for name in command.place)
    are_names_sane = all(len(name) <= _LONGEST_NAME for name in (command.peer, command.name, command.node_ip))
    are_numbers_sane = max(abs(command.group), abs(command.foreign_node)) <= LARGEST
    if not (is_place_sane and are_names_sane and are_numbers_sane):
        raise malformed(
            f"A place has at most {_DEEPEST_PLACE} levels. Its names, the node's name and addresses have at most "
            f"{_LONGEST_NAME} characters, and group and number of a node are small."
        )


def _check_terms(command: Attach, terms: JobTerms | None, *, is_scaled: bool) -> None:
    """A differing shutdown timeout does no harm: each agent stops its own workers by its own.

    Nor do the numbers of nodes once the job was scaled: nodes come with those of the command line.
    """
    if terms is None:
        return
    free = {"shutdown_timeout", "min_nodes", "max_nodes"} if is_scaled else {"shutdown_timeout"}
    differences = _differences(terms, command.terms, free)
    if differences:
        raise Rejected(
            f"{command.host} was started with other options than the job: {'; '.join(differences)}. Start all nodes "
            "alike.",
            code=ErrorCode.TERMS_DIFFER,
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


HANDLERS: Handlers = {Attach: _attach}
