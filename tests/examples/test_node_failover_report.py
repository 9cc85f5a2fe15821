"""The node failover benchmark's report: each budget gets its verdict, and what was not measured gets none."""

import sys

import pytest
from failover import Kill, Result
from node_failover import budget_lines, parse_args, report
from timeline import PHASES, Recovery


def killed(seconds: float, num_steps_lost: int = 0) -> Kill:
    return Kill(1, Recovery(seconds, {phase: seconds / len(PHASES) for _, phase in PHASES}, num_steps_lost))


def test_ratios_are_against_both_of_ours() -> None:
    results = [
        Result("ours-standby", kills=[killed(1.0)]),
        Result("ours-cold", kills=[killed(4.0)]),
        Result("torchrun", kills=[killed(16.0), Kill(1, None)]),
    ]
    text = report(results, hang_timeout=90, imports=[3.0], strangers=[1.0])
    line = next(line for line in text.splitlines() if line.startswith("| torchrun"))
    assert "16.00x" in line
    assert "4.00x" in line
    assert "1 of 2" in line


def test_budgets_are_judged_only_where_measured() -> None:
    lines = "\n".join(budget_lines({"ours-standby": 1.2, "dlrover-0.6.1": 12.0}, None, 0))
    assert "within 3 s: 1.2: met" in lines
    assert "dlrover 0.6.1: 10: met" in lines
    assert "steps lost at most 0: 0: met" in lines
    assert "after its start: not measured" in lines
    assert "met" not in "\n".join(budget_lines({}, 3.0, None)).replace("not measured", "")


def test_missed_budgets_are_said() -> None:
    lines = "\n".join(budget_lines({"ours-standby": 3.5, "ours-cold": 7.0, "dlrover-0.6.1": 12.0}, 3.0, 2))
    assert lines.count("NOT MET") == 4


def test_an_unknown_system_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["node_failover.py", "--systems", "theirs"])
    with pytest.raises(SystemExit):
        parse_args()
    assert "unknown theirs" in capsys.readouterr().err
