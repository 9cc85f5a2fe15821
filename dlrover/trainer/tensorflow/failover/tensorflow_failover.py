"""
`TensorflowFailover`: the original watched the list of parameter servers from inside each process.

Here the master decides when a version of the cluster ends, and the agents replace the processes. The object exists for scripts that make one.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("dlrover.trainer.tensorflow")


class TensorflowFailover:
    def __init__(self, failover_client: Any = None, failover_level: int = 1) -> None:
        """A level of 0 or less switches it off, as ever."""
        self.failover_client = failover_client
        self.failover_level = failover_level

    @property
    def recoverable(self) -> bool:
        return self.failover_level > 0

    def start_failover_monitor(self) -> None:
        if self.recoverable:
            log.info(
                "The master replaces the processes of a cluster when its parameter servers change; there is nothing to monitor here."
            )
