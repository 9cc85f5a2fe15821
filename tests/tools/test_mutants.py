"""Which mistakes the mutator makes, and which it leaves alone."""

from __future__ import annotations

from pathlib import Path

from tools.mutation.mutants import Mutant, mutants_of

MODULE = '''\
"""A module."""

from __future__ import annotations

LIMIT = 3
LIMITS = [4, 5]
Pair = tuple[int, bytes]
Names = Mapping[str, Pair]
SECOND = LIMITS[1]


def decide(first: int, second: int, *, is_late: bool = False) -> bool | None:
    """Says whether."""
    if first < second and not is_late:
        note(first, second, why="it is late", code="late")
        return True
    for each in [first, second]:
        if each == LIMIT:
            continue
    raise ValueError(f"{first + 1} of {second} came")


def note(first: int, second: int, why: str, code: str) -> None:
    assert first >= 0, "never below zero"
    NOTED[code] = min(first, second)


class Note:
    def __repr__(self) -> str:
        return "Note" if NOTED else "none"


NOTED: dict[str, int] = {}
'''


def found(tmp_path: Path) -> list[Mutant]:
    (tmp_path / "module.py").write_text(MODULE)
    return mutants_of(tmp_path, "module.py")


def changes(tmp_path: Path) -> set[tuple[str, str]]:
    return {(mutant.operator, mutant.after) for mutant in found(tmp_path)}


def test_it_makes_the_mistakes_that_people_make(tmp_path: Path) -> None:
    assert changes(tmp_path) >= {
        ("constant", "LIMIT = 4"),
        ("comparison", "if first <= second and (not is_late)"),
        ("and/or", "if first < second or not is_late"),
        ("not removed", "if first < second and is_late"),
        ("condition negated", "if not (first < second and (not is_late))"),
        ("statement removed", "pass"),
        ("arguments swapped", "note(second, first, why='it is late', code='late')"),
        ("argument removed", "note(first, second, why='it is late')"),
        ("constant", "note(first, second, why='it is late', code='')"),
        ("None returned", "return None"),
        ("item removed", "for each in [second]"),
        ("comparison", "if each != LIMIT"),
        ("continue for break", "break"),
        ("opposite", "NOTED[code] = max(first, second)"),
    }


def test_texts_for_people_types_and_assertions_are_left_alone(tmp_path: Path) -> None:
    mutants = found(tmp_path)
    texts = [mutant for mutant in mutants if "came" in mutant.before or "Note" in mutant.before]
    assert texts == []
    assert [mutant.after for mutant in mutants if "why=''" in mutant.after or '"""' in mutant.before] == []
    assert [mutant.after for mutant in mutants if "assert" in mutant.before] == []
    assert [mutant.after for mutant in mutants if mutant.before.startswith(("Pair", "Names"))] == []
    assert [mutant.after for mutant in mutants if mutant.before.startswith("SECOND")] == ["SECOND = LIMITS[2]"]


def test_a_default_belongs_to_the_body_that_defines_the_function(tmp_path: Path) -> None:
    (default,) = [mutant for mutant in found(tmp_path) if "is_late: bool=True" in mutant.after]
    assert default.function == ""
    (inside,) = [mutant for mutant in found(tmp_path) if mutant.after == "return None"]
    assert (inside.function, inside.first_line, inside.line) == ("decide", 12, 16)


def test_each_can_be_compiled_and_told_from_the_others(tmp_path: Path) -> None:
    mutants = found(tmp_path)
    for mutant in mutants:
        mutant.compile(tmp_path)
    assert len({mutant.key for mutant in mutants}) == len(mutants)
