"""Namespaces: a new one gets its default account and certificate; a deleted one goes when its content is gone."""

from __future__ import annotations

import asyncio
import contextlib

from tests.kubernetes.server.answers import Json, Refused
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.registry import Options, Registry
from tests.kubernetes.server.routes import Routes
from tests.kubernetes.server.store import Record

_OPTIONS = Options(manager="control-plane")
_NAMESPACES = ("", "namespaces")


class Namespaces:
    def __init__(self, registry: Registry, routes: Routes, *, certificate: str) -> None:
        self._registry = registry
        self._routes = routes
        self._certificate = certificate
        registry.after.append(self.note)

    def note(self, kind: Kind, before: Record | None, after: Record | None) -> None:
        if kind.resource == _NAMESPACES and after is not None:
            if before is None:
                self._furnish(after.key[1])
            elif "deletionTimestamp" in after.body["metadata"]:
                self._later(after.key[1])
        elif after is None and before is not None and before.key[0]:
            space = self._registry.store.get(_NAMESPACES, ("", before.key[0]))
            if space is not None and "deletionTimestamp" in space.body["metadata"]:
                self._later(before.key[0])

    def _furnish(self, name: str) -> None:
        wanted: list[tuple[str, Json]] = [
            ("serviceaccounts", {"metadata": {"name": "default"}}),
            ("configmaps", {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": self._certificate}}),
        ]
        for plural, body in wanted:
            kind = self._routes.named("", plural)
            assert kind is not None, f"{plural} is built in"
            self._registry.create(kind, name, body, _OPTIONS)

    def _later(self, name: str) -> None:
        asyncio.get_running_loop().call_soon(self._empty, name)

    def _empty(self, name: str) -> None:
        space = self._registry.store.get(_NAMESPACES, ("", name))
        if space is None:
            return
        left = False
        for kind in self._routes.every():
            if not kind.namespaced:
                continue
            for record in self._registry.store.every(kind.resource, name):
                if "deletionTimestamp" not in record.body["metadata"]:
                    with contextlib.suppress(Refused):
                        self._registry.remove(
                            kind, record.key, Options(manager="control-plane", propagation="Background")
                        )
                left = left or self._registry.store.get(kind.resource, record.key) is not None
        spaces = self._routes.named(*_NAMESPACES)
        if not left and spaces is not None and self._registry.store.get(_NAMESPACES, ("", name)) is not None:
            self._registry.finish(spaces, ("", name))
