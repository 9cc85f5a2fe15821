"""What workers ask through the agent's socket, and what the agent makes of it on its way to the master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from dlrover.agent.relay import MAX_RELAYED, Relay
from dlrover.agent.workers.socket import MAX_ASKED, WorkerSocket
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.local_frames import pack, read_frame
from dlrover.protocol.messages.checkpoint import AwaitSaveDuties
from dlrover.protocol.messages.job import (
    AgentCommand,
    AgentMessage,
    AskMaster,
    AskStatus,
    BlockRendezvous,
    Done,
    Hello,
    Incarnation,
    MasterAnswer,
    MasterRefusal,
    NodeId,
    Pong,
    Query,
    Reply,
    ReportStep,
    Round,
    StopJob,
    WorkerRequest,
)
from dlrover.protocol.messages.kv import KvAdd, KvGet, KvNumber, KvSet, KvValues
from dlrover.protocol.messages.peers import AskPeers
from dlrover.protocol.messages.sync import JoinSync, SyncJoined
from dlrover.protocol.messages.watch import NodeEvent, SampleTaken
from tests.agent.lab import until

ROUND = Round(3)


class Worker:
    """The other end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, *messages: Hello | ReportStep | AskMaster) -> None:
        for message in messages:
            self._writer.write(pack(msgspec.msgpack.encode(message)))

    async def answer(self) -> AgentMessage:
        frame = await asyncio.wait_for(read_frame(self._reader), 20)
        assert frame is not None, "the agent hung up"
        return msgspec.msgpack.decode(frame, type=AgentMessage)  # type: ignore[no-any-return]

    async def ask(self, request: WorkerRequest) -> AgentMessage:
        self.send(AskMaster(id=1, body=request, timeout=20))
        return await self.answer()

    def close(self) -> None:
        self._writer.close()


class Master:
    """Takes what is relayed and answers when told."""

    def __init__(self) -> None:
        self.asked: list[WorkerRequest] = []
        self.num_left = 0
        self.answers: dict[str, asyncio.Future[Reply]] = {}

    async def __call__(self, request: WorkerRequest, *, timeout: float) -> Reply:
        self.asked.append(request)
        key = request.keys[0] if isinstance(request, KvGet) else ""
        try:
            return await self.answers.setdefault(key, asyncio.get_running_loop().create_future())
        except asyncio.CancelledError:
            self.num_left += 1
            raise

    def answer(self, reply: Reply, key: str = "") -> None:
        self.answers.setdefault(key, asyncio.get_running_loop().create_future()).set_result(reply)

    def fail(self, error: Exception) -> None:
        self.answers.setdefault("", asyncio.get_running_loop().create_future()).set_exception(error)


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[WorkerSocket]:
    server = await WorkerSocket.open(str(tmp_path))
    server.open_round(ROUND)
    yield server
    await server.close()


@pytest.fixture
def master(server: WorkerSocket) -> Master:
    master = Master()
    server.relay_to(master)
    return master


async def a_worker(server: WorkerSocket, *, round_: int = ROUND, local_rank: int = 0) -> Worker:
    worker = Worker(*await asyncio.open_unix_connection(server.path))
    worker.send(Hello(local_rank=local_rank, round=Round(round_), pid=1))
    return worker


async def test_answers_find_their_request_in_any_order(server: WorkerSocket, master: Master) -> None:
    worker = await a_worker(server)
    worker.send(*(AskMaster(id=number, body=KvGet(keys=(str(number),)), timeout=20) for number in (1, 2)))
    await until(lambda: len(master.asked) == 2)
    master.answer(KvValues((b"2",)), "2")
    assert await worker.answer() == MasterAnswer(id=2, reply=KvValues((b"2",)))
    worker.send(ReportStep(step=7))
    master.answer(KvValues((b"1",)), "1")
    assert await worker.answer() == MasterAnswer(id=1, reply=KvValues((b"1",)))
    await until(lambda: server.step() == 7)
    worker.close()


async def test_refusals_come_back_with_their_code(server: WorkerSocket, master: Master) -> None:
    for error, code in ((Rejected("no", code="kv-full"), "kv-full"), (Unavailable("away"), "unavailable")):
        master.answers.clear()
        master.fail(error)
        worker = await a_worker(server)
        assert await worker.ask(KvSet(items={})) == MasterRefusal(id=1, code=code, message=str(error))
        worker.close()


