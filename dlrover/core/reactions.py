"""
Who reacts to what, and in which order: the only module that knows all rooms.

A room imports `decision`, `happenings`, `membership.nodes` and itself. What it announces is handed to the rows here, one after the other, before the
announcing function goes on. To add a room:

1. Put its state into a struct without functions of other rooms, and give `JobState` a field of it.
2. Write a function for each command (`HANDLERS` of the room) and question (`ANSWERS`), and add both tables below.
3. Write `on_…(decision, happening)` for what it has to know (a node is lost, a round opens, the job ends), and add a row where its turn is.
4. If time alone changes something in it, export `deadlines(state)`, and a function for `PASSED` that says what follows then.
5. If it can go on by itself after any command, export `advance(decision)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dlrover.core.check import commands as check
from dlrover.core.check import pre_check
from dlrover.core.checkpoints import break_points, commits
from dlrover.core.clusters import commands as clusters
from dlrover.core.data import commands as data
from dlrover.core.data import cuts, restoring
from dlrover.core.decision import MOST_PASSES, Answers, Decision, Handlers, Reactions, Tables, rooms_of
from dlrover.core.desired import tell_nodes
from dlrover.core.exchange import commands as exchange
from dlrover.core.failures import hangs, incidents
from dlrover.core.fleet import agents, early_stop, life_cycle, reconcile, targets
from dlrover.core.fleet import commands as fleet
from dlrover.core.goodput import booking
from dlrover.core.membership import adoption, attaching, departures, rounds, waiting
from dlrover.core.membership import commands as membership
from dlrover.core.outcome import Deadline
from dlrover.core.scaling import acting
from dlrover.core.scaling import commands as scaling
from dlrover.core.state import JobState
from dlrover.protocol.messages.job import (
    Command,
    DeadlineKind,
    DeadlinePassed,
    Done,
    Micros,
    NodeId,
    Reply,
    ReportFailure,
    ReportFinished,
)

F = TypeVar("F", bound=Callable[..., object])


def _table(*, has_platform: bool, has_checks: bool) -> Reactions:
    """For a job with nodes of a platform, or with node checks, or without: then these rooms are not asked."""

    def platform(*rows: F) -> tuple[F, ...]:
        return rows if has_platform else ()

    def checks(*rows: F) -> tuple[F, ...]:
        return rows if has_checks else ()

    return Reactions(
        master_restarted=(
            membership.on_master_restarted,
            incidents.on_master_restarted,
            exchange.on_master_restarted,
            check.on_master_restarted,
            commits.on_master_restarted,
            data.on_master_restarted,
            clusters.on_master_restarted,
            *platform(reconcile.on_master_restarted),
        ),
        agent_comes=(agents.on_agent_comes, clusters.on_agent_comes),
        terms_set=(clusters.on_terms_set, scaling.on_terms_set),
        task_finished=(clusters.on_task_finished,),
        cluster_looks=platform(agents.on_cluster_looks),
        cluster_settled=platform(targets.on_cluster_settled),
        cut_taken=(cuts.on_cut_taken,),
        cut_counts=(cuts.on_cut_counts,),
        model_returns=(cuts.on_model_returns,),
        rank_contested=platform(agents.on_rank_contested),
        agent_attached=platform(agents.on_agent_attached),
        agent_gone=(exchange.on_workers_ended, data.on_workers_ended, commits.on_agent_gone),
        joins_check=(check.on_joins_check,),
        node_expected=checks(check.on_node_expected),
        node_unexpected=checks(check.on_node_unexpected),
        node_finished=(
            exchange.on_workers_ended,
            *checks(check.on_node_unexpected),
            *platform(agents.on_node_finished),
        ),
        workers_ended=(data.on_workers_ended,),
        all_finished=(*platform(reconcile.on_all_finished), data.on_all_finished),
        node_leaves=(break_points.on_node_leaves,),
        node_lost=(
            *checks(check.on_node_lost),
            departures.on_node_lost,  # the next round may open
            booking.on_node_lost,
            *platform(agents.on_node_lost),
        ),
        node_released=(departures.send_away,),
        node_succeeded=(departures.on_node_succeeded,),
        node_dismissed=(departures.on_node_dismissed,),
        node_excluded=platform(agents.on_node_excluded),
        nodes_overdue=platform(agents.on_nodes_overdue),
        node_exchanged=(commits.on_node_exchanged,),
        another_node=platform(life_cycle.on_another_node),
        pre_check_over=(pre_check.on_pre_check_over,),
        round_opened=(
            booking.on_round_opened,
            *platform(reconcile.on_round_opened),
            *checks(check.on_round_opened),
        ),
        round_chosen=(incidents.on_round_chosen,),
        round_completed=(
            *platform(agents.on_round_completed),
            booking.on_round_completed,
            exchange.on_round_completed,
            data.on_round_completed,
        ),
        workers_failed=(
            incidents.on_workers_failed,
            rounds.on_workers_failed,  # the next round opens
            incidents.judge_first,
            scaling.on_workers_failed,
        ),
        world_unclaimed=(adoption.give_up_claims,),
        fleet_defined=(scaling.on_fleet_defined,),
        job_grows=platform(fleet.on_job_grows),
        job_scaled=platform(targets.on_job_scaled),
        target_moved=(
            rounds.on_target_moved,  # a smaller world meets again
            *platform(targets.on_target_moved),
        ),
        plan_made=platform(targets.on_plan_made),
        exchange_called_off=platform(targets.on_exchange_called_off),
        memory_ran_out=platform(scaling.on_memory_ran_out),
        workers_grown=platform(targets.on_workers_grown),
        bounds_moved=(scaling.on_bounds_moved,),
        person_decided=(scaling.on_person_decided,),
        world_taken_up=(scaling.on_world_taken_up,),
        launch_refused=platform(acting.on_launch_refused),
        job_starts_over=(
            check.on_job_over,
            incidents.on_job_starts_over,
            exchange.on_job_starts_over,
            data.on_job_starts_over,
            rounds.on_job_starts_over,  # the next round opens
        ),
        job_pauses=(check.on_job_over, rounds.on_job_pauses),
        checkpoint_counts=(data.on_checkpoint_counts,),
        model_restored=(commits.on_model_restored,),
        job_ends=(
            data.on_job_ends,
            incidents.on_job_ends,
            departures.on_job_ends,  # the job is over
            check.on_job_over,
            *platform(reconcile.on_job_ends),
        ),
        job_finished=(booking.on_job_finished, *platform(reconcile.on_job_finished)),
        advance=(
            *checks(check.advance),
            *platform(clusters.advance, reconcile.advance),
            departures.advance,
            rounds.advance,
        ),
        deadlines=(
            waiting.deadlines,
            *checks(check.deadlines),
            exchange.deadlines,
            commits.deadlines,
            data.deadlines,
            scaling.deadlines,
            *platform(clusters.deadlines, early_stop.deadlines),
        ),
    )


TABLES: Tables = {
    (one, two): _table(has_platform=one, has_checks=two) for one in (False, True) for two in (False, True)
}
PASSED: dict[DeadlineKind, Callable[[Decision, int], None]] = {
    DeadlineKind.NODE_GONE: membership.end_break,
    DeadlineKind.DRAIN: membership.end_drain,
    DeadlineKind.PEND_TIMEOUT: membership.end_pending,
    DeadlineKind.SYNC_TIMEOUT: exchange.expire,
    DeadlineKind.SAVE_TIMEOUT: commits.expire,
    DeadlineKind.BREAK_POINT: break_points.expire,
    DeadlineKind.CLUSTER_PHASE: clusters.expire,
    DeadlineKind.DATA_LEASE: data.end_overdue_leases,
    DeadlineKind.SMALLER_NODE: targets.make_smaller,
    DeadlineKind.GROUP_PENDING: targets.move_group,
    DeadlineKind.PS_WAIT: targets.stop_waiting_for_server,
    DeadlineKind.SCALING: scaling.look_again,
}
"""What follows when a deadline has passed. The others only make `advance` look, which looks at the clock itself."""


def decide(command: Command, decision: Decision) -> Reply:
    """
    Apply the command and what follows from it, or raise `Rejected` with nothing changed.

    If something changed that may let them, the rooms go on by themselves until nothing changes any more. At last the nodes get their new wishes.
    """
    state, rdzv = decision.state, decision.state.rendezvous
    former = (rdzv.world, rdzv.opening)
    reply = HANDLERS[type(command)](command, decision)
    for _ in range(MOST_PASSES if decision.is_unsettled else 0):
        for go_on in decision.on.advance:
            if go_on(decision):
                break  # all look again
        else:
            break
    else:
        assert not decision.is_unsettled, f"nothing settles after {MOST_PASSES} passes: {decision.verdicts}"
    changed = tell_nodes(decision)
    if (rdzv.world, rdzv.opening) != former:  # the same wish to wait means another thing now
        changed = list(dict.fromkeys([*changed, *rdzv.waiting, *rdzv.absent]))
    booking.follow(state, changed, decision.now)
    return reply


def passed_deadlines(state: JobState, now: Micros) -> list[Deadline]:
    """Those that have passed, in their order."""
    nodes = [
        node
        for node, broken in state.nodes.broken.items()
        if broken.broken_at is not None or broken.gone_at <= now  # the first may depend on the others
    ]
    return sorted(deadline for deadline in _running(state, nodes) if deadline.at <= now)


def next_deadline(state: JobState) -> Micros | None:
    """
    When the first of all passes.

    Asked in each turn of the master. Under a new one all nodes wait for the same moment, ten thousand perhaps: they are only
    glanced at.
    """
    of_known: list[NodeId] = []
    times: list[Micros] = []
    for node, broken in state.nodes.broken.items():
        if broken.broken_at is None:
            times.append(broken.gone_at)
        else:
            of_known.append(node)
    times += [deadline.at for deadline in _running(state, of_known)]
    return min(times, default=None)


def _running(state: JobState, nodes: list[NodeId]) -> list[Deadline]:
    """In no order; of the nodes without a stream only those that are asked for."""
    found = waiting.deadlines_of(state, nodes)
    if state.end is None:
        rooms = TABLES[rooms_of(state)].deadlines
        found.extend(each for deadlines in rooms for each in deadlines(state))
    return found


def _deadline_passed(command: DeadlinePassed, decision: Decision) -> Reply:
    """A deadline that is no longer due (a node joined or came back) is a harmless no-op."""
    follow = PASSED.get(command.kind)
    if follow is not None:
        follow(decision, command.id)
    decision.is_unsettled = True
    return Done()


def _report_failure(command: ReportFailure, decision: Decision) -> Reply:
    """Of workers of a world, or of the process of a node in a cluster."""
    is_cluster = decision.state.cluster is not None
    return clusters.report_failure(command, decision) if is_cluster else incidents.report_failure(command, decision)


def _report_finished(command: ReportFinished, decision: Decision) -> Reply:
    is_cluster = decision.state.cluster is not None
    return clusters.report_finished(command, decision) if is_cluster else membership.report_finished(command, decision)


HANDLERS: Handlers = {
    DeadlinePassed: _deadline_passed,
    **attaching.HANDLERS,
    **membership.HANDLERS,
    **incidents.HANDLERS,
    **hangs.HANDLERS,
    **fleet.HANDLERS,
    **check.HANDLERS,
    **pre_check.HANDLERS,
    **exchange.HANDLERS,
    **commits.HANDLERS,
    **data.HANDLERS,
    **restoring.HANDLERS,
    **booking.HANDLERS,
    **clusters.HANDLERS,
    **scaling.HANDLERS,
    ReportFailure: _report_failure,
    ReportFinished: _report_finished,
}
"""What each command does. A test holds it against the union of commands."""

ANSWERS: Answers = {
    **fleet.ANSWERS,
    **exchange.ANSWERS,
    **commits.ANSWERS,
    **data.ANSWERS,
    **clusters.ANSWERS,
    **scaling.ANSWERS,
}
