"""
Ranges of places in an epoch, and what can be done with them: join, cut, compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from dlrover.protocol.data_messages import Claim


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
    def key(self) -> tuple[int, str, int]:
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


def minus(whole: Range, parts: Iterable[Range]) -> list[Range]:
    """What is left of a range without the others."""
    left = [whole]
    for part in parts:
        if part.key == whole.key:
            left = [
                rest
                for each in left
                for rest in (
                    Range(each.epoch, each.start, min(each.end, part.start), each.partition, each.listing),
                    Range(each.epoch, max(each.start, part.end), each.end, each.partition, each.listing),
                )
                if rest.size > 0
            ]
    return left


def overlaps(whole: Range, parts: Iterable[Range]) -> list[Range]:
    found = []
    for part in parts:
        start, end = max(whole.start, part.start), min(whole.end, part.end)
        if part.key == whole.key and start < end:
            found.append(Range(whole.epoch, start, end, whole.partition, whole.listing))
    return found


def overlapping(ranges: list[Range]) -> Iterator[Range]:
    """The parts of sorted ranges that others before them cover already."""
    ends: dict[tuple[int, str, int], int] = {}
    for each in ranges:
        end = ends.get(each.key, 0)
        if each.start < end:
            yield Range(each.epoch, each.start, min(each.end, end), each.partition, each.listing)
        ends[each.key] = max(end, each.end)


def subtract(wanted: list[Range], found: list[Range]) -> list[Range]:
    """What of the first is in none of the second."""
    by_key: dict[tuple[int, str, int], list[Range]] = {}
    for each in sorted(found, key=lambda each: each.start):
        by_key.setdefault(each.key, []).append(each)
    left = []
    for each in sorted(wanted, key=lambda each: (each.key, each.start)):
        at = each.start
        for other in by_key.get(each.key, ()):
            if other.end <= at or other.start >= each.end:
                continue
            if other.start > at:
                left.append(Range(each.epoch, at, other.start, each.partition, each.listing))
            at = max(at, other.end)
        if at < each.end:
            left.append(Range(each.epoch, at, each.end, each.partition, each.listing))
    return left


def said(each: Range) -> str:
    where = f" of partition {each.partition}" if each.partition else ""
    return f"{each.start} to {each.end - 1}{where} in epoch {each.epoch}"
