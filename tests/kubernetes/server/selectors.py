"""Label and field selectors, as clients write them in a query."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from tests.kubernetes.server.answers import Json, bad_request

Test = Callable[[dict[str, str]], bool]

_SET = re.compile(r"^\s*(?P<key>[^\s!=<>(),]+)\s+(?P<op>in|notin)\s*\((?P<values>[^()]*)\)\s*$")
_EQUAL = re.compile(r"^\s*(?P<key>[^\s!=<>(),]+)\s*(?P<op>==|!=|=)\s*(?P<value>[^\s!=<>(),]*)\s*$")
_EXISTS = re.compile(r"^\s*(?P<not>!?)\s*(?P<key>[^\s!=<>(),]+)\s*$")


def by_labels(text: str) -> Test | None:
    """A test of an object's labels; None: every object passes."""
    tests = [_label_requirement(part, text) for part in _split(text)]
    return (lambda labels: all(test(labels) for test in tests)) if tests else None


def by_fields(text: str, known: Iterable[str], kind: str, version: str) -> Test | None:
    """A test of an object's selectable fields. Unknown fields are an error: an empty answer would be a lie."""
    tests = []
    for part in _split(text):
        found = _EQUAL.match(part)
        if found is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        key, op, value = found["key"], found["op"], found["value"]
        if key not in known:
            raise bad_request(f"field label not supported: {key}")
        tests.append(_equal(key, value, wanted=op != "!="))
    return (lambda fields: all(test(fields) for test in tests)) if tests else None


def from_object(selector: Json) -> Test:
    """The `matchLabels` / `matchExpressions` form that objects carry. An empty one selects everything."""
    tests = [_equal(key, value, wanted=True) for key, value in (selector.get("matchLabels") or {}).items()]
    for expression in selector.get("matchExpressions") or []:
        key, values = expression["key"], expression.get("values") or []
        tests.append(_operation(key, expression["operator"], values))
    return lambda labels: all(test(labels) for test in tests)


def _operation(key: str, operator: str, values: list[str]) -> Test:
    if operator == "In":
        return lambda labels: labels.get(key) in values
    if operator == "NotIn":
        return lambda labels: labels.get(key) not in values
    if operator == "Exists":
        return lambda labels: key in labels
    return lambda labels: key not in labels


def _equal(key: str, value: str, *, wanted: bool) -> Test:
    return lambda fields: (fields.get(key) == value) is wanted


def _label_requirement(part: str, text: str) -> Test:
    if found := _SET.match(part):
        values = [value.strip() for value in found["values"].split(",")]
        return _operation(found["key"], "In" if found["op"] == "in" else "NotIn", values)
    if found := _EQUAL.match(part):
        return _equal(found["key"], found["value"], wanted=found["op"] != "!=")
    if found := _EXISTS.match(part):
        return _operation(found["key"], "DoesNotExist" if found["not"] else "Exists", [])
    raise bad_request(f"unable to parse requirement: {text!r}")


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
    parts.append(text[begin:])
    return [part for part in parts if part.strip()]


def value_at(body: Any, path: str) -> Any:
    """What a path such as `status.phase` or `.spec.replicas` leads to; None if a step is missing."""
    for step in path.strip(".").split("."):
        if not isinstance(body, dict):
            return None
        body = body.get(step)
    return body


def as_field(value: Any) -> str:
    """A selectable field's value as text. A missing one is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
