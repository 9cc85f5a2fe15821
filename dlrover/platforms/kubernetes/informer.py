"""
A copy of the objects that we read, kept current by one list and one watch that is opened again and again.

Life: list (pages of 500), watch from the list's version, watch on from the last version or bookmark when the watch
ends, list again when the server has forgotten that version (410). A broken connection costs 0.1 s, then twice as long
each time up to 10 s, with jitter. While the server is away the copy stays as it is: nothing is declared gone.

An informer outlives its subscriptions: each begins with the full list out of the copy, without a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from dlrover.platforms.kubernetes.answers import (
    ApiRefusal,
    ApiResource,
    EventKind,
    Gone,
    Page,
    WatchEvent,
)
from dlrover.platforms.kubernetes.api import UNREADABLE, ClusterApi
from dlrover.platforms.kubernetes.objects import Metadata, Stub, decode
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Unavailable

log = logging.getLogger(__name__)

MAX_BEHIND = 10_000
"""Changes that wait for one slow reader, before a full list takes their place."""
LONGEST_RETRY_AFTER = 60.0
"""Seconds: what a server may ask for at most, so that a wrong number does not blind us for a day."""
STEADY = 0.5
"""Seconds: a watch that was open this long counts as a success, even if nothing happened."""
WORTH_A_LINE = 3
"""Failures in a row. Fewer are everyday life, and over within half a second."""


class Identity(Protocol):
    """What an informer reads of an object's metadata."""

    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def resource_version(self) -> str: ...


class HasMetadata(Protocol):
    @property
    def metadata(self) -> Identity: ...


T = TypeVar("T", bound=HasMetadata)


class ObjectsListed(Struct, Generic[T], frozen=True):
    """Everything there is. What was there before and is not in it is gone."""

    objects: tuple[T, ...]


class ObjectChanged(Struct, Generic[T], frozen=True):
    """It is new or has another version."""

    object: T


class ObjectDeleted(Struct, Generic[T], frozen=True):
    """Its last state."""

    object: T


ObjectSight = ObjectsListed[T] | ObjectChanged[T] | ObjectDeleted[T]


class InformerTiming(Struct, frozen=True, kw_only=True):
    """Seconds. Each watch ends by itself after a time between the first two, so that informers do not fall in step."""

    shortest_watch: float = 240.0
    longest_watch: float = 300.0
    silence: float = 30.0
    """We cut a watch that is open this much longer than it asked for: the server or the connection is dead."""
    first_delay: float = 0.1
    longest_delay: float = 10.0


USUAL = InformerTiming()


