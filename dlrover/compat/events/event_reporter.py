"""
`EventReporter`: what an event reporter of the original derives from.

Name yours in `DLROVER_EVENT_REPORTERS` (`module::Class`); the master calls its `report` with the five arguments below.
"""

from __future__ import annotations

import json
import logging
import time

from dlrover.compat.tools.singleton import Singleton

log = logging.getLogger(__name__)


class EventReporter(Singleton):
    def initialize(self, *arguments: object, **named: object) -> None:
        """For your own."""

    def is_initialized(self) -> bool:
        return True

    @classmethod
    def report(cls, event_type: str, instance: str, action: str, msg: str, labels: dict[str, str]) -> None:
        """A line of the log, unless yours does something else."""
        at = time.strftime("%Y-%m-%d, %H:%M:%S")
        log.info("[%s][%s][%s][%s][%s][%s]", at, event_type, instance, action, msg, json.dumps(labels or {}))
