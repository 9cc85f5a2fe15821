"""The glossary speaks of the code as it is: what it names there exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tools.measure_style import Module, read_package

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/glossary.md"


def rows() -> list[tuple[str, str, str]]:
    """Word, meaning, names in the code."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    cells = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    assert all(len(each) == 3 for each in cells), "three columns"
    return [(word, meaning, names.strip("| ")) for word, meaning, names in cells]


def names_of(module: Module) -> set[str]:
    """Classes and types."""
    found = {node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)}
    for node in module.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


def test_what_the_glossary_names_in_the_code_exists() -> None:
    modules = read_package(ROOT / "dlrover")
    known = {module.name for module in modules}.union(*map(names_of, modules))
    named = {name for _, _, names in rows() for name in re.findall(r"`([^`]+)`", names)}
    assert len(named) > 50
    assert {name for name in named - known if not (ROOT / name).is_file()} == set()


def test_a_word_stands_in_the_glossary_once() -> None:
    words = [word for words, _, _ in rows() for word in words.split(", ")]
    assert sorted(words) == sorted(set(words))
