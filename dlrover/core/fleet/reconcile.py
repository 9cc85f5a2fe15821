"""
At the end of each command: the platform is asked for what is wanted now, and a job without a future ends.

Intents are state. They become effects here, once for each master and each list of the platform, so that a lost one is
asked for again and none is asked for before it is known what exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover.core.fleet import early_stop, life_cycle
from dlrover.core.fleet.fleet import Fleet, FleetNode, Removal, Replicas
from dlrover.core.membership.nodes import after_outage
from dlrover.core.membership.rendezvous import num_usable
from dlrover.protocol.messages.fleet import NodePhase, NodeType
from dlrover.protocol.messages.job import ExitReason, Micros

if TYPE_CHECKING:  # a course calls us
    from dlrover.core.decision import Course
    from dlrover.core.state import JobState

_TRAINING = (NodeType.CHIEF, NodeType.WORKER)
"""Types that use the parameter servers; an evaluator reads what they have saved."""
_WORKERS = (*_TRAINING, NodeType.EVALUATOR)
"""Types whose end is the end of the job; parameter servers would serve for ever."""


def settle(course: Course) -> None:
    """Ask the platform for what is wanted now, and end the job if it has no future."""
    state, fleet = course.state, course.state.fleet
    if fleet is None:
        return
    if state.end is None:
        early_stop.note_shortage(state, course.now)
        early_stop.note_idleness(fleet, course.now)
        note_awaited(state)
        _end_if_over(course, fleet)
    if state.end is None:
        _dismiss_servers(course, fleet)
        sentence = early_stop.describe(state)
        if sentence and not fleet.verdict:
            course.say(sentence)  # how many are missing changes with each that comes: the newest is in the status
        elif fleet.verdict and not sentence:
            course.say("Enough workers run now.")
        fleet.verdict = sentence
    issue(course)
    fleet.forget_oldest()


def issue(course: Course) -> None:
    """Open intents become effects, once for each master and each list. Nothing is launched before we know what is there."""
    state, fleet = course.state, course.state.fleet
    if fleet is None:
        return
    for node in [fleet.nodes[id_] for id_ in fleet.to_remove]:
        course.effects.append(fleet.removal_of(node, state.master_epoch))
    fleet.to_remove = {}
    if state.end is not None or fleet.is_suspended or not fleet.is_listed:
        return
    for node in [fleet.nodes[id_] for id_ in fleet.to_launch]:
        node.asked_at = course.now if node.asked_at is None else node.asked_at
        course.effects.append(fleet.launch_of(node, state.master_epoch))
    fleet.to_launch = {}


def master_restarted(course: Course) -> None:
    """What exists is not known any more; the clocks that end the job leave the nodes their window for coming back."""
    state, fleet = course.state, life_cycle.fleet_of(course)
    ends_at = early_stop.shortage_ends_at(state)
    if ends_at is not None and fleet.short_since is not None:
        fleet.short_since = Micros(fleet.short_since + after_outage(ends_at, state.now, course.now) - ends_at)
    fleet.master_restarted()


def job_ended(course: Course) -> None:
    """Nodes on which nobody works any more go at once, the others when their agents have left."""
    fleet = course.state.fleet
    for node in list(() if fleet is None else fleet.nodes.values()):
        if not node.is_released and node.agent is None:
            life_cycle.let_go(course, node, "the job has ended")


def job_finished(course: Course) -> None:
    """Everybody has left: nothing of the job shall remain on the platform."""
    fleet = course.state.fleet
    if fleet is None:
        return
    for node in list(fleet.nodes.values()):
        node.agent = None
        if not node.is_released:
            fleet.release(node, course.now)
        fleet.remove(node, Removal("the job has ended"))
    issue(course)


def is_work_left_beside(state: JobState) -> bool:
    """Beside a world whose workers have all finished: chiefs and evaluators work for themselves, and to their own end."""
    fleet = state.fleet
    if fleet is None:
        return False
    others = [node for kind in (NodeType.CHIEF, NodeType.EVALUATOR) for node in fleet.live_nodes(kind)]
    return any(node.phase is NodePhase.RUNNING or _keeps_job_alive(fleet, node) for node in others)


def _end_if_over(course: Course, fleet: Fleet) -> None:
    state = course.state
    stop = early_stop.judge(state, course.now)
    if stop is not None:
        course.wants_end(*stop)
    if course.ending is None and _have_exited(fleet, _WORKERS):
        if any(fleet.replicas[kind].finished for kind in _WORKERS if kind in fleet.replicas):
            course.wants_end(ExitReason.COMPLETED, "The nodes of all workers have ended.")
        else:
            course.wants_end(ExitReason.UNKNOWN_ERROR, "The nodes of all workers have ended, and none of them well.")
    if course.ending is not None:
        course.end_job(*course.ending)


def is_training_over(fleet: Fleet) -> bool:
    """The chief has finished, and nobody trains any more; there may still be somebody who evaluates."""
    chief = fleet.replicas.get(NodeType.CHIEF)
    return chief is not None and bool(chief.finished) and _have_exited(fleet, _TRAINING)


def _dismiss_servers(course: Course, fleet: Fleet) -> None:
    """Nobody uses the parameter servers any more. Who still waits to train never got resources, and would find none."""
    servers = fleet.replicas.get(NodeType.PS)
    if servers is None or not servers.num_live or not is_training_over(fleet):
        return
    course.say(
        "The chief has finished and no worker is left, so the parameter servers are let go; the evaluation goes on."
    )
    for kind in (*_TRAINING, NodeType.PS):
        for node in list(fleet.live_nodes(kind)):
            node.is_critical = False
            life_cycle.let_go(course, node, "the training is over")
    fleet.servers.dismissed()


def _have_exited(fleet: Fleet, kinds: tuple[NodeType, ...]) -> bool:
    """Nobody of them works, and nobody will."""
    groups = [fleet.replicas[kind] for kind in kinds if kind in fleet.replicas]
    if any(replicas.running for replicas in groups) or not any(_has_ended(replicas) for replicas in groups):
        return False
    waiting = [fleet.nodes[node] for replicas in groups for node in replicas.pending]
    return not any(_keeps_job_alive(fleet, node) for node in waiting)


def _keeps_job_alive(fleet: Fleet, waiting: FleetNode) -> bool:
    """Nodes of low priority that never got resources do not, beside others."""
    return waiting.priority != "low" or fleet.replicas[waiting.node_type].spec.priority == "low"


def _has_ended(replicas: Replicas) -> bool:
    return bool(replicas.finished or replicas.abandoned)


def note_awaited(state: JobState) -> None:
    """The rendezvous does not give up on nodes that the platform is about to bring. Also asked as soon as a round opens."""
    rdzv, fleet, terms = state.rendezvous, state.fleet, state.terms
    if fleet is None or terms is None:
        return
    limits, num_pending = terms.limits, len(fleet.workers.pending)
    rdzv.num_pending_launches = num_pending if early_stop.num_there(state, fleet) < limits.min_nodes else 0
    num_met = num_usable(len(rdzv.waiting) + rdzv.num_coming, limits)
    is_asked_for = bool(rdzv.finished) and rdzv.opening is not None and num_met < limits.min_nodes
    rdzv.num_unattached = len(fleet.coming_ranks()) if is_asked_for else 0