async def test_before_there_is_a_master_requests_are_refused(server: WorkerSocket) -> None:
    worker = await a_worker(server)
    answer = await worker.ask(KvSet(items={}))
    assert isinstance(answer, MasterRefusal)
    assert answer.code == "unavailable"
    worker.close()


@pytest.mark.parametrize(("worker_round", "key_round"), [(2, 2), (2, 0), (2, 3), (3, 2), (3, 4), (4, 4)])
async def test_a_worker_of_another_round_is_not_heard(
    server: WorkerSocket, master: Master, worker_round: int, key_round: int
) -> None:
    worker = await a_worker(server, round_=worker_round)
    answer = await worker.ask(KvSet(items={"k": b"v"}, round=Round(key_round)))
    assert isinstance(answer, MasterRefusal)
    assert answer.code == "stale-round"
    assert master.asked == []
    worker.close()


async def test_a_worker_is_not_heard_any_more_when_the_next_round_runs(server: WorkerSocket, master: Master) -> None:
    master.answer(Done())
    worker = await a_worker(server)
    assert await worker.ask(KvSet(items={}, round=ROUND)) == MasterAnswer(id=1, reply=Done())
    server.open_round(Round(4))
    answer = await worker.ask(KvSet(items={}, round=ROUND))
    assert isinstance(answer, MasterRefusal)
    assert answer.code == "stale-round"
    worker.close()


async def test_who_has_not_said_hello_is_not_heard(server: WorkerSocket, master: Master) -> None:
    worker = Worker(*await asyncio.open_unix_connection(server.path))
    answer = await worker.ask(KvSet(items={}))
    assert isinstance(answer, MasterRefusal)
    assert answer.code == "malformed"
    worker.close()


async def test_a_worker_joins_for_itself_only(server: WorkerSocket, master: Master) -> None:
    master.answer(SyncJoined(generation=1))
    worker = await a_worker(server, local_rank=5)
    await worker.ask(JoinSync(name="s", round=ROUND, local_rank=0))
    assert master.asked == [JoinSync(name="s", round=ROUND, local_rank=5)]
    worker.close()


async def test_the_questions_of_a_worker_that_died_are_dropped(server: WorkerSocket, master: Master) -> None:
    worker = await a_worker(server)
    worker.send(AskMaster(id=1, body=KvGet(keys=("k",)), timeout=20))
    await until(lambda: len(master.asked) == 1)
    worker.close()
    await until(lambda: master.num_left == 1)


async def test_too_many_requests_of_one_worker_are_refused(server: WorkerSocket, master: Master) -> None:
    worker = await a_worker(server)
    for number in range(MAX_ASKED + 1):
        worker.send(AskMaster(id=number, body=KvGet(keys=("k",)), timeout=20))
    answer = await worker.answer()
    assert isinstance(answer, MasterRefusal)
    assert (answer.id, answer.code) == (MAX_ASKED, "too-many-waiting")
    worker.close()


