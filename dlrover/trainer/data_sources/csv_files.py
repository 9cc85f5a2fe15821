"""
CSV files, a record per row: a dict from column to value.

A row may hold quoted newlines. Types come from the first rows, or are given; a value that does not fit is an error that names its row, never a
silent string.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.data_sources.lines import IndexedFile
from dlrover.trainer.data_sources.record_index import QuotedLines
from dlrover.trainer.data_sources.source import FrozenFile, Row, SourceError, combined_fingerprint, find_files

NUM_SAMPLED = 1000
"""Rows from which types are guessed."""
_HEAD = 1 << 20
_QUOTE = b'"'


class CsvSource:
    def __init__(
        self,
        paths: str | Path | Iterable[str | Path],
        *,
        columns: Sequence[str] = (),
        types: Mapping[str, Callable[[str], Any]] | None = None,
        header: bool | Sequence[str] = True,
        delimiter: str = ",",
        encoding: str = "utf-8",
    ) -> None:
        """
        `columns`: those to read; none: all. `types`: by column, what makes a value of its text, e.g. `int`; the rest is guessed: int, float
        (an empty value is nan) or str. `header`: whether the first row of each file names the columns, or their names.
        """
        files = find_files(paths)
        dialect = _Dialect(delimiter, encoding, is_named=header is True)
        heads = [_read_head(path, dialect) for path in files]
        names, sample, _ = heads[0]
        if not isinstance(header, bool):
            names = list(header)
        self._check_heads(files, heads, names)
        unknown = [name for name in (*columns, *(types or {})) if name not in names]
        if unknown:
            raise ConfigError(f"{files[0]} has no column {unknown[0]!r}. Its columns are {', '.join(names)}.")
        wanted = list(columns or names)
        whole = [row for row in sample if len(row) == len(names)]  # others are named when they are read
        guessed = {name: _guess([row[names.index(name)] for row in whole]) for name in wanted}
        self.types: dict[str, Callable[[str], Any]] = {name: (types or {}).get(name, guessed[name]) for name in wanted}
        fields = [(name, names.index(name), self.types[name]) for name in wanted]
        self._row = Row(
            [_CsvFile(path, dialect, head[2], len(names), fields) for path, head in zip(files, heads, strict=True)]
        )
        self.name = Path(files[0]).name
        self._fingerprint = ""

    @property
    def columns(self) -> list[str]:
        return list(self.types)

    @property
    def fingerprint(self) -> str:
        if not self._fingerprint:
            parts = [part.file.fingerprint() for part in self._row.parts if isinstance(part, IndexedFile)]
            self._fingerprint = combined_fingerprint("csv/" + ",".join(self.columns), parts)
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._row)

    def read(self, places: Sequence[int], partition: str = "") -> list[Any]:
        return self._row.read(places)

    @staticmethod
    def _check_heads(files: list[str], heads: list[tuple[list[str], list[list[str]], int]], names: list[str]) -> None:
        for path, (found, sample, _) in zip(files, heads, strict=True):
            if found and found != heads[0][0]:
                raise SourceError(
                    f"{path} has the columns {', '.join(found)}, but {files[0]} has {', '.join(heads[0][0])}. "
                    "Give files with the same columns."
                )
            if not sample:
                raise SourceError(f"{path} has a header and no records. Leave the file out.")
            if len(sample[0]) != len(names):
                raise SourceError(
                    f"{path} has {len(sample[0])} columns, but {len(names)} names were given or found: "
                    f"{', '.join(names)[:200]}. Check that the file is CSV and that `delimiter` is right."
                )
        if len(dict.fromkeys(names)) != len(names) or not all(names):
            raise SourceError(
                f"{files[0]} has columns with an empty name or with the same name: {', '.join(names)[:200]}. "
                "Give `header` as a list of names."
            )


class _Dialect:
    def __init__(self, delimiter: str, encoding: str, *, is_named: bool) -> None:
        if len(delimiter) != 1:
            raise ConfigError(f"`delimiter` must be one character (got {delimiter!r}).")
        self.delimiter, self.encoding, self.is_named = delimiter, encoding, is_named
        try:
            self.delimiter_bytes = delimiter.encode(encoding)
        except UnicodeEncodeError:
            raise ConfigError(
                f"The delimiter {delimiter!r} does not exist in the encoding {encoding}. Give another delimiter or "
                "encoding."
            ) from None

    def begin_of(self, data: bytes) -> int:
        """Where the text begins: what marks the encoding is no part of the first field."""
        is_marked = codecs.lookup(self.encoding).name == "utf-8-sig" and data.startswith(codecs.BOM_UTF8)
        return len(codecs.BOM_UTF8) if is_marked else 0

    def rows(self, data: bytes, path: str) -> list[list[str]]:
        """Without blank lines, which are no rows."""
        if b"\0" in data:
            raise SourceError(f"{path} is not CSV: it contains binary data.")
        try:
            text = data.decode(self.encoding)
        except UnicodeDecodeError as error:
            raise SourceError(f"{path} is not CSV in {self.encoding}: {error.reason} at byte {error.start}.") from error
        try:
            return [
                row for row in csv.reader(io.StringIO(text, newline="\n"), delimiter=self.delimiter, strict=True) if row
            ]
        except csv.Error as error:
            raise SourceError(f"{path} is not CSV: {error}.") from error


def _read_head(path: str, dialect: _Dialect) -> tuple[list[str], list[list[str]], int]:
    """Names of the columns (none without a header), the first rows, and where the records begin."""
    file = FrozenFile(path)
    data = file.read(0, min(file.size, _HEAD))
    file.close()
    begin = dialect.begin_of(data)
    ends = list(islice(_record_ends(data, begin, dialect), NUM_SAMPLED + dialect.is_named))
    if len(data) == file.size and len(ends) < NUM_SAMPLED:
        ends.append(len(data))  # the last row may have no newline
    if not ends and data:
        raise SourceError(f"{path} is not CSV: no row ends within its first {_HEAD} bytes.")
    rows = dialect.rows(data[begin : ends[-1]] if ends else b"", path)
    if not rows:
        raise SourceError(f"{path} is empty. Leave the file out.")
    return (rows[0], rows[1:], ends[0]) if dialect.is_named else ([], rows, begin)


def _record_ends(data: bytes, begin: int, dialect: _Dialect) -> Iterator[int]:
    """Behind each row; blank lines are none."""
    lines = data[begin : data.rfind(b"\n") + 1]
    at = 0
    for end in QuotedLines(_QUOTE, dialect.delimiter_bytes).ends(lines):
        if lines[at:end].strip(b"\r\n"):
            yield begin + end
        at = end


class _CsvFile(IndexedFile):
    def __init__(
        self, path: str, dialect: _Dialect, begin: int, width: int, fields: list[tuple[str, int, Callable[[str], Any]]]
    ) -> None:
        super().__init__(path, begin=begin, quote=_QUOTE, delimiter=dialect.delimiter_bytes, skips_blank=True)
        self._dialect, self._width, self._fields = dialect, width, fields

    def _parse(self, data: bytes, first: int, skip: int, count: int, num_spanned: int) -> list[dict[str, Any]]:
        rows = self._dialect.rows(data, self.file.path)
        if len(rows) != num_spanned:
            raise SourceError(
                f"{self.file.path} has {len(rows)} rows where {num_spanned} were counted, from record "
                f"{first - skip} on. Its quotes or line ends can be read in two ways, so reading stops: records "
                "could be lost or confused. Correct the file there."
            )
        return [self._typed(row, first + number) for number, row in enumerate(rows[skip : skip + count])]

    def _typed(self, row: list[str], number: int) -> dict[str, Any]:
        if len(row) != self._width:
            raise SourceError(
                f"Record {number} of {self.file.path} has {len(row)} columns instead of {self._width}. Correct "
                "the file, or give its `delimiter`."
            )
        record = {}
        for name, at, make in self._fields:
            try:
                record[name] = make(row[at])
            except ValueError as error:
                kind = getattr(make, "__name__", str(make))
                raise SourceError(
                    f"Record {number} of {self.file.path} has {row[at][:64]!r} in column {name!r}, which is not of "
                    f"the type {kind.strip('_')}. Give the column's type, for example types={{{name!r}: str}}."
                ) from error
        return record


def _guess(values: list[str]) -> Callable[[str], Any]:
    for make in (int, number_or_nan):
        try:
            for value in values:
                make(value)
        except ValueError:
            continue
        return make
    return str


def number_or_nan(text: str) -> float:
    return float(text) if text.strip() else float("nan")
