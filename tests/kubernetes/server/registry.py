"""
Every read and write of an object: creation, change, deletion, in the order in which a real API server checks them.

A write is one synchronous step, so two requests never see half of each other. After a write the collector (`owners.py`)
removes what has lost its owner.
"""

from __future__ import annotations

import calendar
import copy
import secrets
import time
import uuid
from collections.abc import Callable

import msgspec

from tests.kubernetes.server import answers
from tests.kubernetes.server.answers import Complaints, Json, Refused
from tests.kubernetes.server.kinds import Kind, terminating_namespace
from tests.kubernetes.server.metadata import check_metadata, check_metadata_change
from tests.kubernetes.server.ownership import record_update
from tests.kubernetes.server.store import ObjectKey, Record, Store

_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
ORPHAN, FOREGROUND = "orphan", "foregroundDeletion"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says beside its body."""

    dry_run: bool = False
    manager: str = "unknown"
    is_apply: bool = False
    """The change already carries the records of its owners."""
    subresource: str = ""
    grace: int | None = None
    uid: str | None = None
    version: str | None = None
    propagation: str | None = None


Change = Callable[[Json], Json]
"""From a copy of the stored object to the object that the client wants."""
Admission = Callable[[Kind, Json, "Json | None", Options], None]
"""Looks at a new object (the third argument is None) or a change; may fill in fields or raise `Refused`."""


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def parse_stamp(text: str) -> float:
    return calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))


class Registry:
    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.clock = clock
        self.mutating: list[Admission] = []
        """Run before an object is checked: they may fill in fields."""
        self.validating: list[Admission] = []
        """Run on the finished object, right before it is stored."""
        self.after: list[Callable[[Kind, Record | None, Record | None], None]] = []
        """Called with each stored write: before, after (None: no such object)."""

    def find(self, kind: Kind, namespace: str, name: str) -> Record:
        record = self.store.get(kind.resource, (namespace, name))
        if record is None:
            raise answers.not_found(kind.plural, kind.group, name)
        return record

    def create(self, kind: Kind, namespace: str, body: Json, options: Options) -> Json:
        meta = body.setdefault("metadata", {})
        if meta.get("resourceVersion"):
            raise Refused(500, "", "resourceVersion should not be set on objects to be created")
        for field in (
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generation",
            "selfLink",
        ):
            meta.pop(field, None)
        meta["uid"] = str(uuid.uuid4())
        meta["creationTimestamp"] = stamp(self.clock())
        if not meta.get("name") and meta.get("generateName"):
            suffix = "".join(secrets.choice(_SUFFIX_LETTERS) for _ in range(5))
            meta["name"] = meta["generateName"][:58] + suffix
        _place(kind, namespace, meta)
        self._check_namespace(kind, namespace, meta.get("name", ""))
        kind.rules.fill_in(body)
        for admission in self.mutating:
            admission(kind, body, None, options)
        kind.rules.begin(body)
        complaints = Complaints()
        check_metadata(kind, meta, complaints)
        kind.rules.check(body, None, complaints)
        complaints.raise_for(kind.kind, kind.group, meta.get("name", ""))
        key = (namespace, meta["name"])
        # Quotas are charged before the name is looked up: a second create of a full quota is told about the quota.
        for admission in self.validating:
            admission(kind, body, None, options)
        existing = self.store.get(kind.resource, key)
        if existing is not None:
            deleting = "deletionTimestamp" in existing.body["metadata"]
            raise answers.already_exists(kind.plural, kind.group, meta["name"], deleting=deleting)
        self._record(kind, body, None, options)
        if options.dry_run:
            return _finished(kind, body)
        return self._put(kind, key, body).body

    def change(self, kind: Kind, key: ObjectKey, make: Change, options: Options, *, create: bool = False) -> Json:
        """
        Replaces an object with what `make` makes of it. A body without a version changes the newest one.

        With `create`, an object that does not exist is made (server-side apply).
        """
        before = self.store.get(kind.resource, key)
        if before is None:
            if create:
                return self.create(kind, key[0], make({}), options)
            raise answers.not_found(kind.plural, kind.group, key[1])
        old = before.body
        new = make(copy.deepcopy(old))
        meta = new.setdefault("metadata", {})
        _place(kind, key[0], meta)
        if meta.get("name") != key[1]:
            message = f"the name of the object ({meta.get('name', '')}) does not match the name on the URL ({key[1]})"
            raise answers.bad_request(message)
        self._check_version(kind, meta, old)
        self._keep_metadata(new, old)
        if options.subresource == "status":
            kind.rules.keep_but_status(new, old)
        else:
            kind.rules.keep(new, old)
        kind.rules.fill_in(new)
        for admission in self.mutating:
            admission(kind, new, old, options)
        complaints = Complaints()
        check_metadata_change(kind, new["metadata"], old["metadata"], complaints)
        if options.subresource == "status":
            kind.rules.check_status(new, old, complaints)
        else:
            kind.rules.check(new, old, complaints)
        complaints.raise_for(kind.kind, kind.group, key[1])
        for admission in self.validating:
            admission(kind, new, old, options)
        self._record(kind, new, old, options)
        if options.dry_run:
            return _finished(kind, new)
        if _same(new, old):
            return old
        if _is_finished(new, old):
            return self._drop(kind, key, new).body
        return self._put(kind, key, new).body

    def remove(self, kind: Kind, key: ObjectKey, options: Options) -> tuple[Json, bool]:
        """Deletes, or begins to delete. Returns the object and whether it is gone."""
        body = copy.deepcopy(self.find(kind, *key).body)
        meta = body["metadata"]
        self.check_preconditions(kind, meta, options)
        asked = None if options.grace is None else (options.grace if options.grace >= 0 else 1)
        if "deletionTimestamp" in meta and meta.get("deletionGracePeriodSeconds"):
            left = meta["deletionGracePeriodSeconds"]
            if asked is None or asked >= left:
                return body, False
            self._shorten(meta, left, asked)
            graceful, grace = True, meta["deletionGracePeriodSeconds"]
        elif "deletionTimestamp" in meta:
            graceful, grace = False, 0
        else:
            period = kind.rules.grace(body, asked)
            graceful, grace = period is not None, period or 0
            if graceful:
                self._mark(meta, grace)
        finalizers = _collector_finalizers(meta, options.propagation)
        meta.pop("finalizers", None)
        if finalizers:
            meta["finalizers"] = finalizers
        is_held = kind.rules.hold(body)
        pending = bool(finalizers) or is_held
        if pending and not graceful:
            self._mark(meta, 0)
        if options.dry_run:
            return body, not pending and grace == 0
        if graceful or pending:
            stored = self.find(kind, *key).body
            if not _same(body, stored):
                body = self._put(kind, key, body).body
        if pending or grace > 0:
            return body, False
        return self._drop(kind, key, None).body, True

    def rewrite(self, kind: Kind, key: ObjectKey, make: Change, options: Options) -> Json:
        """A change by the server itself (binding, eviction): any part may change, and no checks are made."""
        old = self.find(kind, *key).body
        new = make(copy.deepcopy(old))
        self._record(kind, new, old, options)
        return new if options.dry_run else self._put(kind, key, new).body

    def finish(self, kind: Kind, key: ObjectKey) -> None:
        """Removes an object that something beside finalizers held, such as a namespace that is empty now."""
        if not self.find(kind, *key).body["metadata"].get("finalizers"):
            self._drop(kind, key, None)

    def _record(self, kind: Kind, new: Json, old: Json | None, options: Options) -> None:
        if not options.is_apply:
            part = options.subresource if options.subresource in ("status", "scale") else ""
            record_update(kind, new, old, manager=options.manager, subresource=part, at=stamp(self.clock()))

    def _put(self, kind: Kind, key: ObjectKey, body: Json) -> Record:
        before = self.store.get(kind.resource, key)
        after = self.store.put(kind.resource, key, _finished(kind, body))
        for note in self.after:
            note(kind, before, after)
        return after

    def _drop(self, kind: Kind, key: ObjectKey, last: Json | None) -> Record:
        before = self.store.get(kind.resource, key)
        after = self.store.drop(kind.resource, key, last)
        for note in self.after:
            note(kind, before, None)
        return after

    def _check_namespace(self, kind: Kind, namespace: str, name: str) -> None:
        if not kind.namespaced:
            return
        record = self.store.get(("", "namespaces"), ("", namespace))
        if record is None:
            raise answers.not_found("namespaces", "", namespace)
        if "deletionTimestamp" in record.body["metadata"]:
            raise terminating_namespace(kind, name, namespace)

    def _check_version(self, kind: Kind, meta: Json, old: Json) -> None:
        uid = meta.get("uid")
        if uid and uid != old["metadata"]["uid"]:
            why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {old['metadata']['uid']}"
            raise answers.conflict(kind.plural, kind.group, meta["name"], _storage_words(kind, meta, why))
        version = meta.get("resourceVersion")
        if not version or version == "0":
            if kind.rules.needs_version_on_update:
                complaints = Complaints()
                complaints.add(
                    "FieldValueInvalid", "metadata.resourceVersion", "Invalid value: 0: must be specified for an update"
                )
                complaints.raise_for(kind.plural, kind.group, meta["name"])
        elif version != old["metadata"]["resourceVersion"]:
            raise answers.old_version(kind.plural, kind.group, meta["name"])

    def _keep_metadata(self, new: Json, old: Json) -> None:
        """What no change at any path can change."""
        meta, was = new["metadata"], old["metadata"]
        kept = [
            "uid",
            "creationTimestamp",
            "generation",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "resourceVersion",
        ]
        for field in kept:
            if field in was:
                meta[field] = was[field]
            else:
                meta.pop(field, None)
        meta.pop("selfLink", None)

    def check_preconditions(self, kind: Kind, meta: Json, options: Options) -> None:
        if options.uid is not None and options.uid != meta["uid"]:
            why = (
                f"the UID in the precondition ({options.uid}) does not match the UID in record ({meta['uid']}). "
                "The object might have been deleted and then recreated"
            )
            raise answers.conflict(kind.kind, kind.group, meta["name"], why)
        if options.version is not None and options.version != meta["resourceVersion"]:
            why = (
                f"the ResourceVersion in the precondition ({options.version}) does not match the ResourceVersion in record "
                f"({meta['resourceVersion']}). The object might have been modified"
            )
            raise answers.conflict(kind.kind, kind.group, meta["name"], why)

    def _mark(self, meta: Json, grace: int) -> None:
        if "deletionTimestamp" not in meta and meta.get("generation"):
            meta["generation"] += 1
        if "deletionTimestamp" not in meta:
            meta["deletionTimestamp"] = stamp(self.clock() + grace)
        meta["deletionGracePeriodSeconds"] = grace

    def _shorten(self, meta: Json, left: int, asked: int) -> None:
        """The deletion comes earlier, but never in the past. A grace that has run out leaves one second."""
        at, now = parse_stamp(meta["deletionTimestamp"]) - left + asked, self.clock()
        if at < now:
            at, asked = now, 1 if asked else 0
        meta["deletionTimestamp"] = stamp(at)
        meta["deletionGracePeriodSeconds"] = asked


def _finished(kind: Kind, body: Json) -> Json:
    body["apiVersion"], body["kind"] = kind.api_version, kind.kind
    return body


def _place(kind: Kind, namespace: str, meta: Json) -> None:
    if not kind.namespaced:
        meta.pop("namespace", None)
    elif meta.setdefault("namespace", namespace) != namespace:
        raise answers.bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )


def _storage_words(kind: Kind, meta: Json, why: str) -> str:
    group = f"{kind.group}/" if kind.group else ""
    key = f"/registry/{group}{kind.plural}/{meta['namespace'] + '/' if 'namespace' in meta else ''}{meta['name']}"
    return f"StorageError: invalid object, Code: 4, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: {why}"


def _collector_finalizers(meta: Json, propagation: str | None) -> list[str]:
    finalizers = list(meta.get("finalizers") or [])
    if propagation is None:
        return finalizers
    finalizers = [name for name in finalizers if name not in (ORPHAN, FOREGROUND)]
    if propagation == "Orphan":
        finalizers.append(ORPHAN)
    elif propagation == "Foreground":
        finalizers.append(FOREGROUND)
    return finalizers


def _is_finished(new: Json, old: Json) -> bool:
    """A change took the last finalizer from an object whose deletion was asked for."""
    was = old["metadata"]
    if new["metadata"].get("finalizers") or "deletionTimestamp" not in was:
        return False
    return not was.get("deletionGracePeriodSeconds")


def _same(new: Json, old: Json) -> bool:
    """A change that changes nothing stores nothing: no version, no event. When a manager last wrote does not count."""

    def counted(body: Json) -> Json:
        entries = [
            {key: value for key, value in entry.items() if key != "time"}
            for entry in body["metadata"].get("managedFields") or []
        ]
        return {**body, "metadata": {**body["metadata"], "managedFields": entries}}

    return counted(new) == counted(old)
