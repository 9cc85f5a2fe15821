"""A number over time in bounded memory: when it is full, neighbours are merged, so old times get coarser and none is forgotten."""

from __future__ import annotations

import math
from typing import NamedTuple

MAX_POINTS = 480
"""About as many as a plot on a page has room for."""


class Point(NamedTuple):
    version: int
    """Of the board when it was added."""
    at: float
    """Seconds."""
    value: float | None
    """None: it was no number (NaN, infinite)."""


class Series:
    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._points: list[Point] = []
        self._spacing = 0.0
        """Seconds that new points keep from the last one: as far apart as the merged ones are."""
        self.merged_at = 0
        """Version at which points were merged last: who has seen less than that needs all of them."""

    def add(self, version: int, at: float, value: float) -> bool:
        """Whether it was taken; what comes too soon after the last one is not."""
        if self._points and at < self._points[-1].at + self._spacing:
            return False
        self._points.append(Point(version, at, value if math.isfinite(value) else None))
        if len(self._points) > self._max_points:
            self._merge(version)
        return True

    @property
    def last(self) -> Point | None:
        return self._points[-1] if self._points else None

    def since(self, version: int) -> list[tuple[float, float | None]]:
        """Points that are newer; all of them if some were merged since."""
        if version < self.merged_at:
            version = -1
        start = len(self._points)
        while start and self._points[start - 1].version > version:
            start -= 1
        return [(round(point.at, 3), _short(point.value)) for point in self._points[start:]]

    def _merge(self, version: int) -> None:
        newest = self._points[-1]
        pairs = zip(self._points[0:-1:2], self._points[1:-1:2], strict=False)
        merged = [Point(second.version, second.at, _mean(first.value, second.value)) for first, second in pairs]
        self._spacing = max(2 * self._spacing, (newest.at - self._points[0].at) / self._max_points)
        self._points = [*merged, newest]
        self.merged_at = version


def _mean(first: float | None, second: float | None) -> float | None:
    """What was no number stays visible."""
    return None if first is None or second is None else (first + second) / 2


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
