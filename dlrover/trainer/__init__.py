"""Inside the training process."""

from dlrover.trainer.progress import report

__all__ = ["report"]
