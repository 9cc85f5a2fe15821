"""The cgroups of a job's workers go with the job, whoever of it was killed."""

from __future__ import annotations

import os
import signal

import pytest

from tests.integration.jobs import SCRIPTS, kill, wait_until


@pytest.mark.parametrize("killed", ["agent", pytest.param("launcher", marks=pytest.mark.chaos)])
def test_no_cgroup_outlives_its_job(jobs, tmp_path, killed):
    job = jobs.start("dlrover-run", "--nproc-per-node=2", SCRIPTS / "steps.py", tmp_path, "grandchildren")
    wait_until(lambda: (tmp_path / "steps-1").exists() and (tmp_path / "steps-0").exists(), explain=lambda: job.err)
    records = list(jobs.runtime.glob("dlrover-*/*/node-*/cgroup"))
    if not records:
        (tmp_path / "stop").touch()
        job.wait()
        pytest.skip("the agent may not make cgroups of version 2 here (root or a delegated subtree needed)")
    path = records[0].read_text()
    assert os.path.isdir(path)
    if killed == "agent":
        [agent] = jobs.pids("dlrover.agent")
        kill(agent)
        wait_until(
            lambda: all((tmp_path / f"pid-{rank}").read_text().split()[1:] == ["1"] for rank in (0, 1)),
            explain=lambda: job.err,
        )
        (tmp_path / "stop").touch()
        assert job.wait() == 0, job.err
    else:
        job.signal(signal.SIGKILL)
        job.wait()
    wait_until(lambda: not jobs.processes(), explain=lambda: f"still there: {jobs.processes()}")
    wait_until(lambda: not os.path.exists(path), explain=lambda: f"{path} is still there")
