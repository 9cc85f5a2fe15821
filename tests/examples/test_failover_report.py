"""The failover benchmark's report: what was not measured is said, never left out."""

import sys

import pytest
from failover import Kill, Result, as_json, parse_args, report
from timeline import PHASES, Recovery


def recovered(seconds: float, num_steps_lost: int = 0) -> Kill:
    return Kill(0, Recovery(seconds, {phase: seconds / len(PHASES) for _, phase in PHASES}, num_steps_lost))


def row(text: str, name: str) -> list[str]:
    return [
        cell.strip() for cell in next(line for line in text.splitlines() if line.startswith(f"| {name} ")).split("|")
    ]


def test_ratios_are_against_ours_and_start_against_the_peer() -> None:
    peer = Result("torchrun", starts=[5.0], kills=[recovered(4.0), recovered(4.0, 1)])
    ours = Result("ours", starts=[4.0], kills=[recovered(0.4)])
    text = report([peer, ours], hang_timeout=60)
    assert "10.00x" in row(text, "torchrun")
    assert "0.80x" in row(text, "torchrun")
    assert "0.5 (max 1)" in row(text, "torchrun")
    assert "1.00x" in row(text, "ours")


def test_a_hang_is_counted_and_stays_out_of_the_median() -> None:
    text = report([Result("torchrun-default", kills=[recovered(4.0), Kill(1, None)])], hang_timeout=60)
    assert "1 of 2" in row(text, "torchrun-default")
    assert "4.000" in row(text, "torchrun-default")


def test_a_launcher_that_cannot_run_is_reported_once_per_reason() -> None:
    text = report([Result("dlrover-0.6.1", errors=["no network", "no network"])], hang_timeout=60)
    assert text.count("dlrover-0.6.1: NOT FULLY MEASURED: no network") == 1
    assert row(text, "dlrover-0.6.1")[2] == "-"


def test_a_detection_that_nobody_told_is_said_and_not_shown_as_a_figure() -> None:
    told = Kill(0, Recovery(0.5, {phase: 0.1 for _, phase in PHASES} | {"stop": 0.2}, 0))
    untold = Kill(1, Recovery(0.5, {phase: 0.9 for _, phase in PHASES if phase != "detect"}, 0))
    phases = report([Result("silent", kills=[untold]), Result("mixed", kills=[told, untold])], hang_timeout=60)
    phases = phases.split("Where the time")[1]
    assert row(phases, "silent")[2:5] == ["-", "0.900", "0.900"]
    assert row(phases, "mixed")[2:5] == ["0.100", "0.200", "0.500"]
    assert "silent: its log did not tell when it noticed 1 of 1 kills" in phases
    assert "mixed: its log did not tell when it noticed 1 of 2 kills" in phases
    assert "its log" not in report([Result("ours", kills=[told])], hang_timeout=60)


def test_the_json_holds_every_sample() -> None:
    written = as_json([Result("ours", starts=[4.0], kills=[recovered(0.4), Kill(1, None)])])
    launchers = written["launchers"]
    assert isinstance(launchers, list)
    assert launchers[0]["kills"][0]["recovery"]["seconds"] == 0.4
    assert launchers[0]["kills"][1]["recovery"] is None
    assert launchers[0]["kill_to_new_step"]["median"] == 0.4


def test_naming_torchrun_measures_both_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["failover.py", "--peers", "torchrun,ours"])
    assert parse_args().peers == ["torchrun", "torchrun-default", "ours"]


def test_an_unknown_peer_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["failover.py", "--peers", "torchrum"])
    with pytest.raises(SystemExit):
        parse_args()
    assert "unknown torchrum" in capsys.readouterr().err
