"""
The garbage collector: objects whose owners are gone are deleted.

It follows owner references as a real one does: by version, kind, name and uid. A reference whose kind does not exist is left
alone. It works after the answer of the request that caused it, as a controller does.
"""

from __future__ import annotations

import asyncio
import contextlib

from tests.kubernetes.server.answers import Json, Refused
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.registry import FOREGROUND, ORPHAN, Options, Registry
from tests.kubernetes.server.routes import Routes
from tests.kubernetes.server.store import ObjectKey, Record

Place = tuple[Kind, ObjectKey]
_BACKGROUND = Options(manager="garbage-collector", propagation="Background")


class Collector:
    def __init__(self, registry: Registry, routes: Routes) -> None:
        self._registry = registry
        self._routes = routes
        self._dependents: dict[str, dict[tuple[tuple[str, str], ObjectKey], Kind]] = {}
        """By the owner's uid: objects that name it."""
        self._due: dict[tuple[tuple[str, str], ObjectKey], Kind] = {}
        self._timer: asyncio.Handle | None = None
        registry.after.append(self.note)

    def note(self, kind: Kind, before: Record | None, after: Record | None) -> None:
        for record, is_now in ((before, False), (after, True)):
            if record is None:
                continue
            for owner in record.body["metadata"].get("ownerReferences") or []:
                held = self._dependents.setdefault(owner["uid"], {})
                if is_now:
                    held[kind.resource, record.key] = kind
                else:
                    held.pop((kind.resource, record.key), None)
        record = after or before
        if record is None:
            return
        meta = record.body["metadata"]
        if after is None:
            for place, dependent in self._dependents.get(meta["uid"], {}).items():
                self._due[place] = dependent
            for owner in meta.get("ownerReferences") or []:
                self._attend_owner(owner, meta.get("namespace", ""))
        elif meta.get("ownerReferences") or "deletionTimestamp" in meta:
            self._due[kind.resource, record.key] = kind
        self._wake()

    def _attend_owner(self, reference: Json, namespace: str) -> None:
        kind = self._routes.of_object(reference["apiVersion"], reference["kind"])
        if kind is not None:
            self._due[kind.resource, (namespace if kind.namespaced else "", reference["name"])] = kind

    def _wake(self) -> None:
        if self._due and self._timer is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return
            self._timer = loop.call_soon(self._work)

    def _work(self) -> None:
        self._timer = None
        due, self._due = self._due, {}
        for (_resource, key), kind in due.items():
            # A refusal means that the object changed or went meanwhile: its own note brings it back here.
            with contextlib.suppress(Refused):
                self._attend(kind, key)
        self._wake()

    def _attend(self, kind: Kind, key: ObjectKey) -> None:
        record = self._registry.store.get(kind.resource, key)
        if record is None:
            return
        meta = record.body["metadata"]
        finalizers = meta.get("finalizers") or []
        if "deletionTimestamp" in meta:
            if ORPHAN in finalizers:
                self._orphan(kind, record)
            elif FOREGROUND in finalizers:
                self._delete_in_foreground(kind, record)
            return
        references = meta.get("ownerReferences") or []
        if not references:
            return
        states = [self._state(reference, key[0]) for reference in references]
        if any(state == "unknown" for state in states):
            return
        gone = [reference["uid"] for reference, state in zip(references, states, strict=True) if state == "gone"]
        if not gone:
            return
        if len(gone) == len(references):
            options = Options(manager="garbage-collector", propagation="Background", uid=meta["uid"])
            self._registry.remove(kind, key, options)
        else:
            self._drop_references(kind, key, set(gone))

    def _state(self, reference: Json, namespace: str) -> str:
        kind = self._routes.of_object(reference["apiVersion"], reference["kind"])
        if kind is None:
            return "unknown"
        record = self._registry.store.get(kind.resource, (namespace if kind.namespaced else "", reference["name"]))
        return "there" if record is not None and record.body["metadata"]["uid"] == reference["uid"] else "gone"

    def _delete_in_foreground(self, kind: Kind, record: Record) -> None:
        """Dependents that block go first; then the owner's finalizer."""
        uid = record.body["metadata"]["uid"]
        blocking = False
        for (resource, key), dependent in list(self._dependents.get(uid, {}).items()):
            held = self._registry.store.get(resource, key)
            if held is None:
                continue
            mine = [one for one in held.body["metadata"].get("ownerReferences") or [] if one["uid"] == uid]
            blocking = blocking or any(one.get("blockOwnerDeletion") for one in mine)
            if "deletionTimestamp" not in held.body["metadata"]:
                options = Options(
                    manager="garbage-collector", propagation="Foreground", uid=held.body["metadata"]["uid"]
                )
                self._registry.remove(dependent, key, options)
        still = [place for place in self._dependents.get(uid, {}) if self._registry.store.get(*place) is not None]
        if not blocking or not still:
            self._drop_finalizer(kind, record.key, FOREGROUND)

    def _orphan(self, kind: Kind, record: Record) -> None:
        uid = record.body["metadata"]["uid"]
        for (_resource, key), dependent in list(self._dependents.get(uid, {}).items()):
            self._drop_references(dependent, key, {uid})
        self._drop_finalizer(kind, record.key, ORPHAN)

    def _drop_references(self, kind: Kind, key: ObjectKey, uids: set[str]) -> None:
        def make(body: Json) -> Json:
            left = [one for one in body["metadata"]["ownerReferences"] if one["uid"] not in uids]
            body["metadata"]["ownerReferences"] = left
            if not left:
                del body["metadata"]["ownerReferences"]
            return body

        self._registry.change(kind, key, make, _BACKGROUND)

    def _drop_finalizer(self, kind: Kind, key: ObjectKey, name: str) -> None:
        def make(body: Json) -> Json:
            left = [one for one in body["metadata"].get("finalizers") or [] if one != name]
            body["metadata"]["finalizers"] = left
            if not left:
                del body["metadata"]["finalizers"]
            return body

        self._registry.change(kind, key, make, _BACKGROUND)
