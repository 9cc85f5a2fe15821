"""Checkpoints in an object store: a real server that speaks S3, on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from tests.integration.jobs import DEADLINE, SCRIPTS, wait_until

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
pytest.importorskip("moto", reason="moto, whose server stands for the store, is not installed")

SCRIPT = SCRIPTS / "flash.py"
BUCKET = "trainings"


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(url, timeout=5).close()
        return True
    return False


class Store(NamedTuple):
    server: subprocess.Popen[bytes]
    environ: dict[str, str]
    """By which clients find it."""

    def stop(self) -> None:
        self.server.kill()
        self.server.wait()


@pytest.fixture
def store(tmp_path, monkeypatch, reserved_port) -> Iterator[Store]:
    url = f"http://127.0.0.1:{reserved_port}"
    environ = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_ENDPOINT_URL": url,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with (tmp_path / "store.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(reserved_port)], stdout=log, stderr=log
        )
    try:
        wait_until(lambda: server.poll() is not None or answers(f"{url}/moto-api/"))
        assert server.poll() is None, (tmp_path / "store.log").read_text()
        yield Store(server, environ)
    finally:
        server.kill()
        server.wait()


def test_a_job_saves_to_an_object_store_and_the_next_one_goes_on_from_there(jobs, tmp_path, store):
    files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    files.mkdir(BUCKET)
    url = f"s3://{BUCKET}/run-7"
    saves = ["--disk-every", "5", "--checkpoints", url]
    job = jobs.run("--nproc-per-node=2", SCRIPT, tmp_path, "12", *saves, "--kill-at", "7", **store.environ)
    assert job.process.returncode == 0, job.err
    assert "was not" not in job.err, job.err
    assert files.cat_file(f"{BUCKET}/run-7/dlrover_latest.txt") == b"10"
    with files.open(f"{BUCKET}/run-7/10/rank_0.pt", "rb") as file:
        assert torch.load(file)["step"] == 10  # a plain file of torch's

    checked = subprocess.run(
        [sys.executable, "-m", "dlrover.cli.main", "checkpoint", "verify", url],
        env={**os.environ, **store.environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr

    following = jobs.run(SCRIPT, tmp_path, "14", *saves, **store.environ)
    assert following.process.returncode == 0, following.err
    assert [int(line.split()[0]) for line in (tmp_path / "lives-0").read_text().splitlines()] == [0, 8, 11]


def test_a_store_that_goes_away_costs_checkpoints_but_no_training(jobs, tmp_path, store):
    saves = ["--disk-every", "5", "--checkpoints", f"s3://{BUCKET}/run-8", "--hold-at", "3"]
    files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    files.mkdir(BUCKET)
    env = {**store.environ, "AWS_MAX_ATTEMPTS": "1", "DLROVER_LOG_LEVEL": "INFO"}
    job = jobs.start("dlrover-run", SCRIPT, tmp_path, "12", *saves, **env)
    # By the agent's word: the store may have the last file of a step when the answer is still on its way.
    wait_until(lambda: "step 0 was written to " in job.err or job.process.poll() is not None, explain=lambda: job.err)
    store.stop()
    (tmp_path / "go").touch()
    job.process.wait(DEADLINE)
    assert job.process.returncode == 0, job.err
    errors = [line for line in job.err.splitlines() if " ERROR " in line]
    assert len(errors) == 1, job.err
    assert "was not written" in errors[0]
    assert (tmp_path / "weights-0.pt").exists()
