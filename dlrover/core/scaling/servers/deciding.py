"""
How many workers and servers a job with parameter servers should have, and of which size.

In this order: a server whose memory will not last is exchanged before it fails; one that is much busier than the others gets more cores; if all are busy there are
more of them; if one is idle and the job still long, it gets fewer cores. Then the numbers (`search`). The user's number of workers is a cap, and the user's
size of servers stays where it is one.
"""

from __future__ import annotations

import math

from dlrover.core.scaling import brakes, facts, rules
from dlrover.core.scaling.allreduce import LEAST_GAIN, LEAST_SAVING
from dlrover.core.scaling.brakes import SERVERS, Promise
from dlrover.core.scaling.facts import ScaleFacts
from dlrover.core.scaling.fit.model import fit_servers, median
from dlrover.core.scaling.servers.plans import (
    cores_given,
    excess_of,
    held,
    judged,
    measured_servers,
    repair,
    watched,
)
from dlrover.core.scaling.servers.search import cores_of_all, decide_numbers, demanded, sample_of
from dlrover.core.scaling.servers.short_memory import short_server
from dlrover.core.scaling.verdict import ScaleVerdict
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import (
    Brake,
    NodeUse,
    Optimizer,
    PlannedGroup,
    PlannedNode,
    PlanOffered,
    ScaleOutcome,
    SizePlan,
)

HOT = 0.9
HOTTER = 1.5
"""Times the median of the others."""
WATCHED = 180.0
"""Seconds for which a server has to be hot or idle; less where a configuration is seen for less than a minute: three times as long as that."""
IDLE = 0.4
LEAST_LEFT = 3600.0
IDLE_MARGIN = 4
_URGENT = (Brake.OFF, Brake.UNDER_WAY, Brake.MANUAL_HOLD, Brake.COOL_DOWN)
"""Brakes that hold even what prevents a failure."""


def decide(state: JobState, known: ScaleFacts, offer: PlanOffered | None = None) -> ScaleVerdict:
    scaling = state.scaling
    brake = brakes.of_job(scaling, known, SERVERS)
    is_changeable = NodeType.PS in scaling.terms.types
    if is_changeable and (brake is None or brake.brake not in _URGENT):
        found = _short_memory(state)
        if found is not None:
            return found
    if brake is not None:
        return held(brake, f"Servers and workers stay: {brake.why}.")
    if offer is not None:
        return judged(state, known, offer.plan, _gain_of(offer, known), offer.sentence)
    for rule in (_hot, _all_hot, _idle) if is_changeable else ():
        found = rule(state, known)
        if found is not None:
            return found
    if scaling.terms.optimizer is Optimizer.NONE:
        return ScaleVerdict(outcome=ScaleOutcome.RESTED, sentence="No server is hot, short or idle.", kind=SERVERS)
    return decide_numbers(state, known)


def _gain_of(offer: PlanOffered, known: ScaleFacts) -> float:
    """Of an offer that expects no speed the least that counts: probation judges it."""
    return offer.expected_speed / known.speed - 1 if offer.expected_speed else LEAST_GAIN


def _short_memory(state: JobState) -> ScaleVerdict | None:
    short = short_server(state, facts.seconds_left(state.scaling))
    if short is None or not short.is_possible:
        return None
    return repair(f"Server {short.rank} gets {short.more_mb} MiB: {short.why}.", short.plan)


def _hot(state: JobState, known: ScaleFacts) -> ScaleVerdict | None:
    nodes = [node for node in measured_servers(state) if cores_given(state, node) > 0]
    if len(nodes) < 2:
        return None
    for node in nodes:
        had = cores_given(state, node)
        others = [each.cpu / cores_given(state, each) for each in nodes if each is not node]
        use = node.cpu / had
        if not _is_watched(state, node) or use < HOT or use < HOTTER * median(others):
            continue
        cpu = _cores_for_hot(state, node, had)
        plan = SizePlan(nodes=(PlannedNode(platform_node=node.platform_node, cpu=cpu),))
        if cpu > rules.GROWTH_BAND * had and not excess_of(state, plan):
            return repair(
                f"Server {node.rank} gets {cpu:g} cores instead of {had:g}: it uses {use:.0%} of them, the others "
                f"{median(others):.0%}; its memory stays.",
                plan,
            )
    return None


