"""Everything that the server knows, put together: kinds, objects, rights, and the control plane around them."""

from __future__ import annotations

import contextlib
from typing import Any

from tests.kubernetes.server import answers, ownership
from tests.kubernetes.server.access.rights import Rights
from tests.kubernetes.server.access.tokens import Tokens, User
from tests.kubernetes.server.answers import Json
from tests.kubernetes.server.built_in import built_in
from tests.kubernetes.server.control.admission import PodAdmission
from tests.kubernetes.server.control.budgets import Budgets
from tests.kubernetes.server.control.claims import Claims
from tests.kubernetes.server.control.namespaces import Namespaces
from tests.kubernetes.server.control.owners import Collector
from tests.kubernetes.server.control.quotas import Quotas
from tests.kubernetes.server.custom.definitions import GROUP as DEFINITIONS
from tests.kubernetes.server.custom.definitions import established, kinds_of
from tests.kubernetes.server.decoding import read
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.registry import Options, Registry, stamp
from tests.kubernetes.server.routes import Routes, Target
from tests.kubernetes.server.store import Record, Store
from tests.kubernetes.server.subresources import Subresources

_DEFINITIONS = (DEFINITIONS, "customresourcedefinitions")
_SYSTEM = Options(manager="control-plane")


class Cluster:
    def __init__(self, *, history: int, token_cache: float, accounts: bool, certificate: str = "") -> None:
        self.store = Store(history)
        self.registry = Registry(self.store)
        self.routes = Routes(built_in())
        self.tokens = Tokens(self.store, cache=token_cache)
        self.rights = Rights(self.store)
        for kind in self.routes.every():
            self.store.shelf(kind.resource)
        PodAdmission(self.registry, accounts=accounts)
        Quotas(self.registry, self._kind("", "resourcequotas"))
        self.budgets = Budgets(self.registry, self.routes)
        Collector(self.registry, self.routes)
        Claims(self.registry, self._kind("", "persistentvolumeclaims"))
        Namespaces(self.registry, self.routes, certificate=certificate)
        self.subresources = Subresources(self.registry, self.budgets, self.tokens)
        self.registry.after.append(self._note_definition)
        for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
            self.create("namespaces", "", {"metadata": {"name": name}})

    def create(self, plural: str, namespace: str, body: Json, *, group: str = "") -> Json:
        """Stores an object as the control plane does it, without a request."""
        return self.registry.create(self._kind(group, plural), namespace, body, _SYSTEM)

    def _kind(self, group: str, plural: str) -> Kind:
        kind = self.routes.named(group, plural)
        assert kind is not None, f"{plural} is no resource"
        return kind

    def apply(self, target: Target, config: Any, options: Options, *, force: bool, user: User) -> tuple[int, Json]:
        """Server-side apply. Makes the object if it does not exist. Unknown fields are an error, however lenient the client is."""
        kind = target.kind
        body, unknown = read(kind, config)
        if unknown:
            faults = [f".{path}: field not declared in schema" for path in unknown]
            listed = faults[0] if len(faults) == 1 else "errors:\n" + "\n".join(f"  {fault}" for fault in faults)
            version = f"{kind.group}/{kind.version}" if kind.group else f"/{kind.version}"
            space = body["metadata"].get("namespace", "")
            message = (
                f"failed to create typed patch object ({space}/{target.name}; {version}, Kind={kind.kind}): {listed}"
            )
            raise answers.Refused(500, "", message)
        meta = body.setdefault("metadata", {})
        if meta.get("managedFields"):
            raise answers.bad_request("metadata.managedFields must be nil")
        if meta.setdefault("name", target.name) != target.name:
            raise answers.bad_request(
                f"the name of the object ({meta['name']}) does not match the name on the URL ({target.name})"
            )
        key = (target.namespace, target.name)
        exists = self.store.get(kind.resource, key) is not None
        if not exists and target.subresource:
            raise answers.not_found(kind.plural, kind.group, target.name)

        def make(live: Json) -> Json:
            return ownership.apply(
                kind,
                live or None,
                body,
                manager=options.manager,
                subresource=options.subresource,
                force=force,
                at=stamp(self.registry.clock()),
            )

        if not exists:
            self.rights.check_binding(user, kind, body, target.namespace)
        answer = self.registry.change(kind, key, make, options, create=True)
        return (200 if exists else 201), answer

    def _note_definition(self, kind: Kind, before: Record | None, after: Record | None) -> None:
        if kind.resource != _DEFINITIONS:
            return
        old = kinds_of(before.body) if before is not None else []
        if after is None:
            for one in old:
                self.routes.drop(one)
                for record in self.store.every(one.resource):
                    with contextlib.suppress(answers.Refused):
                        self.registry.remove(one, record.key, _SYSTEM)
            return
        for one in old:
            self.routes.drop(one)
        for one in kinds_of(after.body):
            self.routes.add(one)
            self.store.shelf(one.resource)
        if "conditions" not in after.body.get("status", {}):
            status = established(after.body, stamp(self.registry.clock()))
            options = Options(manager="control-plane", subresource="status")
            self.registry.change(kind, after.key, lambda body: {**body, "status": status}, options)
