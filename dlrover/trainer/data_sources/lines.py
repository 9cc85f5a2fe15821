"""Text files, a record per line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dlrover.trainer.data_sources.record_index import RecordIndex
from dlrover.trainer.data_sources.source import FrozenFile, Row, SourceError, combined_fingerprint, find_files


class LineSource:
    """The lines of one or several files, decoded, without their ends. Nothing but an index of bounded size is kept in memory."""

    def __init__(self, paths: str | Path | Iterable[str | Path], *, encoding: str = "utf-8") -> None:
        files = find_files(paths)
        self._row = Row([_LineFile(path, encoding) for path in files])
        self.name = Path(files[0]).name
        self._fingerprint = ""

    @property
    def fingerprint(self) -> str:
        if not self._fingerprint:
            parts = [part.file.fingerprint() for part in self._row.parts if isinstance(part, IndexedFile)]
            self._fingerprint = combined_fingerprint("lines", parts)
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._row)

    def read(self, places: Sequence[int], partition: str = "") -> list[Any]:
        return self._row.read(places)


class IndexedFile:
    """One file of records that end with a newline, and where they begin. Subclasses say what a record is."""

    def __init__(self, path: str, **framing: Any) -> None:
        self.file = FrozenFile(path)
        if not self.file.size:
            raise SourceError(f"{path} is empty. Leave the file out.")
        self.index = RecordIndex(self.file.read, **framing)

    def __len__(self) -> int:
        self.index.look(self.file.size)
        has_rest = self.index.open_at < self.file.size  # the last one may have no newline
        return self.index.num_records + has_rest

    def read(self, places: Sequence[int]) -> list[Any]:
        if isinstance(places, range) and places.step == 1:
            return self._read_run(places.start, places.stop)
        by_entry: dict[int, list[int]] = {}
        stride = self.index.stride
        for place in places:
            by_entry.setdefault(place // stride, []).append(place)
        found = {}
        for wanted in by_entry.values():
            first = min(wanted)
            records = self._read_run(first, max(wanted) + 1)
            found.update({place: records[place - first] for place in wanted})
        return [found[place] for place in places]

    def _read_run(self, first: int, last: int) -> list[Any]:
        self.index.look(self.file.size, last)
        start, end, skip = self.index.span(first, last)
        num_spanned = self.index.num_spanned(first, last)
        if self.index.num_records < last:
            num_spanned += self.index.open_at < self.file.size
            end = self.file.size
        records = self._parse(self.file.read(start, end), first, skip, last - first, num_spanned)
        if len(records) != last - first:
            raise SourceError(f"{self.file.path} has no records {first} to {last - 1}.")
        return records

    def _parse(self, data: bytes, first: int, skip: int, count: int, num_spanned: int) -> list[Any]:
        """Records, after the first `skip` ones. `num_spanned`: how many the index has counted in the data."""
        raise NotImplementedError


class _LineFile(IndexedFile):
    def __init__(self, path: str, encoding: str) -> None:
        super().__init__(path)
        self._encoding = encoding

    def _parse(self, data: bytes, first: int, skip: int, count: int, num_spanned: int) -> list[str]:
        return decoded_lines(
            data, skip, count, self._encoding, lambda number: f"Line {first + number + 1} of {self.file.path}"
        )


def decoded_lines(data: bytes, skip: int, count: int, encoding: str, where: Any) -> list[str]:
    lines = data.removesuffix(b"\n").split(b"\n", skip + count)[skip : skip + count] if data else []
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(line.removesuffix(b"\r").decode(encoding))
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{where(number)} is not text in {encoding}: {error.reason}. Give the encoding of the file as "
                "`encoding`."
            ) from error
    return found
