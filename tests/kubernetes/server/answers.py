"""Refusals in the words of a real API server: a `Status` object with code, reason and sentence."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]


class Refused(Exception):
    """The request ends with this status. `body` is the `Status` object that the client reads."""

    def __init__(self, code: int, reason: str, message: str, *, details: Json | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.body: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
        }
        if details:
            self.body["details"] = details
        self.body["code"] = code


def qualified(plural: str, group: str) -> str:
    return f"{plural}.{group}" if group else plural


def _details(plural: str, group: str, name: str) -> Json:
    details = {"name": name, "group": group, "kind": plural}
    return {key: value for key, value in details.items() if value}


def not_found(plural: str, group: str, name: str) -> Refused:
    message = f'{qualified(plural, group)} "{name}" not found'
    return Refused(404, "NotFound", message, details=_details(plural, group, name))


class NoSuchGroup(Exception):
    """No such group or version: a real server answers these with plain text, not with a `Status`."""


def no_such_path() -> Refused:
    return Refused(404, "NotFound", "the server could not find the requested resource", details={})


def already_exists(plural: str, group: str, name: str, *, deleting: bool = False) -> Refused:
    message = f'{qualified(plural, group)} "{name}" already exists'
    if deleting:
        message = f"object is being deleted: {message}"
    return Refused(409, "AlreadyExists", message, details=_details(plural, group, name))


def conflict(plural: str, group: str, name: str, why: str) -> Refused:
    message = f'Operation cannot be fulfilled on {qualified(plural, group)} "{name}": {why}'
    return Refused(409, "Conflict", message, details=_details(plural, group, name))


def old_version(plural: str, group: str, name: str) -> Refused:
    why = "the object has been modified; please apply your changes to the latest version and try again"
    return conflict(plural, group, name, why)


def forbidden(plural: str, group: str, name: str, why: str) -> Refused:
    named = f' "{name}"' if name else ""
    message = f"{qualified(plural, group)}{named} is forbidden: {why}"
    return Refused(403, "Forbidden", message, details=_details(plural, group, name))


def bad_request(message: str) -> Refused:
    return Refused(400, "BadRequest", message)


def expired(message: str) -> Refused:
    return Refused(410, "Expired", message)


def too_many(message: str, after: int) -> Refused:
    return Refused(429, "TooManyRequests", message, details={"retryAfterSeconds": after})


def not_supported(plural: str, group: str) -> Refused:
    message = "the server does not allow this method on the requested resource"
    return Refused(405, "MethodNotAllowed", message, details={})


class Complaints:
    """What is wrong with one object, field by field. All complaints go into one answer, as a real server does it."""

    def __init__(self) -> None:
        self.causes: list[Json] = []

    def add(self, reason: str, field: str, message: str) -> None:
        self.causes.append({"reason": reason, "message": message, "field": field})

    def required(self, field: str, detail: str = "") -> None:
        self.add("FieldValueRequired", field, "Required value" + (f": {detail}" if detail else ""))

    def invalid(self, field: str, value: object, detail: str) -> None:
        self.add("FieldValueInvalid", field, f"Invalid value: {shown(value)}: {detail}")

    def forbidden(self, field: str, detail: str) -> None:
        self.add("FieldValueForbidden", field, f"Forbidden: {detail}")

    def duplicate(self, field: str, value: object) -> None:
        self.add("FieldValueDuplicate", field, f"Duplicate value: {shown(value)}")

    def unsupported(self, field: str, value: object, supported: list[str]) -> None:
        names = ", ".join(f'"{name}"' for name in supported)
        self.add("FieldValueNotSupported", field, f"Unsupported value: {shown(value)}: supported values: {names}")

    def too_long(self, field: str, limit: int) -> None:
        self.add("FieldValueTooLong", field, f"Too long: may not be more than {limit} bytes")

    def raise_for(self, kind: str, group: str, name: str) -> None:
        if not self.causes:
            return
        sentences = list(dict.fromkeys(f"{cause['field']}: {cause['message']}" for cause in self.causes))
        said = sentences[0] if len(sentences) == 1 else "[" + ", ".join(sentences) + "]"
        details: Json = {"name": name, "group": group, "kind": kind, "causes": self.causes}
        details = {key: value for key, value in details.items() if value}
        message = f'{qualified(kind, group)} "{name}" is invalid: {said}'
        raise Refused(422, "Invalid", message, details=details)


def shown(value: object) -> str:
    """A value as the sentences of a real server show it."""
    if value is None:
        return "null"
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
