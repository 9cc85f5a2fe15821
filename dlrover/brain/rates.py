"""How much one job may send. What is too much is sent away with the time after which it may come again; the job's runs wait in its journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from dlrover.brain.config import RateTerms
from dlrover.protocol.errors import Unavailable

SAVED_SECONDS = 2.0
MOST_SENDERS = 65_536
"""Senders that are remembered. Who has been silent for long has nothing to be remembered for."""


@dataclass
class _Spent:
    """In seconds: how much of the future has been used up."""

    messages: float = 0.0
    size_bytes: float = 0.0
    at: float = 0.0


class SendRates:
    def __init__(self, terms: RateTerms, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._terms = terms
        self._clock = clock
        self._spent: dict[Hashable, _Spent] = {}

    def check(self, sender: Hashable, size_bytes: int) -> None:
        """Counts a message. Raises Unavailable if it is too much now."""
        now = self._clock()
        spent = self._spent.pop(sender, None) or _Spent(at=now)
        passed = now - spent.at
        spent.messages, spent.size_bytes = max(0.0, spent.messages - passed), max(0.0, spent.size_bytes - passed)
        spent.at = now
        self._spent[sender] = spent  # the one that was heard last comes last
        while len(self._spent) > MOST_SENDERS:
            del self._spent[next(iter(self._spent))]
        cost = 1 / self._terms.messages, size_bytes / self._terms.size_bytes
        wait = max(spent.messages + cost[0], spent.size_bytes + cost[1]) - SAVED_SECONDS
        if wait > 1e-9 and max(spent.messages, spent.size_bytes) > 0:
            raise Unavailable(
                f"This job sends more than {self._terms.messages:g} messages or {self._terms.size_bytes / 2**20:g} MiB a second.",
                max(0.05, wait),
            )
        spent.messages += cost[0]
        spent.size_bytes += cost[1]
