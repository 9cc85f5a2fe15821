"""A conductor and a cluster that a test controls: what starts, what restarts, and what a killed conductor changes (nothing)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from dlrover.protocol.messages.identity import Micros
from dlrover.unified.conductor import Conductor, InstanceBroken
from dlrover.unified.core.messages import BeginEnsemble
from dlrover.unified.core.spec import EnsembleSpec, OnFailure, RoleSpec
from dlrover.unified.store import ConductorFenced, EnsembleJournal
from tests.unified.fake_cluster import FakeCluster
from tests.unified.key_values import FakeKeyValues

SPEC = EnsembleSpec(
    name="job",
    roles=(
        RoleSpec(name="policy", on_failure=OnFailure.SELF),
        RoleSpec(
            name="rollout", count=2, needs=("policy",), is_driver=False, on_failure=OnFailure.INSTANCE, max_restarts=50
        ),
    ),
)
ALL_RUN = ("policy-0#1", "rollout-0#1", "rollout-1#1")

pytestmark = pytest.mark.asyncio


class Job:
    """One store and one cluster, and conductors one after the other."""

    def __init__(self) -> None:
        self.store = FakeKeyValues()
        self.cluster = FakeCluster()
        self.skipped = 0.0
        self.conductor: Conductor | None = None

    def clock(self) -> Micros:
        return Micros(int((time.monotonic() + self.skipped) * 1e6))

    def skip(self, seconds: float) -> None:
        assert self.conductor is not None
        self.skipped += seconds
        self.conductor.look_at_clock()

    def journal(self) -> EnsembleJournal:
        return EnsembleJournal(self.store, "uid", snapshot_every=7)

    @asynccontextmanager
    async def conducted(self, spec: EnsembleSpec = SPEC) -> AsyncIterator[asyncio.Task]:
        """The task of a conductor; it is killed at the end of the block, if it is not over."""
        self.conductor = Conductor(self.journal(), self.cluster, self.clock)
        task = asyncio.ensure_future(self.conductor.conduct(BeginEnsemble(spec)))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, condition: Callable[[], bool], *, skipping: float = 0.0) -> None:
        """`skipping`: seconds that pass with each look."""
        async with asyncio.timeout(120):
            while not condition():
                if skipping:
                    self.skip(skipping)
                await asyncio.sleep(0)


async def test_a_job_runs_to_its_end_and_nothing_of_it_is_left():
    job = Job()
    async with job.conducted() as task:
        await job.cluster.until_running(*ALL_RUN)
        assert str(job.cluster.lives[0]) == "policy-0", "what is needed comes first"
        job.cluster.finish(job.cluster.newest("policy"))
        over = await asyncio.wait_for(task, 120)
    assert (over.exit_code, over.reason) == (0, "all drivers ended well")
    assert job.cluster.running() == []


async def test_a_killed_instance_restarts_alone():
    job = Job()
    async with job.conducted():
        await job.cluster.until_running(*ALL_RUN)
        job.cluster.kill(job.cluster.newest("rollout", 1))
        await job.cluster.until_running("policy-0#1", "rollout-0#1", "rollout-1#2")
        assert len(job.cluster.lives) == 4


async def test_a_job_that_cannot_go_on_says_why():
    job = Job()
    job.cluster.broken["policy"] = "ModuleNotFoundError: grpo"
    spec = EnsembleSpec(name="job", roles=(RoleSpec(name="policy", on_failure=OnFailure.STOP),))
    async with job.conducted(spec) as task:
        over = await asyncio.wait_for(task, 120)
    assert (over.exit_code, over.reason) == (1, "policy-0 failed: ModuleNotFoundError: grpo")


async def test_what_does_not_end_is_killed_after_its_grace():
    job = Job()
    job.cluster.stubborn = {"rollout"}
    async with job.conducted() as task:
        await job.cluster.until_running(*ALL_RUN)
        assert job.conductor is not None
        assert job.conductor.stop("a person", 3)
        assert not job.conductor.stop("again")
        await job.until(lambda: len(job.cluster.ended) == 3)
        assert not task.done()
        job.skip(60)
        over = await asyncio.wait_for(task, 120)
    assert (over.exit_code, over.reason) == (3, "a person")


@pytest.mark.parametrize("stage", ["INIT", "READY", "RUNNING", "STOPPING"])
async def test_a_conductor_that_is_killed_in_any_stage_changes_nothing(stage: str):
    job = Job()
    if stage == "INIT":
        job.cluster.has_room.clear()
    async with job.conducted():
        assert job.conductor is not None
        if stage == "INIT":
            await job.conductor.has_begun.wait()
        else:
            await job.cluster.until_running(*ALL_RUN)
        if stage in ("READY", "RUNNING"):  # there is something to count
            job.cluster.kill(job.cluster.newest("rollout", 1))
            await job.cluster.until_running("policy-0#1", "rollout-0#1", "rollout-1#2")
        if stage == "READY":
            job.cluster.stubborn = {"policy"}
            job.conductor.restart("a person")
            await job.until(lambda: len(job.cluster.ended) == 3)
        if stage == "STOPPING":
            job.cluster.stubborn = {"policy"}
            job.conductor.stop("a person", 5)
            await job.until(lambda: len(job.cluster.ended) == 3)
        assert job.conductor.status().stage == stage
        lives, before = list(job.cluster.lives), job.conductor.status()
    async with job.conducted() as task:
        await job.conductor.has_begun.wait()
        after = job.conductor.status()
        assert after.stage == stage
        assert replace(after, verdict=before.verdict) == before, "no counter and no life differs"
        assert job.cluster.lives == lives, "nothing was made"
        job.cluster.has_room.set()
        job.cluster.stubborn = set()
        if stage in ("READY", "STOPPING"):
            job.cluster.kill(job.cluster.newest("policy"))
        if stage != "STOPPING":
            await job.until(lambda: len(job.cluster.running()) == 3)
            job.cluster.finish(job.cluster.newest("policy"))
        over = await asyncio.wait_for(task, 120)
    assert over.exit_code == (5 if stage == "STOPPING" else 0)
    if stage == "RUNNING":
        assert job.cluster.lives == lives, "a running job was not restarted"


async def test_a_conductor_that_was_replaced_ends_itself():
    job = Job()
    async with job.conducted() as old:
        await job.cluster.until_running(*ALL_RUN)
        async with job.conducted() as new:
            await job.until(lambda: len(job.store.keys("uid/ensemble/epoch/")) == 2)
            job.cluster.kill(job.cluster.newest("rollout"))
            await job.cluster.until_running("policy-0#1", "rollout-0#2", "rollout-1#1")
            with pytest.raises(ConductorFenced):
                await asyncio.wait_for(old, 120)
            job.cluster.finish(job.cluster.newest("policy"))
            assert (await asyncio.wait_for(new, 120)).exit_code == 0


async def test_restarts_of_the_whole_job_leave_no_task_behind():
    """Row 3 of section 19 of spec 11: the original had one more monitor after each."""
    job = Job()
    async with job.conducted():
        num_tasks = set()
        for life in range(1, 6):
            names = [f"{name.partition('#')[0]}#{life}" for name in ALL_RUN]
            await job.cluster.until_running(*names)
            await job.until(lambda: job.conductor is not None and job.conductor.status().stage == "RUNNING")
            num_tasks.add(len(asyncio.all_tasks()))
            assert job.conductor is not None
            assert job.conductor.restart("a person")
        assert len(num_tasks) == 1, num_tasks


@pytest.mark.parametrize("seed", range(30))
async def test_random_deaths_of_instances_and_conductors_end_well(seed: int):
    job, chance = Job(), random.Random(seed)
    over = None
    for _ in range(12):
        async with job.conducted() as task:
            await job.until(lambda: task.done() or len(job.cluster.running()) == 3, skipping=1.0)
            for _ in range(chance.randrange(3)):
                if running := job.cluster.running():
                    rollouts = [each for each in running if each.role == "rollout"]
                    job.cluster.kill(chance.choice(rollouts or running), cause=str(chance.random()))
                for _ in range(chance.randrange(6)):
                    await asyncio.sleep(0)
    async with job.conducted() as task:
        await job.until(lambda: len(job.cluster.running()) == 3, skipping=1.0)
        job.cluster.finish(job.cluster.newest("policy"))
        over = await asyncio.wait_for(task, 120)
    assert over.exit_code == 0, over
    assert job.cluster.newest("policy").incarnation == 1, "only what was killed restarted"
    assert job.cluster.running() == []


async def test_a_role_that_raises_again_and_again_ends_the_job_with_its_cause():
    job = Job()
    spec = EnsembleSpec(
        name="job", roles=(RoleSpec(name="worker", on_failure=OnFailure.ROLE, max_restarts=1),), max_job_restarts=0
    )
    async with job.conducted(spec) as task:
        for incarnation in (1, 2):
            await job.cluster.until_running(f"worker-0#{incarnation}")
            job.cluster.finish(job.cluster.newest("worker"), InstanceBroken("ValueError: 3", f"line {incarnation}"))
        over = await asyncio.wait_for(task, 120)
    assert (over.exit_code, over.reason) == (1, "worker-0 failed: ValueError: 3")


async def test_an_instance_gets_another_machine_also_from_the_next_conductor():
    job = Job()
    role = RoleSpec(name="worker", on_failure=OnFailure.INSTANCE, max_restarts=9, max_failures_per_machine=0)
    spec = EnsembleSpec(name="job", roles=(role,))
    async with job.conducted(spec):
        await job.cluster.until_running("worker-0#1")
        job.cluster.kill(job.cluster.newest("worker"))
        await job.until(lambda: len(job.cluster.to_replace) == 1)
    async with job.conducted(spec) as task:
        await job.until(lambda: len(job.cluster.to_replace) == 2)
        assert job.cluster.to_replace[0] == job.cluster.to_replace[1]
        assert len(job.cluster.lives) == 1, "it waits for its machine"
        job.cluster.replaceable.set()
        await job.cluster.until_running("worker-0#2")
        job.cluster.finish(job.cluster.newest("worker"))
        assert (await asyncio.wait_for(task, 120)).exit_code == 0
