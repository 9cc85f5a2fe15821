"""
Virtual time: what will happen, in order, and nothing in between.

Time jumps from one event to the next, so an hour in which nothing happens costs nothing. Two events of the same instant
happen in the order in which they were planned; there is no other source of order, so a seed always gives the same life.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

SECOND = 1_000_000
"""Microseconds, the unit of the virtual clock as of the master's."""


def micros(seconds: float) -> int:
    return round(seconds * SECOND)


class VirtualTime:
    """The future of one simulation."""

    def __init__(self) -> None:
        self.now = 0
        self.num_past = 0
        """Events so far."""
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_planned = 0

    def at(self, when: int, act: Callable[..., None], *args: Any) -> None:
        """An event cannot be taken back: the code that plans one checks at its time whether it still means something."""
        self._num_planned += 1
        heapq.heappush(self._heap, (when if when > self.now else self.now, self._num_planned, act, args))

    def after(self, delay: int, act: Callable[..., None], *args: Any) -> None:
        self._num_planned += 1
        heapq.heappush(self._heap, (self.now + delay, self._num_planned, act, args))

    def happen(self) -> bool:
        """The next event. False: nothing will ever happen again."""
        if not self._heap:
            return False
        self.now, _, act, args = heapq.heappop(self._heap)
        self.num_past += 1
        act(*args)
        return True


class Chance:
    """All randomness of a simulation, from one seed; a stream per subject, so that one does not disturb another."""

    def __init__(self, seed: int | str) -> None:
        self.network = random.Random(f"{seed}/network")
        self.nodes = random.Random(f"{seed}/nodes")
        self.disk = random.Random(f"{seed}/disk")
        self.platform = random.Random(f"{seed}/platform")


def span(chance: random.Random, low: float, high: float) -> int:
    """A duration between so many seconds, in microseconds."""
    return int((low + (high - low) * chance.random()) * SECOND)
