"""
Rules of custom resources (`x-kubernetes-validations`), written in CEL: a parser, a check against the schema, an evaluator.

It knows the part of the language that rules about jobs need: selections, indexes, operators, the macros `has`, `all`, `exists`,
`exists_one`, `filter` and `map`, and functions of texts. A rule with anything else is refused when its definition is
created, so no rule is silently skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from tests.kubernetes.server.answers import Json

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>\d+(?:\.\d+)?u?)
    | (?P<text>r?"(?:[^"\\]|\\.)*"|r?'(?:[^'\\]|\\.)*')
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<sign>&&|\|\||[=!<>]=|[-+*/%!<>?:.,()\[\]{}])
    )""",
    re.VERBOSE,
)
_BINARY = {
    "||": 1,
    "&&": 2,
    "==": 3,
    "!=": 3,
    "<": 3,
    "<=": 3,
    ">": 3,
    ">=": 3,
    "in": 3,
    "+": 4,
    "-": 4,
    "*": 5,
    "/": 5,
    "%": 5,
}
_MACROS = {"all", "exists", "exists_one", "filter", "map"}


class CelError(Exception):
    """The rule does not compile, or its evaluation failed. The text says which part."""


class Node(msgspec.Struct, frozen=True):
    """One part of a rule. `head` says what it does; `parts` are nodes, names or values."""

    head: str
    parts: tuple[Any, ...] = ()


class Rule:
    """A compiled rule. `schema` is that of the object to which the rule is attached."""

    def __init__(self, text: str, schema: Json) -> None:
        self.text = text
        self.tree = _Parser(text).whole()
        self.uses_old = _mentions(self.tree, "oldSelf")
        _type_of(self.tree, {"self": schema, "oldSelf": schema})

    def value(self, new: Any, old: Any = None) -> Any:
        return _value(self.tree, {"self": new, "oldSelf": old})


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                raise CelError(f"Syntax error: token recognition error at: '{text[at:].strip()[:1]}'")
            kind = found.lastgroup or ""
            self.tokens.append((kind, found[kind]))
            at = found.end()
        self.at = 0

    def whole(self) -> Node:
        tree = self.ternary()
        if self.at < len(self.tokens):
            raise CelError(f"Syntax error: extraneous input '{self.peek()}'")
        return tree

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else "<EOF>"

    def take(self, wanted: str = "") -> tuple[str, str]:
        if self.at >= len(self.tokens) or (wanted and self.peek() != wanted):
            raise CelError(f"Syntax error: mismatched input '{self.peek()}' expecting '{wanted or 'an expression'}'")
        self.at += 1
        return self.tokens[self.at - 1]

    def ternary(self) -> Node:
        test = self.binary(1)
        if self.peek() != "?":
            return test
        self.take("?")
        yes = self.binary(1)
        self.take(":")
        return Node("if", (test, yes, self.ternary()))

    def binary(self, least: int) -> Node:
        left = self.unary()
        while (power := _BINARY.get(self.peek(), 0)) >= least:
            sign = self.take()[1]
            left = Node("binary", (sign, left, self.binary(power + 1)))
        return left

    def unary(self) -> Node:
        if self.peek() in ("!", "-"):
            return Node("unary", (self.take()[1], self.unary()))
        return self.suffixes(self.primary())

    def suffixes(self, node: Node) -> Node:
        while self.peek() in (".", "["):
            if self.take()[1] == "[":
                node = Node("index", (node, self.ternary()))
                self.take("]")
                continue
            name = self.take()[1]
            if self.peek() == "(":
                node = self._method(node, name)
            else:
                node = Node("select", (node, name))
        return node

    def _method(self, target: Node, name: str) -> Node:
        arguments = self.arguments(")", "(")
        if name not in _MACROS:
            return Node("method", (target, name, *arguments))
        if len(arguments) not in (2, 3) or arguments[0].head != "name":
            raise CelError(f"invalid arguments of macro '{name}'")
        return Node("macro", (target, name, arguments[0].parts[0], *arguments[1:]))

    def primary(self) -> Node:
        kind, text = self.take()
        if kind == "number":
            return Node("value", (float(text) if "." in text else int(text.rstrip("u")),))
        if kind == "text":
            return Node("value", (_unquoted(text),))
        if text in ("true", "false", "null"):
            return Node("value", ({"true": True, "false": False, "null": None}[text],))
        if text == "(":
            inner = self.ternary()
            self.take(")")
            return inner
        if text == "[":
            return Node("list", tuple(self.arguments("]")))
        if kind != "name":
            raise CelError(f"Syntax error: mismatched input '{text}'")
        if self.peek() != "(":
            return Node("name", (text,))
        arguments = self.arguments(")", "(")
        if text == "has":
            if len(arguments) != 1 or arguments[0].head != "select":
                raise CelError("invalid argument to has() macro")
            return Node("has", arguments[0].parts)
        return Node("call", (text, *arguments))

    def arguments(self, end: str, begin: str = "") -> list[Node]:
        if begin:
            self.take(begin)
        found: list[Node] = []
        while self.peek() != end:
            found.append(self.ternary())
            if self.peek() != end:
                self.take(",")
        self.take(end)
        return found


