"""
Spans that also say what the worker is doing, for the agent that watches it.

Under `dlrover-run` a span of evaluation, saving or restoring is a phase of the worker's progress page, and the end of a step is a report of it. So no program has to follow
the event files to know how far training is: the agent reads it where the hooks of torch write it, at the same moment. Elsewhere nothing happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover.trainer.events.process import DurationSpan, safe

if TYPE_CHECKING:
    from dlrover.trainer.phases import PhaseWriter

_PHASES = {"#evaluate": "EVALUATION", "#predict": "EVALUATION", "#save": "CHECKPOINT", "#init#load_ckpt": "RESTORE"}
_STEP = "#step"


class PhaseSpan(DurationSpan):
    _before: int | None = None
    _entered = -1

    @safe
    def begin(self) -> DurationSpan:
        if self._began_at is None:
            self._enter()
        return super().begin()

    def _end(self, extra: dict[str, object]) -> None:
        if self.is_open:
            self._leave()
            step = self._content.get("global_step")
            if self._name == _STEP and extra.get("success", True) and type(step) is int:
                from dlrover.trainer.progress import report_from_span

                report_from_span(step)
        super()._end(extra)

    def _enter(self) -> None:
        phase, writer = _PHASES.get(self._name), _writer()
        if phase is not None and writer is not None:
            from dlrover.trainer import phases

            self._entered = getattr(phases, phase)
            self._before = writer.enter(self._entered)

    def _leave(self) -> None:
        """Only out of what we entered: a span that ends after one that began later must not undo it."""
        before, self._before = self._before, None
        writer = _writer()
        if before is not None and writer is not None and writer.phase == self._entered:
            writer.leave(before)


def _writer() -> PhaseWriter | None:
    from dlrover.trainer import phases  # late: importing events must cost next to nothing

    return phases.current()
