"""
A stream between roles: trainers ask for the batch of a step, feeders make its items, and each key is in exactly one batch.

The step of the trainer is the ledger: step s has the keys from s x batch on, and no others. So the server may be lost at any moment: a trainer asks
again for the step that it needs, and the items are made again. An item depends on its key and its step alone, so it does not matter which feeder makes
it, or how often. What a feeder has put is owned here, and outlives the feeder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from msgspec import Struct

from dlrover.unified.runtime.methods import rpc

WAIT = 10.0
"""Seconds after which a question is answered without news, so that a caller that is gone holds no thread for long."""
KEPT_STEPS = 2
"""Before the newest that was asked for: another rank may be behind by one."""


class KeyLease(Struct):
    feeder: str
    life: int
    until: float


class StreamStep(Struct):
    number: int
    keys: range
    items: dict[int, bytes]
    leases: dict[int, KeyLease]

    @property
    def is_complete(self) -> bool:
        return len(self.items) == len(self.keys)


class StreamServer:
    def __init__(
        self, *, batch: int, lease: float, clock: Callable[[], float] = time.monotonic, wait: float = WAIT
    ) -> None:
        self._batch = batch
        self._lease = lease
        self._clock = clock
        self._wait = wait
        self._steps: dict[int, StreamStep] = {}
        self._newest = -1
        self._changed = threading.Condition()  # guards all: calls come in threads

    @rpc(retry=True)
    def get(self, step: int) -> list[tuple[int, bytes]] | None:
        """Items of the step with their keys, in the order of keys. None: not yet, ask again."""
        with self._changed:
            self._open(step)
            self._changed.wait_for(lambda: self._steps[step].is_complete, self._wait)
            found = self._steps[step]
            return [(key, found.items[key]) for key in found.keys] if found.is_complete else None

    @rpc(retry=True)
    def take(self, feeder: str, life: int, most: int) -> list[tuple[int, int]]:
        """Keys for this feeder to make, each with its step. Empty: none yet, ask again."""
        with self._changed:
            self._release(feeder, life)
            deadline = self._clock() + self._wait
            while True:
                if taken := self._grant(feeder, life, most):
                    return taken
                left = min(deadline, self._next_expiry()) - self._clock()
                if deadline <= self._clock():
                    return []
                self._changed.wait(max(left, 0.001))

    @rpc(retry=True)
    def put(self, step: int, key: int, item: bytes) -> bool:
        """False: it is there already, or the step is over. Both are fine."""
        with self._changed:
            found = self._steps.get(step)
            if found is None or key not in found.keys or key in found.items:
                return False
            found.items[key] = item
            found.leases.pop(key, None)
            if found.is_complete:
                self._changed.notify_all()
            return True

    @rpc(retry=True)
    def statistics(self) -> dict[str, int]:
        with self._changed:
            return {
                "steps": len(self._steps),
                "items": sum(len(step.items) for step in self._steps.values()),
                "leases": sum(len(step.leases) for step in self._steps.values()),
                "newest": self._newest,
            }

    def _open(self, number: int) -> None:
        """A step below the newest is asked for by a trainer that was restored."""
        if number not in self._steps:
            first = number * self._batch
            self._steps[number] = StreamStep(number, range(first, first + self._batch), {}, {})
            self._changed.notify_all()
        self._newest = number
        for old in [each for each in self._steps if each < number - KEPT_STEPS or each > number + KEPT_STEPS]:
            del self._steps[old]

    def _grant(self, feeder: str, life: int, most: int) -> list[tuple[int, int]]:
        now = self._clock()
        taken: list[tuple[int, int]] = []
        for number in sorted(self._steps):
            step = self._steps[number]
            for key in step.keys:
                if len(taken) == most:
                    return taken
                lease = step.leases.get(key)
                if key not in step.items and (lease is None or lease.until <= now):
                    step.leases[key] = KeyLease(feeder, life, now + self._lease)
                    taken.append((number, key))
        return taken

    def _release(self, feeder: str, life: int) -> None:
        """A feeder that asks again has nothing under way any more, nor has a former life of it."""
        for step in self._steps.values():
            for key in [key for key, lease in step.leases.items() if lease.feeder == feeder and lease.life <= life]:
                del step.leases[key]

    def _next_expiry(self) -> float:
        ends = [lease.until for step in self._steps.values() for lease in step.leases.values()]
        return min(ends, default=float("inf"))
