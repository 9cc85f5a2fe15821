"""`dlrover simulate`: a forecast that a person can read, from the same engine that tests the control plane."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from dlrover.cli.main import app
from dlrover.protocol.errors import ConfigError
from dlrover.simulator.forecast import Question, best, choices, forecast, live

RUNNER = CliRunner()
FLAWLESS = Question(nodes=4, min_nodes=4, hours=2.0, node_mtbf=0, worker_mtbf=0, master_mtbf=0)


def test_it_prints_a_forecast_a_timeline_and_a_comparison(tmp_path: Path) -> None:
    picture = tmp_path / "forecast.svg"
    arguments = ["simulate", "--nodes", "4", "--hours", "3", "--node-mtbf", "5", "--seeds", "2", "--plot", str(picture)]
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    for word in ("done in", "goodput", "faults", "the median life", "fastest", "cheapest", "node-hours"):
        assert word in done.output
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag.endswith("svg")
    assert len(root.findall(".//{*}polyline")) == 2, "a curve for each life"
    assert len(root.findall(".//{*}rect")) == 1 + len(choices(Question(nodes=4, min_nodes=4)))


def test_each_moment_of_the_timeline_is_shown_once() -> None:
    done = RUNNER.invoke(app, ["simulate", "--nodes", "2", "--hours", "1", "--node-mtbf", "0", "--no-compare"])
    assert done.output.count("100.0%") == 1


def test_a_picture_that_cannot_be_written_is_told_before_the_long_part() -> None:
    done = RUNNER.invoke(app, ["simulate", "--hours", "1", "--no-compare", "--plot", "/nowhere/at/all.svg"])
    assert isinstance(done.exception, ConfigError)
    assert "done in" not in done.output


def test_the_same_seed_says_the_same() -> None:
    arguments = ["simulate", "--nodes", "4", "--hours", "3", "--node-mtbf", "5", "--seeds", "2", "--no-compare"]
    first, second = (RUNNER.invoke(app, arguments).output for _ in range(2))
    other = RUNNER.invoke(app, [*arguments, "--seed", "9"]).output
    assert first == second != other


def test_without_failures_nothing_is_lost() -> None:
    life = live(FLAWLESS, seed=1)
    assert life.is_completed
    assert life.num_faults == life.num_restarts == 0
    assert life.goodput > 0.99
    assert life.curve[-1][1] == 1.0


def test_failures_cost_time_and_spares_save_some_of_it() -> None:
    often = replace(FLAWLESS, hours=20.0, node_mtbf=20.0, replacement=500.0)
    alone, helped = forecast(often, num_seeds=4), forecast(replace(often, spares=2), num_seeds=4)
    assert alone.goodput < 0.99
    assert helped.num_completed >= alone.num_completed
    assert helped.goodput > alone.goodput


def test_replicas_save_what_a_lost_node_would_repeat() -> None:
    often = replace(FLAWLESS, hours=20.0, node_mtbf=20.0, checkpoint_every=1800.0, replacement=60.0)
    assert live(often, seed=3).lost_hours > 0
    assert live(replace(often, has_replicas=True), seed=3).lost_hours == 0


def test_the_best_choice_completes() -> None:
    fragile = replace(FLAWLESS, hours=20.0, node_mtbf=20.0, replacement=1200.0)
    forecasts = [forecast(choice, num_seeds=2) for choice in choices(fragile)]
    assert not forecasts[0].num_completed, "each loss keeps it below the minimum for longer than it waits"
    for chosen in best(forecasts):
        assert chosen.num_completed == 2


def test_a_choice_that_does_not_always_complete_is_at_worst_never_done() -> None:
    fragile = forecast(replace(FLAWLESS, hours=20.0, node_mtbf=60.0, replacement=700.0), num_seeds=4)
    assert 0 < fragile.num_completed < 4
    assert fragile.worst_hours == math.inf


def test_a_job_that_gives_up_is_told_with_the_option_that_would_let_it_wait() -> None:
    arguments = ["--nodes", "4", "--hours", "20", "--node-mtbf", "20", "--replacement", "1200", "--no-compare"]
    done = RUNNER.invoke(app, ["simulate", *arguments])
    assert "fewer than 4 nodes for longer than --join-timeout 600" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nodes", "4", "--min-nodes", "5"], "--min-nodes 5"),
        (["--nodes", "4", "--node-unit", "3"], "must divide"),
        (["--node-mtbf", "0.01"], "--node-mtbf 0.01"),
        (["--replacement", "-1"], "--replacement -1"),
        (["--hours", "0"], "above 0"),
        (["--hours", "nan"], "above 0"),
        (["--step-time", "inf"], "above 0"),
        (["--spares", "-2"], "--spares -2"),
        (["--hours", "1", "--no-compare", "--plot", "/nowhere/at/all.svg"], "--plot /nowhere/at/all.svg"),
    ],
)
def test_bad_input_is_one_clear_sentence(arguments: list[str], expected: str) -> None:
    done = RUNNER.invoke(app, ["simulate", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert expected in str(done.exception)
