"""Roles of plain actors on a real cluster: their start and end, their deaths, and the calls between them."""

from __future__ import annotations

import os
import time

import pytest

from dlrover.protocol.errors import ConfigError
from dlrover.unified import Ensemble, Role
from tests.ray.jobs import run_dlrover
from tests.ray.lab import RayLab, until
from tests.ray.unified.conftest import ROLES, Start

SOON = 20.0
"""Seconds: ten times what a call to a dead role may take. A call that only waits raises `CallTimeout` after 60."""


def driver(**more: object) -> Role:
    return Role.simple("driver", f"{ROLES}.Driver", cpus=0.1, driver=True, needs=["server"], **more)


def server(count: int = 2, **more: object) -> Role:
    return Role.simple("server", f"{ROLES}.Server", cpus=0.1, count=count, max_restarts=100, restart_pause=0.0, **more)


def test_calls_survive_what_they_promise(lab: RayLab, start: Start):
    job = start(server(), driver())
    job.await_stage("RUNNING")

    # All, one, a batch; what is not there is refused, what raises is told.
    assert [answer[::2] for answer in job.ask("all", "server")] == [(3, 1), (3, 1)]
    assert job.ask("batch", "server", 5) == [0, 2, 4, 6, 8]
    assert job.ask("relay", "server", 0, "absent", ())[0] == "CallRefused"
    kind, text = job.ask("relay", "server", 0, "fail", ())
    assert kind == "CallFailed"
    assert "fail of server-0 raised ValueError: no such answer" in text

    # A plain call whose callee dies is lost, and soon; the next one waits for the next life.
    began = time.monotonic()
    kind, text = job.ask("relay", "server", 0, "die", ())
    assert (kind, "server-0 (incarnation 1) ended" in text) == ("InstanceLost", True)
    assert time.monotonic() - began < SOON
    kind, (total, _, incarnation) = job.ask("relay", "server", 0, "add", (2, 3))
    assert (kind, total, incarnation) == ("ok", 5, 2)

    # Only what was killed is another process.
    before = job.account().pids
    job.kill("server-1.1")
    job.await_instance("server-1", 2)
    after = job.account().pids
    assert before["server-0.2"] == after["server-0.2"]
    assert before["driver-0.1"] == after["driver-0.1"]

    # The conductor dies: nothing else changes.
    restarts = job.account().status.num_job_restarts
    job.kill("conductor")
    until(lambda: job.account().epoch == 2, job.explain)
    again = job.account()
    assert again.pids == after
    assert (again.status.stage, again.status.num_job_restarts) == ("RUNNING", restarts)
    job.kill(f"server-0.{again.status.roles[0].instances[0].incarnation}")
    job.await_instance("server-0", 3)

    job.let_end()
    assert job.handle.wait(120) == 0
    lab.await_nothing_left(job.handle.job_uid)


