"""What the processes of a job show on their console."""

from __future__ import annotations

import logging
import os

_DIRECTORY = "DLROVER_TRAINER_LOG_DIR"
"""Set: what goes to the console goes to a file of each process, too."""


def log_to_console() -> None:
    """Ours alone: TensorFlow has a handler of its own."""
    ours = logging.getLogger("dlrover")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        ours.addHandler(handler)
        directory = os.environ.get(_DIRECTORY, "")
        if directory:
            os.makedirs(directory, exist_ok=True)
            file = logging.FileHandler(os.path.join(directory, f"trainer.{os.getpid()}.log"), encoding="utf-8")
            file.setFormatter(handler.formatter)
            ours.addHandler(file)
        ours.propagate = False
    ours.setLevel(logging.INFO)


def log_steps() -> None:
    """TensorFlow tells of steps and losses at a level that it does not show by default."""
    logger = logging.getLogger("tensorflow")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
