"""Lists and watches: which objects a client sees, page by page and change by change."""

from __future__ import annotations

import asyncio
import base64
import binascii
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from tests.kubernetes.server import answers
from tests.kubernetes.server.answers import Complaints, Json, Refused
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.selectors import by_fields, by_labels
from tests.kubernetes.server.store import Change, Record, Store

_BEFORE_THE_END = 2.0
"""A watch with a time limit gets its last bookmark this long before the end."""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which objects of a resource a client wants."""

    namespace: str = ""
    name: str = ""
    labels: str = ""
    fields: str = ""
    limit: int = 0
    token: str = ""
    version: str = ""
    match: str = ""
    bookmarks: bool = False
    timeout: float | None = None


class Sieve:
    """Tells whether an object is one of those that a query asks for."""

    def __init__(self, kind: Kind, query: Query) -> None:
        self._kind = kind
        self._namespace = query.namespace
        self._name = query.name
        self._labels = by_labels(query.labels)
        self._fields = by_fields(query.fields, kind.known_fields, kind.kind, kind.version)
        self.is_open = self._labels is None and self._fields is None
        """True: the query names no selector."""

    def lets(self, record: Record) -> bool:
        if self._namespace and record.key[0] != self._namespace:
            return False
        if self._name and record.key[1] != self._name:
            return False
        if self._labels is not None and not self._labels(record.body["metadata"].get("labels") or {}):
            return False
        return self._fields is None or self._fields(self._kind.rules.fields(record.body))


def list_page(store: Store, kind: Kind, query: Query) -> bytes:
    """One page of a list, as the JSON text of the answer. All pages of a list show the state of the first one."""
    sieve = Sieve(kind, query)
    version, after = store.version, None
    if query.token:
        version, after = _read_token(query)
        try:
            records = store.at(kind.resource, query.namespace, version)
        except Refused:
            raise _expired_token(store, after) from None
    else:
        version = _wanted_version(store, query)
        current = version == store.version
        records = (
            store.every(kind.resource, query.namespace)
            if current
            else store.at(kind.resource, query.namespace, version)
        )
    records = [record for record in records if (after is None or list(record.key) > after) and sieve.lets(record)]
    meta: Json = {"resourceVersion": str(version)}
    if query.limit and len(records) > query.limit:
        if sieve.is_open:
            meta["remainingItemCount"] = len(records) - query.limit
        records = records[: query.limit]
        meta["continue"] = _write_token(version, list(records[-1].key))
    head = {"kind": kind.kind + "List", "apiVersion": kind.api_version, "metadata": meta}
    return b'%s,"items":[%s]}' % (msgspec.json.encode(head)[:-1], b",".join(record.encoded for record in records))


async def watch(store: Store, kind: Kind, query: Query, *, bookmark_every: float) -> AsyncGenerator[bytes, None]:
    """
    The lines of a watch, until its time is over. A version that is too old ends it with an ERROR line.

    An object that begins to fit the selectors is ADDED, one that stops to fit is DELETED, whatever happened to it.
    """
    sieve = Sieve(kind, query)
    begin = int(query.version) if query.version not in ("", "0") else None
    initial: list[Record] = []
    if begin is None:
        begin = store.version
        initial = [record for record in store.every(kind.resource, query.namespace) if sieve.lets(record)]
    try:
        missed, queue = store.follow(kind.resource, begin)
    except Refused as refused:
        yield line("ERROR", msgspec.json.encode(refused.body))
        return
    ends_at = time.monotonic() + (query.timeout if query.timeout is not None else random.uniform(1800, 3600))
    try:
        for record in initial:
            yield line("ADDED", record.encoded)
        for change in missed:
            if text := _line_of(change, sieve):
                yield text
        seen = store.version if not missed else missed[-1].version
        del initial, missed
        async for text in _live(
            store, kind, query, queue, sieve, seen=max(seen, begin), ends_at=ends_at, every=bookmark_every
        ):
            yield text
    finally:
        store.unfollow(kind.resource, queue)


async def _live(
    store: Store,
    kind: Kind,
    query: Query,
    queue: asyncio.Queue[Change | None],
    sieve: Sieve,
    *,
    seen: int,
    ends_at: float,
    every: float,
) -> AsyncIterator[bytes]:
    now, begin = time.monotonic(), seen
    bookmark_at = min(now + every, max(now, ends_at - _BEFORE_THE_END)) if query.bookmarks else float("inf")
    while (now := time.monotonic()) < ends_at:
        if now >= bookmark_at:
            bookmark_at = _next_bookmark(now, ends_at, every)
            # All changes up to here are sent if the queue is empty: the newest version is then safe to continue from.
            safe = store.version if queue.empty() else seen
            if safe > begin:
                yield line("BOOKMARK", _bookmark(kind, safe))
            continue
        try:
            change = await asyncio.wait_for(queue.get(), min(ends_at, bookmark_at) - now)
        except TimeoutError:
            continue
        if change is None:
            return
        seen = change.version
        if text := _line_of(change, sieve):
            yield text


def _next_bookmark(now: float, ends_at: float, every: float) -> float:
    last = ends_at - _BEFORE_THE_END
    if now + every < last or now >= last:
        return now + every
    return last


def line(kind: str, encoded: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), encoded)


def _line_of(change: Change, sieve: Sieve) -> bytes | None:
    was = change.before is not None and sieve.lets(change.before)
    now = not change.is_deletion and sieve.lets(change.after)
    if now:
        return line("MODIFIED" if was else "ADDED", change.after.encoded)
    if not was:
        return None
    if change.is_deletion:
        return line("DELETED", change.after.encoded)
    # It only left the selection: the line shows what it was, with the version of the change.
    assert change.before is not None, "an object that was let through exists"
    body = change.before.body
    body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(change.version)}}
    return line("DELETED", msgspec.json.encode(body))


def _bookmark(kind: Kind, version: int) -> bytes:
    body = {
        "kind": kind.kind,
        "apiVersion": kind.api_version,
        "metadata": {"resourceVersion": str(version), "creationTimestamp": None},
    }
    return msgspec.json.encode(body)


def check_options(query: Query, *, is_watch: bool) -> None:
    complaints = Complaints()
    if query.match:
        if is_watch:
            complaints.forbidden(
                "resourceVersionMatch",
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
            )
        elif query.token:
            complaints.forbidden("resourceVersionMatch", "resourceVersionMatch is forbidden when continue is provided")
        elif not query.version:
            complaints.forbidden(
                "resourceVersionMatch", "resourceVersionMatch is forbidden unless resourceVersion is provided"
            )
        elif query.match not in ("Exact", "NotOlderThan"):
            complaints.unsupported("resourceVersionMatch", query.match, ["Exact", "NotOlderThan", ""])
    complaints.raise_for("ListOptions", "meta.k8s.io", "")
    if query.version and not query.version.isdigit():
        why = f'strconv.ParseUint: parsing "{query.version}": invalid syntax'
        raise answers.bad_request(f'invalid resource version: resourceVersion: Invalid value: "{query.version}": {why}')


def _wanted_version(store: Store, query: Query) -> int:
    if query.version in ("", "0"):
        return store.version
    wanted = int(query.version)
    if wanted > store.version:
        message = f"Timeout: Too large resource version: {wanted}, current: {store.version}"
        causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
        raise Refused(504, "Timeout", message, details={"causes": causes, "retryAfterSeconds": 1})
    if query.match == "Exact" or (query.limit and not query.match):
        return wanted
    return store.version


def _write_token(version: int, key: list[str]) -> str:
    return (
        base64.urlsafe_b64encode(msgspec.json.encode({"v": "meta.k8s.io/v1", "rv": version, "start": key}))
        .decode()
        .rstrip("=")
    )


def _read_token(query: Query) -> tuple[int, list[str]]:
    if query.version not in ("", "0"):
        raise answers.bad_request("specifying resource version is not allowed when using continue")
    try:
        token = msgspec.json.decode(base64.urlsafe_b64decode(query.token + "=" * (-len(query.token) % 4)))
        return int(token["rv"]), list(token["start"])
    except (binascii.Error, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise answers.bad_request(f"invalid continue token: {error}") from error


def _expired_token(store: Store, after: list[str]) -> Refused:
    message = (
        "The provided continue parameter is too old to display a consistent list result. You can start a new list without the "
        "continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with "
        "the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the "
        "first chunk was returned and now may show up in the list."
    )
    refused = answers.expired(message)
    refused.body["metadata"] = {"continue": _write_token(store.version, after)}
    return refused
