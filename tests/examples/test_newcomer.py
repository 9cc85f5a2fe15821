"""The newcomer counts what it types, and a step that fails is told with what it showed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("newcomer_measure", ROOT / "examples/newcomer/measure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_commands_are_counted_for_each_step(measure: ModuleType, tmp_path: Path) -> None:
    newcomer = measure.Newcomer(tmp_path)

    def two() -> str:
        newcomer.type("true")
        return str(newcomer.type("echo seen")).strip()

    played = measure.play(newcomer, [("look", two), ("again", two)])
    assert [(each.what, each.num_commands, each.outcome) for each in played] == [
        ("look", 2, "seen"),
        ("again", 2, "seen"),
    ]
    lines = measure.table(played).splitlines()
    assert lines[0].split() == ["step", "time", "commands", "outcome"]
    assert lines[-1].split()[0] == "all"
    assert lines[-1].split()[-1] == "4"


def test_a_command_that_fails_is_told_with_what_it_showed(measure: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(measure.StepFailed, match=r"exit code 3\n.*lost"):
        measure.Newcomer(tmp_path).type("echo lost; exit 3")


def test_a_step_that_does_not_exist_is_refused(measure: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure.main(["--only", "dance"])
    assert "no step dance" in capsys.readouterr().err
