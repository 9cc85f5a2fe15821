"""Machines that die, fall silent, join, leave and are drained, under a job that trains."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dlrover.protocol.messages.fleet import ScaleJob
from tests.ray.jobs import SCRIPTS, TRAINED_STEPS, RunningRayJob, actor_above, below, living, raylet_above
from tests.ray.lab import RECOMMENDED, RayLab, until

StartJob = Callable[..., RunningRayJob]
READ_SHARDS = str(SCRIPTS / "read_shards.py")


@pytest.fixture
def start(own_lab: RayLab, tmp_path: Path) -> Iterator[StartJob]:
    jobs = []

    def start(*options: str, **more: object) -> RunningRayJob:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        jobs.append(RunningRayJob(own_lab, folder, *options, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_a_job_grows_shrinks_and_leaves_a_drained_machine(own_lab: RayLab, start: StartJob):
    lab = own_lab
    for _ in range(2):
        lab.add_machine()
    job = start("--nodes", "2:4")
    job.await_steps(world_size=2)
    third = lab.add_machine()
    job.await_steps(world_size=3)
    assert lab.raylet(third) in {raylet_above(pid) for pid in job.workers().values()}
    fourth = lab.add_machine()
    job.await_steps(world_size=4)
    assert lab.raylet(fourth) in {raylet_above(pid) for pid in job.workers().values()}

    # A raylet dies with training workers below it: the job shrinks, and nothing of that node lives on.
    victim = next(pid for pid in job.workers().values() if raylet_above(pid) == lab.raylet(third))
    gone = [actor_above(victim), *below(actor_above(victim).pid)]
    os.kill(lab.raylet(third), signal.SIGKILL)
    until(lambda: not living(gone), lambda: f"still there: {living(gone)}", deadline=10 * 6.0)
    job.await_steps(world_size=3)
    assert {actor_above(pid).pid for pid in job.workers().values()}.isdisjoint({gone[0].pid})

    # A machine is drained: its node saves and leaves before the deadline.
    drained = next(pid for pid in job.workers().values() if raylet_above(pid) == lab.raylet(fourth))
    processes = below(actor_above(drained).pid)
    lab.drain(fourth, seconds=120)
    job.await_steps(world_size=2)
    until(lambda: not living(processes), lambda: f"still there: {living(processes)}", deadline=100.0)
    job.let_end()
    assert job.wait() == 0, job.output()
    lab.await_nothing_left(TRAINED_STEPS)


def test_a_drained_machine_saves_what_no_other_has(own_lab: RayLab, start: StartJob):
    """The model is in the memory of the first rank's node alone, and no save to a disk was asked for."""
    lab = own_lab
    machines = [lab.add_machine() for _ in range(2)]
    job = start("--nodes", "1:2", script=READ_SHARDS, args=("3000", "--pace", "0.1"))
    until(lambda: job.status().world_size == 2, job.output)
    until(lambda: any((node.step or 0) > 10 for node in job.status().nodes), job.output)
    [[_, pid]] = lives_of(job, 0)[-1:]
    [machine] = [each for each in machines if lab.raylet(each) == raylet_above(pid)]
    processes = below(actor_above(pid).pid)
    lab.drain(machine, seconds=120)
    until(lambda: not living(processes), lambda: f"still there: {living(processes)}", deadline=100.0)
    until(lambda: lives_of(job, 0)[-1][1] != pid, job.output)
    assert lives_of(job, 0)[-1][0] > 10, "the next life goes on from what the node saved when it left"
    assert job.wait() == 0, job.output()
    model = torch.load(job.folder / "model.pt")["model"]
    assert model.eq(1).all(), "each record is consumed exactly once"
    lab.await_nothing_left(READ_SHARDS)


def lives_of(job: RunningRayJob, rank: int) -> list[tuple[int, int]]:
    """First step and pid of each life of a rank."""
    lines = (job.folder / f"lives-{rank}").read_text().splitlines()
    return [(int(step), int(pid)) for step, pid in (line.split() for line in lines)]


