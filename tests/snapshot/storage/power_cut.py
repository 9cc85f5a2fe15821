"""
A disk that loses what was not synced.

Each directory has a log of changes since its last sync; after a cut, any of them may have become durable and any not, in any order,
except that changes of one name follow each other. A rename is one change of two names. A file that was not synced has any prefix of its
bytes. Every primitive step counts, and the cut comes before the step with the number that was asked for.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover.snapshot.files.direct_io import WrittenFile
from dlrover.snapshot.storage.storage import StoredName, join, parent_of


class Change(NamedTuple):
    names: tuple[str, ...]
    apply: Callable[[dict[str, Node]], None]


class PowerCut(BaseException):
    """The machine is off."""


@dataclass
class File:
    content: bytes = b""
    durable: bytes | None = None  # None: never synced


@dataclass
class Directory:
    now: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    log: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        change.apply(self.now)
        self.log.append(change)


Node = File | Directory


class Disk:
    """A `Storage` on paths like `/a/b`."""

    def __init__(self, *, can_exchange: bool = True, cut_before: int | None = None) -> None:
        self.root = Directory()
        self.steps: list[str] = []
        self._can_exchange = can_exchange
        self.cut_before = cut_before

    def after_cut(self, fate: random.Random | bool) -> Disk:
        """The disk at the next start. True: everything arrived; False: only what was synced; or as the dice fall."""
        disk = Disk(can_exchange=self._can_exchange)
        disk.root = _survivor(self.root, fate)
        return disk

    def make_directory(self, path: str) -> None:
        at = self.root
        for name in path.strip("/").split("/"):
            if name not in at.now:
                self._step(f"mkdir {name}")
                at.change(_put(name, Directory()))
            below = at.now[name]
            assert isinstance(below, Directory)
            at = below

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._create(path, chunks)
        self.sync([path])

    def _create(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        directory, name = self._parent(path)
        self._step(f"create {path}")
        file = File()
        directory.change(_put(name, file))
        for chunk in chunks:
            self._step(f"write {path}")
            file.content += bytes(chunk)

    def write_atomic(self, path: str, content: bytes) -> None:
        prepared = self.prepare(path, content)
        self.sync([prepared])
        self.replace(prepared, path)
        self.sync([parent_of(path)])

    def prepare(self, path: str, content: bytes) -> str:
        self._create(path + ".new", [content])
        return path + ".new"

    def replace(self, prepared: str, path: str) -> None:
        directory, name = self._parent(path)
        self._step(f"rename {prepared}")
        directory.change(_move(prepared.rsplit("/", 1)[1], name))

    def read(self, path: str) -> bytes:
        directory, name = self._parent(path)
        node = directory.now.get(name)
        if not isinstance(node, File):
            raise FileNotFoundError(path)
        return node.content

    def measure(self, path: str) -> WrittenFile:
        content = self.read(path)
        return WrittenFile(len(content), zlib.crc32(content))

    def list(self, path: str) -> list[StoredName]:
        try:
            directory = self._directory(path)
        except FileNotFoundError:
            return []
        return sorted(
            StoredName(name, isinstance(node, Directory), len(node.content) if isinstance(node, File) else 0)
            for name, node in directory.now.items()
        )

    def rename(self, source: str, target: str) -> None:
        directory, name = self._parent(source)
        assert parent_of(source) == parent_of(target)
        new_name = target.rsplit("/", 1)[1]
        if new_name in directory.now:
            raise FileExistsError(target)
        self._step(f"rename {source}")
        directory.change(_move(name, new_name))

    def exchange(self, source: str, target: str) -> bool:
        if not self._can_exchange:
            return False
        directory, name = self._parent(source)
        self._step(f"exchange {source}")
        directory.change(_swap(name, target.rsplit("/", 1)[1]))
        return True

    def remove_file(self, path: str) -> None:
        directory, name = self._parent(path)
        if name in directory.now:
            self._step(f"unlink {path}")
            directory.change(_drop(name))

    def remove_tree(self, path: str) -> None:
        directory, name = self._parent(path)
        node = directory.now.get(name)
        if isinstance(node, Directory):
            for child in sorted(node.now):
                self.remove_tree(join(path, child))
        if node is not None:
            self.remove_file(path)

    def sync(self, paths: Iterable[str]) -> None:
        """In any order: the one that was named last comes first, so that nobody relies on it."""
        for path in reversed(list(paths)):
            self._step(f"sync {path}")
            above, name = path.rsplit("/", 1)
            node = self._directory(above).now[name] if name else self.root
            if isinstance(node, File):
                node.durable = node.content
            else:
                node.durable, node.log = dict(node.now), []

    def _step(self, what: str) -> None:
        if len(self.steps) == self.cut_before:
            raise PowerCut(what)
        self.steps.append(what)

    def _directory(self, path: str) -> Directory:
        at: Node = self.root
        for name in path.strip("/").split("/"):
            if not name:
                continue
            if not isinstance(at, Directory) or name not in at.now:
                raise FileNotFoundError(path)
            at = at.now[name]
        if not isinstance(at, Directory):
            raise FileNotFoundError(path)
        return at

    def _parent(self, path: str) -> tuple[Directory, str]:
        above, name = path.rsplit("/", 1)
        return self._directory(above), name


def _survivor(directory: Directory, fate: random.Random | bool) -> Directory:
    entries = dict(directory.durable)
    lost: set[str] = set()
    for change in directory.log:
        is_kept = fate if isinstance(fate, bool) else fate.random() < 0.7
        if is_kept and lost.isdisjoint(change.names):
            change.apply(entries)
        else:
            lost.update(change.names)
    alive: dict[str, Node] = {}
    for name, node in entries.items():
        if isinstance(node, Directory):
            alive[name] = _survivor(node, fate)
        elif node.durable is not None:
            alive[name] = File(node.durable, node.durable)
        else:
            length = len(node.content) if fate is True else 0 if fate is False else fate.randint(0, len(node.content))
            alive[name] = File(node.content[:length], node.content[:length])
    return Directory(now=dict(alive), durable=dict(alive))


def _put(name: str, node: Node) -> Change:
    return Change((name,), lambda entries: entries.update({name: node}))


def _move(name: str, new_name: str) -> Change:
    return Change((name, new_name), lambda entries: entries.update({new_name: entries.pop(name)}))


def _swap(name: str, other: str) -> Change:
    return Change((name, other), lambda entries: entries.update({name: entries[other], other: entries[name]}))


def _drop(name: str) -> Change:
    return Change((name,), lambda entries: entries.__delitem__(name))
