"""What people read on the console when workers had to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from dlrover.agent.monitor.progress import FirstStep
from dlrover.agent.recovery import AskOfFault, Recovery
from dlrover.protocol.codec import Unreadable, decode_from_agent, encode_frame
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.frames import Refusal, Request
from dlrover.protocol.messages.goodput import AskFault, FaultTold
from dlrover.protocol.messages.job import NodeRank, Reply, Round
from dlrover.protocol.rpc.server import MasterServer
from tests.agent.lab import make_world, until
from tests.protocol.conftest import TOKEN, Agent, PlainLoop

KILLED = FaultTold(kind="worker", cause="Round 1: global rank 1 failed: killed.", global_rank=1)


class Stage:
    """A recovery, and what it is told by hand."""

    def __init__(
        self,
        caplog: pytest.LogCaptureFixture,
        tell_after: float = 1e6,
        shares_console_as: Callable[[], NodeRank] | None = None,
        ask: AskOfFault | None = None,
    ) -> None:
        self._caplog = caplog
        self.faults: dict[int, FaultTold] = {1: KILLED}
        self.stepped: FirstStep | None = None
        self.is_over = True
        self.shown: list[list[int]] = []
        """Which of the ranks 0 to 2 may say on the console how they failed, by decision."""
        self.recovery = Recovery(
            self._ask if ask is None else ask,
            start=asyncio.create_task,
            first_step=lambda after: self.stepped if self.stepped and self.stepped.round > after else None,
            is_over=lambda _round: self.is_over,
            settle_output=self._settle,
            shares_console_as=shares_console_as,
            tell_after=tell_after,
        )

    async def _ask(self, command: AskFault, *, timeout: float) -> Reply:
        if command.round not in self.faults:
            raise Unavailable("no master")
        return self.faults[command.round]

    def _settle(self, is_shown: Callable[[int], bool]) -> None:
        self.shown.append([rank for rank in range(3) if is_shown(rank)])

    def told(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.levelname == "WARNING"]

    def runs(self, round_: int, **details: int) -> None:
        self.recovery.running(make_world(round=Round(round_), **details))

    def step(self, round_: int, step: int | None) -> None:
        self.stepped = FirstStep(Round(round_), step)


@pytest.fixture
async def stage(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Stage]:
    stage = Stage(caplog)
    yield stage
    stage.recovery.close()


async def test_a_loss_is_one_paragraph_with_its_cause_and_the_step_that_training_went_on_with(stage: Stage) -> None:
    stage.recovery.began(Round(1), "global rank 0 failed: it lost a peer")
    assert stage.recovery.is_cause_untold
    stage.recovery.began(Round(1), "round 1 stops")
    stage.runs(2, local_world_size=3)
    stage.step(2, 16)
    (text,) = await until(stage.told)
    assert text.startswith(
        "Round 1: global rank 1 failed: killed. All 3 workers were started again. Training went on with step 16, "
    )
    assert text.endswith(" s after the workers stopped.")
    assert stage.shown == [[1]], "its traceback alone is news"
    assert not stage.recovery.is_cause_untold


async def test_a_recovery_that_lasts_is_told_as_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(caplog, tell_after=0.0)
    stage.faults[1] = FaultTold(kind="node", cause="node rank 1 (host) was silent for 15 s")
    stage.is_over = False
    stage.recovery.began(Round(1), "somebody is gone")
    await asyncio.sleep(0)
    assert stage.told() == [], "its workers still speak"
    stage.is_over = True
    assert await until(stage.told) == [
        "Node rank 1 (host) was silent for 15 s. The workers start again when enough nodes have joined."
    ]
    assert stage.shown == [[]]
    stage.runs(2, local_world_size=2)
    await until(lambda: len(stage.told()) == 2)
    assert stage.told()[1].startswith("All 2 workers were started again after ")
    stage.step(2, None)
    await until(lambda: len(stage.told()) == 3)
    assert stage.told()[2].startswith("Training went on, ")
    assert len(stage.shown) == 1


async def test_who_fails_again_before_a_step_is_told_of_each_time(stage: Stage) -> None:
    stage.recovery.began(Round(1), "")
    stage.runs(2, local_world_size=2)
    stage.faults[2] = FaultTold(
        kind="hang", cause="Round 2: deadlock: it stood still for 6.1 s. Rank 1 waits. And so on."
    )
    stage.recovery.began(Round(2), "")
    (first,) = await until(stage.told)
    assert first.startswith("Round 1: global rank 1 failed: killed. All 2 workers were started again")
    stage.runs(3, local_world_size=2)
    stage.step(3, 5)
    await until(lambda: len(stage.told()) == 2)
    assert stage.told()[1].startswith(
        "Round 2: deadlock: it stood still for 6.1 s. All 2 workers were started again. Training"
    )


async def test_without_the_masters_word_all_tracebacks_are_shown_and_the_own_reason_told(stage: Stage) -> None:
    stage.faults.clear()
    stage.recovery.began(Round(1), "global rank 0 failed: it lost a peer")
    stage.runs(2)
    stage.step(2, 1)
    (text,) = await until(stage.told)
    assert text.startswith("Global rank 0 failed: it lost a peer. ")
    assert stage.shown == [[0, 1, 2]]


async def test_a_job_that_ends_soon_after_is_not_silent_about_it_but_does_not_repeat_the_final_report(
    stage: Stage,
) -> None:
    stage.recovery.began(Round(1), "")
    stage.runs(2)
    stage.recovery.began(Round(2), "")
    await stage.recovery.finish(but=Round(2))
    assert len(stage.told()) == 1
    assert stage.told()[0].startswith("Round 1: ")


@pytest.mark.parametrize(
    ("group_rank", "lost_rank", "speaks"), [(0, 2, True), (1, 2, False), (1, 0, True), (2, 0, False)]
)
async def test_where_all_nodes_are_read_at_one_place_the_first_that_is_left_speaks_for_all(
    caplog: pytest.LogCaptureFixture, group_rank: int, lost_rank: int, speaks: bool
) -> None:
    caplog.set_level("INFO")
    stage = Stage(caplog, shares_console_as=lambda: NodeRank(group_rank))
    stage.faults[1] = FaultTold(kind="node", cause="a node is gone", node_rank=NodeRank(lost_rank))
    stage.runs(1, group_rank=group_rank, group_world_size=3)
    stage.recovery.began(Round(1), "")
    stage.runs(2)
    stage.step(2, 1)
    await until(lambda: "A node is gone." in caplog.text)
    assert bool(stage.told()) == speaks
    stage.recovery.close()


@pytest.mark.parametrize("is_console_shared", [False, True])
async def test_a_master_that_does_not_know_the_question_costs_no_word(
    caplog: pytest.LogCaptureFixture, is_console_shared: bool
) -> None:
    """An older one. Over the wire: it refuses the one request and the stream lives on; every node tells its own reason."""
    master_loop, server = PlainLoop(), MasterServer(token=TOKEN)
    master_loop.answers = _refuse_as_unknown
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start(master_loop)
    agent = Agent(address)
    try:
        await agent.attached()
        rank = NodeRank(1)  # of two; the one that speaks for all may be gone, which nobody can tell
        shares = (lambda: rank) if is_console_shared else None
        stage = Stage(caplog, ask=agent.channel.call, shares_console_as=shares)
        stage.runs(1, group_rank=1, group_world_size=2)
        stage.recovery.began(Round(1), "global rank 3 failed: it lost a peer")
        stage.runs(2)
        stage.step(2, 8)
        (text,) = await until(stage.told)
        assert text.startswith(
            "Global rank 3 failed: it lost a peer. All 2 workers were started again. Training went on"
        )
        assert stage.shown == [[0, 1, 2]], "nobody knows whose traceback is the cause"
        stage.recovery.began(Round(2), "global rank 0 failed: exit code 1")
        stage.step(3, 9)
        await until(lambda: len(stage.told()) == 2)
        assert [type(request.body) for request in master_loop.requests] == [AskFault, AskFault], (
            "asked once for each loss"
        )
        assert len(master_loop.attaches) == 1, "the stream lives on"
        stage.recovery.close()
    finally:
        await agent.leave()
        await server.stop()


def _refuse_as_unknown(request: Request) -> Refusal:
    """What a master answers to a message that its codec does not have."""
    (parcel,) = decode_from_agent(encode_frame([request]).replace(b"AskFault", b"AskOther"))
    assert isinstance(parcel, Unreadable)
    assert parcel.code == "unknown"
    return Refusal(id=parcel.id, code=parcel.code, message=parcel.message)
