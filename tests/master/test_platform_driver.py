"""The driver between job and platform: order per node, retries, refusals told once, lists after anything was lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from dlrover.master.platform_driver import PATIENCE, FleetWord, PlatformDriver, PlatformPatience
from dlrover.platforms.base import Capabilities, Intent, LaunchNotTaken, Sight
from dlrover.platforms.fake import FakeCloud, FakePlatform
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    FleetSpec,
    LaunchRefused,
    NodeChanged,
    NodePhase,
    NodesListed,
    NodeType,
    RemoveNode,
    ReplicaSpec,
)
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.job import Done, Reply
from tests.platforms.contract import JOB, launch, remove

SPEC = FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=2)})
QUICK = PlatformPatience(call=0.2, first_pause=0.01, longest_pause=0.05, out_of_reach=0.05, watch=60.0, farewell=20.0)


class StandInJob:
    """Takes the driver's words as the loop would."""

    def __init__(self) -> None:
        self.heard: list[FleetWord] = []
        self.failures: list[Exception] = []
        """Answers of the next words, in order."""
        self._more = asyncio.Event()

    def tell(self, word: FleetWord) -> asyncio.Future[Reply]:
        told: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self.failures:
            told.set_exception(self.failures.pop(0))
        else:
            self.heard.append(word)
            told.set_result(Done())
        self._more.set()
        return told

    async def until(self, number: int, kind: type) -> list[FleetWord]:
        """All words of the kind, once there are so many."""
        async with asyncio.timeout(10):
            while len(found := [word for word in self.heard if isinstance(word, kind)]) < number:
                self._more.clear()
                await self._more.wait()
        return found

    async def until_phase(self, node: int, phase: NodePhase) -> NodeChanged:
        async with asyncio.timeout(10):
            while True:
                for word in self.heard:
                    if isinstance(word, NodeChanged) and (word.node.id, word.node.phase) == (node, phase):
                        return word
                self._more.clear()
                await self._more.wait()


class Bench:
    def __init__(self) -> None:
        self.cloud = FakeCloud()
        self.job = StandInJob()
        self.drive(FakePlatform(self.cloud, JOB))
        self.running: asyncio.Task[None] | None = None

    def drive(self, platform: FakePlatform, patience: PlatformPatience = QUICK) -> None:
        self.driver = PlatformDriver(platform, SPEC, self.job.tell, patience=patience)

    def start(self) -> None:
        self.running = asyncio.ensure_future(self.driver.run())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    if bench.running is not None:
        bench.running.cancel()
        await asyncio.gather(bench.running, return_exceptions=True)
    await bench.driver.drain()


async def test_the_fleet_is_defined_before_anything_is_listed(bench):
    bench.job.failures = [Unavailable("the journal cannot be written")] * 2
    bench.start()
    await bench.job.until(1, NodesListed)
    assert bench.job.heard == [DefineFleet(spec=SPEC), NodesListed(nodes=())]


DIFFERS = Rejected("The fleet of this job is defined already, and otherwise.", code=ErrorCode.FLEET_DIFFERS)


async def test_where_people_edit_a_job_its_next_master_goes_on_with_the_fleet_of_the_journal(bench):
    num_begun = 0

    async def begin() -> None:
        nonlocal num_begun
        num_begun += 1

    bench.job.failures = [DIFFERS]
    bench.driver = PlatformDriver(FakePlatform(bench.cloud, JOB), SPEC, bench.job.tell, patience=QUICK, first=begin)
    bench.start()
    await bench.job.until(1, NodesListed)
    assert num_begun == 1, "what stands written comes before the list"


async def test_a_fleet_file_that_differs_from_the_journal_ends_the_master(bench):
    bench.job.failures = [DIFFERS]
    with pytest.raises(Rejected, match="defined already"):
        await bench.driver.run()


async def test_an_intent_leads_to_a_node_that_is_told(bench):
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.driver.take(launch(0))
    told = await bench.job.until_phase(0, NodePhase.RUNNING)
    assert told.node.name == "worker-0"
    bench.driver.take(remove(0))
    await bench.job.until_phase(0, NodePhase.DELETED)


