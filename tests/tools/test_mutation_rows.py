"""Rows of a table are chosen by the mistakes that they notice."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from tests.core.tables import Function, answer
from tools.mutation.mutants import mutants_of
from tools.mutation.rows import ALWAYS, choose

TOY = """\
def decide(first: int, second: int) -> int:
    if first < second:
        return first + 2 * second
    if first > 10_000_000:
        return 1
    return second
"""


def test_a_row_stays_for_each_mistake_that_no_other_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_of_rows.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    decide = importlib.import_module("toy_of_rows").decide
    function, mutants = Function(decide), mutants_of(tmp_path, "toy_of_rows.py")
    before = answer("toy", function, 7)

    chosen = choose("toy", function, mutants, ast.parse(TOY))

    about_the_branch_that_no_row_takes = [mutant for mutant in mutants if mutant.line in (4, 5)]
    assert len(mutants) - len(about_the_branch_that_no_row_takes) <= chosen.num_noticed < len(mutants)
    assert len(chosen.rows) <= ALWAYS + chosen.num_noticed
    assert answer("toy", function, 7) == before, "the function is as it was"
