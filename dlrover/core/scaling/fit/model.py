"""
The step time of a job as a sum of features with coefficients of at least 0, fitted to its runs.

All-reduce: T = θ · (1, b, [n > 1], [n > 1] · (n - 2)) with n nodes and b records of one worker in a step. Parameter servers:
T = θ · (1, b ÷ cw, w ÷ (p · cp), w ÷ p, b ÷ p) with w workers, p servers and their cores. Relative errors count: each row is divided by its time.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from dlrover.core.scaling.evidence import batch_of
from dlrover.core.scaling.fit.nnls import nnls
from dlrover.core.scaling.state import MeasuredRun
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import Configuration

WORLD_FEATURES = ("1", "batch", "network", "nodes-2")
SERVER_FEATURES = ("1", "batch/worker-cores", "workers/server-cores", "workers/servers", "batch/servers")
MOST_ERROR = 0.15
"""A fit whose median error on its own runs is larger is not used."""
WARY_BY = 0.01
"""Of the median error."""
LEAST_COUNTS = 3
LEAST_NETWORKED = 2
"""Of the counts: a single node says nothing about the network."""


class Fit(Struct, frozen=True, kw_only=True):
    features: tuple[str, ...]
    thetas: tuple[float, ...]
    error: float
    num_runs: int
    num_counts: int
    why_unused: str = ""
    """Empty: forecasts may be made with it."""
    is_by_given: bool = False
    """Of servers: cores count as they were given. False: as they were used."""

    def step_time(self, row: Sequence[float]) -> float:
        return sum(theta * part for theta, part in zip(self.thetas, row, strict=True))


def world_row(configuration: Configuration, nodes: int) -> tuple[float, ...]:
    """Of the same job with so many nodes."""
    has_network = 1.0 if nodes > 1 else 0.0
    return (1.0, batch_of_worker(configuration, nodes), has_network, has_network * (nodes - 2))


def batch_of_worker(configuration: Configuration, nodes: int) -> float:
    """Records of one worker in one step, if there are so many nodes."""
    if configuration.total_batch:
        return configuration.total_batch / (nodes * configuration.workers_per_node)
    return float(max(1, configuration.micro_batch) * configuration.accumulation)


def batch_of_all(configuration: Configuration, nodes: int) -> float:
    """Records of all workers in one step, if there are so many nodes."""
    return batch_of_worker(configuration, nodes) * nodes * configuration.workers_per_node


def fit_world(runs: Sequence[MeasuredRun]) -> Fit | None:
    """None: there is nothing to fit."""
    if not runs:
        return None
    rows = [world_row(run.configuration, run.configuration.num_workers) for run in runs]
    counts = {run.configuration.num_workers: None for run in runs}
    num_networked = sum(1 for count in counts if count > 1)
    fit = _fit(WORLD_FEATURES, rows, [run.step_time for run in runs], len(counts))
    if len(counts) < LEAST_COUNTS or num_networked < LEAST_NETWORKED:
        seen = ", ".join(str(count) for count in sorted(counts))
        why = f"sizes seen so far: {seen}; a forecast needs {LEAST_COUNTS} sizes, {LEAST_NETWORKED} of them above 1"
        return _unused(fit, why)
    return fit


def server_row(workers: float, servers: float, worker_cpu: float, server_cpu: float, batch: float) -> tuple[float, ...]:
    return (1.0, batch / worker_cpu, workers / (servers * server_cpu), workers / servers, batch / servers)


def fit_servers(runs: Sequence[MeasuredRun], *, is_wary: bool = False) -> Fit | None:
    """
    With the cores that are really used where a node uses less than it has, or with all that it has, whichever explains the runs better.

    A node that idles between two bursts of work uses few cores in the mean and needs all of them; one that never needs them all uses few, too. Only runs with other cores tell the two apart.
    `is_wary`: where they hardly do, cores count as given, so that none is taken away for nothing.
    """
    usable = [run for run in runs if run.configuration.count(NodeType.PS)]
    if not usable:
        return None
    counts = len(dict.fromkeys(run.configuration for run in usable))
    times = [run.step_time for run in usable]
    used = _fit(SERVER_FEATURES, [row_of_run(run) for run in usable], times, counts)
    given = _fit(SERVER_FEATURES, [row_of_run(run, is_by_given=True) for run in usable], times, counts)
    fit = replace(given, is_by_given=True) if given.error < used.error + (WARY_BY if is_wary else 0.0) else used
    if counts < LEAST_COUNTS:
        return _unused(fit, f"only {counts} configurations were seen; a forecast needs {LEAST_COUNTS}")
    return fit


def row_of_run(run: MeasuredRun, *, is_by_given: bool = False) -> tuple[float, ...]:
    configuration = run.configuration
    workers, servers = configuration.num_workers, configuration.count(NodeType.PS)
    batch = batch_of(configuration) / max(1, workers)
    of_worker, of_server = (cores_of(run, kind, is_by_given=is_by_given) for kind in (NodeType.WORKER, NodeType.PS))
    return server_row(workers, servers, of_worker, of_server, batch)


def cores_of(run: MeasuredRun, node_type: NodeType, *, is_by_given: bool = False) -> float:
    """Of one node: those it has, or those that it uses if it leaves some of them idle."""
    group = run.configuration.group(node_type)
    if group is None and node_type is NodeType.WORKER:
        group = run.configuration.group(NodeType.CHIEF)
    given = 0.0 if group is None else group.cpu
    if is_by_given and given > 0:
        return given
    used = next((most for kind, _, most in run.cpu if kind is node_type), 0.0)
    known = [cores for cores in (given, used) if cores > 0]
    return max(0.1, min(known, default=1.0))


def _fit(features: tuple[str, ...], rows: list[tuple[float, ...]], times: list[float], num_counts: int) -> Fit:
    scaled = [[part / time for part in row] for row, time in zip(rows, times, strict=True)]
    thetas = nnls(scaled, [1.0] * len(times))
    errors = [abs(sum(theta * part for theta, part in zip(thetas, row, strict=True)) - 1.0) for row in scaled]
    error = median(errors)
    fit = Fit(
        features=features, thetas=tuple(thetas), error=error, num_runs=len(times), num_counts=num_counts, why_unused=""
    )
    return _unused(fit, f"its error is {error:.0%}, more than {MOST_ERROR:.0%}") if error > MOST_ERROR else fit


def _unused(fit: Fit, why: str) -> Fit:
    return replace(fit, why_unused=why)


def median(numbers: Sequence[float]) -> float:
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
