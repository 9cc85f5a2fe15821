"""
Workers have failed: which failure was the first one, whether the job restarts, and whether a node goes.

A round fails once, however many report it. The next round opens with the first report; what others add may only make the blame better.
"""

from __future__ import annotations

import math

from msgspec import UNSET
from msgspec.structs import replace

from dlrover.agreed import worker_failure
from dlrover.core.decision import Decision, Handlers
from dlrover.core.failures import blame
from dlrover.core.failures.blame import Incident
from dlrover.core.happenings import AnotherNode, JobEnds, WorkersFailed
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.fleet import NodeExit
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Done, FailureKind, FirstFailure, Reply, ReportFailure


def report_failure(command: ReportFailure, decision: Decision) -> Reply:
    state, rdzv = decision.state, decision.state.rendezvous
    node = state.nodes.current(command.node, command.incarnation)
    if not command.failures:
        raise malformed("A failure report names at least one failure.")
    if command.round > rdzv.round or command.round < 1:
        raise Rejected(
            f"There was no round {command.round} yet; the newest is {rdzv.round}.", code=ErrorCode.UNKNOWN_ROUND
        )

    # A step that begins anew in each epoch is no sign of how far the node came; its accounts tell the model step.
    node.reached(None if command.reach.is_counting_anew else command.step)
    first = FirstFailure(
        failure=worker_failure.first_of(command.failures),
        node_rank=node.rank,
        host=node.host,
        round=command.round,
        step=command.step,
    )
    incident = state.restarts.incident
    is_known = incident is not None and incident.round == command.round
    if is_known or (decision.is_running(node) and command.round == rdzv.round):
        lived = command.lived if math.isfinite(command.lived) else 0.0
        shape = None if command.shape is UNSET else command.shape
        failed = WorkersFailed(first, lived, command.failures, command.reach, command.has_whole_state, shape)
        decision.announce(decision.on.workers_failed, failed)
    elif node.id in rdzv.take_up.claims and command.round == rdzv.round:
        decision.announce(decision.on.world_unclaimed, f"a worker of {node.label} failed")
    decision.is_unsettled = True
    return Done()


def on_workers_failed(decision: Decision, failed: WorkersFailed) -> None:
    """The first report of a round's failures opens the next round without waiting for the others."""
    state, first = decision.state, failed.first
    known = state.restarts.incident
    if known is not None and known.round == first.round:
        _hear_more(decision, known, failed)
        return
    failed.reason, failed.fault = worker_failure.describe(first), _fault_kind(first)
    incident = Incident(round=first.round, first=first, began_at=decision.now, step=first.step, lived=failed.lived)
    incident.reach, incident.num_records = failed.reach, _num_records(decision)
    incident.is_node_suspect = failed.is_node_suspect
    incident.has_whole_state = failed.has_whole_state
    world = state.rendezvous.world
    incident.world_size = world.world_size if world is not None and world.round == first.round else 0
    blame.count(incident, failed.failures, first.node_rank, first.host)
    state.restarts.incident = incident


def judge_first(decision: Decision, failed: WorkersFailed) -> None:
    """The next round is open: decide as soon as the failure to blame is known."""
    incident = decision.state.restarts.incident
    if not failed.reason or incident is None:
        return
    if worker_failure.is_secondary(incident.first.failure):
        decision.say(f"{failed.reason} The next round opens; the first failure may still be reported.")
    elif not failed.is_hopeless:
        _judge(decision, incident)


def on_round_chosen(decision: Decision) -> None:
    """Charge what led to the round, unless it was the end."""
    state, rdzv, restarts = decision.state, decision.state.rendezvous, decision.state.restarts
    assert state.terms is not None, "a world before any node came"
    incident = restarts.open_incident(rdzv.round)
    if incident is not None and worker_failure.is_secondary(incident.first.failure):
        # No better failure was reported. If a member is missing, that is the cause and nobody's budget pays. A node
        # without power is missed by its peers long before its silence is believed: it just did not come back.
        incident.is_member_lost = any(
            node in rdzv.lost or node in rdzv.expected or not state.nodes.is_connected(node)
            for node in rdzv.group_ranks
        )
        _judge(decision, incident)
    if state.end is None:
        restarts.settle(state.terms.restarts)


def on_job_starts_over(decision: Decision, _: str) -> None:
    if decision.state.restarts.incident is not None:
        decision.state.restarts.incident.is_settled = True


