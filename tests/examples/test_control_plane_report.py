"""The control-plane benchmark's report: ratios the right way round, budgets judged, and nothing invented."""

import json
import sys

import pytest
from control_plane import parse_args
from control_plane_clients import num_participants
from control_plane_report import Budget, Sample, Samples, best, budgets, quietness, rate, report


def row(text: str, *begin: str) -> list[str]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells[: len(begin)] == list(begin):
            return cells
    raise AssertionError(f"no row {begin} in\n{text}")


def load(what: str, system: str, clients: int, num: float, cpu: float) -> Sample:
    return Sample(what, system, clients, {"num": num, "seconds": 2.0, "cpu": cpu})


def met(text: str, samples: list[Sample]) -> str:
    return next(budget.verdict for budget in budgets(Samples(samples)) if budget.text.startswith(text))


def test_a_rendezvous_is_compared_with_ours_of_the_same_size() -> None:
    samples = [
        Sample("rendezvous", "ours", 16, {"seconds": 0.02, "cpu": 0.01, "rss_mb": 40, "message_bytes": 200}),
        Sample("rendezvous", "ours", 64, {"seconds": 0.1, "cpu": 0.01, "rss_mb": 40, "message_bytes": 202}),
        Sample("rendezvous", "torch c10d", 64, {"seconds": 8.0}),
    ]
    text = report(samples, [], [1.0])
    assert row(text, "64", "torch c10d")[2:6] == ["8.000", "8.000-8.000", "80.00x", "-"]
    assert row(text, "16", "ours")[4] == "1.00x"


def test_samples_of_several_rounds_become_a_median_and_a_spread() -> None:
    samples = [load("set", "ours", 16, num, 1.0) for num in (2000, 4000, 3000)]
    assert row(report(samples, [], [0.0]), "set", "16", "ours")[3:5] == ["1,500", "1,000-2,000"]


def test_heartbeats_are_held_against_the_better_of_the_peers_figures() -> None:
    ours = [load("heartbeat", "ours", 256, 20_000, 1.0)]
    old = [load("heartbeat", "dlrover-0.6.1", 1, 2_000, 1.0), load("heartbeat", "dlrover-0.6.1", 16, 4_000, 4.0)]
    assert best(Samples(old), "heartbeat", "dlrover-0.6.1") == (2_000, 0.5)
    assert met("heartbeat: rate", ours + old) == "met"
    assert met("heartbeat: master CPU", ours + old) == "met"
    slower = [load("heartbeat", "ours", 256, 11_000, 5.0)]
    assert met("heartbeat: rate", slower + old) == "NOT MET"
    assert met("heartbeat: master CPU", slower + old) == "NOT MET"


def test_a_budget_that_nobody_measured_is_neither_met_nor_missed() -> None:
    verdicts = {budget.verdict for budget in budgets(Samples([]))}
    assert verdicts == {"not measured"}
    assert Budget("x", 1.0, 1.0).verdict == "met"
    assert Budget("x", 0.9, 1.0, is_at_least=True).verdict == "NOT MET"


def test_a_world_message_that_grows_with_the_world_is_found() -> None:
    def with_bytes(size: int, size_bytes: float) -> Sample:
        return Sample("rendezvous", "ours", size, {"seconds": 0.1, "message_bytes": size_bytes})

    assert met("growth", [with_bytes(16, 200), with_bytes(1000, 207)]) == "met"
    assert met("growth", [with_bytes(16, 200), with_bytes(1000, 5000)]) == "NOT MET"


def test_figures_of_a_busy_machine_are_marked() -> None:
    assert quietness([3.0, 55.0]).startswith("NOT FOR PUBLICATION")
    assert "NOT" not in quietness([3.0])


def test_what_could_not_be_measured_is_said_once() -> None:
    assert report([], ["no network", "no network"], []).count("NOT MEASURED: no network") == 1


def test_a_rate_is_calls_over_their_time() -> None:
    assert rate(load("get", "ours", 1, 500, 0.1)) == 250


def test_samples_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(load("get", "ours", 1, 500, 0.1).as_json()))["figures"]["num"] == 500


def test_torchs_state_counts_its_participants() -> None:
    assert num_participants(None) == 0


@pytest.mark.parametrize("words", [["--parts", "kw"], ["--systems", "torchrum"], ["--sizes", "1"], ["--sizes", "a"]])
def test_bad_options_are_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["control_plane.py", *words])
    with pytest.raises(SystemExit):
        parse_args()
    assert words[0] in capsys.readouterr().err
