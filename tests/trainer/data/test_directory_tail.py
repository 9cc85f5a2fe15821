"""A directory into which others write: what appears is told once, in order, and the end is found."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.trainer.data_sources import DirectoryTail, SourceChanged, SourceError, TailWatch
from dlrover.trainer.data_sources.directory_events import DirectoryEvents

Told = tuple[dict[str, int], bool]


class Listener:
    """Hears what a watch tells; asks with a deadline."""

    def __init__(self, tail: DirectoryTail) -> None:
        self._told: queue.Queue[Told] = queue.Queue()
        self.watch = TailWatch(tail, lambda ends, is_over: self._told.put((ends, is_over)))

    def next(self) -> Told:
        return self._told.get(timeout=60)


@pytest.fixture
def listen() -> Iterator[type[Listener]]:
    opened: list[Listener] = []

    class Opened(Listener):
        def __init__(self, tail: DirectoryTail) -> None:
            super().__init__(tail)
            opened.append(self)

    yield Opened
    for each in opened:
        each.watch.close()


def test_new_files_and_new_lines_are_told_and_the_marker_ends_it(tmp_path: Path, listen: type[Listener]) -> None:
    (tmp_path / "a.log").write_text("one\ntwo\nthr")
    (tmp_path / "other.txt").write_text("not meant\n")
    tail = DirectoryTail(tmp_path, "*.log")
    hears = listen(tail)
    assert hears.next() == ({"a.log": 2}, False), "a line without its newline may still grow"
    with (tmp_path / "a.log").open("a") as file:
        file.write("ee\nfour")
    assert hears.next() == ({"a.log": 3}, False)
    (tmp_path / ".b.log").write_text("five\n")
    (tmp_path / ".b.log").rename(tmp_path / "b.log")
    assert hears.next() == ({"b.log": 1}, False)
    (tmp_path / "_END").touch()
    assert hears.next() == ({"a.log": 4}, True), "the rest of a file counts at the end"
    assert tail.read(range(1, 4), "a.log") == ["two", "three", "four"]
    assert tail.read([0], "b.log") == ["five"]


def test_an_idle_directory_is_over(tmp_path: Path, listen: type[Listener]) -> None:
    (tmp_path / "a").write_text("one\n")
    hears = listen(DirectoryTail(tmp_path, idle_limit=0.1))
    assert hears.next() == ({"a": 1}, False)
    assert hears.next() == ({}, True)


def test_a_watch_keeps_its_descriptors_until_it_is_closed(tmp_path: Path) -> None:
    """Else whoever wakes its thread at the end might write into a file that has got the number since."""
    before = os.listdir("/proc/self/fd")
    (tmp_path / "_END").touch()
    hears = Listener(DirectoryTail(tmp_path))
    assert hears.next() == ({}, True)
    hears.watch._thread.join(60)
    kept = set(os.listdir("/proc/self/fd")) - set(before)
    assert len(kept) == 3
    hears.watch.close()
    hears.watch.close()
    assert not kept & set(os.listdir("/proc/self/fd"))


def test_a_file_that_shrinks_ends_the_watch_and_readers_hear_why(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    tail = DirectoryTail(tmp_path)
    hears = Listener(tail)
    assert hears.next() == ({"a": 2}, False)
    os.truncate(tmp_path / "a", 4)
    hears.watch._thread.join(60)
    with pytest.raises(SourceChanged, match="Only append to the files"):
        hears.watch.close()
    with pytest.raises(SourceChanged, match="Only append to the files"):
        tail.read([1], "a")
    assert DirectoryTail(tmp_path).read([0], "a") == ["one"]
    with pytest.raises(SourceChanged, match="lost line 2"):
        DirectoryTail(tmp_path).read([1], "a")
    (tmp_path / "a").unlink()
    with pytest.raises(SourceChanged, match="was removed before all of it was read"):
        DirectoryTail(tmp_path).read([0], "a")


def test_what_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not a directory"):
        DirectoryTail(tmp_path / "none")
    with pytest.raises(SourceError, match="cannot be watched"):
        DirectoryEvents(str(tmp_path / "none"))


def test_the_kernel_tells_which_files_changed(tmp_path: Path) -> None:
    events = DirectoryEvents(str(tmp_path))
    assert events.wait(0.0) == set()
    (tmp_path / "x").write_text("1")
    assert events.wait(60.0) == {"x"}
    events.wake()
    assert events.wait(60.0) == set()
    events.close()