def _unquoted(text: str) -> str:
    if text.startswith("r"):
        return text[2:-1]
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), text[1:-1])


def _mentions(node: Any, name: str) -> bool:
    if not isinstance(node, Node):
        return False
    return node == Node("name", (name,)) or any(_mentions(part, name) for part in node.parts)


def _type_of(node: Node, names: dict[str, Json | None]) -> Json | None:
    """The schema of what a node gives, as far as it is known. Unknown names, fields and functions are errors."""
    if node.head == "name":
        if node.parts[0] not in names:
            raise CelError(f"undeclared reference to '{node.parts[0]}' (in container '')")
        return names[node.parts[0]]
    if node.head in ("select", "has"):
        return _selected(_type_of(node.parts[0], names), node.parts[1])
    if node.head == "index":
        held = _type_of(node.parts[0], names)
        _type_of(node.parts[1], names)
        return _element(held, of_map=True)
    if node.head == "macro":
        held = _type_of(node.parts[0], names)
        name = node.parts[2]
        is_map = held is not None and held.get("type") == "object"
        inner = {**names, name: {"type": "string"} if is_map else _element(held, of_map=False)}
        for part in node.parts[3:]:
            _type_of(part, inner)
        return None
    known = {"call": _FUNCTIONS, "method": _METHODS}.get(node.head)
    if known is not None:
        name = node.parts[0 if node.head == "call" else 1]
        if name not in known:
            raise CelError(f"undeclared reference to '{name}' (in container '')")
    for part in node.parts:
        if isinstance(part, Node):
            _type_of(part, names)
    return None


def _selected(schema: Json | None, field: str) -> Json | None:
    if schema is None or ("properties" not in schema and schema.get("x-kubernetes-preserve-unknown-fields")):
        return None
    if field in schema.get("properties", {}):
        found: Json = schema["properties"][field]
        # A resource's metadata shows a rule its names alone, whatever the schema says.
        return (
            {"type": "object", "properties": {"name": {"type": "string"}, "generateName": {"type": "string"}}}
            if (field == "metadata" and "apiVersion" in schema["properties"])
            else found
        )
    if "additionalProperties" in schema:
        return _element(schema, of_map=True)
    raise CelError(f"undefined field '{field}'")


def _element(schema: Json | None, *, of_map: bool) -> Json | None:
    if schema is None:
        return None
    if of_map and isinstance(schema.get("additionalProperties"), dict):
        return schema["additionalProperties"]
    return schema.get("items")


def _value(node: Node, names: dict[str, Any]) -> Any:
    return _EVALUATE[node.head](node.parts, names)


def _binary(parts: tuple[Any, ...], names: dict[str, Any]) -> Any:
    sign, left, right = parts
    if sign in ("&&", "||"):
        return _logic(left, right, names, decides=sign == "||")
    a, b = _value(left, names), _value(right, names)
    if sign == "==":
        return _equal(a, b)
    if sign == "!=":
        return not _equal(a, b)
    if sign == "in":
        if not isinstance(b, (list, dict)):
            raise CelError("no such overload")
        return a in b
    try:
        return _ARITHMETIC[sign](a, b)
    except TypeError as error:
        raise CelError("no such overload") from error
    except ZeroDivisionError as error:
        raise CelError("division by zero") from error