def on_job_ends(decision: Decision, ends: JobEnds) -> None:
    """Say what led to it."""
    incident, first = decision.state.restarts.incident, ends.first
    ends.message = ends.sentence if first is None else f"{worker_failure.describe(first)} {ends.sentence}"
    if incident is not None and first is not None and incident.round == first.round:
        ends.distinct_failures = tuple(incident.distinct)


def on_master_restarted(decision: Decision) -> None:
    if decision.state.restarts.incident is not None:
        decision.state.restarts.incident.master_restarted(decision.now - decision.state.now)


def _hear_more(decision: Decision, incident: Incident, failed: WorkersFailed) -> None:
    """A further report of a round that has failed already. It never costs a second restart."""
    state, first = decision.state, failed.first
    incident.has_whole_state &= failed.has_whole_state
    if blame.count(incident, failed.failures, first.node_rank, first.host) and state.end is not None:
        state.end = replace(state.end, distinct_failures=tuple(incident.distinct))
        decision.is_all_touched = True
    is_late = decision.now - incident.began_at > micros(blame.LATE_FAILURE)
    if is_late and (incident.is_settled or state.end is not None):
        return
    is_better = blame.improve(incident, first)
    if is_better:
        state.goodput.fault_named(_fault_kind(first), worker_failure.describe(first), first)
    if incident.is_settled:
        if is_better:
            decision.say(f"{worker_failure.describe(incident.first)} It was the first failure of the round.")
        return
    had_progress = _had_progress(decision, incident)
    blame.note(incident, first.step, failed.lived, failed.reach)
    incident.num_records = max(incident.num_records, _num_records(decision))
    is_disproven = had_progress and not _had_progress(decision, incident)
    if state.end is not None:
        if state.end.first_failure is not None and is_better:
            message = f"{worker_failure.describe(incident.first)} {state.end_sentence}"
            state.end = replace(state.end, first_failure=incident.first, message=message)
            decision.is_all_touched = True
    elif (
        (is_better or is_disproven) and not worker_failure.is_secondary(incident.first.failure)
    ) or _is_mistake_proven(decision, incident):
        _judge(decision, incident)


def _judge(decision: Decision, incident: Incident) -> None:
    """Restart or end the job after this incident."""
    state = decision.state
    assert state.terms is not None, "workers ran before any node attached"
    restart = blame.decide(state.terms.restarts, state.restarts, incident)
    if restart.is_elsewhere and _is_node_replaced(decision, incident):
        return
    if restart.reason is not None:
        decision.end_job(restart.reason, restart.sentence, first=incident.first)
    else:
        decision.say(f"{worker_failure.describe(incident.first)} {restart.sentence}")


def _had_progress(decision: Decision, incident: Incident) -> bool:
    """
    By the reports so far. A long life without a step counts as progress until another node reports the step.

    The order of reports must not decide: the late step of a life that repeated old ones ends the job as an early one does.
    """
    terms = decision.state.terms
    return terms is not None and blame.made_progress(terms.restarts, decision.state.restarts, incident)


def _is_mistake_proven(decision: Decision, incident: Incident) -> bool:
    terms = decision.state.terms
    return terms is not None and blame.is_script_mistaken(terms.restarts, decision.state.restarts, incident)


def _is_node_replaced(decision: Decision, incident: Incident) -> bool:
    """Where a platform can give another node, that is better than ending, and for a broken device the only way."""
    failure = incident.first.failure
    if incident.is_node_replaced:
        return True
    exit_reason = NodeExit.HARDWARE if worker_failure.is_device_fault(failure) else NodeExit.FATAL
    if incident.is_node_suspect:
        exit_reason = NodeExit.DIAGNOSED
    if worker_failure.is_out_of_memory(failure):
        exit_reason = NodeExit.OOM
    wanted = AnotherNode(incident.first.node_rank, exit_reason, worker_failure.describe(incident.first))
    decision.announce(decision.on.another_node, wanted)
    if wanted.is_given:
        decision.state.restarts.node_replaced(incident)
    return wanted.is_given


def _num_records(decision: Decision) -> int:
    """That are in the model now, of all datasets."""
    return sum(dataset.num_consumed for dataset in decision.state.data.datasets.values())


def _fault_kind(first: FirstFailure) -> str:
    return "hang" if first.failure.kind is FailureKind.DIAGNOSED else "worker"


HANDLERS: Handlers = {ReportFailure: report_failure}
