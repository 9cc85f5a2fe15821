"""What a person at the console of a job reads when something is lost, and when Ctrl-C is pressed."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.integration.jobs import DEADLINE, LAUNCHERS, SCRIPTS, JobFactory, wait_until
from tests.small_disk import fill

SCRIPT = SCRIPTS / "lost_peer.py"


def run_in_terminal(jobs: JobFactory, *args: str | Path) -> tuple[int, str]:
    """Both streams are a terminal, as when a person starts the job."""
    controller, terminal = pty.openpty()
    argv = [sys.executable, *LAUNCHERS["dlrover-run"], *map(str, args)]
    job = subprocess.Popen(
        argv, env=jobs.env(), stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(controller, 65536):
                shown.extend(data)
        except OSError:
            return  # the last one has closed it

    reader = threading.Thread(target=read)
    reader.start()
    try:
        code = job.wait(DEADLINE)
    finally:
        job.kill()
        job.wait()
        reader.join()
        os.close(controller)
    return code, shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("console", ["pipe", "terminal"])
def test_a_lost_worker_is_one_paragraph_and_its_consequences_are_events(
    jobs: JobFactory, tmp_path: Path, console: str
) -> None:
    argv = ["--standalone", "--nproc-per-node=3", "--journal", tmp_path / "journal", SCRIPT, tmp_path]
    if console == "terminal":
        code, shown = run_in_terminal(jobs, *argv)
    else:
        job = jobs.run(*argv)
        code, shown = job.process.returncode, job.err + job.out
    assert code == 0, shown
    assert all((tmp_path / f"told-{rank}").exists() for rank in (0, 2)), "they have written their tracebacks"
    assert "Traceback" not in shown
    assert "[rank" not in shown
    assert shown.count("global rank") == 1
    assert shown.count("SIGKILL") == 1
    # In one paragraph, or in two where the machine is so busy that a restart takes long.
    assert re.search(
        r"dlrover-run: Round 1: global rank 1 on node rank 0 \(localhost\) failed at step 4: killed by signal 9 \(SIGKILL\)\. "
        r"((.*\n)*dlrover-run: )?All 3 workers were started again.*(\n(.*\n)*dlrover-run: | )Training went on with step 1, \d+\.\d s after the workers stopped\.\n",
        shown,
    ), shown
    (journal,) = (tmp_path / "journal").glob("*.sqlite")
    argv = [sys.executable, "-m", "dlrover.cli.main", "events", str(journal), "--json"]
    told = subprocess.run(argv, env=jobs.env(), capture_output=True, text=True, timeout=DEADLINE, check=True).stdout
    events = [json.loads(line) for line in told.splitlines()]
    failed = [event["rank"] for event in events if event["name"] == "worker-failed"]
    assert len(failed) == len(set(failed)), "each once"
    assert 1 in failed


def test_ctrl_c_is_told_in_one_line_and_the_script_clears_up(jobs: JobFactory, tmp_path: Path) -> None:
    job = jobs.start(
        "dlrover-run", "--standalone", "--job-name=my-job", "--nproc-per-node=2", SCRIPT, tmp_path, "interrupt"
    )
    wait_until(lambda: all((tmp_path / f"steps-{rank}").exists() for rank in (0, 1)), DEADLINE, lambda: job.err)
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does it: to the launcher and to all who share its group
    assert job.wait() == 130
    assert sorted(job.out.splitlines()) == ["rank 0 clears up", "rank 1 clears up"]
    (line,) = job.err.splitlines()
    assert line.startswith(
        "dlrover-run: job my-job was interrupted. Its workers have 30 s to end (--shutdown-timeout);"
    )


RESTARTED = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    sys.exit()
(folder / "started").touch()
while not (folder / "fail").exists():
    time.sleep(0.05)
sys.exit(3)
"""


def dlrover(jobs: JobFactory, *args: str) -> str:
    argv = [sys.executable, "-m", "dlrover.cli.main", *args]
    done = subprocess.run(
        argv,
        env=jobs.env(COLUMNS="400", MASTER_CLIENT_TIMEOUT="3"),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_full_disk_below_the_journal_is_told_and_not_what_the_job_did_before(
    jobs: JobFactory, tmp_path: Path, small_disk: Path
) -> None:
    (tmp_path / "restarted.py").write_text(RESTARTED)
    job = jobs.start(
        "dlrover-run", "--standalone", "--job-name=full", "--journal", small_disk, tmp_path / "restarted.py", tmp_path
    )
    wait_until((tmp_path / "started").exists, DEADLINE, lambda: job.err)
    filler = fill(small_disk)

    def is_blocked() -> bool:
        """What the journal has room for passes; then nothing more does."""
        dlrover(jobs, "save", "full", "--reason", "x" * 1000)
        said = dlrover(jobs, "status", "full")
        return "job full: blocked (running), round 1" in said and f"\nbecause: {cause}" in said

    cause = f"The master cannot write its journal {small_disk}/"
    wait_until(is_blocked, DEADLINE)
    assert json.loads(dlrover(jobs, "status", "full", "--json"))["blocked"].startswith(cause)
    (tmp_path / "fail").touch()
    wait_until(lambda: f"dlrover-run: {cause}" in job.err, DEADLINE, lambda: job.err)
    filler.unlink()
    assert job.wait() == 0, job.err
    assert job.err.count("cannot write its journal") == 1
    assert "dlrover-run: The master can write its journal again, and the job continues.\n" in job.err
