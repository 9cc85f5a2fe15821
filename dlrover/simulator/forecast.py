"""
A forecast for people: how long will this job take on these nodes, and what would spares or a lower minimum change?

No formula: the job is lived through, several times with other chance, by the same core and with the same costs each
time. So whatever the control plane does about a failure is in the figures, and so is bad luck.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.job import ExitReason
from dlrover.simulator.faults.kinds import Fault, draw_faults
from dlrover.simulator.plan import SeedPlan
from dlrover.simulator.shapes import Costs, Shape
from dlrover.simulator.simulation import Simulation
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import SECOND

LONGEST = 20.0
"""Times the undisturbed duration: a job that is not done by then never will be."""
NOTHING: dict[str, float] = {}
POWER_LOSS_SHARE = 0.5
"""Of the lost nodes: half are gone without a word, of the others a kernel closes the connections."""


class Question(Struct, frozen=True, kw_only=True):
    """What a person wants to know. Times in seconds, failures in hours between two."""

    nodes: int = 8
    min_nodes: int = 8
    spares: int = 0
    node_unit: int = 1
    hours: float = 24.0
    """Of training, if nothing ever failed and all nodes were there."""
    step: float = 1.0
    node_mtbf: float = 500.0
    """Hours between two losses of one node; 0: never."""
    worker_mtbf: float = 200.0
    """Hours between two crashes of workers on one node; 0: never."""
    master_mtbf: float = 1000.0
    """Hours between two crashes of the master; 0: never."""
    restart: float = 10.0
    """Seconds from the start of workers to their first step: connect, load, warm up."""
    checkpoint_every: float = 600.0
    """Seconds between two checkpoints in storage: what is lost with a node, unless memory is replicated."""
    has_replicas: bool = False
    replacement: float = 300.0
    """Seconds until the platform has replaced a lost node."""
    join_timeout: float = 600.0
    """Seconds below the minimum after which the job gives up."""

    def shape(self) -> Shape:
        """Raises `ConfigError` if that is no job."""
        _check(self)
        steps = max(1, round(self.hours * 3600 / self.step))
        try:
            shape = Shape(
                min_nodes=self.min_nodes,
                max_nodes=self.nodes,
                node_unit=self.node_unit,
                spares=self.spares,
                join_timeout=self.join_timeout,
                num_steps=steps,
                checkpoint_every=max(1, round(self.checkpoint_every / self.step)),
                has_replicas=self.has_replicas,
                costs=Costs(
                    step=self.step,
                    restore=self.restart,
                    replacement=(0.5 * self.replacement, 1.5 * self.replacement),
                ),
            )
            assert shape.terms.limits.max_nodes == self.nodes, "the terms are those of the shape"
        except ValueError as error:
            raise ConfigError(f"That is no job: {error}.") from error
        return shape


class Life(Struct, frozen=True):
    """One way it may go."""

    hours: float
    is_completed: bool
    reason: str
    goodput: float
    """Undisturbed duration divided by the real one; of an unfinished job, of what it got done."""
    node_hours: float
    num_faults: int
    num_restarts: int
    lost_hours: float
    """Of training that had to be repeated."""
    curve: tuple[tuple[float, float, int], ...]
    """(hours, part of the work that is done, nodes that train) at each turn."""


class Forecast(Struct, frozen=True):
    """All lives of one question."""

    question: Question
    lives: tuple[Life, ...]

    @property
    def num_completed(self) -> int:
        return sum(life.is_completed for life in self.lives)

    @property
    def median_hours(self) -> float:
        """Of those that completed; infinite if fewer than half did."""
        if 2 * self.num_completed < len(self.lives):
            return math.inf
        return statistics.median(life.hours for life in self.lives if life.is_completed)

    @property
    def worst_hours(self) -> float:
        """Infinite if any did not complete."""
        return max(life.hours if life.is_completed else math.inf for life in self.lives)

    @property
    def goodput(self) -> float:
        return statistics.median(life.goodput for life in self.lives)

    @property
    def node_hours(self) -> float:
        return statistics.median(life.node_hours for life in self.lives)

    @property
    def median_life(self) -> Life:
        ordered = sorted(self.lives, key=lambda life: (not life.is_completed, life.hours))
        return ordered[len(ordered) // 2]


def forecast(question: Question, *, num_seeds: int = 5, seed: int = 1) -> Forecast:
    return Forecast(question, tuple(live(question, seed=seed + number) for number in range(num_seeds)))


def choices(question: Question) -> list[Question]:
    """The question and its neighbours: more or fewer spares, a lower or no lower minimum."""
    unit, nodes = question.node_unit, question.nodes
    few = max(1, round(nodes * 0.02))
    tenth = max(unit, (nodes * 9 // 10) // unit * unit)
    spares = dict.fromkeys([question.spares, 0, 1, few, 2 * few])
    minimums = dict.fromkeys([question.min_nodes, nodes, tenth, max(unit, nodes - unit)])
    return [replace(question, spares=num, min_nodes=low) for low in minimums for num in spares]


def best(forecasts: list[Forecast]) -> tuple[Forecast, Forecast]:
    """The fastest, and the one that takes the fewest node-hours. A choice that rarely completes is neither."""

    def by(key: Callable[[Forecast], float]) -> Forecast:
        return min(forecasts, key=lambda one: (-one.num_completed, key(one), one.question.spares))

    return by(lambda one: round(one.median_hours, 2)), by(lambda one: round(one.node_hours, 1))


def live(question: Question, *, seed: int) -> Life:
    shape = question.shape()
    limit = question.hours * LONGEST
    faults = _draw(question, limit, seed)
    plan = SeedPlan(seed=seed, shape=shape, faults=faults, hours=limit, is_cut_off=True, digest_every=1000)
    simulation = Simulation(plan)
    try:
        result = simulation.run()
    except Violation as violation:
        raise AssertionError(f"seed {seed} of {question}: {violation}") from violation
    training = simulation.training
    hours = result.virtual_hours
    return Life(
        hours=hours,
        is_completed=result.reason == ExitReason.COMPLETED.value,
        reason=result.reason or "not done in time",
        goodput=training.best_step * question.step / 3600 / hours,
        node_hours=result.node_hours,
        num_faults=result.num_faults,
        num_restarts=max(0, result.num_rounds - 1),
        lost_hours=training.num_lost_steps * question.step / 3600,
        curve=tuple((at / SECOND / 3600, step / shape.num_steps, nodes) for at, step, nodes in training.turns),
    )


def _draw(question: Question, hours: float, seed: int) -> tuple[Fault, ...]:
    """Each node has its own chance: the same ones fail at the same time, whatever else the choices differ in."""
    mix = {
        "power-loss": _rate(question.node_mtbf) * POWER_LOSS_SHARE,
        "machine-gone": _rate(question.node_mtbf) * (1 - POWER_LOSS_SHARE),
        "worker-crash": _rate(question.worker_mtbf),
    }
    faults = [
        replace(fault, pick=number)
        for number in range(question.nodes + question.spares)
        for fault in draw_faults(
            random.Random(f"{seed}/{number}"), hours=hours, num_nodes=1, mix=mix, master_mix=NOTHING
        )
    ]
    master_mix = {"master-crash": _rate(question.master_mtbf)}
    faults += draw_faults(random.Random(f"{seed}/master"), hours=hours, num_nodes=1, mix=NOTHING, master_mix=master_mix)
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _rate(mtbf: float) -> float:
    return 0.0 if mtbf == 0 else 1.0 / mtbf


def _check(question: Question) -> None:
    if not all(0 < value < math.inf for value in (question.step, question.hours)):
        raise ConfigError("A job needs hours of training and seconds per step, both above 0 and finite.")
    if not 0 < question.min_nodes <= question.nodes:
        raise ConfigError(f"--min-nodes {question.min_nodes}: give 1 to {question.nodes} nodes, or 0 for all of them.")
    if question.spares < 0:
        raise ConfigError(f"--spares {question.spares}: give 0 or more nodes.")
    for name in (
        "node_mtbf",
        "worker_mtbf",
        "master_mtbf",
        "restart",
        "replacement",
        "checkpoint_every",
        "join_timeout",
    ):
        value = getattr(question, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number of at least 0.")
    for name in ("node_mtbf", "worker_mtbf", "master_mtbf"):
        if 0 < getattr(question, name) < 0.1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(question, name)}: nothing that fails every few minutes can train. "
                "Give hours between two failures, 0 for never."
            )
