"""Two nodes whose shards become checkpoints through the master: on request, and after a worker was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import torch

from tests.integration.jobs import SCRIPTS, wait_until

SCRIPT = SCRIPTS / "saving_steps.py"


def test_a_save_on_request_and_a_break_point_of_two_nodes(jobs, tmp_path, reserved_port):
    common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={reserved_port}"]
    nodes = [
        jobs.start("dlrover-run", *common, f"--node-rank={rank}", "--save-at-breakpoint", SCRIPT, tmp_path)
        for rank in (0, 1)
    ]

    def errors() -> str:
        return nodes[0].err + nodes[1].err

    def dlrover(*words: str) -> str:
        argv = [sys.executable, "-m", "dlrover.cli.main", *words]
        return subprocess.run(argv, env=jobs.env(), capture_output=True, text=True, timeout=60, check=True).stdout

    def newest() -> int:
        committed = json.loads(dlrover("status", "--json"))["checkpoints"]["committed"]
        return committed[0]["step"] if committed else -1

    def shards_of(step: int) -> list[dict[str, int]]:
        return [torch.load(tmp_path / "checkpoints" / str(step) / f"rank_{rank}.pt") for rank in (0, 1)]

    def have_saved(step: int) -> bool:
        """In memory, both of them."""
        files = [tmp_path / f"step-{rank}" for rank in (0, 1)]
        return all(file.exists() and int(file.read_text()) >= step for file in files)

    wait_until(lambda: have_saved(0), explain=errors)
    dlrover("save", "--reason", "before the maintenance")
    wait_until(lambda: newest() >= 0, explain=errors)
    on_request = newest()
    assert shards_of(on_request) == [{"step": on_request, "rank": rank} for rank in (0, 1)]

    wait_until(lambda: have_saved(on_request + 1), explain=errors)
    victim = int((tmp_path / "lives-1").read_text().split()[-1])
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: newest() > on_request, explain=errors)
    at_break = newest()
    assert shards_of(at_break) == [{"step": at_break, "rank": rank} for rank in (0, 1)]
    assert (tmp_path / "checkpoints" / "dlrover_latest.txt").read_text() == str(at_break)
    wait_until(lambda: len((tmp_path / "lives-0").read_text().splitlines()) == 2, explain=errors)
    assert "checkpoint: step" in dlrover("status")

    (tmp_path / "stop").touch()
    assert [node.wait() for node in nodes] == [0, 0], errors()
