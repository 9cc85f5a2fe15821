"""The driver alone, with workers that do what the test says."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest

from dlrover.agent.workers.driver import WorkerDriver
from dlrover.agent.workers.group import Failed, Finished, PortOffer
from dlrover.protocol.errors import ConfigError, DLRoverError
from dlrover.protocol.messages.job import FailureKind, Round, StopCause
from tests.agent.lab import make_world
from tests.agent.loopback import DEADLINE, News, StandInGroup, StandInNode, a_failure

FIRST, SECOND, THIRD = (make_world(round=Round(number)) for number in (1, 2, 3))


class Stage:
    """A driver at work, and what it told."""

    def __init__(self) -> None:
        self.news = News()
        self.node = StandInNode(self.news)
        self.outcomes: list[tuple[Round, Finished | Failed]] = []
        self.errors: list[DLRoverError] = []
        self.driver = WorkerDriver(self.node.build, on_outcome=self._on_outcome, on_error=self._on_error)
        self.task = asyncio.create_task(self.driver.run())

    def _on_outcome(self, round_: Round, outcome: Finished | Failed) -> None:
        self.outcomes.append((round_, outcome))
        self.news.tell()

    def _on_error(self, error: DLRoverError) -> None:
        self.errors.append(error)
        self.news.tell()

    @property
    def rounds(self) -> list[int]:
        """Of the groups that were built."""
        return [group.world.round for group in self.node.groups]

    async def run(self, world: object = FIRST) -> StandInGroup:
        assert world in (FIRST, SECOND, THIRD)
        self.driver.want(world, None)
        return await self.node.running(len(self.node.groups) + 1)

    async def settle(self) -> None:
        async with asyncio.timeout(DEADLINE):
            await self.driver.settle()

    async def end(self) -> BaseException | None:
        """How `run` ended."""
        async with asyncio.timeout(DEADLINE):
            return (await asyncio.gather(self.task, return_exceptions=True))[0]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    stage.task.cancel()
    await stage.end()


async def test_a_driver_that_was_never_asked_for_anything_is_settled(stage):
    await stage.settle()
    assert stage.driver.running_round == 0
    assert not stage.driver.is_wanted


async def test_workers_run_until_something_else_is_wanted(stage):
    group = await stage.run(FIRST)
    await stage.settle()
    assert stage.driver.running_round == 1
    stage.driver.want_none(StopCause.PREEMPTION, signal.SIGINT)
    await stage.settle()
    assert group.stops == [(StopCause.PREEMPTION, signal.SIGINT)]
    assert stage.driver.running_round == 0
    assert stage.outcomes == []


async def test_what_should_no_longer_run_is_stopped_before_anything_is_started(stage):
    first = await stage.run(FIRST)
    first.may_stop.clear()
    stage.driver.want(SECOND, None)
    await stage.news.until(lambda: first.stops)
    assert stage.rounds == [1]
    assert not stage.driver.is_settled
    first.may_stop.set()
    await stage.node.running(2)
    assert stage.rounds == [1, 2]
    assert first.is_stopped


async def test_a_superseded_world_is_never_started(stage):
    first = await stage.run(FIRST)
    first.may_stop.clear()
    stage.driver.want(SECOND, None)
    await stage.news.until(lambda: first.stops)
    stage.driver.want(THIRD, None)
    first.may_stop.set()
    await stage.settle()
    assert stage.rounds == [1, 3]


async def test_the_port_of_a_superseded_world_is_free_at_once(stage):
    first = await stage.run(FIRST)
    first.may_stop.clear()
    offer = PortOffer.bind("127.0.0.1")
    stage.driver.want(SECOND, offer)
    await stage.news.until(lambda: first.stops)
    stage.driver.want_none(StopCause.MEMBERSHIP)
    again = PortOffer.bind("127.0.0.1", [offer.port])  # HOST_PORTS with this one port
    stage.driver.want(SECOND, again)
    stage.driver.want(THIRD, None)
    PortOffer.bind("127.0.0.1", [offer.port]).release()


async def test_the_port_of_a_world_that_is_never_started_goes_with_the_driver(stage):
    first = await stage.run(FIRST)
    first.may_stop.clear()
    offer = PortOffer.bind("127.0.0.1")
    stage.driver.want(SECOND, offer)
    stage.task.cancel()
    await stage.end()
    PortOffer.bind("127.0.0.1", [offer.port]).release()


async def test_a_start_that_never_returns_is_cancelled_when_the_target_changes(stage):
    stage.node.prepare = lambda group: group.may_start.clear() if group.world == FIRST else None
    offer = PortOffer.bind("127.0.0.1")
    stage.driver.want(FIRST, offer)
    await stage.news.until(lambda: stage.node.groups and stage.node.groups[0].offer)
    stage.driver.want(SECOND, None)
    await stage.settle()
    first, second = stage.node.groups
    assert first.is_start_cancelled
    assert first.is_stopped
    assert second.is_running
    PortOffer.bind("127.0.0.1", [offer.port]).release()


async def test_a_world_wanted_again_while_its_start_is_cancelled_is_started_anew(stage):
    stage.node.prepare = lambda group: group.may_start.clear() if not stage.node.groups else None
    stage.driver.want(FIRST, None)
    await stage.news.until(lambda: stage.node.groups)
    stage.node.groups[0].may_stop.clear()
    stage.driver.want_none(StopCause.MEMBERSHIP)
    await stage.news.until(lambda: stage.node.groups[0].is_start_cancelled)
    stage.driver.want(FIRST, None)
    stage.node.groups[0].may_stop.set()
    await stage.settle()
    assert [group.is_running for group in stage.node.groups] == [False, True]


async def test_a_repeated_target_changes_nothing(stage):
    stage.node.prepare = lambda group: group.may_start.clear()
    stage.driver.want(FIRST, None)
    await stage.news.until(lambda: stage.node.groups)
    stage.driver.want(make_world(round=Round(1)), None)
    stage.node.groups[0].may_start.set()
    await stage.settle()
    stage.driver.want(make_world(round=Round(1)), None)
    await stage.settle()
    assert stage.rounds == [1]
    assert stage.node.groups[0].stops == []


async def test_a_failed_group_is_stopped_at_once_and_told(stage):
    group = await stage.run(FIRST)
    group.fail(a_failure())
    await stage.news.until(lambda: stage.outcomes)
    assert stage.outcomes == [(1, Failed((a_failure(),), None, 1.0))]
    await stage.settle()
    assert group.stops == [(StopCause.FAILURE, signal.SIGTERM)]
    assert stage.driver.running_round == 0


async def test_a_finished_group_is_swept_and_told(stage):
    group = await stage.run(FIRST)
    group.step = 7
    group.finish()
    await stage.news.until(lambda: stage.outcomes)
    assert stage.outcomes == [(1, Finished(7))]
    await stage.settle()
    assert group.stops == [(StopCause.END_OF_JOB, signal.SIGTERM)]


async def test_failures_that_come_to_light_while_stopping_are_told(stage):
    group = await stage.run(FIRST)
    group.late = (a_failure(message="the culprit"),)
    group.fail(a_failure(FailureKind.PEER_LOST))
    await stage.news.until(lambda: len(stage.outcomes) == 2)
    assert [outcome.failures[0].message for _, outcome in stage.outcomes] == ["RuntimeError: boom", "the culprit"]


async def test_of_workers_being_stopped_only_what_failed_by_itself_is_told(stage):
    group = await stage.run(FIRST)
    group.may_stop.clear()
    stage.driver.want_none(StopCause.MEMBERSHIP)
    await stage.news.until(lambda: group.stops)
    group.fail(a_failure(FailureKind.STOPPED_BY_US), a_failure(message="by itself"))
    await stage.news.until(lambda: stage.outcomes)
    group.may_stop.set()
    await stage.settle()
    ((round_, outcome),) = stage.outcomes
    assert round_ == 1
    assert [failure.message for failure in outcome.failures] == ["by itself"]


async def test_workers_that_end_well_while_being_stopped_have_not_finished(stage):
    group = await stage.run(FIRST)
    group.may_stop.clear()
    stage.driver.want_none(StopCause.MEMBERSHIP)
    await stage.news.until(lambda: group.stops)
    group.finish()
    group.may_stop.set()
    await stage.settle()
    assert stage.outcomes == []


async def test_a_start_that_cannot_be_mended_is_told_and_leaves_nothing(stage):
    stage.node.prepare = lambda group: setattr(group, "start_error", ConfigError("no log directory"))
    stage.driver.want(FIRST, None)
    await stage.news.until(lambda: stage.errors)
    await stage.settle()
    assert [str(error) for error in stage.errors] == ["no log directory"]
    assert stage.node.groups[0].is_stopped
    assert stage.driver.running_round == 0


async def test_a_bug_in_the_start_ends_the_driver_with_it(stage):
    bug = ZeroDivisionError("a bug")
    stage.node.prepare = lambda group: setattr(group, "start_error", bug)
    stage.driver.want(FIRST, None)
    assert await stage.end() is bug
    assert stage.node.groups[0].num_kills == 1


async def test_a_bug_in_the_watch_ends_the_driver_with_it(stage):
    group = await stage.run(FIRST)
    bug = ZeroDivisionError("a bug")
    group.break_down(bug)
    assert await stage.end() is bug
    assert group.num_kills == 1


async def test_a_bug_in_the_watch_is_not_lost_while_the_workers_stop(stage):
    group = await stage.run(FIRST)
    group.may_stop.clear()
    stage.driver.want_none(StopCause.MEMBERSHIP)
    await stage.news.until(lambda: group.stops)
    bug = ZeroDivisionError("a bug")
    group.break_down(bug)
    group.may_stop.set()
    assert await stage.end() is bug


async def test_workers_are_killed_when_the_driver_is_cancelled(stage):
    group = await stage.run(FIRST)
    stage.task.cancel()
    assert isinstance(await stage.end(), asyncio.CancelledError)
    assert group.num_kills == 1
    assert group.stops == []


async def test_a_start_goes_with_the_driver(stage):
    stage.node.prepare = lambda group: group.may_start.clear()
    stage.driver.want(FIRST, None)
    await stage.news.until(lambda: stage.node.groups)
    stage.task.cancel()
    assert isinstance(await stage.end(), asyncio.CancelledError)
    (group,) = stage.node.groups
    assert group.num_kills == 1
    group.may_start.set()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not group.is_started


async def test_cancelling_the_driver_works_while_it_waits_for_a_cancelled_start(stage):
    has_begun, is_cancelled, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def start(offer: PortOffer | None) -> None:
        has_begun.set()
        stage.news.tell()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
            stage.news.tell()
            await may_end.wait()

    stage.node.prepare = lambda group: setattr(group, "start", start)
    stage.driver.want(FIRST, None)
    await stage.news.until(has_begun.is_set)
    stage.driver.want_none(StopCause.MEMBERSHIP)
    await stage.news.until(is_cancelled.is_set)
    stage.task.cancel()
    may_end.set()
    assert isinstance(await stage.end(), asyncio.CancelledError)


async def test_kill_without_workers_is_harmless(stage):
    stage.driver.kill()
    await stage.settle()


async def test_new_workers_start_while_the_kernel_still_frees_the_old_ones_but_nobody_else_takes_that_for_the_end(
    stage,
):
    old = await stage.run(FIRST)
    old.may_be_gone.clear()
    stage.driver.want(SECOND, None)
    await stage.node.running(2)
    assert old.is_stopped
    assert not stage.driver.is_settled
    old.may_be_gone.set()
    await stage.settle()
    assert stage.driver.running_round == 2


async def test_a_driver_that_ends_does_not_wait_for_what_the_kernel_still_frees(stage):
    old = await stage.run(FIRST)
    old.may_be_gone.clear()
    stage.driver.want_none(StopCause.FAILURE)
    await stage.news.until(lambda: old.is_stopped)
    stage.task.cancel()
    assert isinstance(await stage.end(), asyncio.CancelledError)
