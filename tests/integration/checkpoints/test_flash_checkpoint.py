"""Flash Checkpoint in real jobs: every way to die, and what comes back; what is on disk; and that nothing remains."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys

import pytest
import torch

from dlrover.snapshot.memory.segment import Segment
from dlrover.snapshot.storage.commit import committed_checkpoints, find_damage, locate
from dlrover.snapshot.storage.storage import LocalStorage
from tests.integration.jobs import SCRIPTS, kill, kill_together, wait_until

SCRIPT = SCRIPTS / "flash.py"


def lives(folder, rank: int = 0) -> list[int]:
    """The first step of each life of a rank."""
    return [int(line.split()[0]) for line in (folder / f"lives-{rank}").read_text().splitlines()]


def newest_pid(folder, rank: int = 0) -> int:
    return int((folder / f"lives-{rank}").read_text().splitlines()[-1].split()[1])


def weights(folder, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"weights-{rank}.pt")


def undisturbed(jobs, tmp_path, num_steps: int, *options: str) -> dict[str, torch.Tensor]:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    job = jobs.run(*options, SCRIPT, folder, str(num_steps))
    assert job.process.returncode == 0, job.err
    return weights(folder)


def assert_same_weights(one, other) -> None:
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_no_step_is_lost_at_a_kill_and_the_weights_are_bit_for_bit_the_same(jobs, tmp_path):
    kills = ["--kill-at", "3", "--kill-at", "4", "--kill-at", "11"]
    job = jobs.run("--nproc-per-node=2", SCRIPT, tmp_path, "20", *kills)
    assert job.process.returncode == 0, job.err
    assert lives(tmp_path) == lives(tmp_path, 1) == [0, 4, 5, 12]
    expected = undisturbed(jobs, tmp_path, 20, "--nproc-per-node=2")
    for rank in (0, 1):
        assert_same_weights(weights(tmp_path, rank), expected)


@pytest.mark.chaos
def test_lazy_saves_lose_at_most_the_one_that_was_being_copied_and_ranks_stay_together(jobs, tmp_path):
    kills = [3, 8, 12]
    words = [word for step in kills for word in ("--kill-at", str(step))]
    job = jobs.run("--nproc-per-node=2", SCRIPT, tmp_path, "16", "--sharded", "--lazy", "--disk-every", "5", *words)
    assert job.process.returncode == 0, job.err
    assert lives(tmp_path) == lives(tmp_path, 1)
    for first, step in zip(lives(tmp_path)[1:], kills, strict=True):
        assert first in (step, step + 1)
    assert_same_weights(weights(tmp_path), undisturbed(jobs, tmp_path, 16, "--nproc-per-node=2"))
    assert (tmp_path / "checkpoints" / "dlrover_latest.txt").read_text() == "15"


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_twenty_random_crashes_leave_the_weights_as_they_were(jobs, tmp_path):
    """Of either rank's process, at random steps; the model ends bit for bit as without them."""
    steps = random.Random(5).sample(range(1, 119), 20)
    kills = [word for step in steps for word in ("--kill-at", str(step))]
    job = jobs.run(
        "--nproc-per-node=2", "--max-restarts=30", SCRIPT, tmp_path, "120", "--disk-every", "10", *kills, timeout=400
    )
    assert job.process.returncode == 0, job.err
    assert lives(tmp_path) == lives(tmp_path, 1) == [0, *(step + 1 for step in sorted(steps))], "no step is lost"
    expected = undisturbed(jobs, tmp_path, 120, "--nproc-per-node=2")
    for rank in (0, 1):
        assert_same_weights(weights(tmp_path, rank), expected)


def test_a_killed_agents_segments_are_adopted(jobs, tmp_path):
    job = jobs.start("dlrover-run", SCRIPT, tmp_path, "20", "--hold-at", "9")
    wait_until(lambda: (tmp_path / "holding-0").exists(), explain=lambda: job.err)
    [agent] = jobs.pids("dlrover.agent")
    (tmp_path / "holding-0").unlink()
    worker = newest_pid(tmp_path)
    kill(agent)
    wait_until(lambda: not os.path.exists(f"/proc/{worker}"), explain=lambda: job.err)  # it must not go on meanwhile
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.err
    assert lives(tmp_path) == [0, 10]
    assert_same_weights(weights(tmp_path), undisturbed(jobs, tmp_path, 20))


