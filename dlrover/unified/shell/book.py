"""
Where the instances of a job are: one key for each, written by the instance when it takes calls.

It is in the cluster's store, so that a caller needs no other process: the conductor may be away. An entry that is outdated does no harm: the actor that it
names is gone, and the caller waits for a newer one.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec
from msgspec import Struct

from dlrover.unified.runtime.wire import CallTimeout, RoleGone
from dlrover.unified.store import KeyValues

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.2
"""Seconds between two looks. A poll: the store announces no change."""
_ALL = "all"


class Place(Struct, frozen=True, kw_only=True):
    """Where calls to one instance go."""

    role: str
    rank: int
    incarnation: int
    namespace: str
    actor: str
    is_relayed: bool = False
    """It is a forked worker; the actor is the node above it."""
    repeatable: tuple[str, ...] = ()
    """Methods that may run twice."""


class Book(Protocol):
    async def find(self, role: str, rank: int, *, newer_than: int, deadline: float) -> Place:
        """Waits for an incarnation above the given one. `deadline`: of the loop's clock. Raises `RoleGone` or `CallTimeout`."""


class KeyBook:
    def __init__(self, store: KeyValues, job_uid: str) -> None:
        self._store = store
        self._at = f"{job_uid}/at/"
        self._gone = f"{job_uid}/gone/"
        self._lives = f"{job_uid}/life/"

    async def find(self, role: str, rank: int, *, newer_than: int, deadline: float) -> Place:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        while True:
            place = self.look(role, rank)
            if place is not None and place.incarnation > newer_than:
                return place
            if why := self.why_gone(role):
                raise RoleGone(f"{role}-{rank} takes no more calls: {why}")
            if loop.time() + pause > deadline:
                state = "has not started" if place is None else "has not started again"
                raise CallTimeout(f"{role}-{rank} {state} within the time of the call.")
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def look(self, role: str, rank: int) -> Place | None:
        data = self._store.get(f"{self._at}{role}/{rank}")
        return None if data is None else _PLACE.decode(data)

    def enter(self, place: Place) -> None:
        self._store.put(f"{self._at}{place.role}/{place.rank}", msgspec.msgpack.encode(place))

    def leave(self, place: Place) -> None:
        """Unless a newer one is there already."""
        if self.look(place.role, place.rank) == place:
            self._store.delete(f"{self._at}{place.role}/{place.rank}")

    def next_life(self, role: str, rank: int) -> int:
        """An incarnation for a rank that the conductor does not count: above all former ones."""
        number = int(self._store.get(f"{self._lives}{role}/{rank}") or b"0") + 1
        self._store.put(f"{self._lives}{role}/{rank}", str(number).encode())
        return number

    def close(self, role: str, why: str) -> None:
        """Calls to the role are refused from now on."""
        self._store.put(f"{self._gone}{role}", why.encode())

    def reopen(self, role: str) -> None:
        self._store.delete(f"{self._gone}{role}")

    def close_all(self, why: str) -> None:
        self._store.put(f"{self._gone}{_ALL}", why.encode())

    def why_gone(self, role: str) -> str:
        """Empty: it is there, or comes."""
        found = self._store.get(f"{self._gone}{role}") or self._store.get(f"{self._gone}{_ALL}")
        return (found or b"").decode()


_PLACE = msgspec.msgpack.Decoder(Place)