@pytest.mark.parametrize("num_kills", [6, pytest.param(50, marks=[pytest.mark.chaos, pytest.mark.timeout(1200)])])
def test_a_plain_call_never_runs_twice_and_a_repeatable_one_always_ends(start: Start, num_kills: int):
    """Half of the kills by the call itself, half from outside."""
    job = start(server(count=1), driver())
    job.await_stage("RUNNING")
    for number in range(num_kills // 2):
        assert job.ask("relay", "server", 0, "die", ())[0] == "InstanceLost"
        kind, answer = job.ask("relay", "server", 0, "add", (number, 1))
        assert (kind, answer[0]) == ("ok", number + 1)
        assert job.ask("relay", "server", 0, "once", (str(number),))[0] == "ok"
        os.kill(answer[1], 9)
        kind, answer = job.ask("relay", "server", 0, "add", (number, 2))
        assert (kind, answer[0]) == ("ok", number + 2)
    marks = [line for line in job.notes("server-0") if line.startswith("once")]
    assert marks == [f"once {number}" for number in range(num_kills // 2)]


def test_two_jobs_with_the_same_roles_do_not_meet_and_a_name_is_taken_once(lab: RayLab, start: Start):
    first, second = start(server(1), driver(), name="one"), start(server(1), driver(), name="two")
    for job in (first, second):
        job.await_stage("RUNNING")
    pids = [job.ask("relay", "server", 0, "add", (1, 1))[1][1] for job in (first, second)]
    assert pids == [job.account().pids["server-0.1"] for job in (first, second)]
    with pytest.raises(ConfigError, match="A job one runs in this cluster already"):
        start(server(1), driver(), name="one")
    first.let_end()
    assert first.handle.wait(120) == 0
    assert second.ask("relay", "server", 0, "add", (1, 1))[0] == "ok", "the other job goes on"
    assert second.handle.stop("by a user", 7)
    assert second.handle.wait(120) == 7
    lab.await_nothing_left(first.handle.job_uid, second.handle.job_uid)


def test_a_job_that_finds_no_room_in_its_time_says_what_has_none(lab: RayLab, start: Start):
    first = start(Role.simple("wide", f"{ROLES}.Driver", cpus=2, count=2, driver=True), name="first")
    first.await_stage("RUNNING")
    late = start(Role.simple("late", f"{ROLES}.Driver", cpus=1, driver=True), name="late", placement_timeout=1.0)
    assert late.handle.wait(120) == 22
    assert late.handle.report == (
        "no room for all its instances within 1 s. There is no room yet for late-0: it asks for 1 CPU, and the most that a machine has free is 0 CPU."
    )

    # Commands know jobs of several roles, too.
    shown = run_dlrover("ray", "status", "first", "--address", lab.address)
    assert "first: RUNNING, 0 restarts of the whole job. " in shown.stdout, shown
    [line] = [line for line in shown.stdout.splitlines() if line.startswith("wide ")]
    assert line.split() == ["wide", "simple", "2", "of", "2", "2", "running", "0"], shown
    assert "first" in run_dlrover("ray", "list", "--address", lab.address).stdout
    stopped = run_dlrover("ray", "stop", "first", "--address", lab.address)
    assert stopped.returncode == 0, stopped
    assert first.handle.wait(120) == 143
    lab.await_nothing_left(first.handle.job_uid, late.handle.job_uid)


def test_an_instance_that_does_not_end_is_killed_when_its_time_is_up(lab: RayLab, start: Start):
    """Row 5 of section 19: not only asked, and none stays."""
    job = start(Role.simple("stuck", f"{ROLES}.Stuck", cpus=0.1, driver=True), stop_grace=1.0)
    until(lambda: job.notes("stuck-0") == ["runs"], job.explain)
    job.account()  # the process is noted, and must not be left
    assert job.handle.stop("by a person", 7)
    assert job.handle.wait(120) == 7
    lab.await_nothing_left(job.handle.job_uid)


def test_a_users_mistake_ends_the_job_with_its_words(lab: RayLab, start: Start):
    job = start(Role.simple("worker", f"{ROLES}.fails", cpus=0.1, driver=True), max_job_restarts=1)
    assert job.handle.wait(120) == 1
    assert job.handle.report == "worker-0 failed: ValueError: a user's mistake"
    lab.await_nothing_left(job.handle.job_uid)


def test_a_call_to_a_role_that_ended_raises_soon(start: Start):
    job = start(
        Role.simple("short", f"{ROLES}.ends", cpus=0.1, driver=False),
        Role.simple("server", f"{ROLES}.Server", cpus=0.1),
        driver(),
    )
    job.await_stage("RUNNING")
    job.await_instance("short-0", 1, "succeeded")
    os.kill(job.account().pids["short-0.1"], 9)
    job.await_instance("short-0", 1, "finished")
    began = time.monotonic()
    kind, text = job.ask("relay", "short", 0, "anything", ())
    assert (kind, "it has ended" in text) == ("RoleGone", True)
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize(
    ("roles", "more", "why"),
    [
        ([Role.simple("a", f"{ROLES}.Driver", driver=True, cpus=64)], {}, "No machine of this cluster is large enough"),
        ([Role.simple("a", f"{ROLES}.Driver", driver=True, count=9)], {}, "asks for 9 CPU in all"),
        ([Role.simple("a", f"{ROLES}.Absent", driver=True)], {}, "does not define it"),
        ([Role.simple("a", "no.such.module.Thing", driver=True)], {}, "cannot be found here"),
    ],
)
def test_what_can_never_run_is_refused_and_nothing_starts(
    lab: RayLab, roles: list[Role], more: dict[str, object], why: str
):
    with pytest.raises(ConfigError, match=why):
        Ensemble("bad", roles=roles, **more).submit()
    assert lab.leftovers() == []
