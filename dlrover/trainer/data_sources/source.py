"""
What a source of records is, and how it is noticed that one has changed.

A source knows how many records it has and reads those that a shard names. It is copied into the worker processes of a DataLoader, so it
holds no open file in its state: each process opens its own.

Numbers of records mean something only as long as the data stay as they were. So a file is compared with what it was at first, after every
read, and a sample of the content (the fingerprint) goes to the job with the dataset: after a restart, and on another node, other data
are refused.
"""

from __future__ import annotations

import glob
import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from dlrover.protocol.errors import DLRoverError

_ENDS = 64 * 1024
_SAMPLE = 4 * 1024
_NUM_SAMPLES = 16


class SourceError(DLRoverError):
    """The data cannot be read as what they were said to be."""


class SourceChanged(SourceError):
    """The data are not those that were there at first: numbers of records mean others now. What was not used goes back to the job."""


class Source(Protocol):
    @property
    def name(self) -> str:
        """For people; the dataset is called so unless the script says otherwise."""
        ...

    @property
    def fingerprint(self) -> str:
        """The same for the same data on every node and after every restart. Empty: cannot be told."""
        ...

    def __len__(self) -> int: ...

    def read(self, places: Sequence[int], partition: str = "") -> list[Any]:
        """The records with these numbers, in this order. Cheapest for a range."""
        ...


class FrozenFile:
    """A file that must stay as it was when it was first looked at. Positions are given with each read, so forks may share it."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise SourceError(f"{self.path} cannot be read: {error.strerror}.") from error
        if not os.path.isfile(self.path):
            raise SourceError(f"{self.path} is not a file. Give the path of a file.")
        self.size = found.st_size
        self._changed_at = found.st_mtime_ns
        self._fd = -1

    def read(self, start: int, end: int) -> bytes:
        """Raises SourceChanged, also if it changed while it was read."""
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        parts = []
        while start < end and (part := os.pread(self._fd, end - start, start)):
            parts.append(part)
            start += len(part)
        self.check()
        return b"".join(parts)

    def check(self) -> None:
        try:
            found = os.stat(self.path) if self._fd < 0 else os.fstat(self._fd)
        except FileNotFoundError:
            raise SourceChanged(
                f"{self.path} was removed while the job read it. Restore it and start the job again: no record is lost."
            ) from None
        if (found.st_size, found.st_mtime_ns) != (self.size, self._changed_at):
            what = (
                f"has {found.st_size} bytes instead of {self.size}" if found.st_size != self.size else "was written to"
            )
            raise SourceChanged(
                f"{self.path} {what} since this job began to read it, so its record numbers now name other "
                "records. Restore the old file and start the job again (no record is lost), or give the new "
                "file to a dataset with another name."
            )

    def fingerprint(self) -> bytes:
        """Of its size and of samples from its beginning to its end: the cost does not grow with the file."""
        digest = hashlib.blake2b(f"{os.path.basename(self.path)}/{self.size}".encode(), digest_size=16)
        starts = [self.size * number // _NUM_SAMPLES for number in range(_NUM_SAMPLES)]
        spans = [(0, _ENDS), (max(0, self.size - _ENDS), self.size), *((at, at + _SAMPLE) for at in starts)]
        for start, end in spans:
            digest.update(self.read(start, min(end, self.size)))
        return digest.digest()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fd": -1}

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def find_files(paths: str | Path | Iterable[str | Path]) -> list[str]:
    """Files by name or by pattern (`*`, `?`, `[`), in the order given, those of a pattern sorted. At least one."""
    found: list[str] = []
    for each in [paths] if isinstance(paths, str | Path) else list(paths):
        text = str(each)
        matching = sorted(glob.glob(text)) if glob.has_magic(text) and not os.path.exists(text) else [text]
        if not matching:
            raise SourceError(f"There is no file {text}.")
        found += matching
    if not found:
        raise SourceError("No file was given. Give at least one.")
    return found


def combined_fingerprint(kind: str, parts: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join([kind.encode(), *parts]), digest_size=16).hexdigest()


class Part(Protocol):
    """One of several files that are read as one."""

    def __len__(self) -> int: ...

    def read(self, places: Sequence[int]) -> list[Any]: ...


class Row:
    """Parts behind one another. A part is counted only when something behind it is read."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._starts = [0]
        """Of the parts, as far as was looked."""

    def __len__(self) -> int:
        self._look(None)
        return self._starts[-1] + len(self.parts[-1])

    def read(self, places: Sequence[int]) -> list[Any]:
        if not places:
            return []
        self._look(max(places[0], places[-1]) if isinstance(places, range) else max(places))
        found: dict[int, Any] = {}
        for number, wanted in self._by_part(places):
            start = self._starts[number]
            is_run = isinstance(wanted, range)
            local = range(wanted[0] - start, wanted[-1] - start + 1) if is_run else [each - start for each in wanted]
            if min(local[0], local[-1]) < 0:
                raise SourceError(f"There is no record {min(places)}.")
            records = self.parts[number].read(local)
            if len(wanted) == len(places):
                return records
            found.update(zip(wanted, records, strict=True))
        return [found[place] for place in places]

    def _by_part(self, places: Sequence[int]) -> Iterable[tuple[int, Sequence[int]]]:
        if isinstance(places, range) and places.step == 1:
            at = places.start
            while at < places.stop:
                number = self._part_of(at)
                is_last = number + 1 == len(self._starts)
                end = places.stop if is_last else min(places.stop, self._starts[number + 1])
                yield number, range(at, end)
                at = end
            return
        by_part: dict[int, list[int]] = {}
        for place in places:
            by_part.setdefault(self._part_of(place), []).append(place)
        yield from by_part.items()

    def _part_of(self, place: int) -> int:
        return max(0, bisect_right(self._starts, place) - 1)

    def _look(self, place: int | None) -> None:
        """Until the part is known that has this place, or all are."""
        while len(self._starts) < len(self.parts) and (place is None or self._starts[-1] <= place):
            self._starts.append(self._starts[-1] + len(self.parts[len(self._starts) - 1]))
