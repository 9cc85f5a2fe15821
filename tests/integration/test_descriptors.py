"""Jobs under a small limit of open files, as most systems have it."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.jobs import LAUNCHERS

NUM_WORKERS = 32


def run_with(limits, jobs, tmp_path):
    argv = [sys.executable, *LAUNCHERS["dlrover-run"], f"--nproc-per-node={NUM_WORKERS}", "--max-restarts=0"]
    return subprocess.run(
        ["sh", "-c", f'{limits} && exec "$@"', "sh", *argv, "--no-python", "sh", "-c", "ulimit -Sn"],
        env=jobs.env(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_many_workers_run_under_a_small_limit_and_keep_it(jobs, tmp_path):
    done = run_with("ulimit -Sn 128", jobs, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["128"] * NUM_WORKERS


def test_a_limit_that_cannot_be_raised_is_told_with_what_to_do(jobs, tmp_path):
    done = run_with("ulimit -n 128", jobs, tmp_path)
    assert done.returncode == 1
    assert "cannot have 32 workers: Too many open files" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
