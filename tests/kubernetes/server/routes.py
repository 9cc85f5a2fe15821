"""From a path and a method to a resource and a verb, and from its result to an answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tests.kubernetes.server import answers
from tests.kubernetes.server.kinds import Kind


class Target(msgspec.Struct, frozen=True):
    """What a request is about. An empty name means the whole collection."""

    kind: Kind
    namespace: str
    name: str
    subresource: str


class Routes:
    """The kinds that are served now. Custom kinds come and go with their definitions."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self._kinds: dict[tuple[str, str, str], Kind] = {}
        for kind in kinds:
            self.add(kind)

    def add(self, kind: Kind) -> None:
        self._kinds[kind.group, kind.version, kind.plural] = kind

    def drop(self, kind: Kind) -> None:
        self._kinds.pop((kind.group, kind.version, kind.plural), None)

    def every(self) -> list[Kind]:
        return list(self._kinds.values())

    def named(self, group: str, plural: str) -> Kind | None:
        return next((kind for kind in self._kinds.values() if (kind.group, kind.plural) == (group, plural)), None)

    def of_object(self, api_version: str, kind: str) -> Kind | None:
        return next((one for one in self._kinds.values() if (one.api_version, one.kind) == (api_version, kind)), None)

    def target(self, path: str) -> Target:
        parts = [part for part in path.split("/") if part]
        if parts[:1] == ["api"]:
            group, version, rest = "", parts[1] if len(parts) > 1 else "", parts[2:]
        elif parts[:1] == ["apis"] and len(parts) > 2:
            group, version, rest = parts[1], parts[2], parts[3:]
        else:
            raise answers.NoSuchGroup
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        if not rest or len(rest) > 3:
            raise answers.no_such_path()
        if not any((kind.group, kind.version) == (group, version) for kind in self._kinds.values()):
            raise answers.NoSuchGroup
        kind = self._kinds.get((group, version, rest[0]))
        if kind is None or bool(namespace) > kind.namespaced:
            raise answers.no_such_path()
        name, subresource = ([*rest, "", ""])[1:3]
        if name and kind.namespaced and not namespace:
            raise answers.no_such_path()
        if subresource == "status" and not kind.rules.has_status:
            raise answers.no_such_path()
        return Target(kind, namespace, name, subresource)
