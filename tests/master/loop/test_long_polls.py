"""Questions that wait on the master: in the room itself, and at a real loop with a real journal and real streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dlrover.core.outcome import NotYet
from dlrover.master.loop.long_polls import LongPolls
from dlrover.master.loop.request import Work
from dlrover.master.loop.streams import AgentLine
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    MAX_REQUESTS_IN_WORK,
    AgentCommand,
    Done,
    JobTerms,
    Join,
    Ping,
    Query,
    Reply,
    Round,
    Run,
)
from dlrover.protocol.messages.kv import KvAdd, KvDelete, KvGet, KvNumber, KvPop, KvPush, KvSet, KvValues, KvWait
from dlrover.protocol.messages.sync import BarrierOpen, JoinSync, NotifyBarrier, SyncFinished, SyncJoined, SyncState
from dlrover.protocol.rpc.client import ask
from dlrover.protocol.rpc.server import AgentStream
from tests.master.conftest import TOKEN, Agent, Connect, StartMaster

ROUND = Round(1)


def question(until: int = 100, line: AgentLine | None = None) -> Work:
    return Work(KvGet(keys=("k",)), line=line, waits_until=until)


class TestRoom:
    def test_who_waits_for_a_topic_is_found_by_it_once(self) -> None:
        room = LongPolls()
        first, second, other = question(), question(), question()
        room.sit(first, ("x",))
        room.sit(other, ("y",))
        room.sit(second, ("x",))
        assert room.touched(["z"]) == []
        assert room.touched(["x", "x"]) == [first, second]
        assert (len(room), other in room, first in room) == (1, True, False)

    def test_who_waits_for_several_topics_is_found_when_all_were_touched(self) -> None:
        room = LongPolls()
        both, one = question(), question()
        room.sit(both, ("x", "y"))
        room.sit(one, ("y",))
        assert room.touched(["y"]) == [one]
        assert room.touched(["y", "z"]) == []
        assert room.touched(["x"]) == [both]
        assert (len(room), room._by_topic) == (0, {})
        room.sit(both, ("x", "y"))
        assert room.touched(["x", "y"]) == [both]
        room.sit(both, ("x", "x"))
        assert room.touched(["x"]) == [both]
        room.sit(both, ("x", "y"))
        room.touched(["x"])
        assert room.clear() == [both]
        assert room._by_topic == {}

    def test_who_waited_long_enough_leaves_in_the_order_of_time(self) -> None:
        room = LongPolls()
        late, early = question(20), question(10)
        room.sit(late, ("x",))
        room.sit(early, ("x",))
        assert room.next_deadline() == 10
        assert room.expired(9) == []
        assert room.expired(20) == [early, late]
        assert (len(room), room.next_deadline()) == (0, None)

    def test_who_left_is_not_reminded_of_its_deadline(self) -> None:
        room = LongPolls()
        for _ in range(1000):
            room.sit(question(10), ("x",))
            room.touched(["x"])
        assert len(room._deadlines) < 100
        room.sit(keeps_waiting := question(20), ("y",))
        assert room.expired(15) == []
        assert keeps_waiting in room

    def test_a_broken_stream_takes_its_questions_with_it(self) -> None:
        room = LongPolls()
        gone, stays = AgentLine(AgentStream("gone")), AgentLine(AgentStream("stays"))
        room.sit(question(line=gone), ("x",))
        room.sit(work := question(line=stays), ("x",))
        room.drop(gone)
        room.drop(gone)
        assert room.touched(["x"]) == [work]

    def test_a_full_room_refuses(self) -> None:
        room = LongPolls(max_waiting=2)
        room.sit(question(), ("x",))
        room.sit(question(), ("y",))
        with pytest.raises(Rejected, match="2 questions already wait") as refused:
            room.sit(question(), ("x",))
        assert refused.value.code == "too-many-waiting"
        assert len(room.clear()) == 2
        room.sit(question(), ("x",))


class Node:
    """An agent whose one worker runs, and asks."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def ask(self, request: Any, *, timeout: float = 20) -> Reply:
        """Commands are named as the agent's relay would."""
        if hasattr(request, "node"):
            fields = {name: getattr(request, name) for name in request.__struct_fields__}
            request = type(request)(**(fields | {"node": self._agent.node, "incarnation": self._agent.incarnation}))
        command: AgentCommand = request
        return await self._agent.channel.call(command, timeout=timeout)

    def asking(self, request: Any, *, timeout: float = 20) -> asyncio.Future[Reply]:
        return asyncio.ensure_future(self.ask(request, timeout=timeout))

    async def reaches_the_master(self) -> None:
        """All that was sent before has been looked at when this is answered: the loop keeps the order."""
        await asyncio.sleep(0)  # what was begun by `asking` sends first
        await self._agent.channel.call(Ping(), timeout=20)


async def a_running_node(start_master: StartMaster, connect: Connect) -> tuple[Node, Any]:
    master = await start_master()
    agent = connect(master.address, launch="a", terms=JobTerms())
    await agent.attached()
    await agent.wish(Join)
    await agent.join()
    await agent.wish(Run)
    return Node(agent), master


async def test_a_question_is_answered_the_moment_its_last_key_is_there(
    start_master: StartMaster, connect: Connect
) -> None:
    node, master = await a_running_node(start_master, connect)
    asked = node.asking(KvGet(keys=("a", "b"), round=ROUND, wait=20))
    await node.reaches_the_master()
    assert len(master.master_loop._waiting) == 1
    await node.ask(KvSet(items={"b": b"2"}, round=ROUND))
    await node.reaches_the_master()
    assert not asked.done()
    await node.ask(KvSet(items={"a": b"1"}, round=ROUND))
    assert await asked == KvValues((b"1", b"2"))
    assert len(master.master_loop._waiting) == 0


