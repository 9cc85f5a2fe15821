"""
Parquet files, a record per row: a dict from column to value. Read by row group, one or two of which are kept.

Needs pyarrow (the extra `data`). Shards that are shuffled as a whole cost one row group each; records shuffled over the whole file
would read a row group for almost every one of them.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.data_sources.source import FrozenFile, Row, SourceError, combined_fingerprint, find_files

NUM_KEPT = 2
"""Row groups in memory: shards that follow one another often share one."""


class ParquetSource:
    def __init__(self, paths: str | Path | Iterable[str | Path], *, columns: Sequence[str] = ()) -> None:
        """`columns`: those to read; none: all."""
        files = find_files(paths)
        parts = [_ParquetFile(path, list(columns)) for path in files]
        for part in parts[1:]:
            if part.columns != parts[0].columns:
                raise SourceError(
                    f"{part.file.path} has the columns {part.columns}, but {files[0]} has {parts[0].columns}. "
                    "Give files with the same columns, or make one dataset for each set of columns."
                )
        self.columns = parts[0].columns
        self._row = Row(parts)
        self._parts = parts
        self.name = Path(files[0]).name
        self._fingerprint = ""
        if not len(self):
            raise SourceError(
                f"The Parquet files have no records (first file: {files[0]}). Give a file with at least one record."
            )

    @property
    def row_group_size(self) -> int:
        """Records of the largest row group: shards of about that size are read without waste."""
        return max(part.largest for part in self._parts)

    @property
    def fingerprint(self) -> str:
        if not self._fingerprint:
            kind = "parquet/" + ",".join(self.columns)
            self._fingerprint = combined_fingerprint(kind, [part.file.fingerprint() for part in self._parts])
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._row)

    def read(self, places: Sequence[int], partition: str = "") -> list[Any]:
        return self._row.read(places)


class _ParquetFile:
    def __init__(self, path: str, columns: list[str]) -> None:
        self.file = FrozenFile(path)
        self._opened: tuple[int, Any] | None = None
        self._kept: OrderedDict[int, Any] = OrderedDict()
        opened = self._open()
        names = opened.schema_arrow.names
        unknown = [name for name in columns if name not in names]
        if unknown:
            raise ConfigError(f"{path} has no column {unknown[0]!r}. Its columns are {', '.join(names)}.")
        self.columns = columns or list(names)
        sizes = [opened.metadata.row_group(number).num_rows for number in range(opened.metadata.num_row_groups)]
        self.largest = max(sizes, default=0)
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + size)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, places: Sequence[int]) -> list[Any]:
        if max(places) >= len(self):
            raise SourceError(f"{self.file.path} has no record {max(places)}: it has {len(self)} records.")
        by_group: dict[int, list[int]] = {}
        for place in places:
            by_group.setdefault(bisect_right(self._starts, place) - 1, []).append(place)
        found: dict[int, Any] = {}
        for group, wanted in by_group.items():
            table, start = self._group(group), self._starts[group]
            is_run = wanted[-1] - wanted[0] + 1 == len(wanted) and isinstance(places, range)
            rows = (
                table.slice(wanted[0] - start, len(wanted)) if is_run else table.take([each - start for each in wanted])
            )
            found.update(zip(wanted, rows.to_pylist(), strict=True))
        return [found[place] for place in places]

    def _group(self, number: int) -> Any:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        pyarrow = _pyarrow()
        try:
            # Without threads of its own: this may be a fork, which has none.
            table = self._open().read_row_group(number, columns=self.columns, use_threads=False)
        except (pyarrow.ArrowException, OSError) as error:
            self.file.check()
            raise SourceError(
                f"Row group {number} of {self.file.path} cannot be read. If the file is damaged, restore it or "
                f"leave it out. Message of pyarrow: {error}"
            ) from error
        self.file.check()
        self._kept[number] = table
        if len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)
        return table

    def _open(self) -> Any:
        """Each process its own."""
        if self._opened is None or self._opened[0] != os.getpid():
            pyarrow = _pyarrow()
            try:
                self._opened = os.getpid(), pyarrow.parquet.ParquetFile(self.file.path)
            except (pyarrow.ArrowException, OSError) as error:
                raise SourceError(f"{self.file.path} is not a Parquet file, or it is damaged: {error}") from error
        return self._opened[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_kept": OrderedDict()}


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet files need the package pyarrow, which is not installed: pip install 'dlrover[data]'."
        ) from error
    return pyarrow
