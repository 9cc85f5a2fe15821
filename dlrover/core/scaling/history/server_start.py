"""
The numbers with which a job with parameter servers starts, from all runs of former lives together.

The newest life may have ended badly: what it was asked for was wrong and it found no better. So the best size that any of them was measured with counts, by the objective of `balanced`: a
further share of cores is worth half of it in speed. Then the law that all runs together fit may move the start by a step, within what was seen. That costs no pause, and the next
life sees what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dlrover.core.scaling.evidence import batch_of
from dlrover.core.scaling.fit.model import Fit, cores_of, fit_servers, median, server_row
from dlrover.core.scaling.state import MeasuredRun
from dlrover.protocol.messages.fleet import NodeType

MOST_STEP = 1.25
"""Times the best size that was seen, in each number: a forecast does not reach further."""
LEAST_GAIN = 0.05
"""Of the objective. Less is not worth a size that no life has tried."""
NEARNESS = 0.01
"""Squared share by which sizes may differ and still be taken for the same."""
MOST_LOOKS = 400


class ServerNumbers(NamedTuple):
    workers: int
    servers: int
    worker_cpu: float
    """Cores of each; 0: not limited."""
    server_cpu: float

    @property
    def cores(self) -> float:
        return self.workers * (self.worker_cpu or 1.0) + self.servers * (self.server_cpu or 1.0)


def numbers_of(run: MeasuredRun) -> ServerNumbers:
    configuration = run.configuration
    worker = configuration.group(NodeType.WORKER) or configuration.group(NodeType.CHIEF)
    server = configuration.group(NodeType.PS)
    return ServerNumbers(
        configuration.num_workers,
        configuration.count(NodeType.PS),
        0.0 if worker is None else worker.cpu,
        0.0 if server is None else server.cpu,
    )


def measured_worth(runs: Sequence[MeasuredRun]) -> dict[ServerNumbers, float]:
    """Of each size that was seen, by its measured speed."""
    by_size: dict[ServerNumbers, list[float]] = {}
    for run in runs:
        by_size.setdefault(numbers_of(run), []).append(run.speed)
    return {size: median(speeds) / math.sqrt(size.cores) for size, speeds in by_size.items()}


def start_numbers(runs: Sequence[MeasuredRun], paid: Sequence[MeasuredRun] | None = None) -> ServerNumbers | None:
    """
    The best size that was seen, or a better one near it if the fit of all runs finds one. None: there is no run.

    `paid`: those of the runs whose size was not taken back; None: all. The others teach the fit alone.
    """
    known = measured_worth(runs)
    kept = measured_worth(runs if paid is None else paid)
    best = max(kept, key=lambda size: (known[size], size), default=None)
    fit = fit_servers(runs, is_wary=True)  # no probation follows a start
    if best is None or fit is None or fit.why_unused:
        return best
    like = next(run for run in reversed(runs) if numbers_of(run) == best)
    demand = (math.inf, math.inf) if fit.is_by_given else (cores_of(like, NodeType.WORKER), cores_of(like, NodeType.PS))
    forecast = _Forecast(fit, demand, batch_of(like.configuration) / max(1, best.workers), known)
    here, value, looks = best, known[best], 0
    while looks < MOST_LOOKS:
        around = [(forecast.worth(size), size) for size in _around(here) if _is_near(size, best)]
        looks += len(around)
        ahead = max(around, default=(0.0, here))
        if ahead[0] <= value:
            break
        value, here = ahead
    return here if value >= (1 + LEAST_GAIN) * known[best] else best


class _Forecast:
    """The fit, corrected by what it got wrong nearby: a step that an earlier life tried in vain is not forecast again."""

    def __init__(self, fit: Fit, demand: tuple[float, float], batch: float, known: dict[ServerNumbers, float]) -> None:
        self._fit, self._demand, self._batch = fit, demand, batch
        self._errors = {size: worth / fitted for size, worth in known.items() if (fitted := self._fitted(size)) > 0}

    def worth(self, size: ServerNumbers) -> float:
        near = [(1.0 / (NEARNESS + _distance(size, seen)), error) for seen, error in self._errors.items()]
        weights = sum(weight for weight, _ in near)
        return self._fitted(size) * sum(weight * error for weight, error in near) / weights if weights else 0.0

    def _fitted(self, size: ServerNumbers) -> float:
        worker_cpu, server_cpu = (
            min(size.worker_cpu or 1.0, self._demand[0]),
            min(size.server_cpu or 1.0, self._demand[1]),
        )
        time = self._fit.step_time(server_row(size.workers, size.servers, worker_cpu, server_cpu, self._batch))
        return size.workers * self._batch / time / math.sqrt(size.cores) if time > 0 else 0.0


def _distance(one: ServerNumbers, other: ServerNumbers) -> float:
    """Of shares, squared, so that the core needs no logarithm."""
    return sum(((a - b) / max(a, b)) ** 2 for a, b in zip(one, other, strict=True) if max(a, b) > 0)


def _around(size: ServerNumbers) -> list[ServerNumbers]:
    found = [size._replace(workers=size.workers + step) for step in (-1, 1)]
    found += [size._replace(servers=size.servers + step) for step in (-1, 1)]
    if size.worker_cpu:
        found += [size._replace(worker_cpu=size.worker_cpu + step) for step in (-1.0, 1.0)]
    if size.server_cpu:
        found += [size._replace(server_cpu=size.server_cpu + step) for step in (-1.0, 1.0)]
    return found


def _is_near(size: ServerNumbers, seen: ServerNumbers) -> bool:
    return all(
        max(1.0, math.floor(former / MOST_STEP)) <= number <= math.ceil(former * MOST_STEP)
        for number, former in zip(size, seen, strict=True)
        if former
    )
