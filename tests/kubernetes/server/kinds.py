"""
The resources that the server knows, and what is particular about each one.

`Kind` names a resource. Its `rules` fill in defaults and check objects; most resources need none of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kubernetes.server.answers import Complaints, Json, forbidden
from tests.kubernetes.server.selectors import as_field, value_at

if TYPE_CHECKING:
    from tests.kubernetes.server.store import ResourceKey


class Rules:
    """What a resource does beyond storing documents. This class is the rule of a plain one, such as a ConfigMap."""

    has_status = False
    """Status is a sub-resource: the main path leaves it alone, the status path changes nothing else."""
    has_generation = False
    needs_version_on_update = False
    returns_deleted = False
    """A completed DELETE answers with the object instead of a `Status`."""

    def __init__(self, *, returns_deleted: bool | None = None) -> None:
        if returns_deleted is not None:
            self.returns_deleted = returns_deleted

    selectable: tuple[str, ...] = ()
    """Paths beside name and namespace that a field selector may name."""

    open_schema: Json | None = None
    """The schema of a custom resource: it says how lists are owned and merged."""

    def fill_in(self, body: Json) -> None:
        """Defaults, for new and changed objects."""

    def begin(self, body: Json) -> None:
        """What only a creation sets."""
        if self.has_status:
            body.pop("status", None)
        if self.has_generation:
            body["metadata"]["generation"] = 1

    def keep(self, new: Json, old: Json) -> None:
        """What a change at the main path leaves as it was."""
        if self.has_status:
            keep_part(new, old, "status")
        if self.has_generation and self.content(new) != self.content(old):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1

    def keep_but_status(self, new: Json, old: Json) -> None:
        """What a change at the status path leaves as it was: all but status (and owners' records of fields)."""
        for part in (set(new) | set(old)) - {"status", "metadata"}:
            keep_part(new, old, part)
        fields = new["metadata"].get("managedFields")
        new["metadata"] = {**old["metadata"], "resourceVersion": new["metadata"]["resourceVersion"]}
        if fields is not None:
            new["metadata"]["managedFields"] = fields

    def content(self, body: Json) -> Json:
        """What the generation counts: all but metadata, and status where it is a sub-resource."""
        return {
            key: value for key, value in body.items() if key != "metadata" and not (key == "status" and self.has_status)
        }

    def check(self, body: Json, old: Json | None, complaints: Complaints) -> None:
        """Complaints about a new object (old is None) or a change at the main path."""

    def check_status(self, body: Json, old: Json, complaints: Complaints) -> None:
        """Complaints about a change at the status path."""

    def grace(self, body: Json, asked: int | None) -> int | None:
        """Seconds between the request to delete and the deletion. None: the resource knows no grace."""
        return None

    def hold(self, body: Json) -> bool:
        """Called when a deletion is asked for. True: something beside finalizers must end first."""
        return False

    def fields(self, body: Json) -> dict[str, str]:
        meta = body["metadata"]
        found = {"metadata.name": meta["name"], "metadata.namespace": meta.get("namespace", "")}
        for path in self.selectable:
            found[path] = as_field(value_at(body, path))
        return found


class Kind:
    """One resource of the API."""

    def __init__(
        self, group: str, version: str, plural: str, kind: str, rules: Rules, *, namespaced: bool = True
    ) -> None:
        self.group = group
        self.version = version
        self.plural = plural
        self.kind = kind
        self.rules = rules
        self.namespaced = namespaced
        self.short_names: tuple[str, ...] = ()
        self.scale: Json | None = None
        """Paths of a custom resource's scale sub-resource; None: it has none."""

    @property
    def resource(self) -> ResourceKey:
        return (self.group, self.plural)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def known_fields(self) -> tuple[str, ...]:
        return ("metadata.name", "metadata.namespace", *self.rules.selectable)


def keep_part(new: Json, old: Json, part: str) -> None:
    if part in old:
        new[part] = old[part]
    else:
        new.pop(part, None)


def terminating_namespace(kind: Kind, name: str, namespace: str) -> Exception:
    why = f"unable to create new content in namespace {namespace} because it is being terminated"
    return forbidden(kind.plural, kind.group, name, why)
