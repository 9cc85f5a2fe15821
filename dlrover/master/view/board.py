"""
The board: what the page shows, as levels with versions.

A browser says which version it has seen and gets what changed since, as it is now. So nothing is queued: a slow browser, or
one that was away for a minute, gets the newest state and skips what lay between; a browser that comes from an earlier life of the master
gets everything.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Container
from typing import NamedTuple

import msgspec
from msgspec import Struct

from dlrover.master.view.series import Series

MAX_GONE = 2_000
"""So many items that were taken off are remembered; beyond, who has not seen them go gets everything."""
MAX_SERIES = 12


class _Item(NamedTuple):
    version: int
    value: object


class NewPoints(Struct, frozen=True):
    points: list[tuple[float, float | None]]
    is_whole: bool
    """These replace what was known, instead of following it."""


class Delta(Struct, frozen=True, kw_only=True):
    life: str
    version: int
    is_whole: bool
    sections: dict[str, dict[str, object]]
    """By section and key; None: it is gone."""
    series: dict[str, NewPoints]


class Board:
    """Changed by one task; looked at by any number."""

    def __init__(self) -> None:
        self.life = secrets.token_hex(4)
        """Tells the versions of one master from those of the next."""
        self.version = 0
        self.is_closed = False
        """Nothing will change any more: readers may go."""
        self._sections: dict[str, dict[str, _Item]] = {}
        self._gone: dict[tuple[str, str], int] = {}
        self._whole_before = 0
        """Who has seen less than this version gets everything."""
        self._series: dict[str, Series] = {}
        self._news = asyncio.Event()
        self._encoded: tuple[int, int, bytes] = (-1, -1, b"")

    def put(self, section: str, key: str, value: object) -> None:
        items = self._sections.setdefault(section, {})
        known = items.get(key)
        if known is None or known.value != value:
            items[key] = _Item(self.version + 1, value)
            self._gone.pop((section, key), None)

    def keep(self, section: str, keys: Container[str], *, is_told: bool = True) -> None:
        """Take off what is not among them. `is_told` False: readers drop it by themselves, as the oldest of a list."""
        items = self._sections.get(section, {})
        for key in [key for key in items if key not in keys]:
            del items[key]
            if is_told:
                self._gone[section, key] = self.version + 1
        if len(self._gone) > MAX_GONE:
            self._gone.clear()
            self._whole_before = self.version + 1

    def point(self, name: str, at: float, value: float) -> None:
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= MAX_SERIES:
                return
            series = self._series[name] = Series()
        series.add(self.version + 1, at, value)

    def section(self, name: str) -> dict[str, object]:
        return {key: item.value for key, item in self._sections.get(name, {}).items()}

    def last_point(self, name: str) -> float | None:
        series = self._series.get(name)
        return None if series is None or series.last is None else series.last.value

    def publish(self) -> None:
        """What was put since the last time becomes visible, together."""
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()

    def close(self) -> None:
        self.is_closed = True
        self.publish()

    async def wait_beyond(self, version: int, timeout: float) -> bool:
        """Whether there is something newer."""
        if self.version > version:
            return True
        news = self._news
        try:
            async with asyncio.timeout(timeout):
                await news.wait()
        except TimeoutError:
            return False
        return True

    def delta(self, since: int) -> Delta:
        """0: everything."""
        is_whole = since < self._whole_before or not 0 < since <= self.version
        floor = 0 if is_whole else since
        sections: dict[str, dict[str, object]] = {}
        for name, items in self._sections.items():
            changed = {key: item.value for key, item in items.items() if floor < item.version <= self.version}
            if changed:
                sections[name] = changed
        for (name, key), version in () if is_whole else self._gone.items():
            if floor < version <= self.version:
                sections.setdefault(name, {})[key] = None
        series = {}
        for name, points in self._series.items():
            new = points.since(floor)
            if new:
                series[name] = NewPoints(new, is_whole or points.merged_at > floor)
        return Delta(life=self.life, version=self.version, is_whole=is_whole, sections=sections, series=series)

    def encoded(self, since: int) -> bytes:
        """The delta as JSON. Many look at once and have seen the same: it is encoded for the first of them."""
        if self._encoded[:2] != (since, self.version):
            self._encoded = (since, self.version, msgspec.json.encode(self.delta(since)))
        return self._encoded[2]
