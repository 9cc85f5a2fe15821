"""
Schemas of custom resources: unknown fields are pruned, defaults filled in, types, bounds, enums and rules checked.

A part that a change leaves as it was is not checked again: a stricter schema does not lock old objects.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from tests.kubernetes.server.answers import Complaints, Json
from tests.kubernetes.server.custom.cel import CelError, Rule

_MISSING: Any = object()
_BLOCKING = {
    "FieldValueNotSupported",
    "FieldValueRequired",
    "FieldValueTooLong",
    "FieldValueTooMany",
    "FieldValueTypeInvalid",
}
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
}


class Schema:
    def __init__(self, root: Json) -> None:
        self._root = root
        self._rules: dict[int, list[tuple[Json, Rule]]] = {}
        """Compiled rules by the identity of the schema node that carries them."""
        for node in _nodes(root):
            self._rules[id(node)] = [
                (said, Rule(said["rule"], node)) for said in node.get("x-kubernetes-validations", [])
            ]

    def prune(self, body: Json) -> list[str]:
        """Removes unknown fields. Returns their paths in the order in which they stand."""
        dropped: list[str] = []
        root = {
            **self._root,
            "properties": {
                **self._root.get("properties", {}),
                **dict.fromkeys(("apiVersion", "kind", "metadata"), _ANY),
            },
        }
        _prune(root, body, "", dropped)
        return dropped

    def fill_in(self, body: Json) -> None:
        _fill_in(self._root, body)

    def check(self, body: Json, old: Json | None, complaints: Complaints) -> None:
        found = Complaints()
        self._check(self._root, {**body}, _MISSING if old is None else old, "", found)
        if any(cause["reason"] in _BLOCKING for cause in found.causes):
            message = (
                "Invalid value: null: some validation rules were not checked because the object was invalid; "
                "correct the existing errors to complete validation"
            )
            found.add("FieldValueInvalid", ROOT, message)
        else:
            self._check_rules(self._root, body, _MISSING if old is None else old, "", found)
        complaints.causes += found.causes

    def _check(self, schema: Json, value: Any, old: Any, path: str, complaints: Complaints) -> None:
        if value is None and schema.get("nullable"):
            return
        if old is not _MISSING and value == old:
            return
        if not _check_type(schema, value, path, complaints):
            return
        _check_value(schema, value, path, complaints)
        for part in schema.get("allOf", []):
            self._check(part, value, old, path, complaints)
        if isinstance(value, dict):
            for name in schema.get("required", []):
                if name not in value:
                    complaints.required(_joined(path, name))
            for name, part in value.items():
                inner = _child(schema, name)
                if inner is not None and not (path == "" and name == "metadata"):
                    self._check(inner, part, _old_child(old, name), _joined(path, name), complaints)
        elif isinstance(value, list) and "items" in schema:
            _check_list(schema, value, path, complaints)
            for index, part in enumerate(value):
                was = _old_item(schema, part, old)
                self._check(schema["items"], part, was, f"{path}[{index}]", complaints)

    def _check_rules(self, schema: Json, value: Any, old: Any, path: str, complaints: Complaints) -> None:
        if value is None:
            return
        for said, rule in self._rules.get(id(schema), []):
            if rule.uses_old and old is _MISSING:
                continue
            if not rule.uses_old and old is not _MISSING and value == old:
                continue
            self._check_rule(said, rule, schema, value, old, path, complaints)
        if isinstance(value, dict):
            for name, part in value.items():
                inner = _child(schema, name)
                # The sentences of rules show keys of maps in brackets, those of types and bounds do not.
                below = _joined(path, name) if name in schema.get("properties", {}) else f"{path}[{name}]"
                if inner is not None:
                    self._check_rules(inner, part, _old_child(old, name), below, complaints)
        elif isinstance(value, list) and "items" in schema:
            for index, part in enumerate(value):
                self._check_rules(schema["items"], part, _old_item(schema, part, old), f"{path}[{index}]", complaints)

    def _check_rule(
        self, said: Json, rule: Rule, schema: Json, value: Any, old: Any, path: str, complaints: Complaints
    ) -> None:
        field = (path + said.get("fieldPath", "")).lstrip(".") or ROOT
        try:
            if rule.value(value, None if old is _MISSING else old) is True:
                return
        except CelError as error:
            complaints.invalid(
                field, schema.get("type"), f"{error} evaluating rule: {said.get('message') or said['rule']}"
            )
            return
        detail = said.get("message") or f"failed rule: {said['rule']}"
        reason = said.get("reason", "FieldValueInvalid")
        if reason == "FieldValueForbidden":
            complaints.forbidden(field, detail)
        elif reason == "FieldValueRequired":
            complaints.required(field, detail)
        elif schema.get("type") in ("object", "array"):
            complaints.add("FieldValueInvalid", field, f"Invalid value: {detail}")
        else:
            complaints.invalid(field, value, detail)


ROOT = "<nil>"
"""How a real server names the root of an object in a complaint."""
_ANY: Json = {"x-kubernetes-preserve-unknown-fields": True}


def _nodes(schema: Json) -> list[Json]:
    found = [schema]
    inner = [
        *schema.get("properties", {}).values(),
        schema.get("items"),
        schema.get("additionalProperties"),
        *schema.get("allOf", []),
    ]
    for part in inner:
        if isinstance(part, dict):
            found += _nodes(part)
    return found


def _child(schema: Json, name: str) -> Json | None:
    if name in schema.get("properties", {}):
        found: Json = schema["properties"][name]
        return found
    more = schema.get("additionalProperties")
    return more if isinstance(more, dict) else None


def _old_child(old: Any, name: str) -> Any:
    return old.get(name, _MISSING) if isinstance(old, dict) else _MISSING


def _old_item(schema: Json, item: Any, old: Any) -> Any:
    """Items of a list are compared with their predecessors only where the list is a map by keys."""
    keys = schema.get("x-kubernetes-list-map-keys")
    if (
        schema.get("x-kubernetes-list-type") != "map"
        or not keys
        or not isinstance(old, list)
        or not isinstance(item, dict)
    ):
        return _MISSING
    return next((one for one in old if all(one.get(key) == item.get(key) for key in keys)), _MISSING)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _prune(schema: Json, value: Any, path: str, dropped: list[str]) -> None:
    if isinstance(value, list):
        for index, part in enumerate(value):
            if isinstance(schema.get("items"), dict):
                _prune(schema["items"], part, f"{path}[{index}]", dropped)
        return
    if not isinstance(value, dict):
        return
    keeps = bool(schema.get("x-kubernetes-preserve-unknown-fields")) or schema.get("additionalProperties") is True
    known = (
        dict.fromkeys(("apiVersion", "kind", "metadata"), _ANY) if schema.get("x-kubernetes-embedded-resource") else {}
    )
    for name in list(value):
        inner = known.get(name) or _child(schema, name)
        if inner is not None:
            _prune(inner, value[name], _joined(path, name), dropped)
        elif not keeps:
            del value[name]
            dropped.append(_joined(path, name))


def _fill_in(schema: Json, value: Any) -> None:
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for part in value:
            _fill_in(schema["items"], part)
    if not isinstance(value, dict):
        return
    for name, inner in schema.get("properties", {}).items():
        if "default" in inner and (name not in value or (value[name] is None and not inner.get("nullable"))):
            value[name] = copy.deepcopy(inner["default"])
        if name in value and value[name] is None and not inner.get("nullable"):
            # A null where the schema allows none counts as absent.
            del value[name]
    for name, part in value.items():
        child = _child(schema, name)
        if child is not None:
            _fill_in(child, part)


def _check_type(schema: Json, value: Any, path: str, complaints: Complaints) -> bool:
    wanted = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if _TYPES["integer"](value) or isinstance(value, str):
            return True
        wanted = "integer,string"
    elif wanted is None or _TYPES[wanted](value):
        return True
    found = _go_type(value)
    complaints.add(
        "FieldValueTypeInvalid",
        path,
        f'Invalid value: "{found}": {_named(path)} must be of type {wanted}: "{found}"',
    )
    return False


def _go_type(value: Any) -> str:
    if value is None:
        return "null"
    return next(name for name in ("boolean", "integer", "number", "string", "array", "object") if _TYPES[name](value))


def _named(path: str) -> str:
    return f"{path} in body" if path else "body"


def _check_value(schema: Json, value: Any, path: str, complaints: Complaints) -> None:
    named = _named(path)
    if "enum" in schema and value not in schema["enum"]:
        complaints.unsupported(path, value, schema["enum"])
    if isinstance(value, str):
        if "maxLength" in schema and len(value) > schema["maxLength"]:
            complaints.too_long(path, schema["maxLength"])
        if len(value) < schema.get("minLength", 0):
            complaints.invalid(path, value, f"{named} should be at least {schema['minLength']} chars long")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            complaints.invalid(path, value, f"{named} should match '{schema['pattern']}'")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if "minimum" in schema and value < schema["minimum"]:
            complaints.invalid(path, value, f"{named} should be greater than or equal to {schema['minimum']}")
        if "maximum" in schema and value > schema["maximum"]:
            complaints.invalid(path, value, f"{named} should be less than or equal to {schema['maximum']}")
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            complaints.add(
                "FieldValueTooMany", path, f"Too many: {len(value)}: must have at most {schema['maxItems']} items"
            )
        if len(value) < schema.get("minItems", 0):
            complaints.invalid(path, len(value), f"{named} should have at least {schema['minItems']} items")
    elif isinstance(value, dict):
        if len(value) > schema.get("maxProperties", len(value)):
            complaints.add(
                "FieldValueTooMany", path, f"Too many: {len(value)}: must have at most {schema['maxProperties']} items"
            )
        if len(value) < schema.get("minProperties", 0):
            complaints.invalid(path, len(value), f"{named} should have at least {schema['minProperties']} properties")


def _check_list(schema: Json, value: list[Any], path: str, complaints: Complaints) -> None:
    seen: list[Any] = []
    for index, item in enumerate(value):
        if schema.get("x-kubernetes-list-type") == "map" and isinstance(item, dict):
            key: Any = {name: item[name] for name in schema.get("x-kubernetes-list-map-keys", []) if name in item}
        elif schema.get("x-kubernetes-list-type") == "set":
            key = item
        else:
            return
        if key in seen:
            complaints.duplicate(f"{path}[{index}]", key)
        seen.append(key)
