"""A mutant that a test notices is caught, one that none notices survives, and the report says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutation.checks import Catch
from tools.mutation.mutants import Mutant, mutants_of
from tools.mutation.report import Known, Report, Result

ROOT = Path(__file__).parents[2]


def a_mutant(tmp_path: Path, text: str = "def f(x: int) -> bool:\n    return x > 1\n") -> Mutant:
    (tmp_path / "module.py").write_text(text)
    return mutants_of(tmp_path, "module.py")[0]


def test_a_report_counts_what_was_caught_and_lists_what_survived(tmp_path: Path) -> None:
    text = "def f(x: int) -> bool:\n    return x > 1\n\ndef g(x: int) -> bool:\n    return x < 1\n"
    (tmp_path / "module.py").write_text(text)
    caught, other, survivor, *rest = mutants_of(tmp_path, "module.py")
    results = [Result.of(caught, Catch("a test", "test"), 0.1), Result.of(survivor, None, 0.1)]
    known = Known([])
    report = Report.make([caught, other, survivor], results, known, seed=5)
    assert (report.num_caught, len(report.survivors), report.num_left, report.share) == (1, 1, 1, 0.5)
    assert "Seed 5: 3 mutants drawn, 0 of them equivalent, 2 tried." in report.text()
    assert "module.py:5 g: comparison\n    - return x < 1\n    + return x <= 1" in report.text()
    assert rest, "two statements have four mutants"


def test_equivalent_mutants_are_listed_and_do_not_count(tmp_path: Path) -> None:
    mutant = a_mutant(tmp_path)
    listed = tmp_path / "equivalent.toml"
    listed.write_text(
        '[[equivalent]]\nwhere = "module.py::f"\nbefore = "return x > 1"\nafter = "return x >= 1"\nreason = "x is never 1"\n'
    )
    known = Known.read(tmp_path, listed)
    report = Report.make([mutant], [], known, seed=1)
    assert (report.num_left, len(report.equivalent)) == (0, 1)
    assert "x is never 1" in report.text()


def test_an_entry_that_names_no_mutant_is_an_error(tmp_path: Path) -> None:
    a_mutant(tmp_path)
    listed = tmp_path / "equivalent.toml"
    listed.write_text(
        '[[equivalent]]\nwhere = "module.py::f"\nbefore = "return x > 2"\nafter = "pass"\nreason = "old"\n'
    )
    with pytest.raises(SystemExit, match="names no mutant"):
        Known.read(tmp_path, listed)


def test_what_is_listed_as_equivalent_in_the_core_exists() -> None:
    Known.read(ROOT, ROOT / "tools/mutation/equivalent.toml")


TOY = """\
LIMIT = 3


def is_over(count: int) -> bool:
    return count > LIMIT


def count_down(count: int) -> int:
    while count > 0:
        count -= 1
    return count


def unused(count: int) -> int:
    return count + 1
"""
TOY_TESTS = """\
from toy.limits import count_down, is_over


def test_far_from_the_limit():
    assert is_over(9)
    assert not is_over(3)


def test_counting_down_ends():
    assert count_down(5) == 0
"""
PROGRAM = """\
import sys
from pathlib import Path
from tools.mutation.campaign import Campaign
from tools.mutation.mutants import all_mutants

root = Path(sys.argv[1])
sys.path.insert(0, str(root))
campaign = Campaign(root, "toy", tests=("toy_tests",), seeds=range(0), packages=("toy", "toy_tests"))
for result in campaign.run(list(all_mutants(root, "toy"))):
    print(result.after, "|", result.caught.kind if result.caught else "survived")
"""


def test_mutants_of_a_toy_are_caught_survive_or_never_end(tmp_path: Path) -> None:
    """In a process of its own: the campaign forks, and it collects tests while it does."""
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntimeout = 100\n")
    for package in ("toy", "toy_tests"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "toy" / "limits.py").write_text(TOY)
    (tmp_path / "toy_tests" / "test_limits.py").write_text(TOY_TESTS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" | ") for line in done.stdout.splitlines())
    assert told == {
        "LIMIT = 4": "survived",
        "return count >= LIMIT": "test",
        "while count >= 0": "test",
        "while not count > 0": "test",
        "while count > 1": "test",
        "pass": "time",
        "count += 1": "time",
        "count -= 2": "test",
        "return count - 1": "survived",
        "return count + 2": "survived",
    }
