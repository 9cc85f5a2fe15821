"""Elastic roles whose entry point is a class. Forked workers take calls and make some without Ray in their processes; ranks may be actors instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import ray

from dlrover.cli.ray.messages import ACCOUNT
from dlrover.unified import Role
from tests.ray.lab import RayLab, until
from tests.ray.unified.conftest import ROLES, RunningEnsemble, Start
from tests.ray.unified.test_simple_roles import driver, server


def test_workers_made_of_a_class_take_calls_and_come_back_alone(lab: RayLab, start: Start):
    job = start(
        server(count=1),
        Role.elastic(
            "member",
            f"{ROLES}.Member",
            nproc=2,
            cpus=0.2,
            driver=False,
            needs=["server"],
            options=["--enable-dashboard", "--dashboard-port=0"],
        ),
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

    # An instance of another role dies: the page of this one shows it.
    job.kill("server-0.1")
    until(lambda: server_on_page(job) == ("1 of 1", 1, True), lambda: f"{server_on_page(job)}\n{job.explain()}")
    shown = dlrover("ray", "status", job.handle.name, "--address", lab.address)
    assert shown.startswith(f"{job.handle.name}: RUNNING, 0 restarts of the whole job.")
    [line] = [line for line in shown.splitlines() if line.startswith("server ")]
    assert line.split()[:8] == ["server", "simple", "1", "of", "1", "1", "running", "1"], shown
    top = dlrover("top", job.handle.name, "--ray", lab.address)
    assert top.splitlines()[1:] == shown.splitlines()[1:], "no address of a master is needed to see all roles"
    link = dlrover("dashboard", f"{job.handle.name}.member", "--ray", lab.address)
    assert link.startswith("http://127.0.0.1:"), link
    job.let_end()
    assert job.handle.wait(120) == 0, job.handle.report
    lab.await_nothing_left(job.handle.job_uid)


def test_ranks_in_actors_train_together_and_restart_together(lab: RayLab, start: Start):
    job = start(Role.elastic("summing", f"{ROLES}.Summing", nproc=2, cpus=0.4).in_actor())
    for life in (1, 2):
        for rank in range(2):
            job.await_instance(f"summing-{rank}", life)
            until(lambda: job.notes(f"summing-{rank}") == life * [f"2 {rank} True"], job.explain)  # noqa: B023
        if life == 1:
            job.kill("summing-0.1")
    job.let_end()
    assert job.handle.wait(120) == 0, job.handle.report
    lab.await_nothing_left(job.handle.job_uid)


def test_local_rank_is_the_number_of_a_ranks_own_device(lab: RayLab, start: Start):
    """In actors as below an agent. Ray itself shows each rank one device, as number 0."""
    machine = lab.add_machine(num_cpus=1, num_gpus=2)
    try:
        job = start(Role.elastic("ranks", f"{ROLES}.devices", nproc=2, cpus=0.2, gpus=2).in_actor())
        assert job.handle.wait(240) == 0, job.handle.report
        notes = [job.notes(f"ranks-{rank}") for rank in range(2)]
        assert sorted(notes) == [["0 0 of 2"], ["1 1 of 2"]]
    finally:
        lab.remove_machine(machine)


def dlrover(*words: str) -> str:
    argv = [sys.executable, "-m", "dlrover.cli.main", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout


def server_on_page(job: RunningEnsemble) -> tuple[str, int, bool] | None:
    """As the page of the elastic role has it: instances, restarts, whether a failure is told. None: it knows of no roles yet."""
    host = ray.get_actor("host", namespace=job.account().hosts["member"])
    account = ACCOUNT.decode(ray.get(host.describe.remote()))
    address = json.loads((Path(account.socket).parent / "master.ready").read_text())["dashboard"]
    request = urllib.request.Request(f"{address}api/v1/view", headers={"Authorization": f"Bearer {account.token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        roles = json.load(answer)["sections"].get("roles")
    if roles is None:
        return None
    [server] = [role for role in roles[""]["roles"] if role["name"] == "server"]
    assert roles[""]["own_role"] == "member"
    return f"{server['num_ready']} of {server['num_wanted']}", server["num_restarts"], bool(server["failure"])
