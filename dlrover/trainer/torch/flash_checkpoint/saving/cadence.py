"""
Saving by itself: the checkpointer measures what saves and steps take and decides when to save.

    checkpointer = DdpCheckpointer("/shared/run7", checkpoint_interval="auto")
    ...
    checkpointer.save_if_due(step, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})

Global rank 0 plans (`dlrover.agreed.cadence`) and tells the others, by one small broadcast at steps that all of them know beforehand. So all
ranks have to ask at every step, and none of them decides by a clock of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from dlrover.agreed.cadence import BUDGET, Cadence, CadencePlan, Measurements, make_plan
from dlrover.protocol.errors import ConfigError
from dlrover.trainer import environment
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult, StorageType
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

AUTO = "auto"
Interval = str | int | tuple[int, int]
"""`auto`; steps between storage saves, with a memory save at every step; or steps between memory and between storage saves."""


class SaveCadence:
    """Of one checkpointer. Ask `due` at every step, and tell what came of it."""

    def __init__(self, engine: CheckpointEngine, interval: Interval = AUTO, budget: float = BUDGET) -> None:
        self._engine = engine
        self._budget = budget
        self._cadence = Cadence(read_interval(interval, budget))
        self._measured = Measurements()
        self._heard: dict[str, None] = {}
        """Attempts whose time was counted."""
        self._asked_at: float | None = None
        self._began_at = time.monotonic()

    @property
    def plan(self) -> CadencePlan:
        return self._cadence.plan

    def due(self, step: int) -> StorageType | None:
        """Whether this step is saved, and where to. The same on all ranks."""
        now = time.perf_counter()
        if self._asked_at is not None:
            self._measured.note_step(now - self._asked_at)
        if self._cadence.is_look_due(step):
            self._look(step)
        said = self._cadence.due(step)
        self._asked_at = time.perf_counter()
        if said:
            return StorageType.DISK if said == "storage" else StorageType.MEMORY
        return None

    def save_if_due(self, step: int, save: Callable[[StorageType], SaveResult]) -> SaveResult | None:
        """Save this step if it is time. None: it is not."""
        storage_type = self.due(step)
        if storage_type is None:
            return None
        result = save(storage_type)
        self.saved(result, storage_type)
        return result

    def saved(self, result: SaveResult, storage_type: StorageType) -> None:
        if result:
            self._measured.note_save(result.blocking, is_storage=storage_type is StorageType.DISK)
        self._asked_at = time.perf_counter()

    def _look(self, step: int) -> None:
        self._hear_persists()
        costs = self._measured.costs()
        told = [0, 0]
        if costs is not None:
            where = environment.current()
            age = time.monotonic() - self._began_at + (0.0 if where is None else where.job_age)
            mine = make_plan(costs, 0 if where is None else where.num_restarts, age, self._budget)
            told = [mine.memory_every, mine.storage_every]
        memory_every, storage_every = self._engine.agree(told)
        plan = CadencePlan(memory_every=memory_every, storage_every=storage_every) if memory_every else None
        if plan is not None and plan != self._cadence.plan:
            log.info(
                "from step %d on, a save goes to memory every %d steps and to storage every %d steps",
                step,
                memory_every,
                storage_every,
            )
        self._cadence.adopt(plan, step)

    def _hear_persists(self) -> None:
        """What the agent told of finished checkpoints, each once."""
        self._engine.poll()
        for attempt, news in list(getattr(self._engine.outlet, "settled", {}).items()):
            if attempt not in self._heard and news.is_committed and news.seconds > 0:
                self._heard[attempt] = None
                self._measured.note_persist(news.seconds)


def read_interval(interval: Interval, budget: float) -> CadencePlan | None:
    """The caller's plan; None: it is to be found. Raises ConfigError."""
    if not 0 < budget < 1:
        raise ConfigError(
            "overhead_budget, the share of training time that saves may take, must be above 0 and below 1 (got "
            f"{budget})."
        )
    if interval == AUTO:
        return None
    pair = (1, interval) if isinstance(interval, int) else interval
    is_pair = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, int) and each >= 1 for each in pair)
    if not is_pair or isinstance(pair, str):
        raise ConfigError(
            f'checkpoint_interval {interval!r} is not valid. Give "auto", a number of steps between saves to '
            "storage, or two numbers: one for memory and one for storage."
        )
    memory_every, storage_every = pair
    return CadencePlan(memory_every=memory_every, storage_every=math.ceil(storage_every / memory_every) * memory_every)
