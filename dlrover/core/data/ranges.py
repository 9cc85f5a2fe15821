"""
Ranges of places in an epoch, and what can be done with them: join, cut, compare.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct

from dlrover.protocol.messages.data import Claim

Key: TypeAlias = tuple[int, str, int]
"""Ranges of different keys have nothing in common."""


class Range(Struct, frozen=True, array_like=True):
    """Places of one epoch that belong to one shard, or to what is left of it."""

    epoch: int
    start: int
    end: int
    partition: str = ""
    listing: int = 0
    """Number of the list in which the records are named one by one; 0: the places say it."""

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def key(self) -> Key:
        return self.epoch, self.partition, self.listing


def range_of(claim: Claim) -> Range:
    return Range(claim.epoch, claim.start, claim.end, claim.partition, claim.listing)


def joined(one: Range, two: Range) -> Range:
    return Range(one.epoch, one.start, two.end, one.partition, one.listing)


def append(ranges: list[Range], new: Range) -> None:
    """Batches of one shard that follow each other become one entry."""
    if ranges and ranges[-1].key == new.key and ranges[-1].end == new.start:
        ranges[-1] = joined(ranges[-1], new)
    else:
        ranges.append(new)


class Places:
    """Ranges that share nothing with each other, in an order of their own, and found by where they are."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._pieces: dict[Key, list[tuple[int, int, int]]] = {}
        """Start, end, and the number of the range that it is a piece of; by where they start."""
        for number, each in enumerate(ranges):
            if each.size > 0:
                self._pieces.setdefault(each.key, []).append((each.start, each.end, number))
        for pieces in self._pieces.values():
            pieces.sort()

    def add(self, new: Range) -> None:
        """It is in none of them."""
        insort(self._pieces.setdefault(new.key, []), (new.start, new.end, 0))

    def within(self, whole: Range) -> list[Range]:
        """What of it is in them, in their order, and of one of them the last part first."""
        found = self._find(whole)
        found.sort(key=lambda piece: (piece[2], -piece[0]))
        return [_part(whole, start, end) for start, end, _ in found]

    def without(self, whole: Range) -> list[Range]:
        """What of it is in none of them, from its beginning to its end."""
        left, at = [], whole.start
        for start, end, _ in self._find(whole):
            if at < start:
                left.append(_part(whole, at, start))
            at = end
        return [*left, _part(whole, at, whole.end)] if at < whole.end else left

    def remove(self, part: Range) -> None:
        pieces = self._pieces[part.key]
        first, last = self._span(part)
        pieces[first:last] = [
            rest
            for start, end, number in pieces[first:last]
            for rest in ((start, min(end, part.start), number), (max(start, part.end), end, number))
            if rest[0] < rest[1]
        ]

    def ranges(self) -> list[Range]:
        """What is left of them, in their order, and of one of them the last part first."""
        numbered = [
            (number, -start, Range(epoch, start, end, partition, listing))
            for (epoch, partition, listing), pieces in self._pieces.items()
            for start, end, number in pieces
        ]
        numbered.sort(key=lambda each: each[:2])
        return [each for _, _, each in numbered]

    def _find(self, whole: Range) -> list[tuple[int, int, int]]:
        first, last = self._span(whole)
        pieces = self._pieces.get(whole.key, ())
        return [(max(start, whole.start), min(end, whole.end), number) for start, end, number in pieces[first:last]]

    def _span(self, whole: Range) -> tuple[int, int]:
        """Of the pieces that share something with it."""
        pieces = self._pieces.get(whole.key, [])
        first = bisect_left(pieces, (whole.start,))
        if first and pieces[first - 1][1] > whole.start:
            first -= 1
        return first, max(first, bisect_left(pieces, (whole.end,)))


def _part(whole: Range, start: int, end: int) -> Range:
    return Range(whole.epoch, start, end, whole.partition, whole.listing)


def united(ranges: Iterable[Range]) -> list[Range]:
    """The same places in ranges that share nothing and do not touch, sorted."""
    whole: list[Range] = []
    for each in sorted(ranges, key=lambda each: (each.key, each.start)):
        if whole and whole[-1].key == each.key and each.start <= whole[-1].end:
            whole[-1] = _part(whole[-1], whole[-1].start, max(whole[-1].end, each.end))
        else:
            whole.append(each)
    return whole


def overlapping(ranges: list[Range]) -> Iterator[Range]:
    """The parts of sorted ranges that others before them cover already."""
    ends: dict[Key, int] = {}
    for each in ranges:
        end = ends.get(each.key, 0)
        if each.start < end:
            yield Range(each.epoch, each.start, min(each.end, end), each.partition, each.listing)
        ends[each.key] = max(end, each.end)


def subtract(wanted: list[Range], found: list[Range]) -> list[Range]:
    """What of the first is in none of the second."""
    places = Places(united(found))
    return [rest for each in sorted(wanted, key=lambda each: (each.key, each.start)) for rest in places.without(each)]


def said(each: Range) -> str:
    where = f" of partition {each.partition}" if each.partition else ""
    return f"{each.start} to {each.end - 1}{where} in epoch {each.epoch}"