def _is_watched(state: JobState, node: NodeUse) -> bool:
    return node.seconds >= min(WATCHED, 3 * state.scaling.terms.stable_for)


def _cores_for_hot(state: JobState, node: NodeUse, had: float) -> float:
    """Twice as many; by the rules as many as the most workers that the limits allow will need (§8.4)."""
    terms, wanted = state.scaling.terms, 2 * had
    limit = 0.0 if state.fleet is None else state.fleet.spec.limits.cpu
    sample = sample_of(state)
    if terms.optimizer is Optimizer.RULES and limit and sample is not None:
        wanted = rules.hot_servers([sample], limit).get(node.platform_node, wanted)
    return min(terms.largest.cpu, wanted)


def _all_hot(state: JobState, known: ScaleFacts) -> ScaleVerdict | None:
    nodes = [node for node in measured_servers(state) if cores_given(state, node) > 0]
    is_hot = nodes and all(_is_watched(state, node) and node.cpu >= HOT * cores_given(state, node) for node in nodes)
    if not is_hot or state.fleet is None or known.slow_start:
        return None
    count = state.fleet.replicas[NodeType.PS].target
    more = min(state.scaling.terms.most_servers, count + max(1, count // 2))
    plan = SizePlan(groups=(PlannedGroup(node_type=NodeType.PS, count=more),))
    if more <= count or excess_of(state, plan):
        return None
    sentence = f"{more} servers instead of {count}: all of them use more than {HOT:.0%} of their cores."
    return watched(state, known, plan, sentence, direction=1)


def _idle(state: JobState, known: ScaleFacts) -> ScaleVerdict | None:
    left, scaling = facts.seconds_left(state.scaling), state.scaling
    fit = fit_servers(scaling.runs)
    has_forecast = scaling.terms.optimizer is Optimizer.FITTED and fit is not None and not fit.why_unused
    if left is None or left <= LEAST_LEFT or has_forecast:
        return None  # the fit knows what cores are worth, and looks at fewer of them too
    planned = []
    for node in measured_servers(state):
        had, fewer = cores_given(state, node), float(math.ceil(node.cpu_max) + IDLE_MARGIN)
        if (
            _is_watched(state, node)
            and node.cpu_max < IDLE * had
            and max(fewer, state.scaling.terms.smallest.cpu) < had
        ):
            planned.append(
                PlannedNode(platform_node=node.platform_node, cpu=max(fewer, state.scaling.terms.smallest.cpu))
            )
    if not planned:
        return None
    plan = SizePlan(nodes=tuple(planned))
    sentence = f"{len(planned)} servers get fewer cores: they use less than {IDLE:.0%} of them."
    if 2 * len(planned) <= len(measured_servers(state)):
        return repair(sentence, plan)  # the configuration stays what it was, so no run begins that could be judged
    # Use is a mean: a server that is idle between bursts may need its cores in them. So the speed afterwards decides.
    if brakes.of_plan(scaling, known, Promise(plan, SERVERS, -1, 0.0, LEAST_SAVING)) is not None:
        return None
    return watched(state, known, plan, sentence, direction=-1, least_gain=_loss_allowed(state, known, plan))


def _loss_allowed(state: JobState, known: ScaleFacts, plan: SizePlan) -> float:
    """Of speed, for the cores that the servers give up, by the objective."""
    assert state.fleet is not None, "servers are of a fleet"
    saved = sum(state.fleet.nodes[node.platform_node].resource.cpu - (node.cpu or 0.0) for node in plan.nodes)
    total = cores_of_all(known)
    return demanded(state.scaling, max(0.0, 1 - saved / total)) if total else 0.0
