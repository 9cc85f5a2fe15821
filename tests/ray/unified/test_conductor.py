"""SIGKILL to the conductor in each stage of a job: nothing restarts for that, no count is lost, and what waits goes on to wait."""

from __future__ import annotations

import os
import signal

import pytest
from msgspec.structs import replace

from dlrover.unified import Role
from dlrover.unified.shell.messages import EnsembleAccount
from tests.ray.lab import RayLab, until
from tests.ray.unified.conftest import ROLES, RunningEnsemble, Start
from tests.ray.unified.test_simple_roles import server


def kill_conductor(job: RunningEnsemble, stage: str) -> EnsembleAccount:
    """In this stage, which lasts. What the next conductor says: it knows as much, and each process is the same."""
    before = job.await_stage(stage)
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: job.account().epoch == before.epoch + 1, job.explain)
    after = job.account()
    assert after.status == replace(before.status, verdict=after.status.verdict), "a count, a life or the stage differs"
    assert after.pids == before.pids
    return after


@pytest.mark.timeout(600)  # four lives of a conductor, and two of each instance
def test_a_conductor_that_is_killed_in_any_stage_changes_nothing(lab: RayLab, start: Start):
    gate = Role.simple("gate", f"{ROLES}.Gate", cpus=0.1, driver=True)
    job = start(server(count=1), gate, stop_grace=1000.0)

    # INIT: the gate is being made. The server was lost once, so there is something to count.
    until(lambda: job.notes("gate-0") == ["comes 1"], job.explain)
    job.await_instance("server-0", 1, "ready")
    job.kill("server-0.1")
    job.await_instance("server-0", 2, "ready")
    found = kill_conductor(job, "INIT")
    assert [each.instances[0].num_restarts for each in found.status.roles] == [1, 0]

    # RUNNING: the gate waits in run().
    (job.folder / "go-1").touch()
    job.await_stage("RUNNING")
    until(lambda: job.notes("gate-0") == ["comes 1", "runs"], job.explain)
    kill_conductor(job, "RUNNING")

    # READY: the whole job was restarted, and the gate is being made again.
    assert job.handle.restart("by a person")
    job.await_instance("server-0", 3, "ready")
    until(lambda: job.notes("gate-0")[-1] == "comes 2", job.explain)
    found = kill_conductor(job, "READY")
    assert (found.status.num_job_restarts, found.status.roles[0].instances[0].num_restarts) == (1, 2)
    (job.folder / "go-2").touch()
    job.await_stage("RUNNING")
    until(lambda: job.notes("gate-0") == ["comes 1", "runs", "comes 2", "runs"], job.explain)

    # STOPPING: the gate was asked to end and takes its time.
    assert job.handle.stop("by a person", 7)
    until(lambda: list(job.account().pids) == ["gate-0.2"], job.explain)
    found = kill_conductor(job, "STOPPING")
    assert (found.status.exit_code, found.status.num_job_restarts) == (7, 1)
    (job.folder / "leave").touch()
    assert job.handle.wait(300) == 7
    assert job.handle.report == "by a person"
    assert job.notes("gate-0") == ["comes 1", "runs", "comes 2", "runs"], "no third life"
    lab.await_nothing_left(job.handle.job_uid)


def test_queues_and_bundles_outlive_the_conductor(lab: RayLab, start: Start):
    """Row 11 of section 19 of spec 11: who waits for a queue or for an item goes on to wait, and an instance comes back into its bundle."""
    owner = Role.simple("owner", f"{ROLES}.Owner", cpus=0.1, restart_pause=0.0)
    job = start(owner, Role.simple("user", f"{ROLES}.User", cpus=0.1, driver=True))
    until(lambda: job.notes("user-0") == ["looks"], job.explain)
    kill_conductor(job, "RUNNING")
    (job.folder / "own").touch()
    until(lambda: job.notes("user-0") == ["looks", "asks"], job.explain)
    kill_conductor(job, "RUNNING")
    (job.folder / "put-1").touch()
    until(lambda: job.notes("user-0") == ["looks", "asks", "has [1]"], job.explain)
    job.kill("owner-0.1")
    job.await_instance("owner-0", 2)
    until(lambda: len(job.notes("owner-0")) == 2, job.explain)
    [first, second] = job.notes("owner-0")
    assert first == second, "both lives were in the placement group of the job"
    job.let_end()
    assert job.handle.wait(120) == 0, job.handle.report
    lab.await_nothing_left(job.handle.job_uid)
