"""The reference names everything that a user can name, and nothing else."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.cli.help.tree import all_commands
from dlrover.cli.main import app
from dlrover.protocol.error_codes import ErrorCode
from tools.reference import FOLDER, MODULES, PAGES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dlrover"
NAME = re.compile(r"[A-Z][A-Z0-9_]{3,}")
CODES = re.compile(r"`([A-Z][A-Z0-9_]{3,})`")
NOT_VARIABLES = {"DLROVER_CKPT_CONFIG_KEY", "DLROVER_EVENT"}
"""A key in a checkpoint of the original, and the beginning of names."""
VALUES = {"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "PORT", "PATH", "PET_NAME", "DLROVER_EVENT_NAME"}
"""On the page in the form of a variable, and none."""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="written with Python 3.11: argparse of others differs")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_made_from_the_code_says_what_the_code_says(name: str) -> None:
    for extra in ("torch", "transformers", "deepspeed", "lightning"):
        pytest.importorskip(extra)
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make reference`"


def test_every_public_name_is_in_the_reference() -> None:
    import dlrover

    page = (FOLDER / "python-api.md").read_text()
    titles = set(re.findall(r"^### (?:dlrover\.)?(\w+)$", page, re.MULTILINE))
    assert set(dlrover.__all__) <= titles
    for path, _ in MODULES:
        assert f"`{path}`" in page
    offered = set(dlrover.__all__).union(*(names_in(path) for path, _ in MODULES))
    assert titles == offered


def names_in(path: str) -> set[str]:
    module = pytest.importorskip(path)
    return set(getattr(module, "__all__", ())) or {
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == path and name[0] != "_"
    }


def test_every_command_and_option_is_in_the_reference() -> None:
    page = (FOLDER / "commands.md").read_text()
    for command in all_commands(app):
        if command.is_hidden:
            assert f"`{command.name}`" in page
            continue
        part = page.partition(f"\n## {command.name}\n")[2].partition("\n## ")[0]
        spelled = set(re.findall(r"`(-[\w-]+)", part))
        given = {name for option in command.options for name in option.names} - {"--help", "-h"}
        named_by_text = set(re.findall(r"`(-[\w-]+)", " ".join(option.text for option in command.options)))
        assert given <= spelled, command.name
        assert spelled - given <= named_by_text | {"--", "-h"}, command.name


def test_every_error_code_is_in_the_reference() -> None:
    listed = re.findall(r"^\| `([\w-]+)` \|", (FOLDER / "error-codes.md").read_text(), re.MULTILINE)
    assert listed == sorted(ErrorCode)


def variables_read() -> set[str]:
    return {name for path in PACKAGE.rglob("*.py") for name in _variables(ast.parse(path.read_text()))}


def _variables(tree: ast.AST) -> Iterator[str]:
    """Names that stand where the environment is read, and all that begin as ours."""
    for node in ast.walk(tree):
        for given in _given(node):
            match given:
                case ast.Constant(value=str(text)) if NAME.fullmatch(text):
                    yield text


def _given(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Constant(value=str(text)) if text.startswith("DLROVER_") and text[-1] != "_":
            return [node]
        case ast.Call(func=ast.Attribute(attr="get" | "pop", value=where), args=[name, *_]) if _is_environment(where):
            return [name]
        case ast.Call(args=[where, name, *_]) if _is_environment(where):
            return [name]
        case ast.Subscript(value=where, slice=name) if _is_environment(where):
            return [name]
        case ast.Compare(left=name, ops=[ast.In() | ast.NotIn()], comparators=[where]) if _is_environment(where):
            return [name]
    return []


def _is_environment(node: ast.expr) -> bool:
    return ast.unparse(node).endswith("environ")


def test_every_variable_is_in_the_reference_and_none_that_does_not_exist() -> None:
    page = (FOLDER / "environment.md").read_text()
    named = set(CODES.findall(page))
    read = variables_read() - NOT_VARIABLES
    assert len(read) > 80
    assert read - named == set()
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    strings = set(re.findall(r"[\"'\s]([A-Z][A-Z0-9_]{3,})\b", source))
    assert named - VALUES - strings == set()


def test_a_variable_is_found_wherever_the_environment_is_read() -> None:
    code = (
        "os.environ['ONE1']\nenviron.get('TWO2', '')\n_number(environ, 'THREE')\n'FOUR' in environ\n"
        "VARIABLE = 'DLROVER_FIVE'\nother.get('NOT_ONE')\nenviron.get('lower')\n"
    )
    assert set(_variables(ast.parse(code))) == {"ONE1", "TWO2", "THREE", "FOUR", "DLROVER_FIVE"}