def _logic(left: Node, right: Node, names: dict[str, Any], *, decides: bool) -> bool:
    """One side that decides wins, even if the other side fails. That is how rules guard missing fields."""
    failed = None
    for side in (left, right):
        try:
            value = _value(side, names)
        except CelError as error:
            failed = error
            continue
        if not isinstance(value, bool):
            raise CelError("no such overload")
        if value is decides:
            return decides
    if failed is not None:
        raise failed
    return not decides


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b if isinstance(a, bool) or isinstance(b, bool) else bool(a == b)


def _unary(parts: tuple[Any, ...], names: dict[str, Any]) -> Any:
    value = _value(parts[1], names)
    return not value if parts[0] == "!" else -value


def _select(parts: tuple[Any, ...], names: dict[str, Any]) -> Any:
    held = _value(parts[0], names)
    if not isinstance(held, dict) or parts[1] not in held:
        raise CelError(f"no such key: {parts[1]}")
    return held[parts[1]]


def _has(parts: tuple[Any, ...], names: dict[str, Any]) -> bool:
    held = _value(parts[0], names)
    return isinstance(held, dict) and parts[1] in held


def _index(parts: tuple[Any, ...], names: dict[str, Any]) -> Any:
    held, key = _value(parts[0], names), _value(parts[1], names)
    if isinstance(held, dict):
        if key not in held:
            raise CelError(f"no such key: {key}")
        return held[key]
    if not isinstance(key, int) or not 0 <= key < len(held):
        raise CelError(f"index out of bounds: {key}")
    return held[key]


def _macro(parts: tuple[Any, ...], names: dict[str, Any]) -> Any:
    target, macro, name, *steps = parts
    items = list(_value(target, names))
    if macro in ("filter", "map"):
        kept = [
            item for item in items if (len(steps) == 1 and macro == "map") or _value(steps[0], {**names, name: item})
        ]
        return kept if macro == "filter" else [_value(steps[-1], {**names, name: item}) for item in kept]
    results: list[bool] = []
    failed = None
    for item in items:
        try:
            results.append(bool(_value(steps[0], {**names, name: item})))
        except CelError as error:
            failed = error
    decided = {"all": not all(results), "exists": any(results), "exists_one": False}[macro]
    if failed is not None and not decided:
        raise failed
    return {"all": all(results), "exists": any(results), "exists_one": results.count(True) == 1}[macro]


def _call(parts: tuple[Any, ...], names: dict[str, Any]) -> Any:
    name, *arguments = parts
    return _applied(_FUNCTIONS[name], [_value(argument, names) for argument in arguments])


def _method(parts: tuple[Any, ...], names: dict[str, Any]) -> Any:
    target, name, *arguments = parts
    return _applied(_METHODS[name], [_value(target, names), *(_value(argument, names) for argument in arguments)])


def _applied(function: Callable[..., Any], arguments: list[Any]) -> Any:
    try:
        return function(*arguments)
    except (TypeError, AttributeError) as error:
        raise CelError("no such overload") from error


def _if(parts: tuple[Any, ...], names: dict[str, Any]) -> Any:
    return _value(parts[1] if _value(parts[0], names) else parts[2], names)


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b if isinstance(a, int) and isinstance(b, int) else a / b,
    "%": lambda a, b: a % b,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"size": len, "int": int, "string": str, "double": float}
_METHODS: dict[str, Callable[..., Any]] = {
    "size": len,
    "startsWith": lambda text, part: text.startswith(part),
    "endsWith": lambda text, part: text.endswith(part),
    "contains": lambda text, part: part in text,
    "matches": lambda text, pattern: re.search(pattern, text) is not None,
    "split": lambda text, sign: text.split(sign),
    "lowerAscii": lambda text: text.lower(),
    "trim": lambda text: text.strip(),
}
_EVALUATE: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    "value": lambda parts, names: parts[0],
    "name": lambda parts, names: names[parts[0]],
    "list": lambda parts, names: [_value(part, names) for part in parts],
    "if": _if,
    "binary": _binary,
    "unary": _unary,
    "select": _select,
    "has": _has,
    "index": _index,
    "macro": _macro,
    "call": _call,
    "method": _method,
}
