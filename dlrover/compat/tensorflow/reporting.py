"""Reports of a TensorFlow script about its steps, under the names of the original."""

from __future__ import annotations

import time

from dlrover.trainer import progress
from dlrover.trainer.tensorflow.config import CHIEF, own_task


def is_tf_chief() -> bool:
    task = own_task()
    return task is not None and (task.type, task.index) == (CHIEF, 0)


class TFTrainingReporter:
    """One per process is enough; several do no harm."""

    def __init__(self) -> None:
        self.called_in_tf_hook = False
        self._start_time = 0.0

    def set_start_time(self) -> None:
        self._start_time = self._start_time or time.time()

    def report_resource_with_step(self, step: int) -> None:
        """The agent measures what the process uses; the step is all that it has to be told."""
        progress.report(step)
