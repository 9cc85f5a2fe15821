"""Elastic roles whose entry point is a class: each forked worker makes an object of it, takes calls and makes some, without Ray in its process."""

from __future__ import annotations

import os

from dlrover.unified import Role
from tests.ray.lab import RayLab
from tests.ray.unified.conftest import ROLES, Start
from tests.ray.unified.test_simple_roles import driver, server


def test_workers_made_of_a_class_take_calls_and_come_back_alone(lab: RayLab, start: Start):
    job = start(
        server(count=1),
        Role.elastic("member", f"{ROLES}.Member", nproc=2, cpus=0.2, driver=False, needs=["server"]),
        driver(),
    )
    job.await_stage("RUNNING")
    first = [job.ask("relay", "member", rank, "who", ()) for rank in range(2)]
    assert [(kind, rank, size, has_ray) for kind, (rank, _, size, has_ray) in first] == [
        ("ok", 0, "2", False),
        ("ok", 1, "2", False),
    ]
    assert job.ask("relay", "member", 1, "size", (b"x" * (1 << 20),)) == ("ok", 1 << 20)
    assert job.ask("relay", "member", 0, "ask_server", ()) == ("ok", 3)
    kind, text = job.ask("relay", "member", 0, "absent", ())
    assert (kind, "It has: ask_server, size, who" in text) == ("CallRefused", True)

    # A worker dies: its own master starts it again, and the other roles do not notice.
    before = job.instances()
    os.kill(first[1][1][1], 9)
    kind, (rank, pid, _, _) = job.ask("relay", "member", 1, "who", ())
    assert (kind, rank) == ("ok", 1)
    assert pid != first[1][1][1]
    assert job.instances() == before
    job.let_end()
    assert job.handle.wait(120) == 0, job.handle.report
    lab.await_nothing_left(job.handle.job_uid)
