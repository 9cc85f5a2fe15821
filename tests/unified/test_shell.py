"""A whole job of one instance in one process: conductor, instance and calls, over a Ray that is an object."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dlrover.cli.ray.messages import NEWS, JobOver, Said
from dlrover.platforms.ray.store import Registry
from dlrover.protocol.messages.roles import REPORT
from dlrover.unified import Ensemble, Role, current, group, rpc
from dlrover.unified.core.machine import EnsembleMachine
from dlrover.unified.core.messages import EnsembleStatus
from dlrover.unified.core.state import ENSEMBLE_DECISIONS
from dlrover.unified.plan import RoleKind, RolePlan
from dlrover.unified.plan import pack as pack_plan
from dlrover.unified.runtime.wire import CallHeader, CallRefused, freeze, thaw
from dlrover.unified.shell.conductor_actor import ConductorActor
from dlrover.unified.shell.driver import EnsembleHandle
from dlrover.unified.shell.messages import ACCOUNT, pack
from tests.unified.conftest import InstallExtension
from tests.unified.fake_ray import MACHINE, FakeActor, FakeRay, RayTaskError, fake_ray

NAMESPACE = "dlrover/uid"


async def test_a_job_that_has_ended_is_stopped_and_restarted_at_once(monkeypatch: pytest.MonkeyPatch):
    """Its conductor is away for good: nobody waits for its restart."""
    with fake_ray(monkeypatch):
        handle = EnsembleHandle(sys.modules["ray"], "job", "uid")
        async with asyncio.timeout(120):
            assert not await asyncio.to_thread(handle.stop)
            assert not await asyncio.to_thread(handle.restart)


class Loop:
    """Runs until its file `stop` is there, or fails if its file `fail` is."""

    @rpc()
    def incarnation(self) -> int:
        return current().incarnation

    @rpc()
    def call_script(self) -> str:
        try:
            return str(group("script").call_rank0("anything").result(120))
        except CallRefused as error:
            return str(error)

    def run(self) -> None:
        here = current()  # a killed actor's thread lives on in this process, when the next one is here
        folder = Path(here.config)
        print(f"begins {here.incarnation}")
        while not (folder / "stop").exists():
            if here.ending.wait(0.005):
                return
            if (folder / f"fail-{here.incarnation}").exists():
                raise ValueError("as it was told")


class Job:
    def __init__(self, ray: FakeRay, folder: Path, **more: Any) -> None:
        self.ray = ray
        self.folder = folder
        role = Role.simple("loop", f"{__name__}.Loop", driver=True, on_failure="instance", restart_pause=0.0)
        plan = Ensemble("job", roles=[structs.replace(role, **more)], config=str(folder)).build("uid")
        script = RolePlan(kind=RoleKind.ELASTIC, takes_calls=False)  # calls know of it; no instance of it is made here
        ray.keys[b"uid/plan"] = pack_plan(structs.replace(plan, roles={**plan.roles, "script": script}))
        ray.keys[b"jobs/job"] = b"{}"
        self.conductor = self.start_conductor()

    def start_conductor(self) -> FakeActor:
        made = self.ray.remote(ConductorActor).options(namespace=NAMESPACE, name="conductor").remote("uid")
        self.ray.current_actor = self.conductor = made
        return made

    async def status(self) -> EnsembleStatus:
        return ACCOUNT.decode(await self.conductor.account.remote()).status

    async def until(self, condition: Callable[[Any], bool]) -> EnsembleStatus:
        async with asyncio.timeout(120):
            while True:
                status = await self.status()
                if condition(status.roles[0].instances[0]):
                    return status
                await asyncio.sleep(0)

    async def over(self) -> tuple[JobOver, list[str]]:
        async with asyncio.timeout(120):
            while True:
                news = NEWS.decode(await self.conductor.news.remote("me", 0, 0, 1.0))
                if news.over is not None:
                    await self.conductor.taken.remote("me")
                    await self.conductor.is_dead.wait()
                    return news.over, [item.text for item in news.items if isinstance(item, Said)]

    def newest_snapshot(self) -> bytes:
        """Its key."""
        return max(key for key in self.ray.keys if b"/ensemble/snap/" in key)

    async def ask(self, life: int, method: str) -> Any:
        actor = self.ray.get_actor(f"loop-0.{life}", NAMESPACE)
        header = pack(CallHeader(id=os.urandom(4).hex(), method=method))
        return thaw([await actor.answer.remote(header, None, *freeze(((), {})))])


@asynccontextmanager
async def job_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> AsyncIterator[Job]:
    """`more`: fields of its role."""
    with fake_ray(monkeypatch) as ray:
        job = Job(ray, tmp_path, **more)
        yield job
        assert ray.actors == {}, "no actor is left"
        assert ray.keys == {}, "no key is left"
        assert ray.groups == {}, "no placement group is left"


async def test_a_job_runs_answers_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with job_in(tmp_path, monkeypatch) as job:
        status = await job.until(lambda each: each.state == "running")
        assert (status.stage, job.ray.groups) == ("RUNNING", {"dlrover_placement_group_job": [{"CPU": 1.0}]})
        assert await job.ask(1, "incarnation") == 1
        assert (await job.ask(1, "call_script")).startswith("anything: role script is a script that takes no calls")
        with pytest.raises(RayTaskError, match="no @rpc method 'absent'"):
            await job.ask(1, "absent")
        (tmp_path / "stop").touch()
        over, sentences = await job.over()
        assert over == JobOver(0, "")
        assert sentences[-1] == "The job ends with exit code 0: all drivers ended well"


async def test_an_instance_that_is_killed_or_fails_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with job_in(tmp_path, monkeypatch) as job:
        await job.until(lambda each: each.state == "running")
        known = await job.conductor.roles.remote()
        news = job.conductor.roles.remote(known)
        job.ray.kill(job.ray.get_actor("loop-0.1", NAMESPACE))
        assert await news != known, "a question for news waits for them"
        await job.until(lambda each: (each.incarnation, each.state) == (2, "running"))
        (tmp_path / "fail-2").touch()
        status = await job.until(lambda each: (each.incarnation, each.state) == (3, "running"))
        assert status.roles[0].instances[0].cause == "ValueError: as it was told"
        [told] = REPORT.decode(await job.conductor.roles.remote()).roles
        assert (told.kind, told.num_ready, told.num_wanted, told.num_restarts) == ("simple", 1, 1, 2)
        assert (told.failure, told.failed_at > 0) == ("loop-0: ValueError: as it was told", True)
        assert await job.ask(3, "incarnation") == 3
        (tmp_path / "stop").touch()
        assert (await job.over())[0].exit_code == 0


async def test_a_conductor_that_is_killed_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with job_in(tmp_path, monkeypatch) as job:
        await job.until(lambda each: each.state == "running")
        for epoch in (2, 3):
            job.ray.kill(job.conductor)
            job.start_conductor()
            account = ACCOUNT.decode(await job.conductor.account.remote())
            assert (account.epoch, account.status.stage) == (epoch, "RUNNING")
            assert account.status.roles[0].instances[0].num_restarts == 0
        assert await job.ask(1, "incarnation") == 1
        job.ray.kill(job.conductor)  # and the instance dies while no conductor is there
        job.ray.kill(job.ray.get_actor("loop-0.1", NAMESPACE))
        job.start_conductor()
        await job.until(lambda each: (each.incarnation, each.state) == (2, "running"))
        (tmp_path / "stop").touch()
        assert (await job.over())[0].exit_code == 0


async def test_a_conductor_of_an_upgraded_package_goes_on_and_one_that_cannot_read_its_journal_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with job_in(tmp_path, monkeypatch) as job:
        await job.until(lambda each: each.state == "running")
        job.ray.kill(job.ray.get_actor("loop-0.1", NAMESPACE))
        await job.until(lambda each: (each.incarnation, each.state) == (2, "running"))
        job.ray.kill(job.conductor)
        newest = job.newest_snapshot()
        machine = EnsembleMachine.decode(job.ray.keys[newest])
        machine.state.decision_version = ENSEMBLE_DECISIONS - 1
        job.ray.keys[newest] = machine.encode()
        job.start_conductor()
        again = await job.until(lambda each: (each.incarnation, each.state) == (2, "running"))
        assert (again.stage, again.roles[0].instances[0].num_restarts) == ("RUNNING", 1)
        assert await job.ask(2, "incarnation") == 2, "it was not touched"

        job.ray.kill(job.conductor)
        job.ray.keys[job.newest_snapshot()] = b"no snapshot"
        async with asyncio.timeout(120):
            await job.start_conductor().is_dead.wait()
        left = Registry().result("job")
        assert left is not None
        assert left.exit_code == 1
        assert left.report.startswith("The conductor cannot go on. The conductor's stored state cannot be read: ")
        Registry().forget_result("job")


async def test_a_job_is_stopped_or_restarted_by_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with job_in(tmp_path, monkeypatch) as job:
        await job.until(lambda each: each.state == "running")
        assert await job.conductor.restart.remote("a person")
        status = await job.until(lambda each: (each.incarnation, each.state) == (2, "running"))
        assert status.num_job_restarts == 1
        assert await job.conductor.end.remote("a person", 7)
        over, _ = await job.over()
        assert over == JobOver(7, "a person")


REPLACES = """
from pathlib import Path
import ray
from dlrover.python.unified.controller.extension import ManagerExtension
class Cloud(ManagerExtension):
    async def relaunch_nodes_impl(self, nodes):
        assert self.manager.status().stage == "RUNNING"
        ray.nodes()[:] = [{"NodeID": "machine-2", "Alive": True}]
        return nodes
