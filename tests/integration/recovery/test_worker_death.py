"""Every way a worker can die: the job recovers or ends as classified, and the cause is named."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integration.jobs import LAUNCHERS, SCRIPTS, kill, wait_until

CGROUP = Path("/sys/fs/cgroup/memory")

CAUSES = {
    "SIGKILL": "SIGKILL",
    "SIGSEGV": "SIGSEGV",
    "exit": "exit code 3",
    "exception": "ValueError: the weights are on fire",
    "memory-error": "MemoryError",
}


def num_told(err: str) -> int:
    """How often people read that rank 1 failed."""
    return " ".join(err.split()).count("global rank 1 on node rank 0 (localhost) failed")


@pytest.mark.parametrize("how", CAUSES)
def test_one_death_is_survived(jobs, tmp_path, how):
    job = jobs.run("--nproc-per-node=2", SCRIPTS / "fail.py", how, "--folder", tmp_path)
    assert job.process.returncode == 0, job.err
    assert [(tmp_path / f"done-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert CAUSES[how] in job.err


@pytest.mark.parametrize("how", CAUSES)
def test_a_death_at_each_life_ends_the_job_with_the_cause(jobs, tmp_path, how):
    job = jobs.run("--nproc-per-node=2", SCRIPTS / "fail.py", how, "--always", "--folder", tmp_path)
    assert job.process.returncode == 1
    assert CAUSES[how] in job.err
    assert "rank 1" in job.err


def test_a_line_in_the_log_may_end_the_job_at_once(jobs, tmp_path):
    patterns = tmp_path / "patterns.json"
    patterns.write_text('[{"pattern": "weights are [a-z ]*fire", "action": "abort"}]')
    job = jobs.run(
        "--nproc-per-node=2", f"--log-patterns={patterns}", SCRIPTS / "fail.py", "exception", "--folder", tmp_path
    )
    assert job.process.returncode == 1
    assert "a line after which the job shall end (--log-patterns): " in job.err
    assert num_told(job.err) == 1


def test_a_pattern_that_never_ends_is_named_and_the_job_recovers(jobs, tmp_path):
    patterns = tmp_path / "patterns.json"
    patterns.write_text('[{"pattern": "(a+)+$", "action": "abort"}, {"pattern": "(fire)+$", "action": "restart"}]')
    job = jobs.run(
        "--nproc-per-node=2", f"--log-patterns={patterns}", SCRIPTS / "fail.py", "endless-line", "--folder", tmp_path
    )
    assert job.process.returncode == 0, job.err
    assert [(tmp_path / f"done-{rank}").read_text() for rank in (0, 1)] == ["1", "1"], "one restart, nothing was lost"
    assert job.err.count("The pattern '(a+)+$' of --log-patterns is switched off") == 1


def test_max_restarts_is_torchruns(jobs, tmp_path):
    job = jobs.run(
        "--nproc-per-node=2", "--max-restarts=1", SCRIPTS / "fail.py", "exit", "--always", "--folder", tmp_path
    )
    assert job.process.returncode == 1
    assert num_told(job.err) == 2


def test_the_workers_exit_code_on_request(jobs, tmp_path):
    job = jobs.run(
        "--nproc-per-node=2", "--max-restarts=0", "--exit-code=worker", SCRIPTS / "fail.py", "exit", "--always"
    )
    assert job.process.returncode == 3


@pytest.mark.skipif(
    not os.access(CGROUP, os.W_OK) or not (CGROUP / "cgroup.procs").exists(), reason="needs root and cgroup v1 memory"
)
def test_an_out_of_memory_kill_is_named(jobs, tmp_path):
    group = CGROUP / f"dlrover-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(1 << 30))
        job = jobs.start(
            "in-cgroup", group, "-m", "dlrover.trainer.torch.main", "--nproc-per-node=2", "--max-restarts=1",
            SCRIPTS / "fail.py", "oom", "--folder", tmp_path,
        )  # fmt: skip
        job.wait()
        assert job.process.returncode == 0, job.err
        assert num_told(job.err) == 1
        assert "failed: killed by the kernel for lack of memory (killed by the kernel (SIGKILL)" in job.err
        assert "memory" in job.err
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text().split(), 10)
        group.rmdir()


def test_kill_from_outside_with_grandchildren(jobs, tmp_path):
    job = jobs.start("dlrover-run", "--nproc-per-node=2", SCRIPTS / "steps.py", tmp_path, "grandchildren")
    wait_until(lambda: (tmp_path / "steps-1").exists(), explain=lambda: job.err)
    wait_until(lambda: len(jobs.pids("sleep 300")) == 4, explain=lambda: str(jobs.processes()))
    sleepers = jobs.pids("sleep 300")
    kill(int((tmp_path / "pid-1").read_text().split()[0]))
    wait_until(lambda: (tmp_path / "pid-0").read_text().split()[1] == "1")
    wait_until(lambda: not set(sleepers) & set(jobs.pids("sleep 300")))
    wait_until(lambda: (tmp_path / "pid-1").read_text().split()[1] == "1")
    (tmp_path / "stop").touch()
    assert job.wait() == 0, job.err


UNREAD = """
    import os, sys, time
    from pathlib import Path
    folder, life = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"began-{os.environ['RANK']}-{life}").touch()
    if life == "0" and os.environ["RANK"] == "0":
        os.set_blocking(1, False)
        try:
            while True:
                os.write(1, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(1, True)  # it is everybody's
            (folder / "full").touch()
        time.sleep(300)
    while life == "0" and not (folder / "full").exists():
        time.sleep(0.01)
    assert life != "0", "the other one has filled the console"
"""


def test_workers_are_started_again_while_nobody_reads_the_console(jobs, tmp_path):
    script = tmp_path / "unread.py"
    script.write_text(textwrap.dedent(UNREAD))
    argv = [sys.executable, *LAUNCHERS["dlrover-run"], "--nproc-per-node=2", script, tmp_path]
    reader, writer = os.pipe()
    job = subprocess.Popen(
        argv,
        env=jobs.env(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)
    try:
        wait_until(lambda: (tmp_path / "began-0-1").exists() and (tmp_path / "began-1-1").exists())
        with os.fdopen(reader, "rb") as file:
            shown = file.read()
        assert job.wait(60) == 0, shown
        assert b"failed: AssertionError: the other one has filled the console" in shown
    finally:
        job.kill()
        job.wait()
