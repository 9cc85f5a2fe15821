"""From the bytes of a request to an object: wrong types are refused, unknown fields dropped, and named if the client wants it."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from tests.kubernetes.server import answers
from tests.kubernetes.server.answers import Json, Refused
from tests.kubernetes.server.custom.definitions import CustomRules
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.pods.shapes import WrongType, fit


class Undecodable(Refused):
    """The body is no object of its kind. `why` is the reason alone."""

    def __init__(self, kind: Kind, why: str) -> None:
        message = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: {why}'
        super().__init__(400, "BadRequest", message)
        self.why = why


def parse(raw: bytes, kind: str = "") -> Any:
    """JSON or YAML. `kind` names what is expected; empty: a patch."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        try:
            found = yaml.safe_load(raw)
        except yaml.YAMLError:
            found = None
        if isinstance(found, dict):
            return found
        if not kind:
            raise answers.bad_request(f"error decoding patch: {error}") from error
        raise unrecognized(kind, str(error)) from error


def unrecognized(kind: str, why: str) -> Refused:
    message = f"the object provided is unrecognized (must be of type {kind}): couldn't get version/kind; json parse error: {why}"
    return answers.bad_request(message)


def decode(kind: Kind, body: Any, strictness: str) -> tuple[Json, list[str]]:
    """The object and the warnings for its client."""
    body, unknown = read(kind, body)
    if not unknown or strictness == "Ignore":
        return body, []
    if strictness == "Strict":
        faults = ", ".join(f'unknown field "{path}"' for path in unknown)
        raise Undecodable(kind, f"strict decoding error: {faults}")
    return body, [f'unknown field "{path}"' for path in unknown]


def read(kind: Kind, body: Any) -> tuple[Json, list[str]]:
    """The object without unknown fields, and the paths of those."""
    if not isinstance(body, dict):
        raise unrecognized(kind.kind, "json: cannot unmarshal into Go value of type struct")
    _check_kind(kind, body)
    if body.get("metadata") is None:
        body["metadata"] = {}
    if not isinstance(body["metadata"], dict):
        raise Undecodable(
            kind, f"json: cannot unmarshal into Go struct field {kind.kind}.metadata of type v1.ObjectMeta"
        )
    try:
        unknown = fit("" if isinstance(kind.rules, CustomRules) else kind.kind, body)
    except WrongType as error:
        raise Undecodable(kind, str(error)) from error
    if isinstance(kind.rules, CustomRules):
        unknown += kind.rules.schema.prune(body)
    return body, unknown


def _check_kind(kind: Kind, body: Json) -> None:
    said, version = body.setdefault("kind", kind.kind), body.setdefault("apiVersion", kind.api_version)
    if (said, version) == (kind.kind, kind.api_version):
        return
    if isinstance(kind.rules, CustomRules):
        if version != kind.api_version:
            message = (
                f"the API version in the data ({version}) does not match the expected API version ({kind.api_version})"
            )
            raise answers.bad_request(message)
        complaints = answers.Complaints()
        complaints.invalid("kind", said, f"must be {kind.kind}")
        complaints.raise_for(said, kind.group, (body.get("metadata") or {}).get("name", ""))
    scheme = "k8s/pkg/api/legacyscheme/scheme.go:30"
    why = f'no kind "{said}" is registered for version "{version}" in scheme "{scheme}"'
    raise answers.bad_request(f'{said} in version "{version}" cannot be handled as a {kind.kind}: {why}')
