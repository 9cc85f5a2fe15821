"""
A change that is being watched: it stays if it pays, and is taken back if it does not.

It is judged by the first run after it that lasted long enough. If that run says no, the job goes back to what it had, or to a size in between if the fit, which knows
the bad run by now, promises enough of it; so it never turns round more than once for one change. A change that cannot be judged in time stays.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover.core.scaling import allreduce, brakes
from dlrover.core.scaling.evidence import measured_speed, speed_of
from dlrover.core.scaling.facts import ScaleFacts, is_since_change, is_stable
from dlrover.core.scaling.state import Probation, Scaling
from dlrover.core.scaling.verdict import TOLERANCE
from dlrover.protocol.messages.identity import Micros, micros
from dlrover.protocol.messages.scaling import RunMeasured, ScaleOutcome


class Judgement(NamedTuple):
    outcome: ScaleOutcome
    sentence: str
    speed: float
    """What came."""
    back_to: int = 0
    """Nodes to go to; 0: as it was before."""


def ends_at(scaling: Scaling, probation: Probation) -> Micros:
    return Micros(probation.at + micros(scaling.terms.longest_probation))


def judge(scaling: Scaling, facts: ScaleFacts) -> Judgement | None:
    """None: not yet."""
    probation, newest = scaling.probation, scaling.newest
    assert probation is not None, "nothing is on probation"
    is_made = probation.kind != brakes.SERVERS or not facts.under_way
    if is_made and newest is not None and _is_of(scaling, probation, newest):
        speed = measured_speed(scaling, newest.configuration) or speed_of(
            newest.configuration, newest.step_time, newest.records_per_second
        )
        return _judged(scaling, facts, probation, newest, speed)
    if facts.now < ends_at(scaling, probation):
        return None
    seconds = scaling.terms.longest_probation
    return Judgement(
        ScaleOutcome.UNJUDGED, f"{_what(probation)} could not be judged within {seconds:.0f} s and stays.", 0.0
    )


def _is_of(scaling: Scaling, probation: Probation, run: RunMeasured) -> bool:
    if run.is_disturbed or not is_since_change(scaling, run) or not is_stable(scaling, run):
        return False
    batch = probation.plan.micro_batch
    is_batch_right = batch is None or run.configuration.micro_batch == batch
    return run.configuration.num_workers == probation.nodes_after and is_batch_right


def _judged(scaling: Scaling, facts: ScaleFacts, probation: Probation, run: RunMeasured, speed: float) -> Judgement:
    ratio = speed / probation.speed_before
    came = f"{probation.speed_before:.4g} records/s before, {speed:.4g} after ({ratio - 1:+.1%})"
    if ratio >= probation.least_ratio:
        return Judgement(ScaleOutcome.KEPT, f"{_what(probation)} pays: {came}.", speed)
    demanded = probation.least_ratio / TOLERANCE - 1
    objective = scaling.terms.scale_for.value
    sentence = f"{_what(probation)} is taken back: {came}, and {objective} demands {demanded:+.1%}"
    between = _between(scaling, facts, probation, run) if probation.kind == brakes.WORKERS else 0
    if between:
        return Judgement(
            ScaleOutcome.TAKEN_BACK,
            f"{sentence}; {between} nodes promise more than {probation.nodes_before}.",
            speed,
            between,
        )
    return Judgement(ScaleOutcome.TAKEN_BACK, f"{sentence}.", speed)


def _between(scaling: Scaling, facts: ScaleFacts, probation: Probation, run: RunMeasured) -> int:
    """A size between before and after that pays, as far as the fit can tell; 0: none."""
    if probation.nodes_after <= probation.nodes_before:
        return 0
    fit = allreduce.fit_of(scaling, run.configuration)
    if fit is None or fit.why_unused:
        return 0
    before, unit = probation.nodes_before, facts.limits.node_unit
    time_before = fit.step_time(allreduce.world_row(run.configuration, before))
    best, best_ratio = 0, 1 + allreduce.LEAST_GAIN
    for nodes in range(before + unit, min(probation.nodes_after, facts.most + 1), unit):
        time = fit.step_time(allreduce.world_row(run.configuration, nodes))
        refused = brakes.refusal_of(scaling, allreduce.plan_of(nodes))
        if time <= 0 or time_before <= 0 or (refused is not None and facts.now < refused.until):
            continue
        batches = allreduce.batch_of_all(run.configuration, nodes) / allreduce.batch_of_all(run.configuration, before)
        ratio = batches * time_before / time
        if ratio >= max(best_ratio, allreduce.least_ratio(nodes, before, scaling.terms.scale_for)):
            best, best_ratio = nodes, ratio
    return best


def _what(probation: Probation) -> str:
    if probation.plan.micro_batch is not None:
        return f"The micro-batch of {probation.plan.micro_batch}"
    if probation.kind == brakes.SERVERS:
        return "The change of servers"
    return f"The change from {probation.nodes_before} to {probation.nodes_after} nodes"
