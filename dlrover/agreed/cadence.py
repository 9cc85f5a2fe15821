"""
How often to save, from what a save costs and how often training is interrupted.

Saving costs its own time each interval; not saving costs, at each interruption, half an interval on average. The sum is least where the
interval is about sqrt(2 * cost * mean time between interruptions) (Young 1974, Daly 2006). Memory saves answer every interruption; storage
saves only those that take a machine's memory along, which are fewer. Both together stay within a share of the training time.

It is unknown how often a young job will be interrupted, so it begins with an assumption that counts like one interruption seen; what
the job sees itself outweighs it soon. All of it is a pure function of the measurements: one rank computes, all follow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

BUDGET = 0.01
"""Part of the training time that saves may take."""
ASSUMED_INTERRUPTIONS = 1.0
ASSUMED_AGE = 6 * 3600.0
"""As if the job had run so many seconds and been interrupted once."""
MACHINE_SHARE = 0.25
"""Part of the interruptions that memory does not survive; three quarters are cured by starting processes again."""
INTERFERENCE = 0.05
"""By how much steps are slower while the agent writes, at most: that is what a write costs the training."""
MOST_STEPS = 1_000_000
NUM_SAMPLES = 16


class SaveCosts(Struct, frozen=True, kw_only=True):
    """Seconds, as measured."""

    step: float
    """Of training, without any save."""
    memory: float
    """For which training stands still in a memory save."""
    storage: float = 0.0
    """The same in a storage save."""
    persist: float = 0.0
    """From a storage save until its checkpoint counts."""


class CadencePlan(Struct, frozen=True, kw_only=True):
    """In steps. The storage interval is a multiple of the memory interval."""

    memory_every: int
    storage_every: int


def mean_time_between(interruptions: int, age: float) -> float:
    """Seconds between two interruptions, after what the job has seen in `age` seconds."""
    return (age + ASSUMED_AGE) / (interruptions + ASSUMED_INTERRUPTIONS)


def best_interval(cost: float, mean_time: float, budget: float) -> float:
    """Seconds between two saves that cost so much."""
    return max(math.sqrt(2 * cost * mean_time), cost / budget)


def make_plan(costs: SaveCosts, interruptions: int, age: float, budget: float = BUDGET) -> CadencePlan:
    """Half of the budget is for memory saves, half for storage saves."""
    mean_time = mean_time_between(interruptions, age)
    memory = best_interval(costs.memory, mean_time, budget / 2)
    storage_cost = max(costs.storage, costs.memory) + INTERFERENCE * costs.persist
    storage = best_interval(storage_cost, mean_time / MACHINE_SHARE, budget / 2)
    storage = max(storage, 2 * costs.persist)  # one after the other, with time between them
    memory_every = _steps(memory, costs.step)
    return CadencePlan(
        memory_every=memory_every, storage_every=math.ceil(_steps(storage, costs.step) / memory_every) * memory_every
    )


def _steps(interval: float, step: float) -> int:
    return math.ceil(min(max(1.0, interval / max(step, 1e-6)), MOST_STEPS))


class Measurements:
    """The newest of each kind. Medians, because one save that waited for a page or a neighbour says nothing."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._memory: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._storage: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._persists: deque[float] = deque(maxlen=NUM_SAMPLES)

    def note_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def note_save(self, seconds: float, *, is_storage: bool) -> None:
        (self._storage if is_storage else self._memory).append(seconds)

    def note_persist(self, seconds: float) -> None:
        self._persists.append(seconds)

    def costs(self) -> SaveCosts | None:
        """None: nothing can be said yet."""
        if not self._steps or not (self._memory or self._storage):
            return None
        memory = _median(self._memory or self._storage)
        return SaveCosts(
            step=_median(self._steps),
            memory=memory,
            storage=_median(self._storage or [memory]),
            persist=_median(self._persists or [0.0]),
        )


class Cadence:
    """
    Which step is saved, and where to. Every rank has one and asks it at every step; they differ in nothing but their measurements, which count
    on one rank only: what it plans is told to all at steps that all know beforehand.
    """

    FIRST = CadencePlan(memory_every=1, storage_every=MOST_STEPS)
    """Until something has been measured."""
    NUM_FIRST = 4
    """Steps of it."""
    MOST_BETWEEN = 1024
    """Steps between two looks at the plan, at most: a job that begins to fail more often shall save more often soon."""

    def __init__(self, plan: CadencePlan | None = None) -> None:
        """With a plan of the caller's it is kept for good."""
        self.plan = self.FIRST if plan is None else plan
        self._is_fixed = plan is not None
        self._is_planned = plan is not None
        self._next_look: int | None = None
        self._saved_at: int | None = None
        """Step that was due last, for whatever it was; whether the save succeeded does not matter, or ranks would differ."""
        self._stored_at: int | None = None

    def is_look_due(self, step: int) -> bool:
        """Whether all ranks shall hear a new plan before this step is judged."""
        if self._next_look is None:
            self._next_look = step + self.NUM_FIRST
        return not self._is_fixed and step >= self._next_look

    def adopt(self, plan: CadencePlan | None, step: int) -> None:
        """From this step on, on all ranks. None: nothing could be planned yet."""
        if plan is None:
            self._next_look = step + self.NUM_FIRST
            return
        self.plan, self._is_planned = plan, True
        self._next_look = step + min(max(plan.memory_every, 4 * self.NUM_FIRST), self.MOST_BETWEEN)

    def due(self, step: int) -> str:
        """`storage`, `memory`, or nothing. The first storage save comes with the first plan: what it takes is to be measured, too."""
        if self._stored_at is None:
            is_stored = self._is_planned
        else:
            is_stored = step - self._stored_at >= self.plan.storage_every
        is_saved = is_stored or self._saved_at is None or step - self._saved_at >= self.plan.memory_every
        if is_stored:
            self._stored_at = step
        if is_saved:
            self._saved_at = step
        return "storage" if is_stored else "memory" if is_saved else ""


def _median(values: Sequence[float]) -> float:
    """Of the standard library's nothing can be used here: its module imports chance."""
    return sorted(values)[len(values) // 2]
