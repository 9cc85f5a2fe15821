"""A stream of real actors whose producers die between a put and a get: every key once, and no error of Ray's reaches the user."""

from __future__ import annotations

import contextlib
import os
import random
import signal

import pytest

from dlrover.unified import Role
from tests.ray.lab import RayLab, until
from tests.ray.unified.conftest import ROLES, Start

BATCH = 4


@pytest.mark.parametrize("num_kills", [6, pytest.param(50, marks=[pytest.mark.chaos, pytest.mark.timeout(1200)])])
def test_every_key_is_used_once_whoever_is_killed(lab: RayLab, start: Start, num_kills: int):
    job = start(
        Role.stream("samples", batch=BATCH, lease=5.0, restart_pause=0.0),
        Role.simple("feeder", f"{ROLES}.Feeder", count=2, cpus=0.1, max_restarts=100, restart_pause=0.0),
        Role.simple("consumer", f"{ROLES}.Consumer", cpus=0.1, driver=True, needs=["samples"]),
        config={"steps": 10_000},
    )
    job.await_stage("RUNNING")
    chance = random.Random(1)
    for kill in range(num_kills):
        done = len(job.notes("consumer-0"))
        role = "samples" if kill % 5 == 4 else "feeder"
        pids = until(
            lambda role=role: [p for name, p in job.account().pids.items() if name.startswith(role)], job.explain
        )
        with contextlib.suppress(ProcessLookupError):  # it ended since
            os.kill(chance.choice(pids), signal.SIGKILL)
        until(lambda done=done: len(job.notes("consumer-0")) >= done + 2, job.explain)
    (job.folder / "stop").touch()
    assert job.handle.wait(120) == 0, job.handle.report
    lines = job.notes("consumer-0")
    words = [word.split(":") for line in lines for word in line.split()]
    assert [int(key) for key, _ in words] == list(range(len(lines) * BATCH)), "each key once, in order"
    assert all(int(value) == int(key) ** 2 for key, value in words)
    lab.await_nothing_left(job.handle.job_uid)
