"""
What follows from a look at the size of the job: a plan is begun, watched, kept or taken back, and everything is said.
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.decision import Decision
from dlrover.core.happenings import PlanMade, TargetMoved
from dlrover.core.scaling import allreduce, brakes, facts, probation, stragglers, tuning
from dlrover.core.scaling.brakes import HOUR, SERVERS, TUNING, WORKERS
from dlrover.core.scaling.facts import ScaleFacts
from dlrover.core.scaling.probation import Judgement
from dlrover.core.scaling.servers import deciding as servers
from dlrover.core.scaling.servers import plans
from dlrover.core.scaling.state import MAX_DECISIONS, OwnChange, Probation, Scaling
from dlrover.core.scaling.verdict import TOLERANCE, ScaleVerdict, decide_world
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import Micros, PlatformId, micros
from dlrover.protocol.messages.job import LookAgain
from dlrover.protocol.messages.scaling import (
    MAX_SENTENCE,
    Brake,
    PlanOffered,
    ScaleDecision,
    ScaleMode,
    ScaleOutcome,
    SizePlan,
    Tuner,
)
from dlrover.protocol.messages.watch import StepShape

TOPIC = "tuning"
FIRST_REFUSAL = 300.0
LONGEST_REFUSAL = 3600.0
_PASSING = (Brake.UNDER_WAY, Brake.UNSEEN, Brake.COOL_DOWN)
"""Brakes that hold after each change for a minute or so: no news."""


def look(decision: Decision, offer: PlanOffered | None = None) -> None:
    """Judge the change that is being watched, if there is one; else decide about the next."""
    _give_up_exchanges(decision)
    _look(decision, offer)
    scaling = decision.state.scaling
    if scaling.exchanges:
        times = [*scaling.exchanges.values(), *([] if scaling.look_at is None else [scaling.look_at])]
        scaling.look_at = min(times)


def _look(decision: Decision, offer: PlanOffered | None) -> None:
    state, scaling = decision.state, decision.state.scaling
    scaling.look_at = None
    is_tuned = scaling.terms.tuner is not Tuner.OFF
    if state.end is not None or (scaling.mode is ScaleMode.OFF and not is_tuned):
        return
    known = facts.gather(state, decision.now)
    if scaling.probation is not None and (not known.off or scaling.probation.kind == TUNING):
        judgement = probation.judge(scaling, known)
        if judgement is not None:
            _carry(decision, known, judgement)
            if judgement.outcome is ScaleOutcome.TAKEN_BACK:
                return
            known = facts.gather(state, decision.now)
    if scaling.probation is not None:
        scaling.look_at = probation.ends_at(scaling, scaling.probation)
        return
    _follow(decision, known, _decide(decision, known, offer))


def _decide(decision: Decision, known: ScaleFacts, offer: PlanOffered | None) -> ScaleVerdict:
    state, scaling = decision.state, decision.state.scaling
    is_one_world = state.fleet is None or facts.is_world(state)
    exchange = stragglers.decide(state, known) if is_one_world and offer is None else None
    if exchange is not None:
        return exchange
    verdict = decide_world(scaling, known, offer) if is_one_world else servers.decide(state, known, offer)
    if verdict.plan is None and (verdict.outcome is ScaleOutcome.RESTED or verdict.brake is Brake.OFF):
        tuned = tuning.decide(scaling, known)
        return verdict if tuned is None else tuned
    return verdict


def _follow(decision: Decision, known: ScaleFacts, verdict: ScaleVerdict) -> None:
    scaling = decision.state.scaling
    if verdict.opens_at is not None and verdict.opens_at > decision.now:
        scaling.look_at = verdict.opens_at
    if verdict.plan is None:
        _record(decision, _decision_of(scaling, decision.now, known, verdict))
    elif scaling.mode is ScaleMode.DRY_RUN and verdict.kind != TUNING:
        dry = replace(verdict, outcome=ScaleOutcome.DRY, sentence=f"Dry run, nothing changes: {verdict.sentence}")
        _record(decision, _decision_of(scaling, decision.now, known, dry))
    else:
        _record(decision, _decision_of(scaling, decision.now, known, verdict))
        begin(decision, known, verdict)


def begin(decision: Decision, known: ScaleFacts, verdict: ScaleVerdict) -> None:
    """Carry a plan out, and watch it."""
    scaling, plan = decision.state.scaling, verdict.plan
    assert plan is not None, "nothing to carry out"
    if not verdict.least_ratio:
        _repair(decision, verdict)
        return
    back = _back_of(decision, plan, known)
    scaling.probation = Probation(
        number=scaling.num_decisions,
        at=decision.now,
        kind=verdict.kind,
        plan=plan,
        back=back,
        nodes_before=known.nodes,
        nodes_after=verdict.nodes or known.nodes,
        speed_before=known.speed,
        expected_speed=verdict.expected_speed,
        least_ratio=verdict.least_ratio,
        cores_before=plans.cores_before(decision.state, plan) if verdict.kind == SERVERS else {},
    )
    _changed(scaling, verdict.kind, verdict.direction, decision.now)
    scaling.look_at = probation.ends_at(scaling, scaling.probation)
    _carry_out(decision, plan, verdict.sentence)


def _repair(decision: Decision, verdict: ScaleVerdict) -> None:
    """An exchange that prevents a failure, or an offer that others answer for: it is not judged by speed."""
    scaling, plan = decision.state.scaling, verdict.plan
    assert plan is not None, "nothing to carry out"
    number = scaling.number_at_change
    _changed(scaling, verdict.kind, 0, decision.now)
    scaling.number_at_change = number  # the nodes are as many as before, and so is their run
    if any(node.memory_mb is not None for node in plan.nodes):
        scaling.memory.pop(NodeType.PS, None)
    fleet = decision.state.fleet
    until = Micros(decision.now + micros(scaling.terms.longest_probation))
    for planned in plan.nodes:
        scaling.exchanges[planned.platform_node] = until
        if verdict.kind == WORKERS and fleet is not None and planned.platform_node in fleet.nodes:
            stragglers.note(scaling, fleet.nodes[planned.platform_node].rank, decision.now)
    _carry_out(decision, plan, verdict.sentence)


def _back_of(decision: Decision, plan: SizePlan, known: ScaleFacts) -> SizePlan:
    if plan.micro_batch is not None:
        offered = decision.state.scaling.tuning
        former = known.configuration
        batch = offered.micro_batch or (0 if former is None else former.micro_batch)
        accumulation = offered.accumulation or (1 if former is None else former.accumulation)
        return SizePlan(micro_batch=batch or None, accumulation=accumulation)
    if facts.is_world(decision.state):
        return allreduce.plan_of(known.nodes)
    return plans.back_of(decision.state, plan)


def _carry_out(decision: Decision, plan: SizePlan, why: str) -> None:
    state = decision.state
    if tuning.is_tuning(plan):
        offer_tuning(decision, plan)
        return
    group = plan.group(NodeType.WORKER)
    if facts.is_world(state) and group is not None and group.count is not None:
        move_target(decision, group.count, why)
        return
    decision.announce(decision.on.plan_made, PlanMade(plan, _part(why)))
    decision.is_unsettled = True


def offer_tuning(decision: Decision, plan: SizePlan) -> None:
    """The workers take it when their ranks have agreed on its version."""
    scaling, newest = decision.state.scaling, decision.state.scaling.newest
    former = scaling.tuning.micro_batch or (0 if newest is None else newest.configuration.micro_batch)
    is_scaled = scaling.terms.tuner is Tuner.HISTORICAL and plan.micro_batch and former
    factor = tuning.rate_factor(plan.micro_batch, former) if is_scaled and plan.micro_batch else 1.0
    scaling.tuning = tuning.offered(scaling.tuning, plan, former, factor)
    decision.effects.append(LookAgain((TOPIC,)))


def shrink_batch(decision: Decision, told: StepShape | None) -> None:
    """A device ran out of memory: half of the micro-batch from now on, and never again as much. `told`: by the worker itself."""
    scaling = decision.state.scaling
    if scaling.terms.tuner is not Tuner.MEMORY:
        return
    batch, records = tuning.failed_batch(scaling, told)
    if 0 < scaling.tuning.micro_batch < batch:
        return  # another node told of it before, or the worker began before the smaller one had come
    plan = tuning.halved(batch, records)
    if plan is None:
        decision.say(
            "A device ran out of memory, and the micro-batch stays: it is not known, or no smaller one keeps the records of a step."
        )
        return
    scaling.refused_batch = min(batch, scaling.refused_batch or batch)
    if scaling.probation is not None and scaling.probation.kind == TUNING:
        scaling.probation = None
    note_change(scaling, decision.now)
    scaling.changed_kinds[TUNING] = decision.now
    decision.say(f"A device ran out of memory with a micro-batch of {batch}: it is {plan.micro_batch} from now on.")
    offer_tuning(decision, plan)


def move_target(decision: Decision, nodes: int, why: str) -> None:
    """The world shall have so many nodes."""
    state = decision.state
    former, state.scaling.target = state.limits.max_nodes, nodes
    decision.announce(decision.on.target_moved, TargetMoved(former, nodes, _part(why)))
    decision.is_unsettled = True


def _changed(scaling: Scaling, kind: str, direction: int, now: Micros) -> None:
    """A change of our own begins."""
    note_change(scaling, now)
    scaling.changed_kinds[kind] = now
    scaling.num_changes[kind] = scaling.num_changes.get(kind, 0) + 1
    older = [change for change in scaling.own_changes if change.at <= now - micros(HOUR)]
    recent = [change for change in scaling.own_changes if change.at > now - micros(HOUR)]
    scaling.own_changes = [*older[-1:], *recent, OwnChange(at=now, kind=kind, direction=direction)]


def note_change(scaling: Scaling, now: Micros) -> None:
    scaling.changed_at = now
    scaling.number_at_change = 0 if scaling.newest is None else scaling.newest.number


def _carry(decision: Decision, known: ScaleFacts, judgement: Judgement) -> None:
    """The end of a probation."""
    scaling, watched = decision.state.scaling, decision.state.scaling.probation
    assert watched is not None, "nothing was on probation"
    scaling.probation = None
    _note_result(scaling, watched, judgement.speed)
    back_to = judgement.back_to or watched.nodes_before
    _record(
        decision,
        ScaleDecision(
            number=0,
            at=decision.now,
            outcome=judgement.outcome,
            sentence=judgement.sentence,
            plan=watched.plan,
            nodes_before=watched.nodes_before,
            nodes_after=back_to if judgement.outcome is ScaleOutcome.TAKEN_BACK else watched.nodes_after,
            speed_before=watched.speed_before,
            expected_speed=watched.expected_speed,
            speed_after=judgement.speed,
        ),
    )
    if judgement.outcome is ScaleOutcome.KEPT:
        scaling.refusals = 0
    if judgement.outcome is not ScaleOutcome.TAKEN_BACK:
        is_unfinished = watched.kind == WORKERS and known.nodes < watched.nodes_after and known.under_way
        if judgement.outcome is ScaleOutcome.UNJUDGED and is_unfinished:
            _give_up_growth(decision, watched, f"the platform did not bring {watched.nodes_after} nodes in time")
        return
    brakes.refuse(scaling, watched.plan, watched.nodes_after, decision.now)
    _take_back(decision, watched, judgement)


def _take_back(decision: Decision, watched: Probation, judgement: Judgement) -> None:
    scaling, now = decision.state.scaling, decision.now
    direction = -1 if watched.nodes_after > watched.nodes_before else int(watched.nodes_after < watched.nodes_before)
    if watched.kind != WORKERS:
        direction = -next((each.direction for each in reversed(scaling.own_changes) if each.kind == watched.kind), 0)
    known = facts.gather(decision.state, now)
    if direction > 0 and watched.kind == WORKERS and watched.nodes_before > known.most:
        decision.say(f"There is no room for {watched.nodes_before} nodes any more, so the job keeps {known.nodes}.")
        return
    _changed(scaling, watched.kind, direction, now)
    scaling.look_at = None
    if not judgement.back_to:
        back = plans.with_nodes(decision.state, watched) if watched.kind == SERVERS else watched.back
        _carry_out(decision, back, judgement.sentence)
        return
    ratio = allreduce.least_ratio(judgement.back_to, watched.nodes_before, scaling.terms.scale_for)
    scaling.probation = Probation(
        number=scaling.num_decisions,
        at=now,
        kind=WORKERS,
        plan=allreduce.plan_of(judgement.back_to),
        back=watched.back,
        nodes_before=watched.nodes_before,
        nodes_after=judgement.back_to,
        speed_before=watched.speed_before,
        expected_speed=0.0,
        least_ratio=TOLERANCE * ratio,
    )
    scaling.look_at = probation.ends_at(scaling, scaling.probation)
    _carry_out(decision, scaling.probation.plan, judgement.sentence)


def obey_room(decision: Decision) -> bool:
    """A room that is smaller than the job is an order: no brake is asked. Whether it was given."""
    state, scaling = decision.state, decision.state.scaling
    known = facts.gather(state, decision.now)
    is_changeable = facts.is_world(state) and allreduce.is_changeable(
        scaling, replace(known, nodes=max(1, known.nodes))
    )
    target = state.limits.max_nodes
    if known.off or scaling.terms.ignore_room or not is_changeable or known.room is None or known.most >= target:
        return False
    seen = scaling.room.get(NodeType.WORKER)
    reason = f" ({seen.reason})" if seen is not None and seen.reason else ""
    short = f", fewer than the minimum of {known.limits.min_nodes}" if known.room < known.limits.min_nodes else ""
    sentence = (
        f"The platform has room for {known.room} nodes{reason}{short}: the job goes from {target} to {known.most}."
    )
    is_dry = scaling.mode is ScaleMode.DRY_RUN
    _record(
        decision,
        ScaleDecision(
            number=0,
            at=decision.now,
            outcome=ScaleOutcome.DRY if is_dry else ScaleOutcome.PLANNED,
            sentence=f"Dry run, nothing changes: {sentence}" if is_dry else sentence,
            plan=allreduce.plan_of(known.most),
            nodes_before=target,
            nodes_after=known.most,
            speed_before=known.speed,
        ),
    )
    if not is_dry:
        scaling.probation = None
        note_change(scaling, decision.now)
        move_target(decision, known.most, sentence)
    return True


def _give_up_growth(decision: Decision, watched: Probation, why: str) -> None:
    """The platform does not bring what a plan asked for: the plan ends, and the platform is not asked again for a while."""
    scaling = decision.state.scaling
    scaling.refusals += 1
    seconds = min(LONGEST_REFUSAL, FIRST_REFUSAL * 2 ** min(scaling.refusals - 1, 10))
    scaling.no_room_until = Micros(decision.now + micros(seconds))
    scaling.no_room_beyond = watched.nodes_before
    scaling.probation = None
    scaling.own_changes = [change for change in scaling.own_changes if change.at != watched.at]  # it never came about
    scaling.changed_kinds[watched.kind] = decision.now
    note_change(scaling, decision.now)
    sentence = (
        f"The job goes back to {watched.nodes_before} nodes, because {why}; it asks again in {seconds / 60:.0f} min."
    )
    decision.say(sentence)
    scaling.look_at = scaling.no_room_until
    move_target(decision, watched.nodes_before, sentence)


def _give_up_exchanges(decision: Decision) -> None:
    """Of an exchange whose new node never comes: the old one stays."""
    scaling, fleet = decision.state.scaling, decision.state.fleet
    for old, until in list(scaling.exchanges.items()):
        new = None if fleet is None else fleet.migrations.get(old)
        if fleet is None or new is None or not fleet.nodes[new].is_pending:
            del scaling.exchanges[old]  # it was made, or is about to be
        elif decision.now >= until:
            _call_off(decision, old, f"no other node came in {scaling.terms.longest_probation:.0f} s")


def _call_off(decision: Decision, old: PlatformId, why: str) -> None:
    scaling, fleet = decision.state.scaling, decision.state.fleet
    assert fleet is not None, "an exchange is one of a fleet"
    node = fleet.nodes[old]
    del scaling.exchanges[old]
    scaling.changed_kinds[WORKERS if node.node_type is NodeType.WORKER else SERVERS] = decision.now
    decision.say(f"{node.label[:1].upper()}{node.label[1:]} stays, because {why}.")
    decision.announce(decision.on.exchange_called_off, old)
    decision.is_unsettled = True


def on_launch_refused(decision: Decision, node: PlatformId, reason: str) -> None:
    state, watched = decision.state, decision.state.scaling.probation
    fleet = state.fleet
    old = next(
        (one for one in state.scaling.exchanges if fleet is not None and fleet.migrations.get(one) == node), None
    )
    if old is not None:
        _call_off(decision, old, f"the platform refuses another node: {reason.rstrip('.')}")
        return
    if watched is None or watched.kind != WORKERS or state.fleet is None or not facts.is_world(state):
        return
    is_growing = watched.nodes_after > watched.nodes_before and facts.num_training(state) < watched.nodes_after
    if is_growing and state.scaling.mode is ScaleMode.ON:
        _give_up_growth(decision, watched, f"the platform refuses a node: {reason.rstrip('.')}")


def _note_result(scaling: Scaling, watched: Probation, speed: float) -> None:
    scaling.decisions = [
        replace(each, speed_after=speed) if each.number == watched.number else each for each in scaling.decisions
    ]


def _decision_of(scaling: Scaling, now: Micros, known: ScaleFacts, verdict: ScaleVerdict) -> ScaleDecision:
    return ScaleDecision(
        number=0,
        at=now,
        outcome=verdict.outcome,
        sentence=verdict.sentence[:MAX_SENTENCE],
        plan=SizePlan() if verdict.plan is None else verdict.plan,
        brake=verdict.brake,
        nodes_before=known.nodes,
        nodes_after=verdict.nodes or known.nodes,
        speed_before=known.speed,
        expected_speed=verdict.expected_speed,
    )


def _record(decision: Decision, made: ScaleDecision) -> None:
    """Of decisions that say the same again and again, the newest is kept. Only what is new is said."""
    scaling = decision.state.scaling
    scaling.num_decisions += 1
    made = replace(made, number=scaling.num_decisions)
    scaling.num_outcomes[made.outcome] = scaling.num_outcomes.get(made.outcome, 0) + 1
    last = scaling.decisions[-1] if scaling.decisions else None
    is_quiet = made.outcome in (ScaleOutcome.HELD, ScaleOutcome.RESTED, ScaleOutcome.DRY)
    if last is not None and is_quiet and _sameness(last) == _sameness(made):
        scaling.decisions = [*scaling.decisions[:-1], made]
        return
    if last is not None and last.brake in _PASSING:
        scaling.decisions = scaling.decisions[:-1]
    scaling.decisions = [*scaling.decisions, made][-MAX_DECISIONS:]
    if made.brake not in _PASSING:
        decision.say(made.sentence)


def _sameness(made: ScaleDecision) -> tuple[object, ...]:
    return made.outcome, made.brake, made.plan, made.nodes_before


def _part(sentence: str) -> str:
    """As the reason in another sentence."""
    text = sentence.rstrip(".")
    return f"the job scales itself: {text[:1].lower()}{text[1:]}" if text else "the job scales itself"
