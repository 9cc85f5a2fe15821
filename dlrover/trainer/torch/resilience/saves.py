"""
What the guard of a script knows of its saves: which engine makes them, in which shape, and how their steps are numbered.

Engines tell of every save and restore here. Without a guard only the shape of what was restored is kept, because a script restores before it builds
its guard.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dlrover.protocol import progress_page
from dlrover.trainer import environment, phases
from dlrover.trainer.torch.resilience.recipe import DoubtError, shape_of

log = logging.getLogger("dlrover.trainer.resilience")


class Engine(Protocol):
    """What is needed of a `CheckpointEngine`."""

    def release(self) -> None:
        """Let another process write to the segment."""

    def save_alone(self, step: int, parts: Mapping[str, object], paths: Mapping[str, str], attempt: str) -> None:
        """Without asking other ranks. Raises an error if that is not possible."""


class KnownSave:
    """The newest save or restore of this process."""

    def __init__(
        self,
        engine: Engine,
        step: int,
        parts: Mapping[str, object],
        paths: Mapping[str, str],
        whole: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """`whole` makes the rest of the state, where the checkpointer and not the script builds it."""
        self.engine = engine
        self.step = step
        self.shape = shape_of(parts)
        self.paths = dict(paths)
        self.whole = whole


class SaveLog:
    """One per process: `save_log`."""

    def __init__(self) -> None:
        self.known: KnownSave | None = None
        self.num_notes = 0
        """Grows with each save and restore, and when there is a guard."""
        self.doubt = ""
        """Why steps cannot be counted; empty: they can, or it is not known yet."""
        where = environment.current()
        self.is_counted = where is not None and where.is_step_counted
        """The script's numbers grow by one with each guarded step."""
        self._count: Callable[[], int] | None = None
        self._counted_at = (0, 0)
        """The step of `known`, and how many guarded steps had been done."""

    def count_with(self, count: Callable[[], int]) -> None:
        """From now on there is a guard, which says how many steps are done, with the one that the script is in."""
        self._count = count
        self.num_notes += 1
        if self.known is not None:
            self._counted_at = (self.known.step, count())

    def restored(self, known: KnownSave) -> None:
        self._note(known, is_compared=False)

    def saved(self, make_known: Callable[[], KnownSave]) -> None:
        """Looking at a state takes a moment: it is not done without a guard."""
        if self._count is not None:
            self._note(make_known(), is_compared=True)

    def step_after(self, num_done: int) -> int:
        """The script's number of the step with which so many guarded ones are done. Raises DoubtError."""
        if self.known is None:
            raise DoubtError("this process has not saved or restored anything yet")
        if self.doubt or not self.is_counted:
            raise DoubtError(self.doubt or "two saves are needed to see how the script numbers its steps")
        step, counted = self._counted_at
        return step + num_done - counted

    def _note(self, known: KnownSave, *, is_compared: bool) -> None:
        step = known.step
        is_first = self.known is None
        before_step, before_count = self._counted_at
        self.known = known
        self.num_notes += 1
        if self._count is None:
            return
        counted = self._count()
        self._counted_at = (step, counted)
        if not is_compared or (is_first and not self._begins_at_zero(step, counted)):
            return
        if step - before_step == counted - before_count:
            self.is_counted = True
            _tell_next_life(progress_page.COUNTED)
        elif not self.doubt:
            _tell_next_life(progress_page.NOT_COUNTED)
            self.doubt = (
                f"the script's step number went from {before_step} to {step}, but its optimizers made "
                f"{counted - before_count} steps"
            )
            log.warning("If a worker is lost, the last step of this job cannot be saved: %s.", self.doubt)

    def _begins_at_zero(self, step: int, counted: int) -> bool:
        """Without a restore the script has begun with step 0, unless its first save says otherwise; that alone is no reason for a doubt."""
        return step == counted


def _tell_next_life(value: int) -> None:
    writer = phases.current()
    if writer is not None:
        writer.words[progress_page.STEP_COUNT] = value


@functools.cache
def save_log() -> SaveLog:
    """Of this process. Not made at the import, which may happen in a process that workers are forked from."""
    return SaveLog()
