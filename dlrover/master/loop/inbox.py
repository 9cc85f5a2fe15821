"""
The inbox: what came in and waits for the next turn of the loop.

It has room for a bounded number of requests. Who comes when it is full is refused for now and told when to come again,
spread over the time that the number of those refused needs: else they would all be back at once.
"""

from __future__ import annotations

import asyncio

from dlrover.master.loop.request import SHORTEST_RETRY, Work
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.job import MAX_REQUESTS_IN_WORK

SERVICE_TIME = 0.0005
"""Rough seconds of work per request: those refused are told to come back spread over the time their number needs."""


class Inbox:
    def __init__(self, wake: asyncio.Event) -> None:
        """`wake` is set when there is something to do."""
        self._wake = wake
        self._works: list[Work] = []
        self._num_refused = 0  # since the inbox was last empty
        self.num_in_work = 0
        """Requests from outside that came in and are not decided: in the inbox, or in the turn."""

    def offer(self, work: Work) -> None:
        """Refused if there is no room."""
        if self.num_in_work >= MAX_REQUESTS_IN_WORK:
            self._num_refused += 1
            text = f"the master already works on {MAX_REQUESTS_IN_WORK} requests"
            work.fail(Unavailable(text, self.retry_after()))
            return
        self.put(work)

    def put(self, work: Work) -> None:
        """Never refused."""
        if work.is_from_outside:
            self.num_in_work += 1
        self._works.append(work)
        self._wake.set()

    def look_again(self, works: list[Work]) -> None:
        """At questions that waited: their answer may be there, or their time is over."""
        if works:
            self.num_in_work += len(works)
            self._works += works
            self._wake.set()

    def retry_after(self) -> float:
        """Seconds after which a client that is refused now may come again."""
        return max(SHORTEST_RETRY, self._num_refused * SERVICE_TIME)

    def take(self) -> list[Work]:
        works, self._works = self._works, []
        return works

    def put_back(self, works: list[Work]) -> None:
        """What was taken and is undecided all the same comes first."""
        self._works[:0] = works

    def leave(self, work: Work) -> None:
        """It was decided, or it waits elsewhere: it takes no room any more."""
        if work.is_from_outside:
            self.num_in_work -= 1

    def turn_away(self, work: Work, error: Unavailable) -> None:
        """It changed nothing and may come again. No client waits for a finding of our own."""
        self.leave(work)
        work.fail(error)

    def end_turn(self) -> None:
        if not self._works:
            self._num_refused = 0
