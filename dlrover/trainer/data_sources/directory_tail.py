"""
A directory into which others write: the reference for data without an end.

Each file is a partition of a stream and its lines are the records, numbered from 0; files that come and lines that are appended become shards. A
line counts when its newline is there. The stream is over when a file with the name of the marker appears, or when nothing came for some
time; then the rest of a file without a newline counts, too.

One process of the job watches (`TailWatch`) and tells the job how far each file goes; every process reads the files by itself. Files are
only ever appended to: one that becomes shorter or is replaced is an error. Names that begin with a dot are not looked at, so
a writer can prepare a file and rename it.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dlrover.host.edges import contained
from dlrover.trainer.data_sources.directory_events import DirectoryEvents
from dlrover.trainer.data_sources.lines import decoded_lines
from dlrover.trainer.data_sources.record_index import RecordIndex
from dlrover.trainer.data_sources.source import SourceChanged, SourceError

log = logging.getLogger("dlrover.trainer.data")

_ENTRIES_PER_FILE = 4096
_GATHER = 0.2
"""Seconds between two words to the job: a busy writer must not fill its journal."""


class DirectoryTail:
    """As a source: it has no length, and partitions are names of files."""

    def __init__(
        self,
        folder: str | Path,
        pattern: str = "*",
        *,
        end_marker: str = "_END",
        idle_limit: float = 0.0,
        encoding: str = "utf-8",
    ) -> None:
        """`idle_limit`: seconds without anything new after which the stream is over; 0: only the marker ends it."""
        self.folder = str(folder)
        if not os.path.isdir(self.folder):
            raise SourceError(f"{self.folder} is not a directory.")
        self.name = Path(self.folder).name
        self.end_marker, self.idle_limit = end_marker, idle_limit
        self._pattern, self._encoding = pattern, encoding
        self._files: dict[str, _GrowingFile] = {}

    @property
    def fingerprint(self) -> str:
        return ""  # it changes all the time

    def __len__(self) -> int:
        raise TypeError("The length of a growing directory is unknown. Iterate over it instead.")

    def read(self, places: Sequence[int], partition: str = "") -> list[Any]:
        return self._file(partition).read(places, self._encoding)

    def names(self) -> list[str]:
        """Of the files that there are."""
        try:
            found = [entry.name for entry in os.scandir(self.folder) if entry.is_file() and self.is_meant(entry.name)]
        except FileNotFoundError:
            raise SourceChanged(f"{self.folder} is gone.") from None
        return sorted(found)

    def is_meant(self, name: str) -> bool:
        return not name.startswith(".") and name != self.end_marker and fnmatch.fnmatch(name, self._pattern)

    def is_marked_over(self) -> bool:
        return os.path.exists(os.path.join(self.folder, self.end_marker))

    def count(self, name: str, *, is_final: bool = False) -> int:
        """Lines of the file."""
        return self._file(name).count(is_final=is_final)

    def _file(self, name: str) -> _GrowingFile:
        if name not in self._files:
            self._files[name] = _GrowingFile(os.path.join(self.folder, name))
        return self._files[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}


class TailWatch:
    """
    Tells how far the files go, from a thread of its own, until the stream is over.

    `tell(ends, is_over)` gets only what changed. An error of it, or of the files, ends the watch and is raised by `close`.
    """

    def __init__(self, tail: DirectoryTail, tell: Callable[[dict[str, int], bool], None]) -> None:
        self._tail, self._tell = tail, tell
        self._events = DirectoryEvents(tail.folder)
        self._told: dict[str, int] = {}
        self._closing = threading.Event()
        self.trouble: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="dlrover-tail", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._events.wake()
            self._thread.join(timeout=10.0)
            if not self._thread.is_alive():
                self._events.close()  # not by the thread: who wakes it must not find other descriptors by these numbers
        if self.trouble is not None:
            raise self.trouble

    def _run(self) -> None:
        with contained(self._note_trouble):  # readers would wait for ever for data that no thread finds
            self._watch()

    def _note_trouble(self, error: Exception) -> None:
        log.error("No new data of %s are read any more: %s", self._tail.folder, error)
        self.trouble = error

    def _watch(self) -> None:
        changed: Iterable[str] | None = None
        news_at = time.monotonic()
        while not self._closing.is_set():
            is_marked = self._tail.is_marked_over()  # before the files: what was written before the marker counts
            names = (
                self._tail.names() if changed is None or is_marked else [n for n in changed if self._tail.is_meant(n)]
            )
            if self._tell_of(names):
                news_at = time.monotonic()
            idle_left = self._tail.idle_limit - (time.monotonic() - news_at) if self._tail.idle_limit else 3600.0
            if is_marked or idle_left <= 0:
                self._tell_of(self._tail.names(), is_over=True)
                return
            changed = self._events.wait(idle_left)
            if changed and not self._tail.is_marked_over():
                self._closing.wait(_GATHER)  # what comes in this time is told together

    def _tell_of(self, names: Iterable[str], *, is_over: bool = False) -> bool:
        counts = {}
        for name in names:
            if os.path.exists(os.path.join(self._tail.folder, name)):
                counts[name] = self._tail.count(name, is_final=is_over)
        news = {name: count for name, count in counts.items() if count > self._told.get(name, 0)}
        if news or is_over:
            self._tell(news, is_over)
            self._told.update(news)
        return bool(news)


class _GrowingFile:
    """Its index goes on where it stood; bytes that were looked at are not looked at again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode = 0
        self._index = RecordIndex(self._read, most_entries=_ENTRIES_PER_FILE)
        self._lock = threading.Lock()
        """Guards the index: the watch counts while the training thread reads."""

    def count(self, *, is_final: bool) -> int:
        with self._lock:
            size = self._size()
            self._index.look(size)
            return self._index.num_records + (is_final and self._index.open_at < size)

    def read(self, places: Sequence[int], encoding: str) -> list[str]:
        first, last = min(places), max(places) + 1
        with self._lock:
            size = self._size()
            self._index.look(size, last)
            start, end, skip = self._index.span(first, last)
            if self._index.num_records < last:
                end = size
            data = self._read(start, end)
        lines = decoded_lines(
            data, skip, last - first, encoding, lambda number: f"Line {first + number + 1} of {self._path}"
        )
        if len(lines) < last - first:
            raise SourceChanged(
                f"{self._path} lost line {last}, which it had before. Only append to the files of a stream."
            )
        return [lines[place - first] for place in places]

    def _size(self) -> int:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            raise SourceChanged(
                f"{self._path} was removed before all of it was read. Restore it and start the job again: no "
                "record is lost."
            ) from None
        self._inode = self._inode or found.st_ino
        if found.st_ino != self._inode or found.st_size < self._index.looked_to:
            raise SourceChanged(
                f"{self._path} was replaced or became shorter: it has {found.st_size} bytes, and "
                f"{self._index.looked_to} bytes were read before. Only append to the files of a stream. Give "
                "new data a new file name."
            )
        return found.st_size

    def _read(self, start: int, end: int) -> bytes:
        with open(self._path, "rb") as file:
            file.seek(start)
            return file.read(end - start)