def test_checkpoints_on_disk_are_plain_files_and_the_last_one_is_there_at_the_end(jobs, tmp_path):
    job = jobs.run("--nproc-per-node=2", SCRIPT, tmp_path, "21", "--disk-every", "10")
    assert job.process.returncode == 0, job.err
    directory = tmp_path / "checkpoints"
    assert (directory / "dlrover_latest.txt").read_text() == "20"
    assert sorted(os.listdir(directory)) == ["0", "10", "20", "dlrover_latest.txt"]
    state = torch.load(directory / "20" / "rank_0.pt")
    assert state["step"] == 20
    assert_same_weights(state["model"], weights(tmp_path))


@pytest.mark.chaos
def test_every_rank_gets_its_own_shard_back(jobs, tmp_path):
    """From memory after a kill, and from storage in the next job; the script checks that it got its own."""
    options = ["--nproc-per-node=2", SCRIPT, tmp_path]
    job = jobs.run(*options, "11", "--sharded", "--disk-every", "5", "--kill-at", "7")
    assert job.process.returncode == 0, job.err
    assert lives(tmp_path) == lives(tmp_path, 1) == [0, 8]
    directory = tmp_path / "checkpoints"
    assert [torch.load(directory / "10" / f"rank_{rank}.pt")["rank"] for rank in (0, 1)] == [0, 1]
    assert jobs.run(*options, "12", "--sharded").process.returncode == 0
    assert lives(tmp_path, 1) == [0, 8, 11]


def test_every_node_keeps_the_state_and_one_of_them_writes_it(jobs, tmp_path, reserved_port):
    common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={reserved_port}"]
    steps = [SCRIPT, tmp_path, "11", "--disk-every", "5", "--kill-at", "7"]
    nodes = [jobs.start("dlrover-run", *common, f"--node-rank={rank}", *steps) for rank in (0, 1)]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].err + nodes[1].err
    assert lives(tmp_path) == lives(tmp_path, 1) == [0, 8]
    assert sorted(os.listdir(tmp_path / "checkpoints" / "10")) == [".dlrover", "rank_0.pt"]
    assert_same_weights(weights(tmp_path, 0), weights(tmp_path, 1))


@pytest.mark.chaos
def test_a_new_job_goes_on_from_storage(jobs, tmp_path):
    assert jobs.run(SCRIPT, tmp_path, "11", "--disk-every", "10").process.returncode == 0
    job = jobs.run("--nproc-per-node=2", SCRIPT, tmp_path, "15")
    assert job.process.returncode == 0, job.err
    assert lives(tmp_path) == [0, 11]
    assert lives(tmp_path, 1) == [11]


def test_a_break_point_save_is_on_disk_when_the_job_fails(jobs, tmp_path):
    job = jobs.run(
        "--save-at-breakpoint", "--max-restarts=0", SCRIPT, tmp_path, "20", "--kill-at", "7"
    )  # fmt: skip
    assert job.process.returncode == 1
    assert "failed at step 7" in job.err, "a save says which step it is"
    assert (tmp_path / "checkpoints" / "dlrover_latest.txt").read_text() == "7"
    assert torch.load(tmp_path / "checkpoints" / "7" / "rank_0.pt")["step"] == 7


def test_storage_that_cannot_be_written_does_not_stop_training(jobs, tmp_path):
    job = jobs.run(SCRIPT, tmp_path, "20", "--disk-every", "5", "--spoil")
    assert job.process.returncode == 0, job.err
    assert job.err.count("was not written") == 1
    assert "Training continues" in job.err


def newest_step(jobs) -> int:
    """Of the complete snapshots in memory."""
    steps = [-1]
    for path in jobs.shared_memory.rglob("*.segment"):
        with contextlib.suppress(FileNotFoundError), Segment(path) as segment:
            steps += [name.step for name in segment.complete_slots()]
    return max(steps)


