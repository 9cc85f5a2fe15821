"""Codes of refusals: each is a member of the enum, each is used, and the page lists them as they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.protocol.error_codes import ErrorCode
from tools.error_codes import PAGE, page

PACKAGE = Path(__file__).parents[2] / "dlrover"
ENUM = PACKAGE / "protocol" / "error_codes.py"
CODE_ARGUMENT = {"Rejected": 1, "Unavailable": 2, "Unreadable": 1}
"""Where the code stands if it is given by position."""
OTHER_MEANINGS = {
    "platforms/hosted/messages.py": {"old-master"},  # a kind of refusal, on a wire of its own
    "protocol/messages/job.py": {"job-ended"},  # why workers stop
    "cli/events_command.py": {"job-ended"},  # the name of an event
    "core/goodput/events.py": {"job-ended"},
}
"""The same text as a code, for something else. Only codes with a hyphen: the others are words of English."""


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != ENUM]


def bare_codes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each code that is raised, sent, compared or assigned as a string."""
    for node in ast.walk(tree):
        for given in _codes_given(node):
            for part in ast.walk(given):
                if (
                    isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value
                ):  # empty: there is none
                    yield part.lineno, part.value


def _codes_given(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=keywords):
            place = CODE_ARGUMENT.get(name)
            return [
                *(word.value for word in keywords if word.arg == "code"),
                *(args[place : place + 1] if place else ()),
            ]
        case ast.Compare(left=left, comparators=others) if any(_is_code(side) for side in (left, *others)):
            return [left, *others]
        case ast.Match(subject=subject, cases=cases) if _is_code(subject):
            return [part.value for case in cases for part in ast.walk(case.pattern) if isinstance(part, ast.MatchValue)]
        case ast.MatchClass(kwd_attrs=names, kwd_patterns=patterns):
            by_code = [pattern for name, pattern in zip(names, patterns, strict=True) if name == "code"]
            return [part.value for pattern in by_code for part in ast.walk(pattern) if isinstance(part, ast.MatchValue)]
        case ast.Assign(targets=targets, value=ast.Constant() | ast.IfExp() as value) if any(map(_is_code, targets)):
            return [value]
        case ast.arguments(args=args, defaults=defaults):
            return [default for arg, default in zip(args[::-1], defaults[::-1], strict=False) if arg.arg == "code"]
    return []


def _is_code(node: ast.expr) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == "code"
    return False


def test_no_code_is_raised_or_compared_as_a_bare_string() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{line}": text
        for path in modules()
        for line, text in bare_codes(ast.parse(path.read_text()))
    }
    assert found == {}, "use dlrover.protocol.error_codes.ErrorCode"


def test_no_table_holds_codes_as_strings() -> None:
    written = {code.value for code in ErrorCode if "-" in code}
    found = {}
    for path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        texts = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        if codes := (texts & written) - OTHER_MEANINGS.get(name, set()):
            found[name] = codes
    assert found == {}, "use dlrover.protocol.error_codes.ErrorCode"


def test_every_code_is_used() -> None:
    used = {
        node.attr
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ErrorCode"
    }
    assert {code.name for code in ErrorCode} - used == set()


@pytest.mark.parametrize(
    "text",
    [
        "raise Rejected('no', code='a')",
        "raise Rejected('no', 'a')",
        "raise errors.Rejected('no', code=X if y else 'a')",
        "Unavailable('later', 1.0, 'a')",
        "Refusal(id=1, code='a')",
        "error.code == 'a'",
        "'a' != error.code",
        "error.code in (ErrorCode.B, 'a')",
        "code = 'a' if x else ErrorCode.B",
        "def f(code: str = 'a') -> None: ...",
        "match error.code:\n    case ErrorCode.B | 'a': ...",
        "match parcel:\n    case Refusal(code='a'): ...",
    ],
)
def test_a_bare_code_is_found(text: str) -> None:
    assert [code for _, code in bare_codes(ast.parse(text))] == ["a"]


@pytest.mark.parametrize(
    "text", ["Rejected('no')", "error.code == ErrorCode.A", "exit_code == 'a'", "Other('no', 'a')"]
)
def test_other_strings_are_left_alone(text: str) -> None:
    assert list(bare_codes(ast.parse(text))) == []


def test_the_page_lists_the_codes_as_they_are() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.error_codes"


def test_every_code_says_what_it_means_and_what_to_do() -> None:
    for code in ErrorCode:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code), code
        for text in (code.meaning, code.remedy):
            assert text[0].isupper(), text
            assert text.endswith("."), text
            assert all(len(sentence.split()) <= 30 for sentence in re.split(r"[.:] ", text)), text
