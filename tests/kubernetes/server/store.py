"""
Objects and their versions: one counter for all writes, a bounded history, and watchers that get each change once.

The history is what makes a watch from an earlier version possible, and its bound is what makes 410 happen. All methods are
synchronous and run in the server's event loop, so each write is atomic.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque

import msgspec

from tests.kubernetes.server.answers import Json, Refused, expired

ResourceKey = tuple[str, str]
"""Group and plural. All versions of a resource share one store."""
ObjectKey = tuple[str, str]
"""Namespace ("" for cluster-wide objects) and name."""


class Record:
    """One stored version of one object. The body never changes after this."""

    __slots__ = ("_encoded", "body", "key", "version")

    def __init__(self, key: ObjectKey, body: Json, version: int) -> None:
        self.key = key
        self.body = body
        self.version = version
        self._encoded: bytes | None = None

    @property
    def encoded(self) -> bytes:
        if self._encoded is None:
            self._encoded = msgspec.json.encode(self.body)
        return self._encoded


class Change(msgspec.Struct, frozen=True):
    """One write. `before` is None for a creation, `after` carries the last state also for a deletion."""

    version: int
    before: Record | None
    after: Record
    is_deletion: bool = False


class Shelf:
    """The objects of one resource, their recent changes, and the queues of those that watch."""

    def __init__(self, history: int, oldest: int) -> None:
        self.objects: dict[ObjectKey, Record] = {}
        self.order: list[ObjectKey] = []
        self.changes: deque[Change] = deque(maxlen=history)
        self.oldest = oldest
        """A watch may begin at this version or later."""
        self.queues: set[asyncio.Queue[Change | None]] = set()

    def note(self, change: Change) -> None:
        if len(self.changes) == self.changes.maxlen:
            self.oldest = self.changes[0].version
        self.changes.append(change)
        for queue in self.queues:
            queue.put_nowait(change)


class Store:
    def __init__(self, history: int) -> None:
        self.version = 100
        """A real server has written a few things before the first request. So a watch from version 1 is too old."""
        self._history = history
        self._shelves: dict[ResourceKey, Shelf] = {}

    def shelf(self, resource: ResourceKey) -> Shelf:
        if resource not in self._shelves:
            self._shelves[resource] = Shelf(self._history, oldest=self.version)
        return self._shelves[resource]

    def get(self, resource: ResourceKey, key: ObjectKey) -> Record | None:
        return self.shelf(resource).objects.get(key)

    def every(self, resource: ResourceKey, namespace: str = "") -> list[Record]:
        """All objects, or those of one namespace, in the order of their keys."""
        shelf = self.shelf(resource)
        if not namespace:
            return [shelf.objects[key] for key in shelf.order]
        begin = bisect.bisect_left(shelf.order, (namespace, ""))
        end = bisect.bisect_left(shelf.order, (namespace + "\0", ""))
        return [shelf.objects[key] for key in shelf.order[begin:end]]

    def put(self, resource: ResourceKey, key: ObjectKey, body: Json) -> Record:
        """Stores a new version. The version is written into the body."""
        shelf = self.shelf(resource)
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        before = shelf.objects.get(key)
        after = Record(key, body, self.version)
        shelf.objects[key] = after
        if before is None:
            bisect.insort(shelf.order, key)
        shelf.note(Change(self.version, before, after))
        return after

    def drop(self, resource: ResourceKey, key: ObjectKey, last: Json | None = None) -> Record:
        """Removes an object. Watchers get its last state with the version of the deletion."""
        shelf = self.shelf(resource)
        before = shelf.objects.pop(key)
        del shelf.order[bisect.bisect_left(shelf.order, key)]
        self.version += 1
        body = last or before.body
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        after = Record(key, body, self.version)
        shelf.note(Change(self.version, before, after, is_deletion=True))
        return after

    def at(self, resource: ResourceKey, namespace: str, version: int) -> list[Record]:
        """The objects as they were at a version: today's with the later changes taken back."""
        shelf = self.shelf(resource)
        if version < shelf.oldest:
            raise expired("The resourceVersion for the provided list is too old.")
        objects = dict(shelf.objects)
        for change in reversed(shelf.changes):
            if change.version <= version:
                break
            if change.before is None:
                objects.pop(change.after.key, None)
            else:
                objects[change.after.key] = change.before
        return [objects[key] for key in sorted(objects) if not namespace or key[0] == namespace]

    def follow(self, resource: ResourceKey, version: int) -> tuple[list[Change], asyncio.Queue[Change | None]]:
        """The changes after a version, and a queue with all later ones. The caller ends with `unfollow`."""
        shelf = self.shelf(resource)
        if version < shelf.oldest:
            raise too_old(version, shelf.oldest)
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        shelf.queues.add(queue)
        return [change for change in shelf.changes if change.version > version], queue

    def unfollow(self, resource: ResourceKey, queue: asyncio.Queue[Change | None]) -> None:
        self.shelf(resource).queues.discard(queue)

    def compact(self) -> None:
        """Forgets all changes so far, as a compaction of etcd and a restart of the watch caches do."""
        for shelf in self._shelves.values():
            shelf.changes.clear()
            shelf.oldest = self.version


def too_old(version: int, oldest: int) -> Refused:
    return expired(f"too old resource version: {version} ({oldest})")
