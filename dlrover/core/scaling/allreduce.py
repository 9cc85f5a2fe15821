"""
How many nodes a world should have.

Before three sizes were seen, a larger one is tried: one unit, or as many as promise the least gain that counts. Then the fit says which size is best, but never
more than twice the largest that was seen. A size that was measured counts as measured, whatever the fit says.

What "best" means: a growth has to bring a share of what it costs (`SHARE`), and among those that do the fastest is best. A job shrinks by itself
only for `cost`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dlrover.core.scaling.evidence import is_batch_known, measured_speed
from dlrover.core.scaling.facts import ScaleFacts
from dlrover.core.scaling.fit.model import Fit, fit_world
from dlrover.core.scaling.fit.model import batch_of_all as batch_of_all
from dlrover.core.scaling.fit.model import world_row as world_row
from dlrover.core.scaling.state import MeasuredRun, Scaling
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import (
    Configuration,
    GroupSize,
    PlannedGroup,
    ScaleFor,
    SizePlan,
)

SHARE = {ScaleFor.SPEED: 0.1, ScaleFor.BALANCED: 0.5, ScaleFor.COST: 0.8}
"""Share of the added resources that has to come back as speed."""
SHRINK = 0.8
"""A shrink has to lose less than this part of that share. Between the two nothing happens."""
LEAST_GAIN = 0.05
"""Less is not worth a change, and can hardly be told from chance."""
LEAST_SAVING = 0.1
MOST_GROWTH = 2


class Size(Struct, frozen=True):
    """A number of nodes, and what is expected of it."""

    nodes: int
    speed: float
    """0: it is a try, nothing is known."""
    is_wanted: bool
    """It fits the objective."""

    @property
    def is_try(self) -> bool:
        return self.speed == 0.0


def plan_of(nodes: int) -> SizePlan:
    return SizePlan(groups=(PlannedGroup(node_type=NodeType.WORKER, count=nodes),))


def least_ratio(nodes: int, former: int, scale_for: ScaleFor) -> float:
    """Speed over former speed that the objective demands of this size."""
    share = SHARE[scale_for]
    return 1 + (share if nodes > former else share * SHRINK) * (nodes / former - 1)


def runs_like(scaling: Scaling, configuration: Configuration) -> list[MeasuredRun]:
    """Those that differ in the number of nodes alone, or in the batch."""
    return [run for run in scaling.runs if _without_count(run.configuration) == _without_count(configuration)]


def fit_of(scaling: Scaling, configuration: Configuration) -> Fit | None:
    return fit_world(runs_like(scaling, configuration))


def sizes(scaling: Scaling, facts: ScaleFacts, fit: Fit | None) -> list[Size]:
    """All that may be chosen instead of what runs, the best first. Nothing here looks at brakes."""
    configuration = facts.configuration
    if configuration is None or not facts.speed or not is_changeable(scaling, facts):
        return []
    is_forecast = fit is not None and not fit.why_unused
    known = _measured(scaling, configuration)
    candidates = _within_reach(scaling, facts, configuration) if is_forecast else [n for n in known if n != facts.nodes]
    expected = {} if fit is None else forecasts(fit, configuration, facts, candidates)
    least, most = facts.limits.min_nodes, facts.most
    found = []
    for nodes in candidates:
        speed = known.get(nodes, 0.0) or expected.get(nodes, 0.0)
        if speed > 0 and least <= nodes <= most:
            found.append(Size(nodes, speed, _is_wanted(scaling, facts, nodes, speed)))
    if not is_forecast:
        found += _tries(scaling, facts, known)
    return sorted(found, key=lambda size: (not size.is_wanted, not size.is_try, -size.speed, size.nodes))


def is_changeable(scaling: Scaling, facts: ScaleFacts) -> bool:
    limits = facts.limits
    return NodeType.WORKER in scaling.terms.types and limits.min_nodes < limits.max_nodes and facts.nodes > 0


def forecasts(fit: Fit, configuration: Configuration, facts: ScaleFacts, counts: Sequence[int]) -> dict[int, float]:
    """From the speed that is measured now, by the ratio that the fit gives. A count without one is left out."""
    now, records = fit.step_time(world_row(configuration, facts.nodes)), batch_of_all(configuration, facts.nodes)
    if now <= 0:
        return {}
    times = {nodes: fit.step_time(world_row(configuration, nodes)) for nodes in counts}
    return {
        nodes: facts.speed * (batch_of_all(configuration, nodes) / records) * now / then
        for nodes, then in times.items()
        if then > 0
    }


def _within_reach(scaling: Scaling, facts: ScaleFacts, configuration: Configuration) -> list[int]:
    unit = facts.limits.node_unit
    largest = max(run.configuration.num_workers for run in runs_like(scaling, configuration))
    most = min(facts.most, MOST_GROWTH * largest)
    if facts.room is None:
        most = min(most, facts.nodes + unit)  # a platform that does not tell its room is asked for one unit more
    least = facts.limits.min_nodes
    return [nodes for nodes in range(-(-least // unit) * unit, most + 1, unit) if nodes != facts.nodes]


def _is_wanted(scaling: Scaling, facts: ScaleFacts, nodes: int, speed: float) -> bool:
    scale_for = scaling.terms.scale_for
    if nodes < facts.nodes and scale_for is not ScaleFor.COST:
        return False
    ratio = speed / facts.speed
    demanded = least_ratio(nodes, facts.nodes, scale_for)
    return ratio >= demanded if nodes > facts.nodes else ratio > demanded


def _tries(scaling: Scaling, facts: ScaleFacts, known: dict[int, float]) -> list[Size]:
    """The next larger size if it was never seen; for `cost` else the next smaller one."""
    unit = facts.limits.node_unit
    step = unit
    if facts.room is not None:
        least = LEAST_GAIN * facts.nodes
        step = max(unit, int(-(-least // unit)) * unit)
    larger = facts.nodes + step
    if larger <= facts.most and larger not in known:
        return [Size(larger, 0.0, True)]
    saved = max(unit, int(-(-(LEAST_SAVING * facts.nodes) // unit)) * unit)
    smaller = facts.nodes - saved
    is_for_cost = scaling.terms.scale_for is ScaleFor.COST
    if is_for_cost and smaller >= facts.limits.min_nodes and smaller not in known:
        return [Size(smaller, 0.0, True)]
    return []


def _measured(scaling: Scaling, configuration: Configuration) -> dict[int, float]:
    """Number of nodes to measured speed."""
    found: dict[int, float] = {}
    for run in runs_like(scaling, configuration):
        if _with_same_batch(run.configuration, configuration):
            found[run.configuration.num_workers] = measured_speed(scaling, run.configuration)
    return found


def _with_same_batch(one: Configuration, other: Configuration) -> bool:
    """What ranks accumulate follows from the number of nodes where the total is fixed."""
    if one.total_batch or other.total_batch:
        return one.total_batch == other.total_batch
    return (one.micro_batch, one.accumulation) == (other.micro_batch, other.accumulation)


def _without_count(configuration: Configuration) -> tuple[object, ...]:
    groups = tuple(GroupSize(each.node_type, 0, each.cpu, each.memory_mb, each.gpus) for each in configuration.groups)
    return groups, configuration.workers_per_node, is_batch_known(configuration), bool(configuration.total_batch)