@pytest.mark.parametrize("is_backward", [False, True])
async def test_who_waits_for_many_keys_is_looked_at_when_all_are_there(
    start_master: StartMaster, connect: Connect, is_backward: bool
) -> None:
    """Each look costs as much as it has keys."""
    node, master = await a_running_node(start_master, connect)
    keys = [f"{number:04}" for number in range(200)]
    looks = 0
    ask_job = master.master_loop.job.ask

    def counting(query: Query) -> Reply | NotYet:
        nonlocal looks
        looks += isinstance(query, KvGet)
        return ask_job(query)

    master.master_loop.job.ask = counting
    asked = node.asking(KvGet(keys=tuple(keys), round=ROUND, wait=60), timeout=100)
    await node.reaches_the_master()
    for key in reversed(keys) if is_backward else keys:
        await node.ask(KvSet(items={key: b""}, round=ROUND))
    assert await asked == KvValues((b"",) * 200)
    assert looks == 2


async def test_a_key_that_is_deleted_again_is_still_waited_for(start_master: StartMaster, connect: Connect) -> None:
    node, _ = await a_running_node(start_master, connect)
    asked = node.asking(KvGet(keys=("a", "b"), round=ROUND, wait=20))
    await node.reaches_the_master()
    await node.ask(KvSet(items={"a": b"1"}, round=ROUND))
    await node.ask(KvDelete(key="a", round=ROUND))
    await node.ask(KvPush(key="b", value=b"no value", round=ROUND))
    await node.ask(KvSet(items={"b": b"2"}, round=ROUND))
    await node.reaches_the_master()
    assert not asked.done()
    await node.ask(KvSet(items={"a": b"3"}, round=ROUND))
    assert await asked == KvValues((b"3", b"2"))


async def test_a_wait_that_ends_names_what_was_missing(start_master: StartMaster, connect: Connect) -> None:
    node, _ = await a_running_node(start_master, connect)
    with pytest.raises(Rejected, match="No process has set 'k'") as refused:
        await node.ask(KvGet(keys=("k",), wait=0.05))
    assert refused.value.code == "kv-timeout"
    for impatient in (0.0, -1.0, float("nan")):
        with pytest.raises(Rejected, match="No process has set 'k'"):
            await node.ask(KvWait(keys=("k",), wait=impatient))
    assert await node.ask(SyncFinished(name="s", wait=0.05)) == SyncState(False)


async def test_who_waits_does_not_keep_others_from_coming_in(start_master: StartMaster, connect: Connect) -> None:
    node, _ = await a_running_node(start_master, connect)
    num_waiting = 2 * MAX_REQUESTS_IN_WORK
    waiting = [node.asking(KvGet(keys=(str(number),), wait=20)) for number in range(num_waiting)]
    await node.reaches_the_master()
    assert await node.ask(KvAdd(key="n", amount=1)) == KvNumber(1)
    await node.ask(KvSet(items={str(number): str(number).encode() for number in range(num_waiting)}))
    assert [int(reply.values[0]) for reply in await asyncio.gather(*waiting)] == list(range(num_waiting))  # type: ignore[union-attr]


async def test_a_queue_wakes_who_waits_for_it(start_master: StartMaster, connect: Connect) -> None:
    node, _ = await a_running_node(start_master, connect)
    with pytest.raises(Rejected) as refused:
        await node.ask(KvPop(key="q"))
    assert refused.value.code == "kv-empty"
    waiting = node.asking(KvWait(keys=("q",), wait=20, is_for_queues=True))
    await node.reaches_the_master()
    await node.ask(KvPush(key="q", value=b"v"))
    assert await waiting == Done()
    assert await node.ask(KvPop(key="q")) == KvValues((b"v",))


async def test_sync_points_and_barriers_wake_who_waits_for_them(start_master: StartMaster, connect: Connect) -> None:
    node, _ = await a_running_node(start_master, connect)
    waiting = node.asking(SyncFinished(name="s", round=ROUND, wait=20))
    at_barrier = node.asking(BarrierOpen(name="b", round=ROUND, wait=20))
    await node.reaches_the_master()
    assert await node.ask(JoinSync(name="s", round=ROUND)) == SyncJoined(generation=1)
    assert await waiting == SyncState(True)
    assert not at_barrier.done()
    await node.ask(NotifyBarrier(name="b", round=ROUND))
    assert await at_barrier == SyncState(True)


async def test_the_question_of_a_caller_that_left_is_forgotten_with_its_stream(
    start_master: StartMaster, connect: Connect
) -> None:
    node, master = await a_running_node(start_master, connect)
    asked = node.asking(KvGet(keys=("k",), wait=20))
    await node.reaches_the_master()
    asked.cancel()
    await node._agent.channel.reattach()
    await node._agent.attached()  # of the first stream
    assert len(master.master_loop._waiting) == 0


async def test_a_question_outlives_the_stream_and_the_master(start_master: StartMaster, connect: Connect) -> None:
    node, master = await a_running_node(start_master, connect)
    asked = node.asking(KvGet(keys=("k",), wait=60))
    await node.reaches_the_master()
    port = int(master.address.rpartition(":")[2])
    await master.stop()
    await start_master(port=port)
    await node.ask(KvSet(items={"k": b"v"}))
    assert await asked == KvValues((b"v",))


async def test_a_one_shot_client_may_wait_too(start_master: StartMaster, connect: Connect) -> None:
    node, master = await a_running_node(start_master, connect)
    asked = asyncio.ensure_future(ask(master.address, KvGet(keys=("k",), wait=20), token=TOKEN, timeout=20))
    await node.ask(KvSet(items={"k": b"v"}))
    assert await asked == KvValues((b"v",))
