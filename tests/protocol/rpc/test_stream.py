"""The stream between agent and master, over a real loopback connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dlrover.protocol.codec import QUESTION, VERDICT, encode_frames
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.fleet import FleetNodeStatus, NodePhase, NodeType
from dlrover.protocol.messages.frames import Ack, Answer, Beat, Observed, Refusal, Request
from dlrover.protocol.messages.job import (
    MAX_MESSAGE_BYTES,
    AskStatus,
    Attach,
    Done,
    Heartbeat,
    Incarnation,
    JobStatus,
    JobTerms,
    JoinRendezvous,
    LeaveJob,
    LeaveReason,
    LeftOut,
    NodeId,
    NodeRank,
    NodeStatus,
    Ping,
    PlatformId,
    Pong,
    Round,
    Stage,
)
from dlrover.protocol.messages.kv import KvValues
from dlrover.protocol.messages.watch import SampleTaken
from dlrover.protocol.rpc import transport
from dlrover.protocol.rpc.client import FIRST_PAUSE, LONGEST_PAUSE, AgentChannel, Backoff, ask
from dlrover.protocol.rpc.transport import ASK_METHOD, SERVICE, call_metadata, open_channel
from tests.protocol.conftest import TOKEN, Agent, PlainLoop, Serve

Connect = Callable[..., Agent]


def a_join(round_number: int = 1, offer: str = "h:1") -> JoinRendezvous:
    return JoinRendezvous(
        node=NodeId(7), incarnation=Incarnation(1), round=Round(round_number), local_world_size=1, offer=offer
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (a channel tells nobody of its troubles)
            await asyncio.sleep(0.005)


async def test_an_agent_attaches_calls_beats_and_is_told_levels(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    _, address = await serve()
    agent = connect(address)
    assert agent.channel.outage() > 0
    assert (await agent.attached()).node == 7
    assert agent.channel.outage() == 0.0
    assert (await agent.levels.get()).number == 1
    assert await agent.channel.call(a_join(), timeout=5) == Done()
    agent.channel.beat(Heartbeat(node=NodeId(7), incarnation=Incarnation(1), step=3))
    beat = await master_loop.until(Beat)
    assert isinstance(beat, Beat)
    assert beat.heartbeat.step == 3
    master_loop.push(2)
    assert (await asyncio.wait_for(agent.levels.get(), 5)).number == 2
    assert await master_loop.until(Ack) == Ack(2)


async def test_a_repeated_level_is_acknowledged_again_but_an_older_one_never_shown(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    assert await master_loop.until(Ack) == Ack(1)
    for number in (3, 3, 2, 4):
        master_loop.push(number)
    assert [await master_loop.until(Ack) for _ in range(4)] == [Ack(3), Ack(3), Ack(2), Ack(4)]
    assert [agent.levels.get_nowait().number for _ in range(agent.levels.qsize())] == [1, 3, 4]


async def test_a_level_of_an_older_master_is_ignored(serve: Serve, master_loop: PlainLoop, connect: Connect) -> None:
    master_loop.master_epoch = 5
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    master_loop.master_epoch = 4
    master_loop.push(9)
    master_loop.master_epoch = 5
    master_loop.push(10)
    assert (await agent.levels.get()).number == 1
    assert (await asyncio.wait_for(agent.levels.get(), 5)).number == 10


async def test_an_agent_says_which_master_epoch_it_has_seen(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    """A master that lost its journal begins at 1 again; it has to know above which number the agents will obey it."""
    master_loop.master_epoch = 5
    server, address = await serve()
    agent = connect(address)
    await agent.attached()
    assert master_loop.attaches[-1].master_epoch == 0
    master_loop.master_epoch = 7
    master_loop.push(2)  # it heard so from another agent
    assert await master_loop.until(Ack) == Ack(1)
    assert await master_loop.until(Ack) == Ack(2)
    await server.stop()
    await serve(int(address.split(":")[1]))
    await agent.attached()
    assert master_loop.attaches[-1].master_epoch == 7


async def test_a_master_that_stays_below_that_epoch_is_not_obeyed(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    master_loop.master_epoch = 5
    server, address = await serve()
    agent = connect(address)
    await agent.attached()
    await server.stop()
    master_loop.master_epoch = 4
    await serve(int(address.split(":")[1]))
    async with asyncio.timeout(10):
        while len(master_loop.attaches) < 3:  # refused, and tried again
            await master_loop.until(Request)
    assert agent.attachments.empty()
    assert "it has epoch 4, and a master of epoch 5 answered before" in agent.channel.trouble
    master_loop.master_epoch = 6
    assert (await agent.attached()).master_epoch == 6


async def test_a_request_without_answer_is_sent_again_after_a_broken_stream_with_its_number(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    server, address = await serve()
    agent = connect(address)
    await agent.attached()
    master_loop.answers = lambda request: None
    first = asyncio.ensure_future(agent.channel.call(a_join(1), timeout=30))
    second = asyncio.ensure_future(agent.channel.call(a_join(2), timeout=30))
    await master_loop.until(Request)
    await master_loop.until(Request)
    master_loop.answers = lambda request: Answer(id=request.id, body=Done())
    await server.stop()
    await serve(int(address.split(":")[1]))
    assert await first == await second == Done(), "a restarted local master must be bridged within the calls' time"
    assert [(r.sequence, r.body.round) for r in master_loop.requests] == [(1, 1), (2, 2), (1, 1), (2, 2)]  # type: ignore[union-attr]
    assert (await agent.attached()).node == 7


async def test_a_call_made_during_an_outage_is_sent_once_the_master_is_back(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    server, address = await serve()
    agent = connect(address)
    await agent.attached()
    await server.stop()
    await until(lambda: agent.channel.outage() > 0)  # what is sent before would be sent again
    call = asyncio.ensure_future(agent.channel.call(a_join(), timeout=30))
    with pytest.raises(Unavailable, match="no answer from the master"):
        await agent.channel.call(a_join(5), timeout=0.05)
    await serve(int(address.split(":")[1]))
    assert await call == Done()
    assert [r.body.round for r in master_loop.requests] == [1]  # type: ignore[union-attr]


async def test_a_busy_master_is_asked_again_and_order_is_kept(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    refused: set[int] = set()

    def once_busy(request: Request) -> Answer | Refusal:
        if request.id in refused:
            return Answer(id=request.id, body=Done())
        refused.add(request.id)
        return Refusal(id=request.id, code="busy", message="busy", retry_after=0.05)

    master_loop.answers = once_busy
    calls = [agent.channel.call(a_join(number), timeout=10) for number in range(1, 6)]
    assert await asyncio.gather(*calls) == [Done()] * 5
    assert [r.sequence for r in master_loop.requests] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]


async def test_a_refusal_reaches_its_caller_only(serve: Serve, master_loop: PlainLoop, connect: Connect) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    master_loop.answers = lambda r: (
        Refusal(id=r.id, code="stale", message="too late") if r.sequence == 1 else Answer(id=r.id, body=Done())
    )
    with pytest.raises(Rejected, match="too late") as caught:
        await agent.channel.call(a_join(), timeout=5)
    assert caught.value.code == "stale"
    assert await agent.channel.call(a_join(), timeout=5) == Done()


async def test_a_message_too_large_never_leaves(serve: Serve, connect: Connect) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    with pytest.raises(Rejected, match="limit is 4194304") as caught:
        await agent.channel.call(a_join(offer="x" * MAX_MESSAGE_BYTES), timeout=5)
    assert caught.value.code == "too-large"
    assert await agent.channel.call(a_join(), timeout=5) == Done()


async def test_an_answer_too_large_refuses_its_question_only(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    master_loop.answers = lambda r: Answer(id=r.id, body=KvValues((bytes(MAX_MESSAGE_BYTES),)))
    with pytest.raises(Rejected, match="limit is 4194304") as caught:
        await agent.channel.call(Ping(), timeout=10)
    assert caught.value.code == "too-large"
    master_loop.answers = lambda r: Answer(id=r.id, body=Done())
    assert await agent.channel.call(a_join(), timeout=10) == Done()
    assert (len(master_loop.attaches), agent.running.done()) == (1, False)


async def test_a_stream_that_was_attached_is_opened_again_whatever_was_too_large(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    refusals = [Rejected("more than one frame holds", code="too-large")]

    def answer(request: Request) -> Answer:
        if refusals:
            raise refusals.pop()  # ends the stream with gRPC's RESOURCE_EXHAUSTED
        return Answer(id=request.id, body=Done())

    master_loop.answers = answer
    assert await agent.channel.call(a_join(), timeout=10) == Done()
    await agent.attached()
    assert [r.sequence for r in master_loop.requests] == [1, 1]


async def test_what_gathers_beyond_one_frame_leaves_in_several(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    calls = [agent.channel.call(a_join(offer="x" * (MAX_MESSAGE_BYTES // 3)), timeout=10) for _ in range(5)]
    assert await asyncio.gather(*calls) == [Done()] * 5
    assert [r.sequence for r in master_loop.requests] == [1, 2, 3, 4, 5]


async def test_closing_still_delivers_what_was_queued(serve: Serve, master_loop: PlainLoop, connect: Connect) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    leave = LeaveJob(node=NodeId(7), incarnation=Incarnation(1), reason=LeaveReason.JOB_ENDED)
    call = asyncio.ensure_future(agent.channel.call(leave, timeout=5))
    await master_loop.until(Request)
    await call
    agent.channel.beat(Heartbeat(node=NodeId(7), incarnation=Incarnation(1), step=99))
    await agent.leave()
    await master_loop.until(Beat)
    await master_loop.until("closed")
    with pytest.raises(Unavailable, match="closed"):
        await agent.channel.call(a_join(), timeout=5)


async def test_a_wrong_token_ends_the_channel_for_good(serve: Serve, connect: Connect) -> None:
    _, address = await serve()
    agent = connect(address, token="wrong")
    waiting = asyncio.ensure_future(agent.channel.call(a_join(), timeout=5))
    with pytest.raises(Rejected, match="token is missing or wrong") as caught:
        await agent.attached()
    assert caught.value.code == "bad-token"
    assert "another port" in str(caught.value), "two jobs at one address are as likely a cause as a forgotten token"
    with pytest.raises(Rejected):
        await waiting


async def test_one_shot_questions_are_answered(serve: Serve) -> None:
    _, address = await serve()
    assert await ask(address, Ping(), token=TOKEN, timeout=5) == Pong(job_name="job", master_epoch=1)


async def test_a_question_to_nobody_fails_at_once(serve: Serve) -> None:
    server, address = await serve()
    await server.stop()
    began_at = time.monotonic()
    with pytest.raises(Unavailable, match="not reachable"):
        await ask(address, Ping(), token=TOKEN, timeout=30)
    assert time.monotonic() - began_at < 20


async def test_the_agent_keeps_trying_and_says_why(connect: Connect, serve: Serve) -> None:
    server, address = await serve()
    await server.stop()
    agent = connect(address)
    await until(lambda: "Connection refused" in agent.channel.trouble)
    with pytest.raises(Unavailable, match="Connection refused"):
        await agent.channel.call(a_join(), timeout=0.1)
    assert agent.channel.outage() >= 0.1
    await serve(int(address.split(":")[1]))
    assert (await agent.attached()).node == 7
    assert agent.channel.trouble == ""


def test_agents_that_lost_their_master_do_not_come_back_in_step() -> None:
    """Pauses of many agents, attempt by attempt: spread over a span that grows from a moment to two seconds."""
    attempts = list(
        zip(*([backoff.pause() for _ in range(12)] for backoff in [Backoff() for _ in range(300)]), strict=True)
    )
    for pauses, span in zip(
        attempts, [min(FIRST_PAUSE * 2**number, LONGEST_PAUSE) for number in range(12)], strict=True
    ):
        assert 0 <= min(pauses) < 0.2 * span
        assert 0.8 * span < max(pauses) <= span
    backoff = Backoff()
    for _ in range(12):
        backoff.pause()
    backoff.reset()
    assert backoff.pause() <= FIRST_PAUSE, "who was attached once begins anew"


def a_status(num_nodes: int, **details: object) -> JobStatus:
    """Of a job on a platform, with a node that is away at the end of the list, and a failed one of the platform."""
    last = num_nodes - 1
    fields: dict[str, object] = {
        "job_name": "job",
        "stage": Stage.RUNNING,
        "master_epoch": 1,
        "round": Round(3),
        "world_size": num_nodes,
        "num_restarts": 0,
        "verdict": "all run",
        "nodes": tuple(
            NodeStatus(
                node=NodeId(number),
                node_rank=NodeRank(number),
                incarnation=Incarnation(1),
                host=f"host-{number}.of.a.large.cluster",
                status="disconnected" if number == last else "alive",
                wish="run",
            )
            for number in range(num_nodes)
        ),
        "fleet": tuple(
            FleetNodeStatus(
                id=PlatformId(number),
                node_type=NodeType.WORKER,
                rank=number,
                name=f"job-worker-{number}",
                phase=NodePhase.FAILED if number == last else NodePhase.RUNNING,
                host=f"host-{number}.of.a.large.cluster",
            )
            for number in range(num_nodes)
        ),
    }
    return JobStatus(**(fields | details))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["unary", "stream"])
async def test_a_status_too_large_for_a_message_tells_of_the_nodes_that_matter_and_counts_the_others(
    serve: Serve, master_loop: PlainLoop, connect: Connect, way: str
) -> None:
    whole = a_status(20_000)
    _, address = await serve()
    if way == "unary":
        master_loop.reply = whole
        status = await ask(address, AskStatus(), token=TOKEN, timeout=30)
    else:
        agent = connect(address)
        await agent.attached()
        master_loop.answers = lambda request: Answer(id=request.id, body=whole)
        status = await agent.channel.call(AskStatus(), timeout=30)

    assert isinstance(status, JobStatus)
    assert (status.verdict, status.world_size) == ("all run", 20_000)
    assert (whole.nodes[-1] in status.nodes, whole.fleet[-1] in status.fleet) == (True, True)
    assert status.nodes == (*whole.nodes[: len(status.nodes) - 1], whole.nodes[-1])  # in their order, none twice
    assert status.fleet == (*whole.fleet[: len(status.fleet) - 1], whole.fleet[-1])
    assert 1_000 < len(status.nodes) < 20_000
    assert status.left_out == LeftOut(
        nodes={"alive": 20_000 - len(status.nodes)}, fleet={"Running": 20_000 - len(status.fleet)}
    )


async def test_a_status_that_has_room_leaves_nobody_out(serve: Serve, master_loop: PlainLoop) -> None:
    master_loop.reply = whole = a_status(500)
    _, address = await serve()
    assert await ask(address, AskStatus(), token=TOKEN, timeout=30) == whole


@pytest.mark.parametrize("kind", ["KvValues", "JobStatus"])
async def test_who_asks_once_for_too_much_hears_so_in_our_words(
    serve: Serve, master_loop: PlainLoop, kind: str
) -> None:
    large = {
        "KvValues": KvValues((bytes(MAX_MESSAGE_BYTES),)),
        "JobStatus": a_status(3, verdict="x" * MAX_MESSAGE_BYTES),
    }
    master_loop.reply = large[kind]
    _, address = await serve()
    with pytest.raises(Rejected, match=rf"the answer \({kind}\) has \d+ bytes; the limit is 4194304") as caught:
        await ask(address, Ping(), token=TOKEN, timeout=30)
    assert caught.value.code == "too-large"


HALF = "caf\udce9"
"""Half a character, as in the name of a file that is no UTF-8: no message can carry it."""


def a_sample(text: str) -> SampleTaken:
    return SampleTaken(node=NodeId(7), incarnation=Incarnation(1), kind="mine", text=text)


async def test_an_observation_that_cannot_be_encoded_is_left_out_and_the_rest_arrives(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    for text in ("before", HALF, "after"):
        agent.channel.observe(a_sample(text))
    assert await agent.channel.call(a_join(), timeout=10) == Done()
    assert [await master_loop.until(Observed) for _ in range(2)] == [
        Observed(a_sample("before")),
        Observed(a_sample("after")),
    ]
    assert len(master_loop.attaches) == 1


async def test_a_call_that_cannot_be_encoded_is_refused_and_nothing_else(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    with pytest.raises(Rejected, match="cannot be encoded") as caught:
        await agent.channel.call(a_join(offer=HALF), timeout=10)
    assert caught.value.code == "malformed"
    assert await agent.channel.call(a_join(), timeout=10) == Done()
    assert [request.sequence for request in master_loop.requests] == [1]


async def test_an_agent_that_cannot_present_itself_says_so(serve: Serve, master_loop: PlainLoop) -> None:
    _, address = await serve()
    channel = AgentChannel(
        address,
        token=TOKEN,
        tls=None,
        attach=lambda: Attach(launch="l", host=HALF, terms=JobTerms(), local_world_size=1),
        on_attached=lambda _attached: None,
        on_desired=lambda _desired: None,
    )
    with pytest.raises(Rejected, match="cannot be encoded"):
        await asyncio.wait_for(channel.run(), 10)


async def test_an_answer_that_cannot_be_encoded_becomes_a_refusal(
    serve: Serve, master_loop: PlainLoop, connect: Connect
) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    master_loop.answers = lambda request: (
        Answer(id=request.id, body=Pong(job_name=HALF, master_epoch=1))
        if isinstance(request.body, Ping)
        else Refusal(id=request.id, code="why", message=HALF)
    )
    with pytest.raises(Rejected, match="cannot be encoded") as caught:
        await agent.channel.call(Ping(), timeout=10)
    assert caught.value.code == "internal"
    with pytest.raises(Rejected, match=r"caf\?") as caught:
        await agent.channel.call(a_join(), timeout=10)
    assert caught.value.code == "why"

    master_loop.reply = Pong(job_name=HALF, master_epoch=1)
    with pytest.raises(Rejected, match="cannot be encoded"):
        await ask(address, Ping(), token=TOKEN, timeout=10)
    assert len(master_loop.attaches) == 1


@pytest.mark.parametrize("side", ["agent", "master"])
async def test_a_stream_whose_writer_died_ends_and_another_takes_its_place(
    serve: Serve, master_loop: PlainLoop, connect: Connect, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """Else it would look attached on both ends, and nothing would be heard of the node again."""
    kind = Request if side == "agent" else Answer
    broken: list[object] = []

    def encode(parcels: Sequence[Any]) -> list[bytes]:
        if not broken and any(isinstance(each, kind) and each.id for each in parcels):
            broken.extend(parcels)
            raise KeyError("a bug")
        return encode_frames(parcels)

    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    monkeypatch.setattr(transport, "encode_frames", encode)
    assert await agent.channel.call(a_join(), timeout=10) == Done()
    assert broken
    assert len(master_loop.attaches) == 2


async def test_a_master_too_busy_to_take_the_stream_is_waited_for(connect: Connect) -> None:
    """Who left after the five seconds that a connection may take would be one more who comes."""
    streams: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def speak_http_and_no_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))  # SETTINGS, none: for gRPC the connection stands
        streams.put_nowait(writer)
        await reader.read(-1)

    server = await asyncio.start_server(speak_http_and_no_more, "127.0.0.1", 0)
    agent = connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    writer = await asyncio.wait_for(streams.get(), 30)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(streams.get(), 7)
    assert agent.channel.trouble == ""
    await agent.leave()
    writer.close()
    server.close()


async def test_of_thousands_who_come_at_once_nobody_is_sent_away(serve: Serve) -> None:
    """As after a restart of the master. By itself gRPC would cancel many of them, who would come again and make it worse."""
    _, address = await serve()
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(address, None)) for _ in range(200)]
        methods = [channel.unary_unary(f"/{SERVICE}/{ASK_METHOD}") for channel in channels]
        calls = [
            method(QUESTION.encode(Ping()), metadata=call_metadata(TOKEN)) for _ in range(15) for method in methods
        ]
        answers = [VERDICT.decode(data) for data in await asyncio.gather(*calls)]
    assert answers == [Answer(id=0, body=Pong(job_name="job", master_epoch=1))] * 3000
