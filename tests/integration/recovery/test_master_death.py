"""The master is killed again and again: it comes back with the same state, and training does not notice."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from dlrover.cli.launch.launcher import EXIT_MASTER_LOST
from tests.integration.jobs import SCRIPTS, Launched, kill, wait_until


def test_twenty_master_deaths_restart_no_worker(jobs, tmp_path):
    job = jobs.start("dlrover-run", "--nproc-per-node=2", f"--journal={tmp_path}", SCRIPTS / "steps.py", tmp_path)
    wait_until(lambda: all((tmp_path / f"steps-{rank}").exists() for rank in (0, 1)), explain=lambda: job.err)
    [journal] = tmp_path.glob("*.sqlite")
    chance = random.Random(7)
    for number in range(20):
        [master] = jobs.pids("dlrover.master")
        before, known = num_steps(tmp_path), num_records(journal)
        kill(master)
        wait_until(lambda before=before: num_steps(tmp_path) > before + 2)  # nobody waits for it
        wait_until(lambda dead=master: [pid for pid in jobs.pids("dlrover.master") if pid != dead])
        if number % 3 == 0:  # some serve before they die, others are killed on the way
            wait_until(lambda known=known: num_records(journal) > known)
        begun = time.monotonic() + chance.random() * 0.5
        wait_until(lambda begun=begun: time.monotonic() > begun)
    (tmp_path / "stop").touch()
    assert job.wait() == 0, job.err
    assert job.err.count("the master ended") == 20
    replayed = subprocess.run(
        [sys.executable, "-m", "dlrover.cli.main", "replay", journal], capture_output=True, text=True, check=False
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr  # each digest is compared on the way
    # A master that was killed before it had opened the journal has no life in it.
    assert 7 <= replayed.stdout.count("master started") <= 21
    steps = [line.split() for line in (tmp_path / "steps-0").read_text().splitlines()]
    assert {life for life, _, _ in steps} == {"0"}


def test_workers_run_on_without_a_master_for_as_long_as_the_grace(jobs, tmp_path, reserved_port):
    address = f"127.0.0.1:{reserved_port}"
    env = {"DLROVER_JOB_TOKEN": "of-this-test", "DLROVER_MASTER_ADDR": address, "ELASTIC_JOB_NAME": "grace"}
    argv = [sys.executable, "-m", "dlrover.cli.main", "master", "--job-name=grace", f"--port={reserved_port}"]
    master = Launched(argv, jobs.env(**env), tmp_path, "master")
    jobs.launched.append(master)
    wait_until(lambda: "serving" in master.err, explain=lambda: master.err)
    options = ("--master-grace=3", "--heartbeat=0.5")  # with each of these an agent looks how long the master is away
    node = jobs.start("dlrover-run", *options, SCRIPTS / "steps.py", tmp_path, **env)
    wait_until(lambda: (tmp_path / "steps-0").exists(), explain=lambda: node.err)
    worker, _ = (tmp_path / "pid-0").read_text().split()
    for pid in (master.pid, *jobs.pids("dlrover.master")):
        kill(pid)
    killed_at = time.monotonic()
    wait_until(lambda: int(worker) not in jobs.processes(), explain=lambda: node.err)
    assert time.monotonic() - killed_at > 3
    assert node.wait() == EXIT_MASTER_LOST, node.err
    assert "limit --master-grace 3 s" in " ".join(node.err.split())
    assert {line.split()[0] for line in (tmp_path / "steps-0").read_text().splitlines()} == {"0"}
    clean = [sys.executable, "-m", "dlrover.cli.main", "clean"]
    subprocess.run(clean, env=jobs.env(), check=True)  # what the killed master could not remove


def num_records(journal: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection:
        newest: int = connection.execute("SELECT max(number) FROM records").fetchone()[0]
    return newest


def num_steps(tmp_path: Path) -> int:
    return (tmp_path / "steps-0").read_text().count("\n")
