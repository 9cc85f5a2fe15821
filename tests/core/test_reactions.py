"""The tables of `reactions`: nobody is forgotten, the order is one order, and the core is no knot."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import dlrover.core
from dlrover.core import reactions
from dlrover.core.decision import Decision
from dlrover.core.job import Job
from dlrover.protocol.messages.job import Micros, StopJob
from tools import measure_style

WHOLE = reactions.TABLES[True, True]


def rows_of(function: object) -> list[str]:
    return [happening for happening, rows in zip(WHOLE._fields, WHOLE, strict=True) if function in rows]


def test_each_reaction_of_a_room_stands_in_the_table() -> None:
    found = 0
    for module in pkgutil.walk_packages(dlrover.core.__path__, "dlrover.core."):
        for name, function in inspect.getmembers(importlib.import_module(module.name), inspect.isfunction):
            is_reaction = name.startswith("on_") or name in ("advance", "deadlines")
            if is_reaction and function.__module__ == module.name:
                found += 1
                assert rows_of(function), f"{module.name}.{name} reacts to nothing: add it to a row, or remove it"
    assert found > 40


def test_everything_that_can_happen_matters_to_a_room() -> None:
    assert all(WHOLE), [happening for happening, rows in zip(WHOLE._fields, WHOLE, strict=True) if not rows]


@pytest.mark.parametrize("rooms", reactions.TABLES)
def test_a_job_without_a_platform_or_checks_has_fewer_rows_in_the_same_order(rooms: tuple[bool, bool]) -> None:
    for rows, whole in zip(reactions.TABLES[rooms], WHOLE, strict=True):
        assert list(rows) == [row for row in whole if row in rows]


def test_rooms_that_never_come_to_rest_are_a_bug_and_not_a_hang() -> None:
    restless = reactions.TABLES[False, False]._replace(advance=(lambda decision: True,))
    decision = Decision.begin(Job().state, Micros(1), {(False, False): restless})
    with pytest.raises(AssertionError, match="nothing settles after 4 passes"):
        reactions.decide(StopJob(), decision)


def test_no_module_of_the_core_reaches_itself_not_even_for_a_type() -> None:
    modules = measure_style.read_package(measure_style.ROOT / "dlrover")
    cycles = measure_style.cycles_of(measure_style.imports_of(modules))
    assert [group for group in cycles if any(name.startswith("dlrover.core.") for name in group)] == []
