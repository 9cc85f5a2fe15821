"""
A worker is killed, and while the others save its last step another one dies or stops: at each point of that the job goes on, with the same bits on all ranks.

`benchmarks/second_faults.py` measures how long it stands still.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.jobs import DEADLINE, JobFactory, wait_until
from tests.integration.recovery.test_last_breath import ALLOWED_DOUBT, SAVE_EVERY, Lives, train

NUM_STEPS = 60
NUM_RANKS = {"ddp": 3, "hsdp": 4}
OPTIONS = {"ddp": ("unused",), "hsdp": ("hsdp",)}
"""
After the first step of each life torch groups the gradients of a replicated job anew, unless parameters may be unused: those of more than two ranks are
then summed in another order, and a restart alone changes bits.
"""
VICTIM = 2
NOT_SAVED_YET = ("order", "undone", "offered", "saving", "written")
"""Points at which a worker that dies leaves the save of a replicated state to the next one."""
POINTS = (*NOT_SAVED_YET, "saved", "told")
SIGNALS = ("SIGKILL", "SIGSTOP")
Bits = dict[str, set[str]]


@pytest.fixture(scope="module")
def bits() -> Bits:
    """Of an undisturbed run, by kind: whoever needs them first starts one beside its own job."""
    return {}


def endure(jobs: JobFactory, folder: Path, kind: str, fault: str, bits: Bits) -> tuple[Lives, str]:
    options = OPTIONS[kind]
    calm = None
    if kind not in bits:
        calm = train(jobs, folder / "calm", NUM_RANKS[kind], *options, num_steps=NUM_STEPS)
    job, lives = train(jobs, folder / "killed", NUM_RANKS[kind], *options, f"fault={fault}", num_steps=NUM_STEPS)
    wait_until(lambda: lives.pids(0, SAVE_EVERY + 3), explain=lambda: job.err)
    os.kill(lives.pids(0, 0)[VICTIM], signal.SIGKILL)
    assert job.wait(DEADLINE) == 0, job.err
    if calm is not None:
        undisturbed, calm_lives = calm
        assert undisturbed.wait(DEADLINE) == 0, undisturbed.err
        bits[kind] = calm_lives.ends()
    assert lives.ends() == bits[kind]
    assert [len(begins) for begins in lives.begins()] == [2] * NUM_RANKS[kind], job.err
    assert len({begins[1] for begins in lives.begins()}) == 1, "ranks went on from different steps"
    return lives, job.err


def assert_kept(lives: Lives, err: str) -> None:
    """The last step, unless the machine was too busy to answer within the limit."""
    if ALLOWED_DOUBT not in err:
        assert lives.begins()[0][1] % SAVE_EVERY, err
        assert all(len(steps) == len(set(steps)) for steps in lives.steps()), err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_survivor_that_dies_while_it_writes_leaves_the_step_to_the_next(
    jobs: JobFactory, tmp_path: Path, bits: Bits
) -> None:
    assert_kept(*endure(jobs, tmp_path, "ddp", "saving,SIGKILL,0", bits))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_stopped_survivor_has_half_written_is_not_restored(jobs: JobFactory, tmp_path: Path, bits: Bits) -> None:
    lives, err = endure(jobs, tmp_path, "ddp", "written,SIGSTOP,0", bits)
    assert lives.begins()[0][1] % SAVE_EVERY == 0, err


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("point", POINTS)
def test_a_second_fault_at_each_point_of_replicated_workers(
    jobs: JobFactory, tmp_path: Path, bits: Bits, point: str, number: str
) -> None:
    lives, err = endure(jobs, tmp_path, "ddp", f"{point},{number},0", bits)
    if number == "SIGKILL" and point in (*NOT_SAVED_YET, "told"):
        assert_kept(lives, err)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("point", [*POINTS, "finishing"])
def test_a_second_fault_at_each_point_of_workers_with_pieces(
    jobs: JobFactory, tmp_path: Path, bits: Bits, point: str, number: str
) -> None:
    """Rank 0 alone has the other copy of the victim's piece."""
    endure(jobs, tmp_path, "hsdp", f"{point},{number},0", bits)