@pytest.mark.chaos
def test_kill_9_at_random_instants_of_saves_never_yields_anything_but_a_whole_step(jobs, tmp_path):
    """Killed from outside, whatever the worker is doing: mostly saving, because that is nearly all it does."""
    job = jobs.start("dlrover-run", "--max-restarts=100", SCRIPT, tmp_path, "100000", "--disk-every", "7")
    for life in range(1, 6):
        wait_until(
            lambda life=life: (tmp_path / "lives-0").exists() and len(lives(tmp_path)) >= life, explain=lambda: job.err
        )
        enough = lives(tmp_path)[-1] + 3 * life
        wait_until(lambda enough=enough: newest_step(jobs) >= enough, explain=lambda: job.err)
        kill(newest_pid(tmp_path))
    wait_until(lambda: len(lives(tmp_path)) >= 6, explain=lambda: job.err)
    begun = lives(tmp_path)
    assert begun == sorted(begun)
    assert begun[-1] > 0
    job.signal(15)
    job.wait()
    # Whatever the last life restored is what an undisturbed training has after so many steps.
    tracker = tmp_path / "checkpoints" / "dlrover_latest.txt"
    step = int(tracker.read_text())
    state = torch.load(tmp_path / "checkpoints" / str(step) / "rank_0.pt")
    assert state["step"] == step
    assert_same_weights(state["model"], undisturbed(jobs, tmp_path, step + 1))


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_agents_killed_at_random_instants_of_their_writing_leave_only_whole_checkpoints(jobs, tmp_path):
    """Each step goes to storage, so an agent nearly always writes or commits when it is killed."""
    job = jobs.start("dlrover-run", "--max-restarts=100", SCRIPT, tmp_path, "100000", "--disk-every", "1")
    directory = tmp_path / "checkpoints"
    dice = random.Random(11)
    for life in range(1, 4):
        wait_until(
            lambda life=life: (tmp_path / "lives-0").exists() and len(lives(tmp_path)) >= life, explain=lambda: job.err
        )
        enough = lives(tmp_path)[-1] + dice.randrange(5, 40)
        wait_until(lambda enough=enough: newest_step(jobs) >= enough, explain=lambda: job.err)
        [agent] = jobs.pids("dlrover.agent")
        before = newest_step(jobs)
        kill(agent)
        wait_until(lambda life=life: len(lives(tmp_path)) > life, explain=lambda: job.err)
        assert lives(tmp_path)[-1] > before, "what was in memory is lost"
        for checkpoint in committed_checkpoints(LocalStorage(), str(directory))[-3:]:
            assert find_damage(LocalStorage(), checkpoint) == []
    job.signal(15)
    job.wait()
    found = locate(LocalStorage(), str(directory))
    assert found is not None
    assert find_damage(LocalStorage(), found) == []
    state = torch.load(f"{found.path}/rank_0.pt")
    assert_same_weights(state["model"], undisturbed(jobs, tmp_path, found.manifest.step + 1))


def test_after_a_kill_of_everything_clean_removes_the_segments(jobs, tmp_path):
    job = jobs.start("dlrover-run", SCRIPT, tmp_path, "20", "--hold-at", "3")
    wait_until(lambda: (tmp_path / "holding-0").exists(), explain=lambda: job.err)
    assert list(jobs.shared_memory.rglob("*.segment"))
    kill_together(job.pid, *jobs.pids("dlrover.agent"))
    job.wait()
    wait_until(lambda: not jobs.processes(), explain=lambda: str(jobs.processes()))
    cleaned = subprocess.run(
        [sys.executable, "-m", "dlrover.cli.main", "clean"], env=jobs.env(), capture_output=True, text=True, timeout=60
    )
    assert not list(jobs.shared_memory.rglob("*")), cleaned.stdout + cleaned.stderr


def test_under_torchrun_saves_work_and_the_files_are_the_same(jobs, tmp_path):
    job = jobs.start("torchrun", "--nproc-per-node=2", "--standalone", SCRIPT, tmp_path, "11", "--disk-every", "5")
    assert job.wait() == 0, job.err
    assert (tmp_path / "checkpoints" / "dlrover_latest.txt").read_text() == "10"
    assert torch.load(tmp_path / "checkpoints" / "10" / "rank_0.pt")["step"] == 10
