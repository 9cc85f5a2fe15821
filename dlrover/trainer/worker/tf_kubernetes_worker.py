"""`TFKubernetesWorker`: one process of a TensorFlow job, for scripts that make it themselves."""

from __future__ import annotations

from typing import Any


class TFKubernetesWorker:
    def __init__(self, args: Any) -> None:
        """`args`: with `conf`, the name of the conf class, as the starter parses it."""
        self.args = args

    def start_executor_service(self) -> None:
        """The whole work of this process."""
        from dlrover.trainer.tensorflow.process import run_task

        run_task(self.args.conf)

    run = start_executor_service
