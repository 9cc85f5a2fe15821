"""A master that is told of a platform: wrong words are found before anything is touched, and nodes are asked for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dlrover.master.clock import MasterClock
from dlrover.master.config import EXIT_STOPPED, EXIT_USAGE, MasterConfig
from dlrover.master.journal.journal_thread import JournalThread
from dlrover.master.loop.loop import MasterLoop
from dlrover.master.platform_driver import PlatformDriver
from dlrover.platforms.fake import FakeCloud, FakePlatform
from dlrover.protocol.messages.fleet import FleetSpec, NodePhase, NodeType, ReplicaSpec
from dlrover.protocol.messages.identity import PlatformId
from tests.platforms.contract import JOB, watching

FLEET = FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=2)})


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"platform": "moon", "fleet": FLEET}, "no platform 'moon'"),
        ({"platform": "local"}, "needs a description of its nodes"),
        ({"platform": "local", "fleet": FLEET}, "missing required field `socket`"),
    ],
)
def test_a_wrong_platform_ends_the_master_before_anything_is_touched(tmp_path: Path, extra, what):
    config = MasterConfig(job_name="job", journal=str(tmp_path / "journal"), **extra)
    path = tmp_path / "master.json"
    path.write_bytes(msgspec.json.encode(config))
    done = subprocess.run(
        [sys.executable, "-m", "dlrover.master", "--config", path],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == EXIT_USAGE
    assert what in done.stderr
    assert not (tmp_path / "journal").exists()


class Clinging(FakePlatform):
    """Somebody's platform that cannot let go."""

    async def close(self) -> None:
        raise ConnectionError("reset by peer")


def test_a_platform_that_breaks_when_it_is_closed_does_not_change_how_the_master_ends(tmp_path: Path):
    reader, writer = os.pipe()
    config = MasterConfig(
        job_name="job",
        journal=str(tmp_path / "journal"),
        platform=f"{__name__}::Clinging",
        fleet=FLEET,
        ready_fd=writer,
    )
    path = tmp_path / "master.json"
    path.write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "dlrover.master", "--config", path]
    checkout = Path(__file__).parents[2]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, pass_fds=(writer,), cwd=checkout) as master,
        os.fdopen(reader, "rb") as pipe,
    ):
        os.close(writer)
        assert pipe.readline(), "it never served"
        master.terminate()
        said = master.communicate(timeout=30)[1]
    assert master.returncode == EXIT_STOPPED, said
    assert "the platform could not be closed" in said


async def test_what_the_job_wants_is_launched_and_what_is_lost_is_replaced(tmp_path: Path):
    """The whole way with the real job: effects to the platform, its events into the journal, and back."""
    cloud = FakeCloud()
    platform = FakePlatform(cloud, JOB)
    driver = await JournalThread.open(tmp_path / "journal", job_name="job")
    job = await driver.restore()
    master_loop = MasterLoop(driver, job, MasterClock(job.now), job_name="job")
    fleet = PlatformDriver(platform, FLEET, master_loop.tell)
    master_loop.listeners.on_intent = fleet.take
    await master_loop.begin(driver.master_epoch)
    tasks = [asyncio.ensure_future(master_loop.run()), asyncio.ensure_future(fleet.run())]
    try:
        async with watching(platform) as watch:
            for node in (0, 1):
                if not any(seen.id == node and seen.phase is NodePhase.RUNNING for seen in watch.listed):
                    await watch.until(node, NodePhase.RUNNING)
            cloud.evict(JOB, PlatformId(1))
            replacement = (await watch.until(2, NodePhase.RUNNING)).node
        assert replacement.rank == 1
        assert {intent.master_epoch for intent in cloud.applied} == {driver.master_epoch}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await fleet.drain()
        await driver.close()