async def test_a_refusal_is_told_once_for_each_reason_and_the_launch_goes_on_trying(bench):
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.cloud.refusal = "the quota is used up"
    bench.driver.take(launch(0))
    async with asyncio.timeout(10):
        while len(bench.cloud.applied) < 4:  # noqa: ASYNC110 (attempts are no news to anybody)
            await asyncio.sleep(0.005)
    bench.cloud.refusal = "another quota is used up"
    refusals = await bench.job.until(2, LaunchRefused)
    assert refusals == [
        LaunchRefused(node=PlatformId(0), reason="the quota is used up"),
        LaunchRefused(node=PlatformId(0), reason="another quota is used up"),
    ]
    bench.cloud.refusal = ""
    await bench.job.until_phase(0, NodePhase.RUNNING)


async def test_a_refusal_that_lasts_is_repeated(bench):
    bench.drive(FakePlatform(bench.cloud, JOB), QUICK._replace(repetition=0.0))
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.cloud.refusal = "the quota is used up"
    bench.driver.take(launch(0))
    assert len(set(await bench.job.until(3, LaunchRefused))) == 1


async def test_a_platform_that_breaks_its_word_is_tried_again(bench):
    """It may be anybody's: what it raises beside what it promised must not leave a node without a lane."""
    errors = [OSError("connection reset"), KeyError("status")]

    class Breaking(FakePlatform):
        async def apply(self, intent: Intent) -> None:
            if errors:
                raise errors.pop(0)
            await super().apply(intent)

    bench.drive(Breaking(bench.cloud, JOB))
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.driver.take(launch(0))
    await bench.job.until_phase(0, NodePhase.RUNNING)
    refusals = await bench.job.until(2, LaunchRefused)
    assert "OSError: connection reset" in refusals[0].reason


async def test_a_removal_ends_the_attempts_to_launch(bench):
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.cloud.refusal = "no room"
    bench.driver.take(launch(0))
    await bench.job.until(1, LaunchRefused)
    bench.driver.take(remove(0))
    async with asyncio.timeout(10):
        while not isinstance(bench.cloud.applied[-1], RemoveNode):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    bench.cloud.refusal = ""
    bench.driver.take(launch(1))
    await bench.job.until_phase(1, NodePhase.RUNNING)
    assert [node.id for node in await FakePlatform(bench.cloud, JOB).list()] == [1]


async def test_a_platform_that_hangs_blocks_nobody_and_is_asked_again(bench):
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.cloud.gate.clear()
    bench.driver.take(launch(0))  # returns although the call hangs
    [refused] = await bench.job.until(1, LaunchRefused)
    assert "did not answer within" in refused.reason
    bench.cloud.gate.set()
    await bench.job.until_phase(0, NodePhase.RUNNING)


class Strict:
    """A platform whose answers are given; it notes when it was asked."""

    def __init__(self, errors: list[Exception]) -> None:
        self.capabilities = Capabilities()
        self._errors = errors
        self.asked_at: list[float] = []
        self.is_done = asyncio.Event()

    async def apply(self, intent: Intent) -> None:
        self.asked_at.append(asyncio.get_running_loop().time())
        if self._errors:
            raise self._errors.pop(0)
        self.is_done.set()

    def pauses(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.asked_at)]


async def pauses_after(errors: list[Exception], patience: PlatformPatience) -> list[float]:
    platform = Strict(errors)
    keeper = PlatformDriver(platform, SPEC, StandInJob().tell, patience=patience)  # type: ignore[arg-type]
    keeper.take(launch(0))
    async with asyncio.timeout(30):
        await platform.is_done.wait()
    await keeper.drain()
    return platform.pauses()


async def test_a_platform_out_of_reach_is_asked_again_sooner_than_one_without_room():
    """The first intent is through at most 10 s after the API server is back."""
    assert PATIENCE.out_of_reach < 10
    patience = PlatformPatience(first_pause=0.05, longest_pause=0.8, out_of_reach=0.1)
    away = await pauses_after([Unavailable("away")] * 6, patience)
    full = await pauses_after([LaunchNotTaken("full")] * 6, patience)
    assert sum(away) < sum(full)
    assert min(full[-2:]) >= 0.4


async def test_a_platform_that_names_a_time_is_left_alone_until_then():
    patience = PlatformPatience(first_pause=0.01, longest_pause=0.01, out_of_reach=0.01, longest_request=0.6)
    [first, second] = await pauses_after([Unavailable("busy", 0.4), Unavailable("busy", 1e9)], patience)
    assert first >= 0.4
    assert second >= 0.6


