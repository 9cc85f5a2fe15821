"""Inside the training process."""

from dlrover.trainer.progress import report
from dlrover.trainer.worker.loggers import make_enduring

__all__ = ["report"]

make_enduring()  # here, because every other module of this room is imported after it
