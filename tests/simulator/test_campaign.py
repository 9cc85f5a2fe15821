"""Whole jobs from seeds: nothing breaks, every seed always means the same, and every kind of fault is met."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import signal
import subprocess
import sys

import pytest
from msgspec.structs import replace

from dlrover.protocol.messages.job import Detection
from dlrover.simulator.__main__ import main
from dlrover.simulator.campaign import (
    Failure,
    Totals,
    draw_pauses,
    draw_plan,
    run_many,
    run_plan,
    run_seed,
)
from dlrover.simulator.faults.kinds import (
    CHECK_MIX,
    CLOUD_MIX,
    FAULTS,
    FLEET_MIX,
    MASTER_MIX,
    MASTER_PAUSES,
    PAUSES,
    PEOPLE_MIX,
    POD_MASTER_MIX,
    STANDARD_MIX,
)
from dlrover.simulator.masters.journal import CrashPoint
from dlrover.simulator.plan import Result, SeedPlan
from dlrover.simulator.shapes import Shape

NUM_FAULTS = 2000


def test_two_thousand_faults_break_nothing_and_all_kinds_are_among_them() -> None:
    totals = Totals()
    for totals in run_many(run_seed, itertools.count(1), jobs=1, is_enough=lambda t: t.num_faults >= NUM_FAULTS):
        assert not totals.failures
    assert totals.num_faults >= NUM_FAULTS
    rooms = FLEET_MIX.keys() | CLOUD_MIX.keys() | PEOPLE_MIX.keys() | CHECK_MIX.keys() | POD_MASTER_MIX.keys()
    assert totals.by_kind.keys() == STANDARD_MIX.keys() | MASTER_MIX.keys() | rooms
    assert FAULTS.keys() == totals.by_kind.keys() | PAUSES.keys() | MASTER_PAUSES.keys(), "no kind is never drawn"
    assert totals.by_reason["Completed"] > totals.num_seeds // 2
    assert totals.num_masters > totals.num_seeds, "masters died and others went on"


def test_masters_die_between_all_lines_of_a_commit_and_are_fenced() -> None:
    heard: dict[str, None] = {}
    for seed in range(1, 60):
        run_plan(draw_plan(seed), on_note=lambda _, text: heard.update({text.lstrip(): None}))
    for point in CrashPoint:
        assert any(text.startswith("master epoch") and text.endswith(f"dies {point.value}") for text in heard), point
    for ending in ("dies at rest", "is fenced", "dies because it cannot write", "dies and its journal is lost"):
        assert any(text.endswith(ending) for text in heard), ending


@pytest.mark.parametrize("seed", [50, 100, 150])
def test_checked_in_full_after_each_command(seed: int) -> None:
    plan = draw_plan(seed)
    assert plan.is_thorough
    assert isinstance(run_plan(plan), Result)


def test_a_job_of_some_hundred_nodes() -> None:
    plan = draw_plan(499)
    assert plan.shape.num_nodes >= 200
    outcome = run_plan(plan)
    assert isinstance(outcome, Result)
    assert outcome.num_faults > 5


def test_a_job_without_faults_loses_no_time() -> None:
    shape = Shape(min_nodes=4, max_nodes=4, num_steps=1000)
    outcome = run_plan(SeedPlan(seed=1, shape=shape, faults=(), hours=0.01))
    assert isinstance(outcome, Result)
    assert outcome.reason == "Completed"
    assert outcome.num_rounds == 1
    assert outcome.num_alarms == 0
    assert 1000 <= outcome.virtual_hours * 3600 < 1015


def test_the_same_seed_is_the_same_life_in_another_process_with_another_hash_seed() -> None:
    seeds = [3, 7, 50]
    code = (
        "from dlrover.simulator.campaign import draw_plan, run_plan\n"
        f"for seed in {seeds}: print(run_plan(draw_plan(seed)).trace)\n"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": number},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout.split()
        for number in ("1", "77")
    ]
    ours = [run_plan(draw_plan(seed)) for seed in seeds]
    assert traces[0] == traces[1] == [outcome.trace for outcome in ours if isinstance(outcome, Result)]


def test_other_seeds_are_other_lives() -> None:
    outcomes = [run_plan(draw_plan(seed)) for seed in (3, 4, 5)]
    assert len({outcome.trace for outcome in outcomes if isinstance(outcome, Result)}) == 3


def test_busy_nodes_are_no_false_alarm() -> None:
    """200 node-days; `make false-alarms` looks at fifty times as many."""
    outcome = run_plan(draw_pauses(1, num_nodes=100, days=2.0))
    assert isinstance(outcome, Result)
    assert outcome.by_kind["stall"] > 5000
    assert outcome.num_alarms == 0
    assert outcome.num_rounds == 1


def test_a_silence_shorter_than_a_stall_would_be_false_alarms() -> None:
    """That the test above can fail."""
    hasty = Detection(silence=20.0, lease=15.0)
    plan = draw_pauses(1, num_nodes=20, days=1.0)
    outcome = run_plan(replace(plan, shape=replace(plan.shape, detection=hasty)))
    assert isinstance(outcome, Failure) or outcome.num_alarms > 10


def test_a_campaign_on_two_processes_reports_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--faults", "300", "--jobs", "2", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    assert "violations: 0" in said
    assert "node-hours/s" in said


def test_a_timeline_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--timeline"]) == 0
    said = capsys.readouterr().out
    assert "FAULT worker-crash" in said
    assert "Round 1 starts" in said
    assert "faults stop" in said


def test_a_plan_with_fewer_faults_is_still_a_life() -> None:
    plan = draw_plan(3)
    outcome = run_plan(replace(plan, faults=plan.faults[::2]))
    assert isinstance(outcome, Result)


def test_an_interrupted_campaign_tells_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    """Interrupted after two seconds of its own work: enough for some seeds, far too little for all."""
    former = signal.signal(signal.SIGPROF, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_PROF, 2.0)
    try:
        assert main(["--faults", "1000000000", "--jobs", "1"]) == 130
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, former)
    told = capsys.readouterr().out
    assert re.search(r"over [1-9]\d* seeds", told)
    assert "interrupted" in told
    assert "violations: 0" in told


def test_a_campaign_that_is_killed_leaves_no_process() -> None:
    campaign = subprocess.Popen([sys.executable, "-m", "dlrover.simulator", "--faults=1000000000", "--jobs=2"])
    with contextlib.closing(_Watched()) as children:
        while len(children.pids) < 2:
            assert campaign.poll() is None
            children.find(campaign.pid)
        campaign.kill()
        campaign.wait()
        assert children.have_ended(within=30)


class _Watched:
    """Processes that are not our own children."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}

    def find(self, parent: int) -> None:
        with open(f"/proc/{parent}/task/{parent}/children") as file:
            for pid in map(int, file.read().split()):
                if pid not in self.pids:
                    self.pids[pid] = os.pidfd_open(pid)

    def have_ended(self, *, within: float) -> bool:
        return all(select.select([descriptor], [], [], within)[0] for descriptor in self.pids.values())

    def close(self) -> None:
        for descriptor in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
