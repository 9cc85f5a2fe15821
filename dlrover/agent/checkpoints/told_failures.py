"""Failures of which people are told once, until it works again: storage that cannot be written fails at each save."""

from __future__ import annotations

import logging
import time

from dlrover.protocol.error_codes import ErrorCode

log = logging.getLogger("dlrover.agent")


class ToldFailures:
    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        """Kinds of failures, and when people were told of each."""

    def tell(self, kind: str, message: str) -> None:
        """Once, until a save that began later succeeds."""
        if kind in self._told:
            log.info("%s", message)
        else:
            self._told[kind] = time.monotonic()
            log.error("%s", message)

    def forget(self, begun_at: float) -> None:
        """A save that began then has succeeded."""
        self._told = {
            kind: at
            for kind, at in self._told.items()
            if at > begun_at  # storage failed while this save only waited for the others
            or ErrorCode.ANOTHER_JOB in kind  # it goes on, however often we are quicker
        }
