"""How a master tells a platform that shows jobs how its job does."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dlrover.core.job import Job
from dlrover.master.job_glances import JobGlances
from dlrover.platforms.base import JobGlance, ShowsJobs
from dlrover.platforms.fake import FakePlatform
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.goodput import AskGoodput
from dlrover.protocol.messages.job import AskStatus, Micros, Reply
from tests.core.fleet.fleet_scene import FleetScene


class Showcase:
    """A platform that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[JobGlance] = []
        self.trouble: Exception | None = None
        self.is_shown = asyncio.Event()

    async def show(self, glance: JobGlance) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.shown.append(glance)
        self.is_shown.set()


class Loop:
    """Answers from a real job."""

    def __init__(self, job: Job) -> None:
        self.job = job

    async def ask(self, question: AskStatus | AskGoodput) -> Reply:
        if isinstance(question, AskStatus):
            return self.job.status()
        return self.job.goodput(Micros(self.job.now))


async def test_a_round_is_shown_once_and_nothing_before_it() -> None:
    scene, showcase = FleetScene.of(2), Showcase()
    glances = JobGlances(showcase, Loop(scene.job).ask)
    await glances.show()
    assert showcase.shown == [], "nothing has run yet"
    scene.train(0, 1)
    await glances.show()
    await glances.show()
    assert [glance.round for glance in showcase.shown] == [1]


async def test_what_could_not_be_shown_is_shown_later_and_the_trouble_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene, showcase = FleetScene.of(2), Showcase()
    scene.train(0, 1)
    glances = JobGlances(showcase, Loop(scene.job).ask, pause=0.01)
    showcase.trouble = Unavailable("The API server is away.")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await glances.show()
    assert [record.getMessage() for record in caplog.records].count(
        "the platform cannot show the state of the job reason=The API server is away."
    ) == 1
    showcase.trouble = None
    task = asyncio.ensure_future(glances.run())
    async with asyncio.timeout(30):
        await showcase.is_shown.wait()
    task.cancel()
    assert showcase.shown[0].round == 1


def test_only_some_platforms_show_jobs() -> None:
    assert isinstance(Showcase(), ShowsJobs)
    assert not isinstance(FakePlatform, ShowsJobs)
