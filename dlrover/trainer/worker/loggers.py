"""
Our loggers in the worker, which nothing disables.

`logging.config.dictConfig` and `fileConfig` disable, unless told otherwise, every logger that exists and that they do not name. Scripts call
them after our modules were imported, and what we warn about would be lost. So our loggers cannot be disabled. Handlers, levels and
formats stay the script's: to hear less of us, set the level of the logger `dlrover`.
"""

from __future__ import annotations

import logging

NAMES = (
    "dlrover.snapshot",
    "dlrover.trainer",
    "dlrover.trainer.data",
    "dlrover.trainer.events",
    "dlrover.trainer.flash_checkpoint",
    "dlrover.trainer.resilience",
    "dlrover.trainer.sync",
    "dlrover.trainer.tensorflow",
    "dlrover.compat.client.brain_client",
    "dlrover.compat.client.comm",
    "dlrover.compat.client.diagnosis",
    "dlrover.compat.client.master_client",
    "dlrover.compat.client.paral_config_tuner",
    "dlrover.compat.client.resource_monitor",
    "dlrover.compat.client.shared_objects",
    "dlrover.compat.client.tasks",
)
"""Of all loggers that our modules have in a worker; a test holds this list."""


class _Enduring(logging.Logger):
    """A logger whose attribute `disabled` stays False."""

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        """No code disables us."""


def make_enduring() -> None:
    """Before our modules get their loggers. A logger of a class of the script's own stays as it is, but for that."""
    for name in NAMES:
        logger = logging.getLogger(name)
        if not isinstance(logger, _Enduring):
            kind = type(logger)
            logger.__class__ = (
                _Enduring
                if kind is logging.Logger
                else type(kind.__name__, (_Enduring, kind), {"__module__": __name__})
            )
