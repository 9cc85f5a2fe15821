"""After the end, whatever way it came: no process, socket or segment of the job remains (I9)."""

from __future__ import annotations

import signal

import pytest

from tests.integration.jobs import SCRIPTS, kill, wait_until


@pytest.fixture
def running(jobs, tmp_path):
    """A job in the middle of training, with grandchildren that changed their session."""
    job = jobs.start("dlrover-run", "--nproc-per-node=2", SCRIPTS / "steps.py", tmp_path, "grandchildren")
    wait_until(lambda: (tmp_path / "steps-1").exists() and (tmp_path / "steps-0").exists(), explain=lambda: job.err)
    return job


def test_after_a_normal_end(jobs, tmp_path, running):
    (tmp_path / "stop").touch()
    assert running.wait() == 0, running.err
    jobs.assert_nothing_remains()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_after_a_signal_to_the_launcher(jobs, running, number, code):
    running.signal(number)
    assert running.wait() == code, running.err
    jobs.assert_nothing_remains()


def test_after_sigkill_of_the_launcher(jobs, running):
    running.signal(signal.SIGKILL)
    running.wait()
    jobs.assert_nothing_remains()


def test_after_sigkill_of_the_agent_the_job_recovers(jobs, tmp_path, running):
    workers = {int((tmp_path / f"pid-{rank}").read_text().split()[0]) for rank in (0, 1)}
    sleepers = set(jobs.pids("sleep 300"))
    [agent] = jobs.pids("dlrover.agent")
    kill(agent)
    wait_until(lambda: not workers & set(jobs.processes()))
    wait_until(lambda: not sleepers & set(jobs.pids("sleep 300")))
    wait_until(
        lambda: all((tmp_path / f"pid-{rank}").read_text().split()[1] == "1" for rank in (0, 1)),
        explain=lambda: running.err,
    )
    (tmp_path / "stop").touch()
    assert running.wait() == 0, running.err
    jobs.assert_nothing_remains()


def test_after_sigkill_of_the_zygote_workers_live_on(jobs, tmp_path, running):
    workers = {int((tmp_path / f"pid-{rank}").read_text().split()[0]) for rank in (0, 1)}
    kill(jobs.zygote())
    before = (tmp_path / "steps-0").read_text().count("\n")
    wait_until(lambda: (tmp_path / "steps-0").read_text().count("\n") > before + 5)
    assert workers <= set(jobs.processes())
    kill(int((tmp_path / "pid-1").read_text().split()[0]))
    wait_until(
        lambda: all((tmp_path / f"pid-{rank}").read_text().split()[1] == "1" for rank in (0, 1)),
        explain=lambda: running.err,
    )
    (tmp_path / "stop").touch()
    assert running.wait() == 0, running.err
    jobs.assert_nothing_remains()


def test_stopping_the_masters_host_ends_the_job_on_all_nodes(jobs, tmp_path, reserved_port):
    args = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={reserved_port}"]
    host = jobs.start("dlrover-run", *args, "--node-rank=0", SCRIPTS / "steps.py", tmp_path)
    wait_until(lambda: jobs.pids("dlrover.master"), explain=lambda: host.err)
    other = jobs.start("dlrover-run", *args, "--node-rank=1", SCRIPTS / "steps.py", tmp_path)
    wait_until(lambda: (tmp_path / "steps-1").exists(), explain=lambda: host.err + other.err)
    host.signal(signal.SIGTERM)
    assert host.wait() == 143, host.err
    assert other.wait() == 1, other.err
    assert "hosts the job's master was stopped" in " ".join(other.err.split())