def test_the_machine_of_the_host_dies_and_no_worker_notices(own_lab: RayLab, start: StartJob):
    lab = own_lab
    home = lab.add_machine(num_cpus=0)
    for _ in range(2):
        lab.add_machine()
    job = start("--nodes", "2", "--host-machine", home.node_id)
    kill_the_home_of_the_host(lab, job, home)


def test_the_next_host_continues_a_journal_that_all_machines_see(own_lab: RayLab, start: StartJob, tmp_path: Path):
    lab = own_lab
    home = lab.add_machine(num_cpus=0)
    for _ in range(2):
        lab.add_machine()
    journal = tmp_path / "journal"
    journal.mkdir()
    job = start("--nodes", "2", "--host-machine", home.node_id, launch=(f"--journal={journal}",))
    job.await_steps(world_size=2)
    job.ask(ScaleJob(min_nodes=1, max_nodes=2))
    before = job.status()
    assert (before.min_nodes, before.limits_version) == (1, 1)

    def after() -> None:
        status = job.status()
        assert (status.min_nodes, status.limits_version) == (1, 1), "only the journal knows of it"
        assert status.master_epoch > before.master_epoch

    kill_the_home_of_the_host(lab, job, home, then=after)


@pytest.mark.chaos
def test_the_machine_of_the_host_dies_with_the_settings_that_we_recommend(ray_dir: str, tmp_path: Path):
    """Not for a busy machine: Ray would take a slow raylet for a dead one."""
    lab = RayLab(ray_dir, settings=RECOMMENDED)
    job = None
    try:
        home = lab.add_machine(num_cpus=0)
        for _ in range(2):
            lab.add_machine()
        job = RunningRayJob(lab, tmp_path, "--nodes", "2", "--host-machine", home.node_id)
        kill_the_home_of_the_host(lab, job, home)
    finally:
        if job is not None:
            job.close()
        lab.close()


def kill_the_home_of_the_host(
    lab: RayLab, job: RunningRayJob, home: object, then: Callable[[], None] = lambda: None
) -> None:
    job.await_steps(world_size=2)
    account, workers = job.account(), job.workers()
    assert raylet_above(account.pid) == lab.raylet(home), f"host {account.host_epoch} is not where it shall be"
    os.kill(lab.raylet(home), signal.SIGKILL)
    until(lambda: job.account().host_epoch > account.host_epoch, job.output, deadline=10 * 25.0)
    assert raylet_above(job.account().pid) != lab.raylet(home)
    until(lambda: job.status().world_size == 2, job.output)
    job.await_steps(world_size=2)
    assert job.workers() == workers
    then()
    job.let_end()
    assert job.wait() == 0, job.output()
    lab.await_nothing_left(TRAINED_STEPS)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_machine_that_is_silent_for_90_s_and_comes_back_changes_nothing(own_lab: RayLab, start: StartJob):
    """Ray calls its node dead and starts another; the old one lives on. Each record is consumed once all the same."""
    lab = own_lab
    for _ in range(3):
        lab.add_machine()
    size = 6000
    job = start("--nodes", "2", script=READ_SHARDS, args=(str(size), "--pace", "0.2"))
    until(lambda: (job.folder / "lives-1").exists(), job.output)
    _, pid = (job.folder / "lives-1").read_text().split()[-2:]
    raylet = raylet_above(int(pid))
    gone = [actor_above(int(pid)), *below(actor_above(int(pid)).pid)]
    os.kill(raylet, signal.SIGSTOP)
    try:
        silent_until = time.monotonic() + 90
        until(lambda: time.monotonic() > silent_until, deadline=100)
    finally:
        os.kill(raylet, signal.SIGCONT)
    until(lambda: not living(gone), lambda: f"still there: {living(gone)}\n{job.output()}")
    assert job.wait(600) == 0, job.output()
    model = torch.load(job.folder / "model.pt")["model"]
    assert model.eq(1).all(), "each record is consumed exactly once"
    for path in job.folder.glob("rounds-*"):
        rounds = path.read_text().split()
        assert len(rounds) == len(set(rounds)), f"{path.name}: two workers of one rank in one world: {rounds}"
    lab.await_nothing_left(READ_SHARDS)
