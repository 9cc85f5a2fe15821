"""A house in which a newcomer finds the way: few files to a folder, and one word for one thing."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dlrover"
MOST_FILES = 16
MOST_VOCABULARY = 20
"""Of `protocol/messages`, which is one vocabulary."""
GIVEN = {"KeepLatestStepStrategy", "KeepStepIntervalStrategy"}
"""Names of the original that a script imports from two places and that mean two things there."""


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts]


def test_a_folder_has_few_files() -> None:
    counts = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in modules() if path.name != "__init__.py")
    allowed = {"protocol/messages": MOST_VOCABULARY}
    assert {folder: count for folder, count in counts.items() if count > allowed.get(folder, MOST_FILES)} == {}


def test_a_class_name_means_one_thing() -> None:
    names = Counter[str]()
    for path in modules():
        if "compat" not in path.relative_to(PACKAGE).parts:  # its names are given
            names.update(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == GIVEN
