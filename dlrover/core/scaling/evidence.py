"""
Runs: what was measured, what is kept of it, and what it says about the speed of a configuration.

Of each configuration the newest three runs are kept and older ones merged into one, so an old measurement fades without being lost. When there are too
many, the configuration that was seen least recently goes.
"""

from __future__ import annotations

from dlrover.core.scaling.state import MAX_MEMORY_POINTS, MAX_RUNS, RUNS_PER_CONFIGURATION, MeasuredRun, Scaling
from dlrover.protocol.errors import malformed
from dlrover.protocol.messages.identity import Micros
from dlrover.protocol.messages.scaling import (
    MAX_MEMORY_POINTS as MAX_POINTS_TOLD,
)
from dlrover.protocol.messages.scaling import (
    MAX_RUN_NODES,
    Configuration,
    RunMeasured,
)

_LARGEST = 2.0**53
_MOST_TYPES = 4


def check_run(run: RunMeasured) -> None:
    """Raises `Rejected` for numbers that no measurement gives."""
    if run.number < 1 or run.steps < 1:
        raise malformed("A run has a number and steps of at least 1.")
    if not 0 < run.seconds < _LARGEST or not 0 < run.step_time < _LARGEST:
        raise malformed("A run lasts longer than 0 s, and so does each of its steps.")
    configuration = run.configuration
    if not configuration.groups or len({group.node_type for group in configuration.groups}) != len(
        configuration.groups
    ):
        raise malformed("A configuration names each type of nodes once, and at least one.")
    for group in configuration.groups:
        if group.count < 0 or group.memory_mb < 0 or group.gpus < 0 or not 0 <= group.cpu < _LARGEST:
            raise malformed(f"A configuration cannot have {group.count} nodes of {group.cpu:g} cores.")
    if configuration.num_workers < 1 or configuration.workers_per_node < 1 or configuration.accumulation < 1:
        raise malformed("A run has at least one node that trains, with at least one worker and one pass for each step.")
    if configuration.micro_batch < 0 or configuration.total_batch < 0:
        raise malformed("A batch has 0 records (unknown) or more.")
    if len(run.types) > _MOST_TYPES or len(run.nodes) > MAX_RUN_NODES:
        raise malformed(f"A run tells of at most {_MOST_TYPES} types and {MAX_RUN_NODES} nodes.")
    if any(len(use.memory) > MAX_POINTS_TOLD for use in run.types):
        raise malformed(f"A run tells at most {MAX_POINTS_TOLD} points of memory for each type.")
    if not all(0 <= number < _LARGEST for number in _numbers(run)):
        raise malformed("The numbers of a run are finite and not negative.")


def _numbers(run: RunMeasured) -> list[float]:
    """Those that have no other check; `memory_slope` may be below 0, so its amount counts."""
    found = [run.step_time_low, run.step_time_high, run.records_per_second, run.last_step or 0, run.data_wait]
    for use in run.types:
        found += [use.cpu, use.cpu_most, use.cpu_max, use.memory_mb, abs(use.memory_slope), use.device_memory_mb]
        found += [use.device_total_mb, use.device_use]
        found += [number for point in use.memory for number in (point.at, point.step, point.memory_mb)]
    for node in run.nodes:
        found += [node.cpu, node.cpu_max, node.memory_mb, node.seconds, node.wait_per_step]
    return found


def keep_run(scaling: Scaling, told: RunMeasured, now: Micros) -> None:
    """The newest evidence. A run that is told again takes the place of what was told before; a disturbed one is no evidence of speed."""
    scaling.newest = told
    for use in told.types:
        if use.memory:
            known = scaling.memory.get(use.node_type, [])
            newest_at = known[-1].at if known else -1
            points = [*known, *(point for point in use.memory if point.at > newest_at)]
            scaling.memory[use.node_type] = points[-MAX_MEMORY_POINTS:]
    scaling.runs = [run for run in scaling.runs if run.number != told.number]
    if told.is_disturbed:
        return
    cpu = tuple((use.node_type, use.cpu, use.cpu_max) for use in told.types)
    run = MeasuredRun(
        number=told.number,
        configuration=told.configuration,
        seconds=told.seconds,
        steps=told.steps,
        step_time=told.step_time,
        records_per_second=told.records_per_second,
        cpu=cpu,
        told_at=now,
        speed=speed_of(told.configuration, told.step_time, told.records_per_second),
    )
    scaling.runs.append(run)
    _merge(scaling, run.configuration)
    _forget(scaling)


def _merge(scaling: Scaling, configuration: Configuration) -> None:
    same = [run for run in scaling.runs if run.configuration == configuration]
    if len(same) <= RUNS_PER_CONFIGURATION + 1:
        return
    older, newer = same[0], same[1]
    steps = older.steps + newer.steps
    step_time = (older.step_time * older.steps + newer.step_time * newer.steps) / steps
    records = (older.records_per_second * older.steps + newer.records_per_second * newer.steps) / steps
    merged = MeasuredRun(
        number=newer.number,
        configuration=configuration,
        seconds=older.seconds + newer.seconds,
        steps=steps,
        step_time=step_time,
        records_per_second=records,
        cpu=newer.cpu,
        told_at=newer.told_at,
        speed=speed_of(configuration, step_time, records),
    )
    scaling.runs = [merged if run is newer else run for run in scaling.runs if run is not older]


def _forget(scaling: Scaling) -> None:
    while len(scaling.runs) > MAX_RUNS:
        newest: dict[Configuration, Micros] = {}
        for run in scaling.runs:
            newest[run.configuration] = max(run.told_at, newest.get(run.configuration, Micros(0)))
        oldest = min(newest, key=lambda each: newest[each])
        scaling.runs = [run for run in scaling.runs if run.configuration != oldest]


def batch_of(configuration: Configuration) -> float:
    """Records of all workers in one step; what each worker does counts as one record where the script does not tell."""
    if configuration.total_batch:
        return float(configuration.total_batch)
    workers = configuration.num_workers * configuration.workers_per_node
    return float(workers * max(1, configuration.micro_batch) * configuration.accumulation)


def is_batch_known(configuration: Configuration) -> bool:
    return bool(configuration.total_batch or configuration.micro_batch)


def speed_of(configuration: Configuration, step_time: float, records_per_second: float) -> float:
    """Records per second. The median step time counts more than a mean rate, which one slow step spoils."""
    if not is_batch_known(configuration) and records_per_second > 0:
        return records_per_second
    return batch_of(configuration) / step_time


def measured_speed(scaling: Scaling, configuration: Configuration) -> float:
    """Of this configuration, the newest run counting most; 0: it was never seen."""
    same = [run for run in scaling.runs if run.configuration == configuration]
    total = weight_sum = 0.0
    for age, run in enumerate(reversed(same)):
        weight = min(run.steps, 1000) / 4.0**age
        total, weight_sum = total + weight * run.speed, weight_sum + weight
    return total / weight_sum if weight_sum else 0.0
