"""What the core's plain functions answer. After a wanted change: `python -m tests.referees --record`."""

from __future__ import annotations

import pytest

from tests.core.tables import TABLES, functions, table_of

RECORDED = dict(line.split() for line in TABLES.read_text().splitlines()) if TABLES.exists() else {}
FUNCTIONS = dict(functions())


def test_each_plain_function_has_its_table() -> None:
    assert list(RECORDED) == list(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_answers_as_it_did(name: str) -> None:
    assert table_of(name, FUNCTIONS[name]) == RECORDED[name], "it answers something else: is that meant?"
