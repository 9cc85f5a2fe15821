"""What has not shown the token is refused on its headers, has few streams and connections, and does not stay. What has is not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from dlrover.protocol.codec import QUESTION, VERDICT, Question, encode_frame
from dlrover.protocol.messages.frames import Answer, Request
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES, Ping, Pong, Reply, StopJob
from dlrover.protocol.rpc.client import ask
from dlrover.protocol.rpc.door import (
    MAX_ANSWERS,
    MAX_CALLS,
    MAX_OF_ADDRESS,
    SHARE,
    Door,
    leave_the_silent_to_the_kernel,
    place_of,
)
from dlrover.protocol.rpc.server import MasterServer
from dlrover.protocol.rpc.transport import AGENT_METHOD, ASK_METHOD, MAX_STREAMS, SERVICE, call_metadata, open_channel
from tests.floods import STRANGER, connections_to, needs_cookies
from tests.protocol.conftest import TOKEN, Agent, PlainLoop, Serve
from tests.protocol.rpc import by_hand
from tests.protocol.rpc.by_hand import NO_SETTINGS, PREFACE

DEADLINE = 60.0
BOMB_BYTES = 256 * 2**20
MOST_UNREAD = 64 * 1024
"""Bytes of a stream that the master does not read: docs/reference/protocol.md."""


class Silent:
    """A connection of a stranger."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def closed(self) -> None:
        """By the other side."""
        async with asyncio.timeout(DEADLINE):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65_536):
                    pass


@contextlib.asynccontextmanager
async def strangers(address: str, count: int, *, say: bytes = b"") -> AsyncIterator[list[Silent]]:
    host, port = address.rsplit(":", 1)
    opened = []
    try:
        for _ in range(count):
            opened.append(Silent(*await asyncio.open_connection(host, int(port), local_addr=(STRANGER, 0))))
            opened[-1].writer.write(say)
        yield opened
    finally:
        for each in opened:
            each.writer.transport.abort()


async def test_a_call_without_a_token_is_refused_before_its_body_comes(serve: Serve) -> None:
    _, address = await serve()
    async with open_channel(address, None) as channel:
        call = channel.stream_unary(f"/{SERVICE}/{ASK_METHOD}")(metadata=call_metadata("wrong"))
        assert await asyncio.wait_for(call.code(), DEADLINE) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_method_that_there_is_not_is_refused_like_any_other(serve: Serve) -> None:
    _, address = await serve()
    async with open_channel(address, None) as channel, asyncio.timeout(DEADLINE):
        for token, code in ((TOKEN, grpc.StatusCode.UNIMPLEMENTED), ("wrong", grpc.StatusCode.UNAUTHENTICATED)):
            for path in (f"/{SERVICE}/Nothing", "/grpc.health.v1.Health/Check"):
                call = channel.stream_unary(path)(metadata=call_metadata(token))
                assert await call.code() is code


async def test_an_end_instead_of_a_question_gets_a_clear_status(serve: Serve) -> None:
    _, address = await serve()
    async with open_channel(address, None) as channel:
        call = channel.stream_unary(f"/{SERVICE}/{ASK_METHOD}")(metadata=call_metadata(TOKEN))
        await call.done_writing()
        assert await asyncio.wait_for(call.code(), DEADLINE) is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_is_compressed_is_not_expanded(serve: Serve) -> None:
    """The oldest gRPC that we allow expands a megabyte to a gigabyte before it looks at the limit."""
    _, address = await serve()
    question = QUESTION.encode(StopJob(message="x" * 100_000))
    async with open_channel(address, None) as channel:
        method = channel.unary_unary(f"/{SERVICE}/{ASK_METHOD}")
        assert isinstance(VERDICT.decode(await method(question, metadata=call_metadata(TOKEN))), Answer)
        with pytest.raises(grpc.aio.AioRpcError, match="malformed"):
            await method(question, metadata=call_metadata(TOKEN), compression=grpc.Compression.Gzip)


