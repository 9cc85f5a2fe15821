"""Workers die at any moment of a step, and the job repeats none; with every doubt it goes back to its snapshot, and goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.integration.jobs import DEADLINE, SCRIPTS, JobFactory, wait_until

SAVE_EVERY = 20
NUM_STEPS = 160
"""For six kills. A busy machine may be many steps further before it kills."""
ALLOWED_DOUBT = "of the survivors did not answer"
"""On a busy machine an answer may take longer than 2 s. The agent says so, and the job goes back to its snapshot; its bits stay the same."""


class Lives:
    """What the ranks of guarded_steps.py wrote."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._paths = [folder / f"rank{rank}" for rank in range(num_ranks)]

    def lines(self) -> list[list[str]]:
        return [path.read_text().splitlines() if path.exists() else [] for path in self._paths]

    def steps(self) -> list[list[int]]:
        return [[int(line.split()[1]) for line in lines if line.startswith("step")] for lines in self.lines()]

    def begins(self) -> list[list[int]]:
        return [[int(line.split()[2]) for line in lines if line.startswith("life")] for lines in self.lines()]

    def ends(self) -> set[str]:
        return {line for lines in self.lines() for line in lines if line.startswith("end")}

    def pids(self, life: int, num_steps: int) -> list[int]:
        """Of all ranks in their so-manyeth life, once each has done so many steps in it; empty before."""
        found = []
        for lines in self.lines():
            starts = [at for at, line in enumerate(lines) if line.startswith("life")]
            if len(starts) <= life or len(lines) - starts[life] <= num_steps:
                return []
            found.append(int(lines[starts[life]].split()[1]))
        return found


def train(
    jobs: JobFactory, folder: Path, num_ranks: int, *options: str, num_steps: int = NUM_STEPS
) -> tuple[object, Lives]:
    folder.mkdir()
    is_cut = "hsdp" in options
    script = SCRIPTS / ("guarded_hsdp.py" if is_cut else "guarded_steps.py")
    words = (folder, str(num_steps), str(SAVE_EVERY), *(word for word in options if word != "hsdp"))
    job = jobs.start("dlrover-run", f"--nproc-per-node={num_ranks}", "--max-restarts=50", script, *words)
    return job, Lives(folder, num_ranks)


KINDS = pytest.mark.parametrize(
    ("num_ranks", "num_kills", "options"),
    [(2, 6, ()), (4, 3, ("unused",)), (2, 2, ("loop",)), (2, 2, ("elastic",)), (4, 3, ("hsdp",))],
    ids=["ddp", "unused-parameters", "loop", "elastic-trainer", "hsdp"],
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@KINDS
def test_the_bits_are_those_of_an_undisturbed_run(
    jobs: JobFactory, tmp_path: Path, num_ranks: int, num_kills: int, options: tuple[str, ...]
) -> None:
    """A busy machine may exceed the limit of a last breath; then the job goes back to its snapshot, and the bits are the same."""
    lives, err = kill_at_random(jobs, tmp_path, num_ranks, num_kills, options)
    if num_kills > 2 or ALLOWED_DOUBT not in err:  # of two kills a busy machine may turn both into a doubt
        assert any(begin % SAVE_EVERY for begin in lives.begins()[0]), "not one last step was kept"


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_ranks", "num_kills", "options"),
    [(2, 20, ()), (4, 20, ("unused",)), (2, 20, ("loop",)), (2, 20, ("elastic",)), (4, 20, ("hsdp",))],
    ids=["ddp", "unused-parameters", "loop", "elastic-trainer", "hsdp"],
)
def test_no_step_is_repeated(
    jobs: JobFactory, tmp_path: Path, num_ranks: int, num_kills: int, options: tuple[str, ...]
) -> None:
    """For a quiet machine."""
    lives, err = kill_at_random(jobs, tmp_path, num_ranks, num_kills, options)
    if ALLOWED_DOUBT not in err:
        assert all(len(steps) == len(set(steps)) for steps in lives.steps()), (lives.begins(), err)


def kill_at_random(
    jobs: JobFactory, directory: Path, num_ranks: int, num_kills: int, options: tuple[str, ...]
) -> tuple[Lives, str]:
    """A job with kills beside an undisturbed one: both end with the same bits. What the first did, and its console."""
    chance = random.Random(num_ranks + num_kills)
    length = max(NUM_STEPS, 40 * num_kills)
    undisturbed, calm = train(jobs, directory / "calm", num_ranks, *options, num_steps=length)
    job, lives = train(jobs, directory / "killed", num_ranks, *options, num_steps=length)
    for life in range(num_kills):
        num_steps = SAVE_EVERY + 3 if life == 0 else chance.randint(2, 6)
        wait_until(lambda life=life, num_steps=num_steps: lives.pids(life, num_steps), explain=lambda: job.err)
        time.sleep(chance.uniform(0, 0.02))  # at no particular moment of a step
        os.kill(chance.choice(lives.pids(life, num_steps)), signal.SIGKILL)
    assert job.wait(DEADLINE) == 0, job.err
    assert undisturbed.wait(DEADLINE) == 0, undisturbed.err
    assert all(len(begins) == num_kills + 1 for begins in lives.begins())
    assert all(steps[-1] == length for steps in lives.steps())
    assert len(lives.ends()) == 1
    assert lives.ends() == calm.ends()
    return lives, job.err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_survivor_that_stands_still_ends_in_a_restart_from_the_snapshot(jobs: JobFactory, tmp_path: Path) -> None:
    """Stopped just before the other is killed: the agent does not wait for it, and there is nobody else."""
    job, lives = train(jobs, tmp_path / "killed", 2)
    wait_until(lambda: lives.pids(0, SAVE_EVERY + 3), explain=lambda: job.err)
    first, second = lives.pids(0, 0)
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    assert job.wait(DEADLINE) == 0, job.err
    [begin, again] = lives.begins()[0]
    assert begin == 0
    assert again % SAVE_EVERY == 0
    assert again > 0
    assert len(lives.ends()) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_without_a_guard_goes_back_to_its_snapshot(jobs: JobFactory, tmp_path: Path) -> None:
    job, lives = train(jobs, tmp_path / "killed", 2, "plain")
    wait_until(lambda: lives.pids(0, SAVE_EVERY + 3), explain=lambda: job.err)
    os.kill(lives.pids(0, 0)[1], signal.SIGKILL)
    assert job.wait(DEADLINE) == 0, job.err
    assert [begins[1] % SAVE_EVERY for begins in lives.begins()] == [0, 0]
    assert "a worker was lost" not in job.err
