"""
The time of one master: the job's clock, which stands still while nothing can be written, and how far it can be trusted.

After it stood still itself, a master grants grace before deadlines pass, as `dlrover/master/loop/stalls.py` does, but never more
than so much in a row.
"""

from __future__ import annotations

from dlrover.protocol.messages.job import Micros
from dlrover.simulator.virtual_time import SECOND, VirtualTime

START = 1_700_000_000 * SECOND
"""What the wall clock shows when a simulation begins."""
LONGEST_GRACE = 40 * SECOND


class MasterTime:
    """Owned by the master."""

    def __init__(self, events: VirtualTime, job_now: Micros) -> None:
        self._events = events
        self._offset = max(job_now, START + events.now) - events.now
        """From virtual time to the job's time."""
        self._stood_still = 0
        self._stopped_at: int | None = None
        self._grace_until = 0
        self._granted = 0
        self._stalled = 0
        """What the observations have not been told of."""
        self._new_stall = 0

    def now(self) -> Micros:
        at = self._events.now if self._stopped_at is None else self._stopped_at
        return Micros(at + self._offset - self._stood_still)

    def stop(self) -> None:
        self._stopped_at = self._events.now

    def go_on(self) -> None:
        assert self._stopped_at is not None, "the clock never stopped"
        self._stood_still += self._events.now - self._stopped_at
        self._stopped_at = None

    def event_at(self, deadline: int) -> int:
        """When on the virtual clock that deadline may pass."""
        return max(deadline, self._grace_until) - self._offset + self._stood_still

    def add_stall(self, duration: int) -> None:
        self._new_stall += duration

    def notice_stall(self) -> None:
        """At the first turn after it."""
        if self._new_stall:
            self.extend_grace(self._new_stall)
            self._stalled += self._new_stall
            self._new_stall = 0

    def extend_grace(self, duration: int) -> None:
        given = min(duration, LONGEST_GRACE - self._granted)
        self._granted += given
        self._grace_until = max(self._grace_until, self.now() + given)

    def is_trusted(self) -> bool:
        return self.now() >= self._grace_until

    def end_grace(self) -> int:
        """Returns for how long the master stood still since it ended last: for so long no node was silent."""
        self._granted = 0
        stalled, self._stalled = self._stalled, 0
        return stalled