class Informer(Generic[T]):
    """One kind of objects, in one namespace or in all, narrowed by selectors."""

    def __init__(
        self,
        api: ClusterApi,
        resource: ApiResource,
        decode: type[T],
        *,
        namespace: str | None,
        labels: str = "",
        fields: str = "",
        unreadable: Callable[[Metadata, str], T | None] | None = None,
        timing: InformerTiming = USUAL,
    ) -> None:
        """
        `decode` is a msgspec struct with a field `metadata`. An object that does not fit is logged once and shown as
        what `unreadable(metadata, error)` makes of it; without that, or with None, it is left out.
        """
        self.cache: dict[str, T] = {}
        """By name; by `namespace/name` if the informer looks into all namespaces. Read it, never change it."""
        self._api = api
        self._resource = resource
        self._kind = decode
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._unreadable = unreadable
        self._timing = timing
        self._version = ""
        """To watch from; empty: list first."""
        self._first_list = asyncio.Event()
        self._trouble: str | None = "The first list has not arrived yet."
        self._failures = 0
        """Steps in a row that brought nothing."""
        self._is_logged = False
        """The trouble is in the log."""
        self._readers: set[_Backlog[T]] = set()
        self._complained: set[str] = set()
        """Uids of objects that do not decode, so that each is logged once."""

    async def run(self) -> None:
        """For ever: start it as a task and cancel it. It ends with an exception only if there is a bug."""
        try:
            while True:
                try:
                    await (self._watch() if self._version else self._list())
                except _VersionGone as gone:
                    self._version = ""
                    # The first 410 costs a list at once. A server that only ever answers 410 is asked with pauses.
                    is_repeated = self._failures > 0
                    wait = self._failed(str(gone))
                    await asyncio.sleep(wait if is_repeated else 0.0)
                except Unavailable as error:
                    asked = min(error.retry_after or 0.0, LONGEST_RETRY_AFTER) * random.uniform(1.0, 1.2)
                    await asyncio.sleep(max(asked, self._failed(str(error))))
        finally:
            for reader in self._readers:
                reader.end()

    async def listed(self, timeout: float | None = None) -> None:
        """Wait for the first list. Raises `Unavailable` with the reason if it has not come in time."""
        try:
            async with asyncio.timeout(timeout):
                await self._first_list.wait()
        except TimeoutError as error:
            raise Unavailable(
                f"No list of {self._resource.plural} arrived within {timeout:g} s: {self._trouble}",
                code=ErrorCode.NO_LIST,
            ) from error

    @property
    def version(self) -> str:
        """The version of the server's history that the copy shows; empty before a list."""
        return self._version

    @property
    def trouble(self) -> str | None:
        """Why the copy may be old now; None while a watch is open or is being opened again after its usual end."""
        return self._trouble

    async def subscribe(self) -> AsyncGenerator[ObjectSight[T], None]:
        """
        The full list as soon as there is one, then each change in order, and a full list again after a new list.

        It ends when the informer ends. A reader that falls far behind gets a full list instead of the changes. A reader
        that leaves early closes it (`contextlib.aclosing`).
        """
        reader: _Backlog[T] = _Backlog()
        self._readers.add(reader)
        try:
            if self._first_list.is_set():
                reader.put(self._snapshot())
            while True:
                sight = await reader.take()
                if sight is None:
                    return
                yield sight
        finally:
            self._readers.discard(reader)

    async def _list(self) -> None:
        """Nothing changes in the copy before the last page is there."""
        found: dict[str, T] = {}
        uids: set[str] = set()
        token = ""
        while True:
            page = await self._api.list_page(
                self._resource, namespace=self._namespace, labels=self._labels, fields=self._fields, token=token
            )
            if not isinstance(page, Page):
                raise self._refused("list", page)
            for raw in page.items:
                metadata, read = self._read(raw)
                uids.add(metadata.uid)
                if read is not None:
                    found[self._key(metadata)] = read
            token = page.token
            if not token:
                break
        self._complained &= uids
        self.cache.clear()
        self.cache.update(found)
        self._version = page.version
        self._trouble = None
        self._first_list.set()
        self._tell(self._snapshot())

    async def _watch(self) -> None:
        """Until it ends, which each watch does sooner or later."""
        timing = self._timing
        now = asyncio.get_running_loop().time
        begun_at = now()
        events = self._api.watch(
            self._resource,
            namespace=self._namespace,
            labels=self._labels,
            fields=self._fields,
            version=self._version,
            timeout=random.uniform(timing.shortest_watch, timing.longest_watch),
            silence=timing.silence,
            opened=self._opened,
        )
        has_events = False
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if not isinstance(event, WatchEvent):
                        raise self._refused("watch", event)
                    self._take(event)
                    self._succeeded()
                    has_events = True
        finally:
            if now() - begun_at >= STEADY:
                self._succeeded()
        if not has_events and now() - begun_at < STEADY:
            # A proxy that ends each watch at once must not make us ask without a pause.
            raise Unavailable(f"The watch of {self._resource.plural} ended as soon as it began.")

    def _take(self, event: WatchEvent) -> None:
        if event.kind is EventKind.BOOKMARK:
            self._version = decode(_Bookmark, event.object).metadata.resource_version
            return
        metadata, read = self._read(event.object)
        if metadata.resource_version:
            self._version = metadata.resource_version
        key = self._key(metadata)
        known = self.cache.get(key)
        if event.kind is EventKind.DELETED:
            self._complained.discard(metadata.uid)
            self.cache.pop(key, None)
            if known is not None:
                self._tell(ObjectDeleted(read if read is not None else known))
        elif read is None:
            self.cache.pop(key, None)
            if known is not None:
                self._tell(ObjectDeleted(known))
        elif known is None or known.metadata.resource_version != metadata.resource_version:
            self.cache[key] = read
            self._tell(ObjectChanged(read))

    def _read(self, raw: msgspec.Raw) -> tuple[Identity, T | None]:
        """None: the object is there and is not shown."""
        try:
            read = decode(self._kind, raw)
            return read.metadata, read
        except UNREADABLE as error:
            reason = str(error)
        try:
            metadata = decode(Stub, raw).metadata
        except UNREADABLE:
            metadata = Metadata(name="")
        if metadata.uid not in self._complained:
            self._complained.add(metadata.uid)
            log.warning(
                "an object cannot be read kind=%s name=%s namespace=%s: %s",
                self._resource.kind,
                metadata.name or "?",
                metadata.namespace,
                reason,
            )
        if self._unreadable is None or not metadata.name:
            return metadata, None
        return metadata, self._unreadable(metadata, reason)

    def _key(self, metadata: Identity) -> str:
        if self._namespace is not None or not metadata.namespace:
            return metadata.name
        return f"{metadata.namespace}/{metadata.name}"

    def _refused(self, what: str, refusal: ApiRefusal) -> Exception:
        sentence = f"The {what} of {self._resource.plural} was refused: {refusal.message}"
        return _VersionGone(sentence) if isinstance(refusal, Gone) else Unavailable(sentence)

    def _failed(self, trouble: str) -> float:
        """The seconds to wait before the next step."""
        self._failures += 1
        self._trouble = trouble
        if self._failures >= WORTH_A_LINE and not self._is_logged:
            self._is_logged = True
            log.warning(
                "the view of the cluster is out of date and is read again resource=%s: %s",
                self._resource.plural,
                trouble,
            )
        longest = min(self._timing.first_delay * 2.0 ** min(self._failures - 1, 30), self._timing.longest_delay)
        return longest * random.uniform(0.5, 1.0)

    def _opened(self) -> None:
        self._trouble = None

    def _succeeded(self) -> None:
        self._failures = 0
        if self._is_logged:
            self._is_logged = False
            log.info("informer current resource=%s", self._resource.plural)

    def _snapshot(self) -> ObjectsListed[T]:
        return ObjectsListed(tuple(self.cache.values()))

    def _tell(self, sight: ObjectSight[T]) -> None:
        for reader in self._readers:
            if len(reader.waiting) < MAX_BEHIND:
                reader.put(sight)
            else:
                reader.waiting.clear()
                reader.put(self._snapshot())


class _VersionGone(Exception):
    """The copy cannot be kept current from the version that we have: list again."""


class _Version(Struct, rename="camel"):
    resource_version: str


class _Bookmark(Struct):
    """A bookmark has a version and no name."""

    metadata: _Version


class _Backlog(Generic[T]):
    """What one subscription has not read yet."""

    def __init__(self) -> None:
        self.waiting: deque[ObjectSight[T]] = deque()
        self._is_ended = False
        self._news = asyncio.Event()

    def put(self, sight: ObjectSight[T]) -> None:
        self.waiting.append(sight)
        self._news.set()

    def end(self) -> None:
        self._is_ended = True
        self._news.set()

    async def take(self) -> ObjectSight[T] | None:
        """None: no more will come."""
        while not self.waiting:
            if self._is_ended:
                return None
            self._news.clear()
            await self._news.wait()
        return self.waiting.popleft()
