"""What a job in a Ray cluster survives: its workers, its nodes, its machines, its host and its driver."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from dlrover.platforms.ray.store import Registry
from tests.ray.jobs import (
    TRAINED_STEPS,
    RunningRayJob,
    actor_above,
    below,
    has_ray,
    living,
    raylet_above,
    run_dlrover,
)
from tests.ray.lab import RayLab, until

StartJob = Callable[..., RunningRayJob]
PROGRAM = str(Path(__file__).parents[2] / "examples" / "kubernetes" / "train.py")


@pytest.fixture
def start(lab: RayLab, tmp_path: Path) -> Iterator[StartJob]:
    jobs = []

    def start(*options: str, **more: object) -> RunningRayJob:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        jobs.append(RunningRayJob(lab, folder, *options, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_a_job_outlives_its_worker_its_node_and_its_host(lab: RayLab, start: StartJob, tmp_path: Path):
    job = start("--nodes", "2", "--standby", "1", "--job-name", "survivor")
    job.await_steps(world_size=2)
    account = job.account()

    # Nothing below an actor knows Ray, nor does the master.
    nodes = [actor_above(pid) for pid in job.workers().values()]
    assert len({node.pid for node in nodes}) == 2
    ours = [account.master_pid, *(process.pid for node in nodes for process in below(node.pid))]
    assert len(ours) >= 1 + 2 * 4, "master, and launcher, agent, zygote and worker of two nodes"
    assert [pid for pid in ours if has_ray(pid)] == []
    assert has_ray(account.pid)
    there = [
        psutil.Process(pid) for pid in (account.pid, *(node.pid for node in nodes), *ours) if psutil.pid_exists(pid)
    ]
    seen = {int(line.partition(":")[0]) for line in lab.processes()}
    unseen = [process for process in living(there) if process.pid not in seen]
    assert unseen == [], "the search for what is left finds what is there"

    # A worker dies: the next round has the same nodes.
    lost = job.workers()[1]
    newest, at = job.newest_step(), time.time()
    os.kill(lost, signal.SIGKILL)
    await_successor(job, lost)
    assert first_new_step(job, newest) - at < 10 * 0.5
    assert {actor_above(pid).pid for pid in job.workers().values()} == {node.pid for node in nodes}

    # A node actor dies: the standby takes its place, and nothing of the node is left.
    lost = job.workers()[1]
    victim = actor_above(lost)
    gone = below(victim.pid)
    newest, at = job.newest_step(), time.time()
    os.kill(victim.pid, signal.SIGKILL)
    await_successor(job, lost)
    assert first_new_step(job, newest) - at < 10 * 1.5
    assert victim.pid not in {actor_above(pid).pid for pid in job.workers().values()}
    until(lambda: not living(gone), lambda: f"still there: {living(gone)}")

    # The host dies: Ray starts it again, and no worker notices.
    workers, epoch = job.workers(), account.host_epoch
    os.kill(job.account().pid, signal.SIGKILL)
    until(lambda: job.account().host_epoch > epoch and job.status().world_size == 2, job.output, deadline=10 * 10.0)
    job.await_steps(world_size=2)
    assert job.workers() == workers

    # The driver dies: the job goes on, and another one finds it.
    job.process.kill()
    job.process.wait()
    job.await_steps(world_size=2)
    listed = run_dlrover("ray", "list", "--address", lab.address)
    assert "survivor" in listed.stdout
    shown = run_dlrover("ray", "status", "survivor", "--address", lab.address)
    assert "running" in shown.stdout, shown
    shown = run_dlrover("status", "survivor", "--ray", lab.address)
    assert "running" in shown.stdout, shown
    scaled = run_dlrover("scale", "surv", "--nodes", "2", "--ray", lab.address)
    assert "The job's target is now 2 nodes" in scaled.stdout, scaled
    assert "failed" in run_dlrover("report", "survivor", "--ray", lab.address).stdout
    both = run_dlrover("status", "--ray", lab.address, "--addr", "127.0.0.1:1")
    assert "Give --addr or --ray, not both" in both.stderr
    unknown = run_dlrover("status", "no-such-job", "--ray", lab.address)
    assert "No jobs in this cluster have the name no-such-job. Running: survivor." in unknown.stderr
    job.let_end()
    until(lambda: Registry().result("survivor") is not None or not lab.actors(), job.output)
    attached = run_dlrover("ray", "attach", "survivor", "--address", lab.address)
    assert attached.returncode == 0, attached
    lab.await_nothing_left(TRAINED_STEPS)


def await_successor(job: RunningRayJob, lost: int) -> None:
    """Until workers of a later round train, none of which is the lost one."""
    until(lambda: lost not in job.workers().values(), job.output)
    job.await_steps(world_size=2)


def first_new_step(job: RunningRayJob, newest: int) -> float:
    """When a step beyond that one was done. Seconds are held to ten times the figure: a busy machine is no failure."""
    return min(step.at for step in job.steps() if step.step > newest)


def test_a_disturbed_job_has_the_losses_of_an_undisturbed_one(lab: RayLab, start: StartJob):
    """Bit for bit: with two nodes, each sum has two terms, and those have the same sum in either order."""
    calm = start("--nodes", "2", script=PROGRAM, args=("--records", "6000"), folder_option="--dir")
    assert calm.wait() == 0, calm.output()
    expected = losses(calm)
    assert sorted(expected) == list(range(1, 101))

    words = ("--records", "6000", "--pace", "0.2")
    job = start("--nodes", "2", "--standby", "1", script=PROGRAM, args=words, folder_option="--dir")
    for victim in (
        lambda: step_events(job)[-1]["pid"],
        lambda: actor_above(step_events(job)[-1]["pid"]).pid,
        lambda: job.account().pid,
    ):
        last = max(losses(job), default=0)
        until(lambda last=last: max(losses(job), default=0) > last + 3, job.output)
        os.kill(victim(), signal.SIGKILL)
    (job.folder / "hurry").touch()
    assert job.wait() == 0, job.output()
    assert losses(job) == expected
    assert len({event["pid"] for event in step_events(job)}) > 2, "workers were replaced"
    lab.await_nothing_left(PROGRAM)


def step_events(job: RunningRayJob) -> list[dict[str, Any]]:
    """In the order of their times."""
    found = []
    for path in job.folder.glob("events-*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a killed worker
                found.append(json.loads(line))
    return sorted((event for event in found if event["event"] == "step"), key=lambda event: event["at"])


def losses(job: RunningRayJob) -> dict[int, float]:
    """By step. One that was done again counts with its later loss."""
    return {event["step"]: event["loss"] for event in step_events(job)}


def test_ctrl_c_ends_everything(lab: RayLab, start: StartJob):
    job = start("--nodes", "2")
    job.await_steps(world_size=2)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.output()
    lab.await_nothing_left(TRAINED_STEPS)


def test_a_job_is_stopped_while_its_host_is_away(lab: RayLab, start: StartJob):
    job = start("--nodes", "2", "--job-name", "headless")
    job.await_steps(world_size=2)
    os.kill(job.account().pid, signal.SIGKILL)
    stopped = run_dlrover("ray", "stop", "headless", "--address", lab.address)
    assert stopped.returncode == 0, stopped
    assert job.wait() == 143, job.output()
    lab.await_nothing_left(TRAINED_STEPS)


STUBBORN = """
import signal, sys, pathlib
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "deaf").touch()
while True:
    signal.pause()
