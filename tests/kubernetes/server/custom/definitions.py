"""Custom resource definitions: from a definition to a kind that is served."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.server.answers import Complaints, Json
from tests.kubernetes.server.custom.cel import CelError, Rule
from tests.kubernetes.server.custom.schemas import Schema
from tests.kubernetes.server.kinds import Kind, Rules
from tests.kubernetes.server.selectors import value_at

GROUP = "apiextensions.k8s.io"


class DefinitionRules(Rules):
    has_status = True
    has_generation = True

    def fill_in(self, body: Json) -> None:
        spec = body.setdefault("spec", {})
        names = spec.setdefault("names", {})
        names.setdefault("singular", str(names.get("kind", "")).lower())
        names.setdefault("listKind", f"{names.get('kind', '')}List")
        spec.setdefault("conversion", {"strategy": "None"})

    def check(self, body: Json, old: Json | None, complaints: Complaints) -> None:
        spec = body["spec"]
        names = spec["names"]
        wanted = f"{names.get('plural')}.{spec.get('group')}"
        if body["metadata"]["name"] != wanted:
            complaints.invalid("metadata.name", body["metadata"]["name"], 'must be spec.names.plural+"."+spec.group')
        if spec.get("scope") not in ("Namespaced", "Cluster"):
            complaints.unsupported("spec.scope", spec.get("scope", ""), ["Cluster", "Namespaced"])
        if [version.get("storage") for version in spec.get("versions") or []].count(True) != 1:
            complaints.invalid(
                "spec.versions", spec.get("versions"), "must have exactly one version marked as storage version"
            )
        for index, version in enumerate(spec.get("versions") or []):
            schema = (version.get("schema") or {}).get("openAPIV3Schema")
            # A single version's schema counts as that of the whole definition.
            path = "spec.validation.openAPIV3Schema"
            if len(spec["versions"]) > 1:
                path = f"spec.versions[{index}].schema.openAPIV3Schema"
            if schema is None:
                complaints.required(path, "schemas are required")
                continue
            _check_schema(schema, path, complaints)


def _check_schema(schema: Json, path: str, complaints: Complaints) -> None:
    """Structural schemas only, as a real server asks: every node has a type, and rules compile."""
    is_typed = (
        schema.get("type")
        or schema.get("x-kubernetes-int-or-string")
        or schema.get("x-kubernetes-preserve-unknown-fields")
    )
    if not is_typed:
        complaints.required(
            f"{path}.type",
            "must not be empty for specified object fields" if "." in path else "must not be empty at the root",
        )
    for index, said in enumerate(schema.get("x-kubernetes-validations") or []):
        try:
            Rule(said["rule"], schema)
        except CelError as error:
            complaints.invalid(
                f"{path}.x-kubernetes-validations[{index}].rule", said["rule"], f"compilation failed: ERROR: {error}"
            )
    for name, inner in (schema.get("properties") or {}).items():
        _check_schema(inner, f"{path}.properties[{name}]", complaints)
    for part in ("items", "additionalProperties"):
        if isinstance(schema.get(part), dict):
            _check_schema(schema[part], f"{path}.{part}", complaints)


class CustomRules(Rules):
    has_generation = True
    needs_version_on_update = True

    def __init__(self, version: Json) -> None:
        self.open_schema = version["schema"]["openAPIV3Schema"]
        self.schema = Schema(self.open_schema)
        parts = version.get("subresources") or {}
        self.has_status = "status" in parts
        self._replicas: str = (parts.get("scale") or {}).get("specReplicasPath", "")
        self.selectable = tuple(field["jsonPath"].lstrip(".") for field in version.get("selectableFields") or [])

    def fill_in(self, body: Json) -> None:
        self.schema.fill_in(body)

    def check(self, body: Json, old: Json | None, complaints: Complaints) -> None:
        self.schema.check(body, old, complaints)
        replicas = value_at(body, self._replicas) if self._replicas else None
        if isinstance(replicas, int) and replicas < 0:
            complaints.invalid(self._replicas, replicas, "should be a non-negative integer")

    def check_status(self, body: Json, old: Json, complaints: Complaints) -> None:
        self.schema.check(body, old, complaints)


def kinds_of(definition: Json) -> list[Kind]:
    """One kind for each served version."""
    spec = definition["spec"]
    found = []
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        names = spec["names"]
        kind = Kind(
            spec["group"],
            version["name"],
            names["plural"],
            names["kind"],
            CustomRules(version),
            namespaced=spec["scope"] == "Namespaced",
        )
        kind.short_names = tuple(names.get("shortNames") or ())
        kind.scale = (version.get("subresources") or {}).get("scale")
        found.append(kind)
    return found


def established(definition: Json, at: str) -> Json:
    """The status that the server writes when it serves a definition."""
    spec = definition["spec"]
    words: list[tuple[str, str, str]] = [
        ("NamesAccepted", "NoConflicts", "no conflicts found"),
        ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
    ]
    conditions: list[Any] = [
        {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": at}
        for kind, reason, message in words
    ]
    stored = [version["name"] for version in spec["versions"] if version.get("storage")]
    return {"conditions": conditions, "acceptedNames": spec["names"], "storedVersions": stored}
