"""
Steps in the model: those that the script restored, and those that its optimizer has taken since.

A script that restores by itself does not report its step, but its state tells it: most optimizers keep a count of their steps with each
parameter, and frameworks keep a `global_step`. Both are looked at once, after the first step of a life. A script that loads nothing begins at 0.
A script that loads something without any count (SGD, or weights alone) may go on anywhere: then the start is unknown.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from dlrover.trainer import phases
from dlrover.trainer.phases import DATA, PhaseWriter


class ModelSteps:
    """The greatest count of any optimizer: a model may have several."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """By optimizer. Not positive: to be learned with the next step, after so many that it took before a state was loaded into it."""
        self._greatest = 0
        self._restored: int | None = None
        self._has_loaded = False

    def loaded(self, what: Any) -> None:
        """The script has read some state: of an optimizer, a module, a file. Not where it waits for data: samples may be files, too."""
        writer = phases.current()
        if writer is None or writer.phase == DATA:
            return
        self._has_loaded = True
        if what in self._counts:
            self._counts[what] = -abs(self._counts[what])

    def restored(self, step: Any) -> None:
        """A framework goes on from this step. That it begins at 0 says nothing of weights that were loaded before."""
        if type(step) is int and step > 0:
            self._restored = step

    def took_one(self, optimizer: Any, writer: PhaseWriter) -> int | None:
        """An optimizer has stepped. The number of the step, if it is a new one of the model."""
        count = self._counts.get(optimizer, 0)
        count = self._counts[optimizer] = count + 1 if count > 0 else self._learn(optimizer, -count, writer)
        if count <= self._greatest:
            return None
        self._greatest = count
        writer.set_model_step(count)
        return count

    def _learn(self, optimizer: Any, count: int, writer: PhaseWriter) -> int:
        """The number of the first step of a life, or of the first after a state was loaded into the optimizer."""
        kept = count_in(optimizer)
        if kept > 1 and kept != count + 1:
            self._greatest = min(self._greatest, kept - 1)
        elif count:
            return count + 1
        else:
            kept = (self._restored or 0) + 1
        if kept > self._greatest:
            is_known = kept > 1 or self._restored is not None or not self._has_loaded
            writer.set_model_start(kept - 1 if is_known else None)
        return kept


def count_in(optimizer: Any) -> int:
    """The greatest `step` in its state; 0: it keeps none."""
    greatest = 0
    try:
        for state in (*optimizer.state.values(), *optimizer.param_groups):
            step = state.get("step") if isinstance(state, Mapping) else None
            if step is not None:
                greatest = max(greatest, int(step))
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError):
        return 0  # an optimizer of somebody else, with a state of another form
    return greatest
