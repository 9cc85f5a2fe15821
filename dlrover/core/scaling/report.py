"""
What people are told about the size of the job: the answer to `AskScaling`. It only looks.
"""

from __future__ import annotations

from dlrover.core.scaling import allreduce, facts
from dlrover.core.scaling.evidence import is_batch_known, measured_speed
from dlrover.core.scaling.facts import ScaleFacts
from dlrover.core.scaling.fit.model import Fit
from dlrover.core.scaling.servers import deciding as servers
from dlrover.core.scaling.state import Scaling
from dlrover.core.scaling.verdict import ScaleVerdict, decide_world
from dlrover.core.state import JobState
from dlrover.protocol.messages.scaling import (
    MOST_DECISIONS_SHOWN,
    RefusedSize,
    ScaleFit,
    ScalingStatus,
    SpeedPoint,
)

MOST_POINTS = 128


def status_of(state: JobState) -> ScalingStatus:
    scaling, limits = state.scaling, state.limits
    known = facts.gather(state, state.now)
    verdict = _verdict(state, known)
    configuration = None if scaling.newest is None else scaling.newest.configuration
    newest = scaling.decisions[-1] if scaling.decisions else None
    is_counted = configuration is not None and (is_batch_known(configuration) or _has_records(scaling))
    sentence = known.off if known.off else verdict.sentence
    return ScalingStatus(
        mode=scaling.mode,
        scale_for=scaling.terms.scale_for,
        optimizer=scaling.terms.optimizer,
        now=state.now,
        sentence=sentence if newest is None or known.off else newest.sentence,
        brake=verdict.brake,
        brake_opens_at=verdict.opens_at,
        min_nodes=known.limits.min_nodes,
        max_nodes=known.limits.max_nodes,
        node_unit=limits.node_unit,
        target=limits.max_nodes,
        configuration=configuration,
        speed=0.0 if configuration is None else measured_speed(scaling, configuration),
        unit="records/s" if is_counted else "steps/s",
        cost=known.cost,
        decisions=tuple(scaling.decisions[-MOST_DECISIONS_SHOWN:]),
        candidates=verdict.candidates,
        fit=None if verdict.fit is None else _told(verdict.fit),
        points=_points(scaling, known, verdict),
        refused=tuple(
            RefusedSize(text=f"{each.nodes} nodes", until=each.until, times=each.times)
            for each in scaling.refused
            if each.until > state.now
        ),
        on_probation="" if scaling.probation is None else _watched(scaling),
        room=tuple(scaling.room.values()),
        num_outcomes=dict(scaling.num_outcomes),
        tuning=scaling.tuning,
        warnings=tuple(scaling.warnings.values()),
        facts=scaling.facts,
    )


def _verdict(state: JobState, known: ScaleFacts) -> ScaleVerdict:
    if state.fleet is None or facts.is_world(state):
        return decide_world(state.scaling, known)
    return servers.decide(state, known)


def _has_records(scaling: Scaling) -> bool:
    return scaling.newest is not None and scaling.newest.records_per_second > 0


def _watched(scaling: Scaling) -> str:
    watched = scaling.probation
    assert watched is not None, "nothing is on probation"
    if watched.plan.micro_batch is not None:
        return f"a micro-batch of {watched.plan.micro_batch}"
    return f"{watched.nodes_after} nodes instead of {watched.nodes_before}"


def _told(fit: Fit) -> ScaleFit:
    return ScaleFit(
        features=fit.features,
        thetas=fit.thetas,
        error=fit.error,
        num_runs=fit.num_runs,
        num_counts=fit.num_counts,
        is_used=not fit.why_unused,
        why=fit.why_unused,
    )


def _points(scaling: Scaling, known: ScaleFacts, verdict: ScaleVerdict) -> tuple[SpeedPoint, ...]:
    """Measured runs, and the curve of a fit that is used."""
    points = [SpeedPoint(run.configuration.num_workers, run.speed) for run in scaling.runs]
    fit, configuration = verdict.fit, known.configuration
    if fit is not None and not fit.why_unused and configuration is not None and len(fit.thetas) == 4:
        unit, largest = known.limits.node_unit, min(known.limits.max_nodes, MOST_POINTS)
        counts = range(known.limits.min_nodes, largest + 1, unit)
        expected = allreduce.forecasts(fit, configuration, known, counts)
        points += [SpeedPoint(nodes, speed, True) for nodes, speed in expected.items() if speed > 0]
    return tuple(points[: 2 * MOST_POINTS])