class TestRelay:
    def relay(self, *answers: Reply | Exception) -> Relay:
        self.sent: list[AgentCommand | Query] = []
        self.node, self.life = self.renamed = NodeId(7), Incarnation(1)
        left = list(answers)

        async def call(command: AgentCommand | Query, *, timeout: float) -> Reply:
            self.sent.append(command)
            answer = left.pop(0)
            self.node, self.life = self.renamed
            if isinstance(answer, Exception):
                raise answer
            return answer

        return Relay(call, lambda: (self.node, self.life))

    async def test_a_command_goes_in_the_name_of_the_node_and_its_life(self) -> None:
        relay = self.relay(KvNumber(1))
        stranger = KvAdd(key="n", amount=1, node=NodeId(99), incarnation=Incarnation(99))
        assert await relay(stranger, timeout=1) == KvNumber(1)
        assert self.sent == [KvAdd(key="n", amount=1, node=NodeId(7), incarnation=Incarnation(1))]

    async def test_a_question_goes_as_it_is(self) -> None:
        relay = self.relay(KvValues(()))
        await relay(KvGet(keys=()), timeout=1)
        assert self.sent == [KvGet(keys=())]

    async def test_orders_about_the_job_go_as_they_are_and_those_of_the_node_in_its_name(self) -> None:
        relay = self.relay(Done(), Done())
        assert await relay(StopJob(message="enough"), timeout=1) == Done()
        await relay(BlockRendezvous(node=NodeId(99), incarnation=Incarnation(99), reason="why"), timeout=1)
        block = BlockRendezvous(node=NodeId(7), incarnation=Incarnation(1), reason="why")
        assert self.sent == [StopJob(message="enough"), block]

    async def test_news_of_a_worker_are_news_of_its_node(self) -> None:
        observed: list[NodeEvent | SampleTaken] = []

        async def call(command: AgentCommand | Query, *, timeout: float) -> Reply:
            raise AssertionError("nothing is asked")

        relay = Relay(call, lambda: (NodeId(7), Incarnation(1)), observed.append)
        news = NodeEvent(node=NodeId(99), incarnation=Incarnation(99), level="info", name="n", text="t")
        assert await relay(news, timeout=1) == Done()
        assert observed == [replace(news, node=NodeId(7), incarnation=Incarnation(1))]

    async def test_workers_that_ask_about_the_job_at_a_time_share_one_answer(self) -> None:
        may_answer = asyncio.Event()
        num_asked = 0

        async def call(command: AgentCommand | Query, *, timeout: float) -> Reply:
            nonlocal num_asked
            num_asked += 1
            await may_answer.wait()
            return Pong(job_name=str(num_asked), master_epoch=1)

        relay = Relay(call, lambda: (NodeId(7), Incarnation(1)))
        asked = [asyncio.ensure_future(relay(AskStatus(), timeout=60)) for _ in range(64)]
        await until(lambda: num_asked == 1)
        with pytest.raises(Unavailable, match="did not answer the question"):
            await relay(AskStatus(), timeout=0.01)
        may_answer.set()
        first = await asked[0]
        assert {id(answer) for answer in await asyncio.gather(*asked)} >= {id(first)}
        assert num_asked < 64

    async def test_a_refusal_that_was_lost_is_fetched_again(self) -> None:
        relay = self.relay(Rejected("?", code="too-old"), Rejected("empty", code="kv-empty"))
        with pytest.raises(Rejected, match="empty"):
            await relay(KvAdd(key="n", amount=1), timeout=1)
        assert len(self.sent) == 2

    async def test_what_waited_for_a_master_without_its_journal_goes_under_the_new_number(self) -> None:
        relay = self.relay(Rejected("?", code="wrong-sender"), SyncJoined(generation=1))
        self.renamed = NodeId(8), Incarnation(1)
        assert await relay(JoinSync(name="x", round=Round(3)), timeout=1) == SyncJoined(generation=1)
        assert [command.node for command in self.sent if isinstance(command, JoinSync)] == [7, 8]

    @pytest.mark.parametrize("question", [AwaitSaveDuties(), AskPeers(node=NodeId(-1), round=Round(3))])
    async def test_so_do_questions_about_this_node(self, question: AwaitSaveDuties | AskPeers) -> None:
        """The old number may be that of another node now."""
        relay = self.relay(Rejected("?", code="wrong-sender"), Done())
        self.renamed = NodeId(8), Incarnation(1)
        assert await relay(question, timeout=1) == Done()
        assert [asked.node for asked in self.sent if isinstance(asked, AwaitSaveDuties | AskPeers)] == [7, 8]

    async def test_what_a_former_life_asked_for_is_not_asked_by_the_new_one(self) -> None:
        relay = self.relay(Rejected("?", code="wrong-sender"))
        self.renamed = NodeId(8), Incarnation(2)
        with pytest.raises(Rejected):
            await relay(JoinSync(name="x", round=Round(3)), timeout=1)

    async def test_no_more_commands_are_under_way_than_the_master_remembers(self) -> None:
        is_over = asyncio.Event()
        num_under_way = 0

        async def call(command: AgentCommand | Query, *, timeout: float) -> Reply:
            nonlocal num_under_way
            num_under_way += 1
            await is_over.wait()
            num_under_way -= 1
            return Done()

        relay = Relay(call, lambda: (NodeId(7), Incarnation(1)))
        relayed = [asyncio.ensure_future(relay(KvSet(items={}), timeout=20)) for _ in range(2 * MAX_RELAYED)]
        await until(lambda: num_under_way == MAX_RELAYED)
        with pytest.raises(Unavailable, match="already wait for the master"):
            await relay(KvSet(items={}), timeout=0.01)
        is_over.set()
        assert await asyncio.gather(*relayed) == [Done()] * len(relayed)
