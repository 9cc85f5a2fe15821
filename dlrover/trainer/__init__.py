"""Inside the training process."""

from dlrover.trainer.loggers import make_enduring
from dlrover.trainer.progress import report

__all__ = ["report"]

make_enduring()  # here, because every other module of this room is imported after it
