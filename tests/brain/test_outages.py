"""Brain and the master's client, both real: after outages of either side each run is stored exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dlrover.brain.serving import RunningBrain
from dlrover.core.commit_order import CommitSequence
from dlrover.core.job import DECISION_VERSION, Job
from dlrover.master.brain.client import BrainClient, BrainPatience, job_ref
from dlrover.master.brain.past_runs import past_runs
from dlrover.master.config import BrainTerms
from dlrover.master.journal.journal import Journal
from dlrover.protocol.messages.brain import JobAsked, JobRecipe, JobRecord, digest_of
from dlrover.protocol.messages.identity import Micros
from dlrover.protocol.messages.job import Command, ExitReason, JobEnd, MasterStarted
from dlrover.protocol.messages.scaling import ScaleMode, ScaleTerms
from dlrover.protocol.rpc.brain import BrainChannel
from tests.brain.conftest import Serve
from tests.master.brain.brains import FLEET, DrivenJob, run

HASTE = BrainPatience(call=10.0, first_pause=0.01, longest_pause=0.05, gathering=0.005, farewell=60.0)
SEED = 23
OUTAGES = 20


class WrittenJob:
    """A job whose commands are journalled like a master's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shell = DrivenJob()
        self.journal = Journal(path, job_name="a-job", decision_version=DECISION_VERSION)
        self.journal.load()
        self.sequence = CommitSequence(Job(), master_epoch=self.journal.master_epoch, next_number=1)
        self.num = 0
        self.client: BrainClient | None = None
        self._write(MasterStarted(1, "a-job"))

    def _write(self, command: Command) -> None:
        self.sequence.stage(command, Micros(self.shell.at + 1))
        batch = self.sequence.take()
        assert batch is not None
        self.journal.append(batch.first_number, batch.records)

    def measure(self, *, seconds: float = 60.0, is_new: bool = True) -> None:
        """First durable, then told."""
        self.num += is_new
        told = run(self.num, seconds=seconds, nodes=1 + self.num % 4)
        self._write(told)
        outcome = self.shell.do(told)
        if self.client is not None:
            self.client.hear(told, outcome, self.shell.now())

    @contextlib.asynccontextmanager
    async def master(self, port: int) -> AsyncIterator[BrainClient]:
        """One life of it."""
        self.client = BrainClient(
            BrainTerms(address=f"127.0.0.1:{port}", recipe=JobRecipe(name="nightly")),
            BrainChannel(f"127.0.0.1:{port}", token=""),
            self.shell,
            job=job_ref("uid-1", "token"),
            job_name="a-job",
            journal=self.path,
            fleet=FLEET,
            scaling=ScaleTerms(mode=ScaleMode.ON),
            patience=HASTE,
        )
        task = asyncio.ensure_future(self.client.run())
        try:
            yield self.client
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.client = None


async def stored(brain: RunningBrain) -> JobRecord:
    channel = BrainChannel(f"127.0.0.1:{brain.port}", token="")
    try:
        answer = await channel.ask(JobAsked(uid="uid-1", most=500), timeout=10)
    finally:
        await channel.close()
    assert isinstance(answer, JobRecord)
    return answer


@pytest.mark.slow
async def test_every_run_is_stored_once_through_outages_of_either_side(serve: Serve, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    job = WrittenJob(tmp_path / "journal.sqlite")
    brains, masters = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
    brain = await brains.enter_async_context(serve())
    port = brain.port
    await masters.enter_async_context(job.master(port))
    for _ in range(OUTAGES):
        is_brain = chance.random() < 0.5
        for _ in range(chance.randint(1, 4)):
            job.measure()
            await asyncio.sleep(chance.uniform(0, 0.02))
        await (brains if is_brain else masters).aclose()
        for _ in range(chance.randint(0, 4)):
            job.measure()
            job.measure(seconds=90.0, is_new=False)
            await asyncio.sleep(chance.uniform(0, 0.02))
        if is_brain:
            brain = await brains.enter_async_context(serve(port))
        else:
            await masters.enter_async_context(job.master(port))
    await until(brain, job.num)
    client = job.client
    assert client is not None
    await masters.aclose()  # as a master does it: first the task, then the farewell
    await client.finish(JobEnd(reason=ExitReason.COMPLETED, exit_code=0, message="done"))
    written = past_runs(job.path)
    found = await stored(brain)
    await brains.aclose()
    assert len(written) == job.num >= OUTAGES
    assert (len(found.runs), digest_of(found.runs)) == (len(written), digest_of(written.values()))
    assert found.job.end_reason == "Completed"


async def test_a_brain_that_lost_its_database_hears_everything_again(serve: Serve, tmp_path: Path) -> None:
    job = WrittenJob(tmp_path / "journal.sqlite")
    async with serve() as brain, job.master(brain.port):
        port = brain.port
        for _ in range(5):
            job.measure()
        await until(brain, 5)
    for path in tmp_path.glob("served.sqlite*"):
        path.unlink()
    async with serve(port) as brain, job.master(port):
        job.measure()
        found = await until(brain, 6)
    assert digest_of(found.runs) == digest_of(past_runs(job.path).values())


async def until(brain: RunningBrain, num_runs: int) -> JobRecord:
    from dlrover.protocol.errors import Rejected

    async with asyncio.timeout(200):
        while True:
            with contextlib.suppress(Rejected):
                if len((found := await stored(brain)).runs) == num_runs:
                    return found
            await asyncio.sleep(0.02)
