"""
Reports that cannot be true. What the store holds shapes the starts of later jobs, so a number that no machine has stays outside.

A run, a decision or the end of a node that is absurd is ignored and counted: the job that told it goes on with the next. Bounds of a job that make no sense are refused, because a plan
could not keep them.
"""

from __future__ import annotations

import math

import msgspec

from dlrover.core.scaling.history.starting import MOST_CPU, MOST_MEMORY, MOST_NODES
from dlrover.protocol.errors import malformed
from dlrover.protocol.messages.brain import AllowanceAsked, JobBegan, NodeEnded, kept_of
from dlrover.protocol.messages.fleet import Resource
from dlrover.protocol.messages.scaling import RunMeasured, ScaleDecision, SpeedPoint

MOST_NUMBER = 2**31
MOST_SECONDS = 1e9
MOST_STEPS = 2**53
MOST_SPEED = 1e15
MOST_RUN_BYTES = 8 * 1024
"""A run has at most 2 KB."""
MOST_GPUS = 1024
MOST_NODE_NUMBER = 2**62
_ENCODER = msgspec.msgpack.Encoder()


def is_sane_run(run: RunMeasured) -> bool:
    groups, last = run.configuration.groups, run.last_step
    seconds = (run.seconds, run.step_time, run.step_time_low, run.step_time_high)
    used = [(use.cpu, use.cpu_most, use.cpu_max) for use in run.types] + [(use.cpu, use.cpu_max) for use in run.nodes]
    memory = [use.memory_mb for use in run.types] + [use.memory_mb for use in run.nodes]
    devices = [(use.device_memory_mb, use.device_total_mb) for use in run.types]
    return (
        1 <= run.number <= MOST_NUMBER
        and all(_is_within(number, MOST_SECONDS) for number in seconds)
        and 0 <= run.steps <= MOST_STEPS
        and (last is None or 0 <= last <= MOST_STEPS)
        and _is_within(run.records_per_second, MOST_SPEED)
        and all(_is_within(number, MOST_CPU) for numbers in used for number in numbers)
        and all(_is_within(number, MOST_MEMORY) for number in memory)
        and all(_is_within(number, MOST_MEMORY) for numbers in devices for number in numbers)
        and all(0 <= group.count <= MOST_NODES and 0 <= group.gpus <= MOST_GPUS for group in groups)
        and all(_is_within(group.cpu, MOST_CPU) and _is_within(group.memory_mb, MOST_MEMORY) for group in groups)
        and 0 <= run.configuration.num_workers <= MOST_NODES
        and len(_ENCODER.encode(kept_of(run))) <= MOST_RUN_BYTES
    )


def is_sane_decision(made: ScaleDecision) -> bool:
    groups, nodes = made.plan.groups, made.plan.nodes
    sizes = [(each.cpu, each.memory_mb) for each in groups] + [(each.cpu, each.memory_mb) for each in nodes]
    return (
        1 <= made.number <= MOST_NUMBER
        and _is_within(made.expected_speed, MOST_SPEED)
        and _is_within(made.speed_after, MOST_SPEED)
        and all(group.count is None or 0 <= group.count <= MOST_NODES for group in groups)
        and all(cpu is None or _is_within(cpu, MOST_CPU) for cpu, _ in sizes)
        and all(memory is None or _is_within(memory, MOST_MEMORY) for _, memory in sizes)
        and len(_ENCODER.encode(made)) <= MOST_RUN_BYTES
    )


def is_sane_node_end(ended: NodeEnded) -> bool:
    return (
        abs(ended.node) <= MOST_NODE_NUMBER
        and is_sane_resource(ended.resource)
        and _is_within(ended.memory_mb, MOST_MEMORY)
    )


def is_sane_resource(resource: Resource) -> bool:
    return (
        _is_within(resource.cpu, MOST_CPU)
        and _is_within(resource.memory_mb, MOST_MEMORY)
        and 0 <= resource.gpus <= MOST_GPUS
    )


def check_beginning(began: JobBegan) -> None:
    """Raises Rejected."""
    bounds = began.bounds
    if bounds.min_nodes > bounds.max_nodes:
        raise malformed(f"min_nodes must be at most max_nodes (got {bounds.min_nodes} and {bounds.max_nodes}).")
    if bounds.node_unit > bounds.max_nodes:
        raise malformed(f"node_unit must be at most max_nodes (got {bounds.node_unit} and {bounds.max_nodes}).")
    for name in ("smallest", "largest"):
        if not is_sane_resource(getattr(bounds, name)):
            raise malformed(f"bounds.{name} must be the size of a real machine (got {getattr(bounds, name)}).")
    if bounds.smallest.cpu > bounds.largest.cpu or bounds.smallest.memory_mb > bounds.largest.memory_mb:
        raise malformed("bounds.smallest must be at most bounds.largest.")
    limits = bounds.limits
    if not (_is_within(limits.cpu, MOST_CPU * MOST_NODES) and 0 <= limits.memory_mb <= MOST_MEMORY * MOST_NODES):
        raise malformed(f"bounds.limits must be the size of a real cluster (got {limits}).")
    if not all(is_sane_resource(group.resource) for group in began.asked):
        raise malformed("The size of a group must be that of a real machine.")


def sane_points(asked: AllowanceAsked) -> tuple[SpeedPoint, ...]:
    """The fewest nodes first, each number once."""
    found = {
        point.nodes: point
        for point in asked.points
        if 1 <= point.nodes <= MOST_NODES and _is_within(point.speed, MOST_SPEED) and point.speed > 0
    }
    return tuple(found[nodes] for nodes in sorted(found))


def _is_within(number: float, most: float) -> bool:
    return math.isfinite(number) and 0 <= number <= most
