"""The master dies together with its journal: training does not notice."""

from __future__ import annotations

from pathlib import Path

from tests.integration.jobs import SCRIPTS, kill, wait_until


def test_a_master_without_its_journal_takes_the_running_workers_up_again(jobs, tmp_path):
    job = jobs.start("dlrover-run", "--nproc-per-node=2", f"--journal={tmp_path}", SCRIPTS / "steps.py", tmp_path)
    wait_until(lambda: (tmp_path / "steps-1").exists(), explain=lambda: job.err)
    for deaths in range(1, 3):
        [master] = jobs.pids("dlrover.master")
        kill(master)
        for file in tmp_path.glob("*.sqlite*"):
            file.unlink()
        wait_until(lambda dead=master: [pid for pid in jobs.pids("dlrover.master") if pid != dead])
        wait_until(lambda: list(tmp_path.glob("*.sqlite")))
        before = num_steps(tmp_path)
        wait_until(lambda before=before: num_steps(tmp_path) > before + 20)
        wait_until(lambda deaths=deaths: job.err.count("the master ended") == deaths)
    (tmp_path / "stop").touch()
    assert job.wait() == 0, job.err
    steps = [line.split() for line in (tmp_path / "steps-0").read_text().splitlines()]
    assert {life for life, _, _ in steps} == {"0"}, "no worker was restarted"


def num_steps(tmp_path: Path) -> int:
    return (tmp_path / "steps-0").read_text().count("\n")
