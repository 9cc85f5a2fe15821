"""Workers that meet in the master's store and at its sync points, in real jobs."""

from __future__ import annotations

import pytest

from tests.integration.jobs import SCRIPTS


def results(folder, world_size: int) -> list[str]:
    return [(folder / f"done-{rank}").read_text() for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, pytest.param(64, marks=pytest.mark.chaos)])
def test_ddp_over_the_masters_store(jobs, tmp_path, world_size):
    job = jobs.run(f"--nproc-per-node={world_size}", SCRIPTS / "store_ddp.py", tmp_path, "live")
    assert job.process.returncode == 0, job.err
    total = sum(range(world_size))
    assert results(tmp_path, world_size) == [f"{total} {world_size} {world_size} True True"] * world_size


def test_the_next_round_finds_a_fresh_store(jobs, tmp_path):
    """Keys of the dead round would make the new ranks connect to dead ones."""
    job = jobs.run("--nproc-per-node=2", SCRIPTS / "store_ddp.py", tmp_path, "die")
    assert job.process.returncode == 0, job.err
    assert "SIGKILL" in job.err
    assert results(tmp_path, 2) == ["1 2 2 True True"] * 2


def test_workers_of_two_nodes_meet(jobs, tmp_path, reserved_port):
    args = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={reserved_port}"]
    nodes = [
        jobs.start("dlrover-run", *args, f"--node-rank={rank}", SCRIPTS / "store_ddp.py", tmp_path, "live")
        for rank in (0, 1)
    ]
    for node in nodes:
        assert node.wait() == 0, node.err
    assert results(tmp_path, 2) == ["1 2 2 True True"] * 2
