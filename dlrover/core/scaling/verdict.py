"""
One look at the size of the job: candidates, the brake that holds each, and a sentence.

`decide` is a pure function of evidence and facts. What follows from it is done by `commands`.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.core.scaling import allreduce, brakes
from dlrover.core.scaling.allreduce import Size
from dlrover.core.scaling.brakes import WORKERS, HeldBack, Promise
from dlrover.core.scaling.facts import ScaleFacts
from dlrover.core.scaling.fit.model import Fit
from dlrover.core.scaling.state import Scaling
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import Micros
from dlrover.protocol.messages.scaling import (
    MOST_CANDIDATES_SHOWN,
    Brake,
    Optimizer,
    PlanOffered,
    ScaleCandidate,
    ScaleOutcome,
    SizePlan,
)


class ScaleVerdict(Struct, frozen=True, kw_only=True):
    outcome: ScaleOutcome
    sentence: str
    plan: SizePlan | None = None
    """None: nothing changes."""
    kind: str = WORKERS
    direction: int = 0
    nodes: int = 0
    """That train then."""
    expected_speed: float = 0.0
    least_ratio: float = 0.97
    brake: Brake = Brake.NONE
    opens_at: Micros | None = None
    candidates: tuple[ScaleCandidate, ...] = ()
    fit: Fit | None = None


TOLERANCE = 0.97
"""A change may be so much worse than it has to be before it is taken back: less cannot be told from chance."""


def decide_world(scaling: Scaling, facts: ScaleFacts, offer: PlanOffered | None = None) -> ScaleVerdict:
    """For a job whose workers form one world."""
    configuration = facts.configuration
    is_planned = scaling.terms.optimizer is not Optimizer.NONE
    fit = None if configuration is None else allreduce.fit_of(scaling, configuration)
    sizes = allreduce.sizes(scaling, facts, fit) if is_planned else []
    offered = None if offer is None or not facts.speed else _offered(offer, facts)
    if offered is not None:
        sizes = [offered, *(size for size in sizes if size.nodes != offered.nodes)]
    held = brakes.of_job(scaling, facts, WORKERS)
    shown = [_candidate(scaling, facts, size, held) for size in sizes[:MOST_CANDIDATES_SHOWN]]
    candidates = tuple(candidate for candidate, _ in shown)
    if held is not None:
        return _held(held, candidates, fit, f"The job keeps {_nodes(facts.nodes)}: {held.why}.")
    wanted = [size for size in sizes if size.is_wanted or size is offered]
    waits: list[HeldBack] = []
    for size in wanted:
        brake = brakes.of_plan(scaling, facts, _promise(scaling, facts, size))
        if brake is None:
            return _planned(scaling, facts, size, candidates, fit, offer if size is offered else None)
        waits.append(brake)
    if waits:
        first, opens = waits[0], [brake.opens_at for brake in waits if brake.opens_at is not None]
        sentence = f"The job keeps {_nodes(facts.nodes)}: {_text(wanted[0].nodes)} would be next, but {first.why}."
        return _held(HeldBack(first.brake, first.why, min(opens, default=None)), candidates, fit, sentence)
    return ScaleVerdict(
        outcome=ScaleOutcome.RESTED, sentence=_why_rest(scaling, facts, sizes), candidates=candidates, fit=fit
    )


def _offered(offer: PlanOffered, facts: ScaleFacts) -> Size | None:
    group = offer.plan.group(NodeType.WORKER)
    if group is None or group.count is None or group.count == facts.nodes:
        return None
    return Size(group.count, offer.expected_speed, True)


def _promise(scaling: Scaling, facts: ScaleFacts, size: Size) -> Promise:
    ratio = size.nodes / facts.nodes
    gain = ratio - 1 if size.is_try else size.speed / facts.speed - 1
    if size.is_try and ratio < 1:
        gain = 0.0
    return Promise(
        plan=allreduce.plan_of(size.nodes),
        kind=WORKERS,
        direction=1 if ratio > 1 else -1,
        gain=gain,
        saving=max(0.0, 1 - ratio),
        bound=_bound(facts, size.nodes),
        objective="" if size.is_wanted else _objective(scaling, size.nodes, facts.nodes, gain),
    )


def _bound(facts: ScaleFacts, nodes: int) -> str:
    limits = facts.limits
    if not limits.min_nodes <= nodes <= limits.max_nodes:
        return f"the job has {limits.min_nodes} to {limits.max_nodes} nodes"
    if nodes % limits.node_unit:
        return f"the number of nodes is a multiple of {limits.node_unit}"
    if nodes > facts.most_by_limits:
        return f"the job's resource limits allow {facts.most_by_limits} nodes"
    if facts.room is not None and nodes > max(facts.room, limits.min_nodes):
        return f"the platform has room for {facts.room} nodes"
    return ""


def _objective(scaling: Scaling, nodes: int, former: int, gain: float) -> str:
    scale_for = scaling.terms.scale_for
    demanded = allreduce.least_ratio(nodes, former, scale_for) - 1
    if nodes < former and scale_for.value != "cost":
        return f"a job that scales for {scale_for.value} does not shrink by itself"
    return f"it promises {gain:+.1%} speed, and {scale_for.value} demands {demanded:+.1%}"


def _candidate(
    scaling: Scaling, facts: ScaleFacts, size: Size, held: HeldBack | None
) -> tuple[ScaleCandidate, HeldBack | None]:
    promise = _promise(scaling, facts, size)
    brake = held or brakes.of_plan(scaling, facts, promise)
    candidate = ScaleCandidate(
        plan=promise.plan,
        text=_text(size.nodes),
        nodes=size.nodes,
        speed=size.speed,
        gain=promise.gain,
        resources=size.nodes / facts.nodes,
        cost=facts.cost,
        brake=Brake.NONE if brake is None else brake.brake,
        why="" if brake is None else brake.why,
    )
    return candidate, brake


def _held(held: HeldBack, candidates: tuple[ScaleCandidate, ...], fit: Fit | None, sentence: str) -> ScaleVerdict:
    return ScaleVerdict(
        outcome=ScaleOutcome.HELD,
        sentence=sentence,
        brake=held.brake,
        opens_at=held.opens_at,
        candidates=candidates,
        fit=fit,
    )


def _planned(
    scaling: Scaling,
    facts: ScaleFacts,
    size: Size,
    candidates: tuple[ScaleCandidate, ...],
    fit: Fit | None,
    offer: PlanOffered | None,
) -> ScaleVerdict:
    share = allreduce.least_ratio(size.nodes, facts.nodes, scaling.terms.scale_for)
    change = f"{_nodes(size.nodes)} instead of {facts.nodes}"
    if offer is not None:
        sentence = f"{change}, as {offer.source} proposes: {offer.sentence or 'it gives no reason'}"
    elif size.is_try:
        why = "" if fit is None else f" ({fit.why_unused})"
        sentence = f"{change}, to see what that brings{why}; {facts.speed:.4g} records/s now"
    else:
        sentence = (
            f"{change}: {size.speed:.4g} records/s are expected and {facts.speed:.4g} are measured "
            f"({size.speed / facts.speed - 1:+.0%})"
        )
    return ScaleVerdict(
        outcome=ScaleOutcome.PLANNED,
        sentence=f"{sentence.rstrip('.')}.",
        plan=allreduce.plan_of(size.nodes),
        direction=1 if size.nodes > facts.nodes else -1,
        nodes=size.nodes,
        expected_speed=size.speed,
        least_ratio=TOLERANCE * share,
        candidates=candidates,
        fit=fit,
    )


def _why_rest(scaling: Scaling, facts: ScaleFacts, sizes: list[Size]) -> str:
    if not allreduce.is_changeable(scaling, facts):
        return f"The job keeps {_nodes(facts.nodes)}: its number of nodes is fixed."
    others = [size for size in sizes if not size.is_try]
    if not others:
        most = f"; {facts.most} are allowed now" if facts.nodes >= facts.most else ""
        return f"The job keeps {_nodes(facts.nodes)}: there is nothing else to try{most}."
    best = others[0]
    gain = best.speed / facts.speed - 1
    verb = "fits" if facts.nodes == 1 else "fit"
    return (
        f"{_nodes(facts.nodes)} {verb} {scaling.terms.scale_for.value} best: {best.nodes} would make {best.speed:.4g} records/s "
        f"against {facts.speed:.4g} ({gain:+.0%}) with {best.nodes / facts.nodes - 1:+.0%} nodes."
    )


def _text(nodes: int) -> str:
    return _nodes(nodes)


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"
