"""
At the end of each command: the platform is asked for what is wanted now, and a job without a future ends.

Intents are state. They become effects here, once for each master and each list of the platform, so that a lost one is
asked for again and none is asked for before it is known what exists.
"""

from __future__ import annotations

from dlrover.core.decision import Decision
from dlrover.core.fleet import early_stop, life_cycle
from dlrover.core.fleet.fleet import Fleet
from dlrover.core.fleet.replicas import FleetNode, Removal, Replicas
from dlrover.core.happenings import AllFinished, JobEnds, RoundOpened
from dlrover.core.membership.nodes import after_outage
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodePhase, NodeType
from dlrover.protocol.messages.job import ExitReason, Micros, Stage

_TRAINING = (NodeType.CHIEF, NodeType.WORKER)
"""Types that use the parameter servers; an evaluator reads what they have saved."""
_WORKERS = (*_TRAINING, NodeType.EVALUATOR)
"""Types whose end is the end of the job; parameter servers would serve for ever."""


def advance(decision: Decision) -> bool:
    """Ask the platform for what is wanted now, and end the job if it has no future."""
    state, fleet = decision.state, life_cycle.fleet_of(decision)
    if state.end is None:
        early_stop.note_shortage(state, decision.now)
        early_stop.note_idleness(fleet, decision.now)
        note_awaited(state)
        _end_if_over(decision, fleet)
    if state.end is None:
        _dismiss_servers(decision, fleet)
        sentence = early_stop.describe(state)
        if sentence and not fleet.verdict:
            decision.say(sentence)  # how many are missing changes with each that comes: the newest is in the status
        elif fleet.verdict and not sentence:
            decision.say("Enough workers run now.")
        fleet.verdict = sentence
    issue(decision)
    fleet.forget_oldest()
    return False


def issue(decision: Decision) -> None:
    """Open intents become effects, once for each master and each list. Nothing is launched before we know what is there."""
    state, fleet = decision.state, life_cycle.fleet_of(decision)
    for node in [fleet.nodes[id_] for id_ in fleet.to_remove]:
        decision.effects.append(fleet.removal_of(node, state.master_epoch))
    fleet.to_remove = {}
    if state.end is not None or fleet.is_suspended or not fleet.is_listed:
        return
    for node in [fleet.nodes[id_] for id_ in fleet.to_launch]:
        node.asked_at = decision.now if node.asked_at is None else node.asked_at
        decision.effects.append(fleet.launch_of(node, state.master_epoch))
    fleet.to_launch = {}


def on_master_restarted(decision: Decision) -> None:
    """What exists is not known any more; the clocks that end the job leave the nodes their window for coming back."""
    state, fleet = decision.state, life_cycle.fleet_of(decision)
    ends_at = early_stop.shortage_ends_at(state)
    if ends_at is not None and fleet.short_since is not None:
        fleet.short_since = Micros(fleet.short_since + after_outage(ends_at, state.now, decision.now) - ends_at)
    fleet.master_restarted()
    if state.stage is Stage.STOPPED:
        issue(decision)  # the former master may have died between its commit and its exit


def on_round_opened(decision: Decision, _: RoundOpened) -> None:
    note_awaited(decision.state)


def on_job_ends(decision: Decision, _: JobEnds) -> None:
    """Nodes on which no worker works any more go at once, the others when their agents have left."""
    for node in list(life_cycle.fleet_of(decision).nodes.values()):
        if not node.is_released and node.agent is None:
            life_cycle.let_go(decision, node, "the job has ended")


def on_job_finished(decision: Decision) -> None:
    """All nodes have left: nothing of the job shall remain on the platform."""
    fleet = life_cycle.fleet_of(decision)
    for node in list(fleet.nodes.values()):
        node.agent = None
        if not node.is_released:
            fleet.release(node, decision.now)
        fleet.remove(node, Removal("the job has ended"))
    issue(decision)


def on_all_finished(decision: Decision, finished: AllFinished) -> None:
    """Beside a world whose workers have all finished: chiefs and evaluators work for themselves, and to their own end."""
    fleet = life_cycle.fleet_of(decision)
    others = [node for kind in (NodeType.CHIEF, NodeType.EVALUATOR) for node in fleet.live_nodes(kind)]
    finished.is_work_left = any(node.phase is NodePhase.RUNNING or _keeps_job_alive(fleet, node) for node in others)


def _end_if_over(decision: Decision, fleet: Fleet) -> None:
    state = decision.state
    stop = early_stop.judge(state, decision.now)
    if stop is not None:
        life_cycle.wants_end(decision, *stop)
    if decision.ending is None and not fleet.is_released and _have_exited(fleet, _WORKERS):
        if any(fleet.replicas[kind].finished for kind in _WORKERS if kind in fleet.replicas):
            life_cycle.wants_end(decision, ExitReason.COMPLETED, "The nodes of all workers have ended.")
        else:
            life_cycle.wants_end(
                decision, ExitReason.UNKNOWN_ERROR, "The nodes of all workers have ended, and none of them well."
            )
    if decision.ending is not None:
        decision.end_job(*decision.ending)


def is_training_over(fleet: Fleet) -> bool:
    """The chief has finished, and no worker trains any more; an evaluator may still run."""
    chief = fleet.replicas.get(NodeType.CHIEF)
    return chief is not None and bool(chief.finished) and _have_exited(fleet, _TRAINING)


def _dismiss_servers(decision: Decision, fleet: Fleet) -> None:
    """No worker uses the parameter servers any more. Who still waits to train never got resources, and would find none."""
    servers = fleet.replicas.get(NodeType.PS)
    if servers is None or not servers.num_live or not is_training_over(fleet):
        return
    decision.say(
        "The chief has finished and no worker is left, so the parameter servers are let go; the evaluation goes on."
    )
    for kind in (*_TRAINING, NodeType.PS):
        for node in list(fleet.live_nodes(kind)):
            node.is_critical = False
            life_cycle.let_go(decision, node, "the training is over")
    fleet.servers.dismissed()


def _have_exited(fleet: Fleet, kinds: tuple[NodeType, ...]) -> bool:
    """None of them works, and none will."""
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
    limits, num_pending = state.limits, len(fleet.workers.pending)
    rdzv.num_pending_launches = num_pending if early_stop.num_there(state, fleet) < limits.min_nodes else 0
    num_met = limits.num_usable(len(rdzv.waiting) + rdzv.num_coming)
    is_asked_for = bool(rdzv.finished) and rdzv.opening is not None and num_met < limits.min_nodes
    rdzv.num_unattached = len(fleet.coming_ranks()) if is_asked_for else 0
    is_growing = state.scaling.target is not None and rdzv.is_active and bool(rdzv.waiting)
    rdzv.num_growing = len(fleet.coming_ranks()) + len(rdzv.expected) if is_growing else 0
