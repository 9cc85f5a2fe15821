"""A stream of real actors whose producers die between a put and a get: every key once, and no error of Ray's reaches the user."""

from __future__ import annotations

import os
import random

from dlrover.unified import Role
from tests.ray.lab import RayLab, until
from tests.ray.unified.conftest import ROLES, Start

STEPS = 150
BATCH = 4
KILLS = 50


def test_every_key_is_used_once_whoever_is_killed(lab: RayLab, start: Start):
    job = start(
        Role.stream("samples", batch=BATCH, lease=5.0),
        Role.simple("feeder", f"{ROLES}.Feeder", count=2, cpus=0.1, max_restarts=100),
        Role.simple("consumer", f"{ROLES}.Consumer", cpus=0.1, driver=True, needs=["samples"]),
        config={"steps": STEPS},
    )
    job.await_stage("RUNNING")
    chance, kills = random.Random(1), 0
    while kills < KILLS and job.account().status.stage == "RUNNING":
        done = len(job.notes("consumer-0"))
        pids = {name: pid for name, pid in job.account().pids.items() if name.startswith(("feeder", "samples"))}
        feeders = [name for name in pids if name.startswith("feeder")]
        victim = chance.choice(feeders) if feeders else ""
        if kills % 10 == 9:
            victim = next((name for name in pids if name.startswith("samples")), victim)
        if not victim:
            continue
        os.kill(pids[victim], 9)
        kills += 1
        until(lambda d=done: len(job.notes("consumer-0")) > d or job.account().status.stage != "RUNNING", job.explain)
    assert job.handle.wait(300) == 0, job.handle.report
    assert kills >= KILLS // 2, "the job was over too soon to tell"
    lines = job.notes("consumer-0")
    keys = [int(word.partition(":")[0]) for line in lines for word in line.split()]
    assert keys == list(range(STEPS * BATCH))
    assert all(
        int(word.partition(":")[2]) == int(word.partition(":")[0]) ** 2 for line in lines for word in line.split()
    )
    lab.await_nothing_left(job.handle.job_uid)
