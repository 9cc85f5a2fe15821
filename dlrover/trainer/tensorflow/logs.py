"""What the processes of a job show on their console."""

from __future__ import annotations

import logging


def log_to_console() -> None:
    """Ours alone: TensorFlow has a handler of its own."""
    ours = logging.getLogger("dlrover")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False
    ours.setLevel(logging.INFO)


def log_steps() -> None:
    """TensorFlow tells of steps and losses at a level that it does not show by default."""
    logger = logging.getLogger("tensorflow")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