@pytest.mark.parametrize("token", [TOKEN, "wrong"])
async def test_a_compression_bomb_costs_no_memory(serve: Serve, token: str) -> None:
    """`make test-grpc-oldest` has the version in which it would."""
    _, address = await serve()
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(BOMB_BYTES // 2**20)) + packer.flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with asyncio.timeout(DEADLINE), by_hand.pouring(address) as stranger:
        call = stranger.call(ASK_METHOD, token, by_hand.message(bomb, is_compressed=True))
        running = asyncio.ensure_future(stranger.run())
        await call.over.wait()
        running.cancel()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BOMB_BYTES / 4
    assert isinstance(await ask(address, Ping(), token=TOKEN, timeout=DEADLINE), Pong)


async def test_a_connection_has_sixteen_streams(serve: Serve) -> None:
    _, address = await serve()
    async with open_channel(address, None) as channel, asyncio.timeout(DEADLINE):
        open_stream = channel.stream_stream(f"/{SERVICE}/{AGENT_METHOD}")
        streams = [open_stream(metadata=call_metadata(TOKEN)) for _ in range(2 * MAX_STREAMS)]
        served = {asyncio.ensure_future(stream.initial_metadata()) for stream in streams}
        while sum(each.done() for each in served) < MAX_STREAMS:
            await asyncio.wait([each for each in served if not each.done()], return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(await ask(address, Ping(), token=TOKEN, timeout=DEADLINE), Pong)
        assert sum(each.done() for each in served) == MAX_STREAMS == 16
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*served, return_exceptions=True)


async def test_a_call_without_the_token_has_64_kib_of_its_body_taken_however_fast_it_comes(serve: Serve) -> None:
    _, address = await serve()
    async with asyncio.timeout(DEADLINE), by_hand.pouring(address) as stranger:
        for _ in range(MAX_STREAMS):
            stranger.call(ASK_METHOD, "wrong", by_hand.message(bytes(MAX_MESSAGE_BYTES)))
        await stranger.run()  # the master closes the connection
        assert all(0 < each.granted <= MOST_UNREAD for each in stranger.calls.values())


class UnhurriedLoop(PlainLoop):
    """Answers no question, so no more is read of the call that asked it."""

    async def ask(self, question: Question) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def test_a_call_that_the_master_does_not_read_has_128_kib_taken_while_another_is_fast() -> None:
    """Of the token's holder. The window opens once more for the message that the master has read; 64 KiB is what nobody has read of."""
    master_loop, server = UnhurriedLoop(), MasterServer(token=TOKEN)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start(master_loop)
    question = by_hand.message(QUESTION.encode(Ping()))
    told = [Request(id=each, sequence=each, body=StopJob(message="x" * 1_000_000)) for each in range(1, 17)]
    try:
        async with asyncio.timeout(DEADLINE), by_hand.pouring(address) as caller:
            unread = caller.call(ASK_METHOD, TOKEN, question + by_hand.message(bytes(MAX_MESSAGE_BYTES)))
            caller.call(AGENT_METHOD, TOKEN, b"".join(by_hand.message(encode_frame([each])) for each in told))
            running = asyncio.ensure_future(caller.run())
            for _ in told:
                await master_loop.until(Request)
            running.cancel()
            assert 0 < unread.granted - len(question) <= 2 * MOST_UNREAD
    finally:
        await server.stop()


async def test_who_shows_no_token_is_sent_away_and_who_has_stays(
    serve: Serve, master_loop: PlainLoop, connect: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    """One byte, half handshakes and whole ones; also where one socket listens for IPv4 and IPv6."""
    _, address = await serve()
    wide = MasterServer(token=TOKEN)
    both = f"127.0.0.1:{wide.bind('::' if socket.has_ipv6 else '0.0.0.0', 0)}"
    await wide.start(master_loop)
    try:
        agents = [connect(each) for each in (address, both)]
        for agent in agents:
            await agent.attached()
        async with contextlib.AsyncExitStack() as stack:
            opened = []
            for place in (address, both):
                for say in (PREFACE[:1], PREFACE[:5], PREFACE + NO_SETTINGS):
                    opened += await stack.enter_async_context(strangers(place, 1, say=say))
            await asyncio.gather(*(each.closed() for each in opened))
        assert "reason=silent" in caplog.text
        assert all(agent.attachments.empty() for agent in agents), "an agent had to come again"
        assert all(agent.channel.outage() == 0.0 for agent in agents)
    finally:
        await wide.stop()


@needs_cookies
@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
async def test_a_connection_that_says_nothing_does_not_reach_the_master(master_loop: PlainLoop, host: str) -> None:
    """A caller that connects later and speaks is answered, and who was silent may still speak."""
    if host == "::" and not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    server = MasterServer(token=TOKEN)
    port = server.bind(host, 0)
    address = f"127.0.0.1:{port}"
    await server.start(master_loop)
    try:
        async with strangers(address, 50) as silent:
            assert isinstance(await ask(address, Ping(), token=TOKEN, timeout=DEADLINE), Pong)
            assert connections_to(port) <= 1, "at most the one that asked, and is accepted after all others"
            silent[0].writer.write(PREFACE + NO_SETTINGS)
            async with asyncio.timeout(DEADLINE):
                head = await silent[0].reader.readexactly(9)
            assert head[3] == by_hand.SETTINGS
            assert connections_to(port) <= 2
    finally:
        await server.stop()


@needs_cookies
async def test_silent_connections_beyond_the_room_of_the_kernel_keep_nobody_out() -> None:
    """A port with room for eight: the kernel hands the others over, and the caller who speaks."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listening:
        listening.settimeout(DEADLINE)
        leave_the_silent_to_the_kernel(listening.getsockname()[1])
        with contextlib.ExitStack() as stack:
            places = set()
            for _ in range(12):
                silent = stack.enter_context(socket.create_connection(listening.getsockname()))
                places.add(silent.getsockname())
            caller = stack.enter_context(socket.create_connection(listening.getsockname()))
            caller.sendall(b"x")
            accepted = []
            while caller.getsockname() not in accepted:
                sock, place = listening.accept()
                sock.close()
                accepted.append(place)
            assert 0 < len(places & set(accepted)) < len(places)


@pytest.mark.parametrize("cookies", ["0", "1", None])
def test_without_syn_cookies_the_kernel_keeps_no_silent_connection(tmp_path: Path, cookies: str | None) -> None:
    """Its room is bounded: without cookies, strangers who fill it keep all others out."""
    told = tmp_path / "tcp_syncookies"
    if cookies is not None:
        told.write_text(f"{cookies}\n")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        leave_the_silent_to_the_kernel(listening.getsockname()[1], told)
        keeps = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT) > 0
    assert keeps == (cookies == "1")


async def test_an_address_has_few_connections_and_a_refused_one_none(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """All are closed in the end; that these were too many is told long before they count as silent."""
    _, address = await serve()
    async with strangers(address, MAX_OF_ADDRESS + 10, say=PREFACE[:1]) as opened:
        closing = [asyncio.ensure_future(each.closed()) for each in opened]
        while sum(each.done() for each in closing) < 10:
            await asyncio.wait([each for each in closing if not each.done()], return_when=asyncio.FIRST_COMPLETED)
        assert "reason=too-many-of-address" in caplog.text
        for each in closing:
            each.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
    async with open_channel(address, None) as channel, asyncio.timeout(DEADLINE):
        method = channel.unary_unary(f"/{SERVICE}/{ASK_METHOD}")
        with pytest.raises(grpc.aio.AioRpcError, match="token is missing or wrong"):
            await method(QUESTION.encode(Ping()), metadata=call_metadata("wrong"))
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


async def test_a_connection_without_the_token_is_answered_four_times_and_then_held_until_it_is_closed(
    serve: Serve,
) -> None:
    """A stranger whose calls are answered opens the next ones at once, thousands in a second."""
    _, address = await serve()
    async with open_channel(address, None) as channel, asyncio.timeout(DEADLINE):
        method = channel.stream_unary(f"/{SERVICE}/{ASK_METHOD}")
        calls = [method(metadata=call_metadata("wrong")) for _ in range(MAX_STREAMS)]
        codes = [await call.code() for call in calls]
    assert codes.count(grpc.StatusCode.UNAUTHENTICATED) == MAX_ANSWERS
    assert codes.count(grpc.StatusCode.UNAVAILABLE) == MAX_STREAMS - MAX_ANSWERS, "their connection was closed"


async def test_a_wrong_token_on_the_connection_of_a_right_one_is_always_answered(serve: Serve) -> None:
    _, address = await serve()
    async with open_channel(address, None) as channel, asyncio.timeout(DEADLINE):
        agent = channel.stream_stream(f"/{SERVICE}/{AGENT_METHOD}")(metadata=call_metadata(TOKEN))
        await agent.initial_metadata()
        method = channel.stream_unary(f"/{SERVICE}/{ASK_METHOD}")
        for _ in range(2 * MAX_ANSWERS):
            assert await method(metadata=call_metadata("wrong")).code() is grpc.StatusCode.UNAUTHENTICATED
        agent.cancel()


async def test_a_master_that_stops_does_not_wait_for_the_calls_that_it_holds(master_loop: PlainLoop) -> None:
    server = MasterServer(token=TOKEN)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start(master_loop)
    async with open_channel(address, None) as channel, asyncio.timeout(DEADLINE):
        method = channel.stream_unary(f"/{SERVICE}/{ASK_METHOD}")
        calls = [method(metadata=call_metadata("wrong")) for _ in range(MAX_ANSWERS + 1)]
        answers = [asyncio.ensure_future(call.code()) for call in calls]
        while sum(each.done() for each in answers) < MAX_ANSWERS:
            await asyncio.wait([each for each in answers if not each.done()], return_when=asyncio.FIRST_COMPLETED)
        await server.stop()
        assert {await each for each in answers} == {grpc.StatusCode.UNAUTHENTICATED}


async def test_a_crowd_of_one_address_that_speaks_at_once_is_read_before_it_is_judged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """All stand outside when the door looks for the first time: the master's event loop is held up until the last one has spoken."""
    _, address = await serve()
    host, port = address.rsplit(":", 1)
    call = PREFACE + NO_SETTINGS + by_hand.call(1, address, ASK_METHOD, TOKEN)
    call += by_hand.frame(by_hand.DATA, 1, by_hand.message(QUESTION.encode(Ping())))
    crowd = [socket.create_connection((host, int(port))) for _ in range(3 * MAX_OF_ADDRESS)]
    try:
        for each in crowd:
            each.sendall(call)
            each.setblocking(False)
        answered = [asyncio.ensure_future(_has_ended_a_stream(each)) for each in crowd]
        async with asyncio.timeout(DEADLINE):
            assert all(await asyncio.gather(*answered))
        assert "too-many" not in caplog.text
    finally:
        for each in crowd:
            each.close()


async def _has_ended_a_stream(sock: socket.socket) -> bool:
    """Whether the server answered the call; else it closed the connection."""
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == 1 and head[4] & 1:  # trailers
                return True
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    finally:
        writer.close()


async def test_a_restarted_master_has_room_for_the_agents_that_it_expects(master_loop: PlainLoop) -> None:
    """All come at once from one address and are slow to speak; as many connections of strangers would be too many."""
    server = MasterServer(token=TOKEN)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start(master_loop, num_expected=20)
    try:
        async with (
            strangers(address, MAX_OF_ADDRESS + 20, say=PREFACE[:1]) as slow,
            strangers(address, 30, say=PREFACE[:1]) as more,
        ):
            closing = [asyncio.ensure_future(each.closed()) for each in (*slow, *more)]
            while sum(each.done() for each in closing) < 10:
                await asyncio.wait([each for each in closing if not each.done()], return_when=asyncio.FIRST_COMPLETED)
            assert isinstance(await ask(address, Ping(), token=TOKEN, timeout=DEADLINE), Pong)
            assert sum(each.done() for each in closing) == 10, "twice as many more as agents are expected"
            for each in closing:
                each.cancel()
            await asyncio.gather(*closing, return_exceptions=True)
    finally:
        await server.stop()


async def test_refusals_are_told_ever_more_rarely(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    _, address = await serve()
    caplog.set_level(logging.INFO)
    for _ in range(10):
        async with open_channel(address, None) as channel:
            method = channel.unary_unary(f"/{SERVICE}/{ASK_METHOD}")
            for _ in range(MAX_ANSWERS):
                with pytest.raises(grpc.aio.AioRpcError):
                    await method(QUESTION.encode(Ping()), metadata=call_metadata("wrong"), wait_for_ready=True)
    assert caplog.text.count("callers without the job token rejected") <= 6
    assert caplog.text.count("connections without the job token closed") <= 6


@pytest.mark.parametrize("is_flooding", [True, False])
async def test_who_opens_and_resets_calls_is_not_heard_until_its_connection_is_closed(is_flooding: bool) -> None:
    """A connection that is closed at once comes again at once. What came on this one and nobody has read yet is thrown away."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        door = Door(listening.getsockname()[1])
        with socket.create_connection(listening.getsockname(), source_address=(STRANGER, 0)) as stranger:
            ours, place = listening.accept()
            with ours:
                for _ in range(MAX_CALLS + is_flooding):
                    door.refuse(place)
                stranger.sendall(b"before the look")
                looking = asyncio.create_task(door.run())
                try:
                    thrown = await _until_closed_or_empty(ours)
                finally:
                    looking.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await looking
                assert thrown == is_flooding
                if is_flooding:
                    stranger.sendall(b"after it")
                    with pytest.raises(BlockingIOError):
                        ours.recv(1, socket.MSG_DONTWAIT)


async def _until_closed_or_empty(sock: socket.socket) -> bool:
    """Whether what has come was taken away while the connection was open."""
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                sock.send(b"x")
            except BlockingIOError:
                return True
            except BrokenPipeError:
                return False
            await asyncio.sleep(0.01)  # for the door's look, which tells nobody


@pytest.mark.parametrize(
    ("peer", "place"),
    [
        ("ipv4:10.0.0.1:80", ("10.0.0.1", 80)),
        ("ipv6:%5B2001:db8::1%5D:80", ("2001:db8::1", 80)),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", ("fe80::1%eth0", 80)),
        ("unknown", ("", 0)),
    ],
)
def test_every_name_of_a_peer_is_understood(peer: str, place: tuple[str, int]) -> None:
    assert place_of(peer) == place


class HeldUpDoor(Door):
    """Another process has the processor in the middle of each look."""

    HELD_UP = 0.1

    def __init__(self, looks: int) -> None:
        super().__init__(port=1)
        self.looks_left = looks
        self.is_seen = asyncio.Event()

    def _look(self) -> None:
        time.sleep(self.HELD_UP)
        self.looks_left -= 1
        if not self.looks_left:
            self.is_seen.set()


async def test_a_busy_machine_does_not_make_looks_rare() -> None:
    """The pause after a look follows from its processor time. By the clock on the wall, strangers piled up on a busy machine: 75 MB instead of 40."""
    num_pauses = 5
    door = HeldUpDoor(looks=1 + num_pauses)
    looking = asyncio.create_task(door.run())
    try:
        await asyncio.wait_for(door.is_seen.wait(), timeout=num_pauses * SHARE * door.HELD_UP)
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
