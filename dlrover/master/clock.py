"""
The master's clock: integer microseconds that never go back, not even over a restart or a step of the wall clock.

It begins at the wall clock or at the last journalled instant, whichever is later, and from there on counts elapsed
time only. So instants are readable as dates, and durations between them are true.

Time in which nothing can be decided does not count: while the journal cannot be written, the commands that would meet
a deadline are refused, so no deadline may come nearer either. The clock is stopped then, which moves them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dlrover.protocol.messages.job import Micros


class MasterClock:
    def __init__(
        self,
        last_journalled: Micros = Micros(0),  # noqa: B008 (a plain number)
        *,
        wall: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._monotonic = monotonic
        self._begin_ns = monotonic()
        self._begin_at = max(last_journalled, wall() // 1000)
        self._stood_still = 0
        self._stopped_at: int | None = None

    def now(self) -> Micros:
        """The job's time."""
        at = self.elapsed() if self._stopped_at is None else self._stopped_at
        return Micros(self._begin_at + at - self._stood_still)

    def elapsed(self) -> int:
        """Microseconds of this master's life, stopped or not: for what is between the master and its peers or disk."""
        return (self._monotonic() - self._begin_ns) // 1000

    @property
    def stood_still(self) -> int:
        """Microseconds of all stops that are over."""
        return self._stood_still

    def stop(self) -> None:
        """The job's time stands still; a second stop changes nothing."""
        if self._stopped_at is None:
            self._stopped_at = self.elapsed()

    def go_on(self) -> None:
        """From the instant at which it was stopped."""
        if self._stopped_at is not None:
            self._stood_still += self.elapsed() - self._stopped_at
            self._stopped_at = None