"""


async def test_an_extension_replaces_the_machine_of_an_instance_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_extension: InstallExtension
):
    install_extension(REPLACES, "Cloud")
    async with job_in(tmp_path, monkeypatch, max_failures_per_machine=0) as job:
        await job.until(lambda each: each.state == "running")
        assert job.ray.keys[b"uid/machine/loop-0"] == MACHINE.encode()
        job.ray.kill(job.ray.get_actor("loop-0.1", NAMESPACE))
        await job.until(lambda each: (each.incarnation, each.state) == (2, "running"))
        assert f"uid/removed/{MACHINE}".encode() in job.ray.keys
        (tmp_path / "stop").touch()
        over, sentences = await job.over()
        assert over.exit_code == 0
        assert f"Replaced: {MACHINE}." in sentences
        assert "The machine of loop-0 was replaced; the instance may start." in sentences


async def test_extensions_that_contradict_each_other_end_the_job_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_extension: InstallExtension
):
    twice = REPLACES + REPLACES.replace("class Cloud", "class Cloud2")
    install_extension(twice, "Cloud", "Cloud2")
    async with job_in(tmp_path, monkeypatch) as job:
        over, _ = await job.over()
        assert over.exit_code == 2
        assert "Two extensions define relaunch_nodes_impl" in over.report