"""


def test_ctrl_c_ends_workers_that_ignore_it_when_their_time_is_up(lab: RayLab, start: StartJob, tmp_path: Path):
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    job = start(script=str(script), launch=("--shutdown-timeout=1",))
    until(lambda: (job.folder / "deaf").exists(), job.output)
    job.process.send_signal(signal.SIGINT)
    assert job.wait(10 * (1 + 5.0)) == 130, job.output()
    lab.await_nothing_left(str(script))


def test_a_job_that_ends_well_leaves_nothing(lab: RayLab, start: StartJob):
    job = start("--nodes", "2")
    job.await_steps(world_size=2)
    job.let_end()
    assert job.wait() == 0, job.output()
    lab.await_nothing_left(TRAINED_STEPS)


def test_a_failed_job_says_why_and_leaves_nothing(lab: RayLab, start: StartJob, tmp_path: Path):
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('the data is not what it was')\n")
    job = start("--nodes", "2", script=str(script))
    assert job.wait() == 1, job.output()
    assert "the data is not what it was" in job.output()
    lab.await_nothing_left(str(script))


def test_two_jobs_do_not_see_each_other_and_a_name_is_taken_once(lab: RayLab, start: StartJob):
    first = start("--job-name", "first")
    first.await_steps(world_size=1)
    second = start("--job-name", "second")
    second.await_steps(world_size=1)
    again = run_dlrover("ray", "run", "--address", lab.address, "--job-name", "first", "--", TRAINED_STEPS, "/nowhere")
    assert again.returncode == 2
    assert "A job first runs in this cluster already" in again.stderr
    workers = second.workers()
    first.let_end()
    assert first.wait() == 0, first.output()
    second.await_steps(world_size=1)
    assert second.workers() == workers
    stopped = run_dlrover("ray", "stop", "second", "--address", lab.address)
    assert stopped.returncode == 0, stopped
    assert second.wait() == 143, second.output()
    lab.await_nothing_left(TRAINED_STEPS)


def test_no_secret_is_where_ray_shows_it(lab: RayLab, start: StartJob, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_KEY", "verysecretvalue")
    job = start("--nodes", "1", "--env", "API_KEY")
    job.await_steps(world_size=1)
    account = job.account()
    [worker] = job.workers().values()
    assert b"API_KEY=verysecretvalue" in Path(f"/proc/{worker}/environ").read_bytes()
    shown = [
        *(repr(Registry_value) for Registry_value in map(_value, lab.keys())),
        *(repr(each) for each in ray.util.list_named_actors(all_namespaces=True)),
        repr(ray._private.state.actors()),
        *(Path(f"/proc/{pid}/environ").read_text(errors="replace") for pid in (account.pid, actor_above(worker).pid)),
        *(
            Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            for pid in (account.pid, actor_above(worker).pid, worker)
        ),
    ]
    session = Path(lab.directory)
    shown += [
        path.read_text(errors="replace") for path in session.rglob("*") if path.is_file() and "/logs/" in str(path)
    ]
    secrets = (account.token, "verysecretvalue")
    for secret in secrets:
        assert [text[:200] for text in shown if secret in text] == []
    # What Ray keeps for restarting an actor is in the memory of its own processes.
    keepers = ray_processes(lab)
    assert {name for name, _ in keepers} >= {"gcs_server", "raylet"}
    assert [name for name, pid in keepers if memory_holds(pid, job.found().job_uid.encode())], (
        "the search finds what is there"
    )
    found = [(name, secret[:4]) for name, pid in keepers for secret in secrets if memory_holds(pid, secret.encode())]
    assert found == []
    job.let_end()
    assert job.wait() == 0, job.output()
    lab.await_nothing_left(TRAINED_STEPS)


def ray_processes(lab: RayLab) -> list[tuple[str, int]]:
    """Name and pid of each process of Ray itself in this cluster."""
    nodes = [lab.cluster.head_node, *lab.machines]
    found = [(name, each.process.pid) for node in nodes for name, all_ in node.all_processes.items() for each in all_]
    return [(name, pid) for name, pid in found if psutil.pid_exists(pid)]


def memory_holds(pid: int, needle: bytes) -> bool:
    """Whether the bytes are in what the process has written."""
    with open(f"/proc/{pid}/mem", "rb") as memory, open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            words = line.split()
            if not words[1].startswith("rw") or (len(words) > 5 and words[5].startswith("/dev/")):
                continue
            begin, end = (int(word, 16) for word in words[0].split("-"))
            with contextlib.suppress(OSError, ValueError):
                memory.seek(begin)
                if needle in memory.read(end - begin):
                    return True
    return False


def _value(key: str) -> bytes | None:
    from dlrover.platforms.ray import store

    return store.get(key)


def node_actors(raylet: int) -> list[psutil.Process]:
    return [each for each in below(raylet) if each.cmdline()[:1] and "LauncherActor" in each.cmdline()[0]]


def test_a_node_without_room_says_what_is_missing_and_takes_a_machine_that_joins(lab: RayLab, start: StartJob):
    job = start("--nodes", "4")
    job.account()
    until(lambda: "The most that a machine has free" in job.output(), job.output, deadline=10 * 1.0)
    assert "It asks for 1 CPU. The most that a machine has free is 0 CPU" in job.output()
    assert "The cluster has no autoscaler" in job.output()
    status = job.status()
    assert "Pending" in repr(status)
    machine = lab.add_machine()
    try:
        until(lambda: node_actors(lab.raylet(machine)), job.output, deadline=10 * 5.0)
        job.await_steps(world_size=4)
        assert lab.raylet(machine) in {raylet_above(pid) for pid in job.workers().values()}
        job.let_end()
        assert job.wait() == 0, job.output()
        lab.await_nothing_left(TRAINED_STEPS)
    finally:
        lab.remove_machine(machine)