async def test_one_node_without_room_does_not_hold_up_another(bench):
    bench.cloud.capacity = 1
    bench.start()
    await bench.job.until(1, NodesListed)
    for node in (0, 1):
        bench.driver.take(launch(node))
    [refused] = await bench.job.until(1, LaunchRefused)
    assert refused.node == 1
    bench.driver.take(remove(0))
    await bench.job.until_phase(1, NodePhase.RUNNING)


async def test_intents_of_an_older_master_are_dropped(bench):
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.driver.take(launch(0, master_epoch=3))
    await bench.job.until_phase(0, NodePhase.RUNNING)
    bench.driver.take(launch(1, master_epoch=2))
    bench.driver.take(launch(2, master_epoch=3))
    await bench.job.until_phase(2, NodePhase.RUNNING)
    assert [intent.id for intent in bench.cloud.applied] == [0, 1, 2]  # tried once
    assert not [word for word in bench.job.heard if isinstance(word, LaunchRefused)]


async def test_a_broken_watch_begins_anew_with_a_list(bench):
    bench.start()
    bench.driver.take(launch(0))
    await bench.job.until(1, NodesListed)
    bench.cloud.break_watches()
    lists = await bench.job.until(2, NodesListed)
    assert [node.id for node in lists[1].nodes] == [0]


async def test_a_platform_out_of_reach_is_watched_again_when_it_is_back(bench):
    bench.cloud.is_reachable = False
    bench.start()
    await bench.job.until(1, DefineFleet)
    bench.driver.take(launch(0))
    await bench.job.until(1, LaunchRefused)
    bench.cloud.is_reachable = True
    await bench.job.until(1, NodesListed)
    bench.driver.take(launch(1))
    await bench.job.until_phase(1, NodePhase.RUNNING)
    async with asyncio.timeout(10):
        while len(nodes := await FakePlatform(bench.cloud, JOB).list()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert [node.id for node in nodes] == [0, 1]


async def test_a_platform_that_breaks_while_it_is_watched_is_watched_again(bench):
    """It may be anybody's: what it raises must not end the master, again and again."""
    errors = [ConnectionError("reset by peer"), KeyError("items")]

    class Breaking(FakePlatform):
        async def watch(self) -> AsyncIterator[Sight]:
            if errors:
                raise errors.pop(0)
            async for sight in super().watch():
                yield sight

    bench.drive(Breaking(bench.cloud, JOB))
    bench.start()
    await bench.job.until(1, NodesListed)
    assert not errors
    bench.driver.take(launch(0))
    await bench.job.until_phase(0, NodePhase.RUNNING)


async def test_half_a_character_in_a_refusal_reaches_the_job(bench, monkeypatch):
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.cloud.refusal = "no room on caf\udce9"
    bench.driver.take(launch(0))
    [refused] = await bench.job.until(1, LaunchRefused)
    assert refused.reason == "no room on caf?"


async def test_what_the_job_could_not_write_comes_again_by_a_list(bench):
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.job.failures = [Unavailable("the disk is full")] * 2  # the events of the launch
    bench.driver.take(launch(0))
    lists = await bench.job.until(2, NodesListed)
    assert [(node.id, node.phase) for node in lists[-1].nodes] == [(0, NodePhase.RUNNING)]


async def test_an_event_that_the_job_refuses_does_not_end_the_watch(bench):
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.job.failures = [Rejected("nobody knows this node")]
    bench.driver.take(launch(0))
    await bench.job.until_phase(0, NodePhase.RUNNING)
    assert len([word for word in bench.job.heard if isinstance(word, NodesListed)]) == 1


async def test_at_the_end_launches_are_dropped_and_removals_are_done(bench):
    bench.start()
    await bench.job.until(1, NodesListed)
    bench.driver.take(launch(0))
    await bench.job.until_phase(0, NodePhase.RUNNING)
    bench.cloud.refusal = "no room"
    bench.driver.take(launch(1))
    await bench.job.until(1, LaunchRefused)
    bench.driver.take(remove(0))
    await bench.driver.drain()
    assert await FakePlatform(bench.cloud, JOB).list() == ()
