"""
The master's clock: integer microseconds that never go back, not even over a restart or a step of the wall clock.

It begins at the wall clock or at the last journalled instant, whichever is later, and from there on counts elapsed
time only. So instants are readable as dates, and durations between them are true.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dlrover.protocol.messages import Micros


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

    def now(self) -> Micros:
        return Micros(self._begin_at + (self._monotonic() - self._begin_ns) // 1000)
