"""The line to the master by itself: what is heard, what is lost, and that nobody waits in vain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from dlrover.agent.checkpoints.duties import DutyLine
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.checkpoint import (
    AnyCheckpointCommand,
    AwaitSaveDuties,
    CheckpointSettled,
    SaveDuties,
    ShardWritten,
)
from dlrover.protocol.messages.job import Done, Reply, Round

WRITTEN = ShardWritten(
    directory="/d", target="5", step=5, attempt="a", shard=0, num_shards=1, round=Round(1), digest="x"
)
COMMITTED = CheckpointSettled(step=5, attempt="a", directory="/d", is_committed=True, number=9)


class Script:
    """A master that says what the test wants, one answer after the other."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[SaveDuties | Exception] = asyncio.Queue()
        self.reported = asyncio.Event()
        self.refusal: Exception | None = None
        self.since: list[int] = []

    async def __call__(self, request: AnyCheckpointCommand | AwaitSaveDuties, *, timeout: float) -> Reply:
        if isinstance(request, AwaitSaveDuties):
            self.since.append(request.since)
            answer = await self.answers.get()
            if isinstance(answer, Exception):
                raise answer
            return answer
        self.reported.set()
        if self.refusal is not None:
            raise self.refusal
        return Done()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def line(script: Script) -> AsyncIterator[DutyLine]:
    line = DutyLine(script, lambda duties: None, lambda: None)
    task = asyncio.create_task(line.run())
    yield line
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def outcome(line: DutyLine, script: Script, then: Callable[[], None]) -> CheckpointSettled | None:
    report = asyncio.create_task(line.report(WRITTEN, patience=20))
    await asyncio.wait_for(script.reported.wait(), 10)
    then()
    return await asyncio.wait_for(report, 10)


async def test_what_became_of_it_is_heard(line: DutyLine, script: Script) -> None:
    duties = SaveDuties(number=9, settled=(COMMITTED,))
    assert await outcome(line, script, lambda: script.answers.put_nowait(duties)) == COMMITTED
    await asyncio.sleep(0)
    assert script.since == [0, 9]


async def test_a_master_that_is_away_ends_the_wait(line: DutyLine, script: Script) -> None:
    assert await outcome(line, script, lambda: script.answers.put_nowait(Unavailable("away"))) is None
    assert not line.is_up


async def test_a_master_that_does_not_know_the_question_ends_the_wait(line: DutyLine, script: Script) -> None:
    assert await outcome(line, script, lambda: script.answers.put_nowait(Rejected("what?", code="malformed"))) is None


async def test_a_master_that_lost_its_journal_ends_the_wait(line: DutyLine, script: Script) -> None:
    script.answers.put_nowait(SaveDuties(number=7))
    assert await outcome(line, script, lambda: script.answers.put_nowait(SaveDuties(number=0))) is None
    assert line.is_up


@pytest.mark.parametrize(
    ("code", "is_committed"), [("attempt-committed", True), ("attempt-over", False), ("stale-incarnation", None)]
)
async def test_a_refused_report_says_what_it_can(
    line: DutyLine, script: Script, code: str, is_committed: bool | None
) -> None:
    script.refusal = Rejected("no", code=code)
    settled = await line.report(WRITTEN, patience=20)
    assert (None if settled is None else settled.is_committed) == is_committed


async def test_patience_has_an_end(line: DutyLine) -> None:
    assert await line.report(WRITTEN, patience=0.01) is None
