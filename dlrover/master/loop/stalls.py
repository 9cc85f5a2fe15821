"""
Time that the master lost and that others must not pay for.

A master that was stopped, swapped out or starved has not read what was sent in time. So it measures how long its event
loop stood still, and holds all deadlines back by as much. A slow disk is no such loss: while a turn waits for it, the
loop reads on, and what it read is decided before the deadlines are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dlrover.protocol.messages.job import Micros

PULSE = 0.5
"""Seconds between two looks at the loop's own punctuality. Only a look can tell: who is stopped gets no signal of it."""
LATE = 0.1
"""Seconds by which a look may come late before that counts."""
LONGEST_GRACE = Micros(40_000_000)
"""Microseconds, a full window of silence: who has not come back by then will not, and a master that is late again and
again, because there is too much to do, must give a node up in the end."""
NEVER = Micros(2**62)
LONG_STALL = 5_000_000
"""Microseconds that a master may stand still without being taken for dead: agents close a stream that is mute for 10 s."""
AFTERMATH = 10_000_000
"""Microseconds after a long stall in which a stream that ends may have ended because of it."""


class LoopWatch:
    """Measures how long the running event loop did not run."""

    def __init__(self, time: Callable[[], float] | None = None) -> None:
        """`time`: in seconds; tests have one that stands still unless they move it. Else that of the loop."""
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time if time is None else time
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._stalled = 0.0

    def start(self) -> None:
        self._due_at = self._time() + PULSE
        self._timer = self._loop.call_later(PULSE, self._pulse)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def take(self) -> int:
        """Microseconds that it stood still since this was last asked."""
        if self._timer is not None:
            self._measure()  # we may run before the pulse that is due
        stalled, self._stalled = self._stalled, 0.0
        return int(stalled * 1e6)

    def _pulse(self) -> None:
        self._measure()
        self._timer = self._loop.call_later(self._due_at - self._time(), self._pulse)

    def _measure(self) -> None:
        now = self._time()
        late = now - self._due_at
        if late >= 0:
            self._due_at = now + PULSE
        if late > LATE:
            self._stalled += late


class Grace:
    """Until when no deadline passes, because what would meet it may be on its way. At first for ever."""

    def __init__(self) -> None:
        self.until = NEVER
        self._granted = 0  # since deadlines could last pass

    def begin(self, now: Micros) -> None:
        """From here on deadlines pass."""
        self.until = now

    def extend(self, now: Micros, duration: int) -> None:
        """Hold deadlines that long; in a row of holds `LONGEST_GRACE` altogether."""
        given = min(duration, LONGEST_GRACE - self._granted)
        self._granted += given
        self.until = Micros(max(self.until, now + given))

    def is_over(self, now: Micros) -> bool:
        if now < self.until:
            return False
        self._granted = 0
        return True
