"""Whatever a bad client does gets a clear status; the master lives on and the master's loop sees nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc
import grpc.aio
import msgspec
import pytest

from dlrover.protocol.codec import encode_frame
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.frames import Answer, Refusal, Request
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES, Attach, JobTerms, Ping, Pong
from dlrover.protocol.rpc.client import ask
from dlrover.protocol.rpc.server import MasterServer, PortTaken
from dlrover.protocol.rpc.transport import AGENT_METHOD, ASK_METHOD, SERVICE, call_metadata, open_channel
from tests.protocol.conftest import TOKEN, Agent, PlainLoop, Serve


async def still_serves(address: str) -> bool:
    return isinstance(await ask(address, Ping(), token=TOKEN, timeout=10), Pong)


async def stream_status(channel: grpc.aio.Channel, *frames: bytes) -> tuple[grpc.StatusCode, str]:
    """What becomes of a stream that sends these frames."""
    stream = channel.stream_stream(f"/{SERVICE}/{AGENT_METHOD}")(metadata=call_metadata(TOKEN))
    async with asyncio.timeout(60):
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            for frame in frames:
                await stream.write(frame)
            while await stream.read() is not grpc.aio.EOF:
                continue
        return await stream.code(), await stream.details()


async def test_random_bytes_on_the_port_harm_nobody(serve: Serve) -> None:
    _, address = await serve()
    chance = random.Random(1)
    host, port = address.split(":")
    for _ in range(5):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(chance.randbytes(20_000))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await asyncio.wait_for(reader.read(), 30)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert await still_serves(address)


async def test_random_bytes_as_frames_get_a_status(serve: Serve, master_loop: PlainLoop) -> None:
    _, address = await serve()
    chance = random.Random(2)
    async with open_channel(address, None) as channel:
        for size in (0, 1, 10, 1000, 100_000):
            code, details = await stream_status(channel, chance.randbytes(size))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "malformed" in details
    assert await still_serves(address)
    assert master_loop.requests == []


async def test_a_message_of_a_gigabyte_is_refused(serve: Serve) -> None:
    _, address = await serve()
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        code, details = await stream_status(channel, bytes(1 << 30))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in details
    assert await still_serves(address)


async def test_a_frame_beyond_the_limit_is_refused(serve: Serve) -> None:
    _, address = await serve()
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        code, _ = await stream_status(channel, bytes(MAX_MESSAGE_BYTES + 1))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        ask_bytes = channel.unary_unary(f"/{SERVICE}/{ASK_METHOD}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask_bytes(bytes(MAX_MESSAGE_BYTES + 1), metadata=call_metadata(TOKEN), timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await still_serves(address)


async def test_an_unknown_request_is_refused_alone_and_the_stream_goes_on(serve: Serve, master_loop: PlainLoop) -> None:
    _, address = await serve()
    frame = msgspec.msgpack.encode(
        [
            {"type": "Request", "id": 3, "sequence": 1, "body": {"type": "DanceTango"}},
            {"type": "Request", "id": 4, "sequence": 2, "body": {"type": "StopJob", "message": 7}},
            {"type": "Request", "id": 5, "sequence": 3, "body": {"type": "StopJob"}, "added_later": True},
        ]
    )
    async with open_channel(address, None) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/{AGENT_METHOD}")(metadata=call_metadata(TOKEN))
        await stream.write(frame)
        answers: list[Answer | Refusal] = []
        while len(answers) < 3:
            answers += msgspec.msgpack.decode(await stream.read(), type=list[Answer | Refusal])
        stream.cancel()
    unknown, malformed, answer = answers
    assert isinstance(unknown, Refusal)
    assert unknown.code == "unknown"
    assert "DanceTango" in unknown.message
    assert isinstance(malformed, Refusal)
    assert malformed.code == "malformed"
    assert "$.body.message" in malformed.message
    assert isinstance(answer, Answer)


async def test_an_unknown_question_gets_a_clear_status(serve: Serve) -> None:
    _, address = await serve()
    async with open_channel(address, None) as channel:
        method = channel.unary_unary(f"/{SERVICE}/{ASK_METHOD}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(msgspec.msgpack.encode({"type": "AskWeather"}), metadata=call_metadata(TOKEN), timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "AskWeather" in str(caught.value.details())


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x"])
async def test_a_wrong_token_is_refused(serve: Serve, token: str) -> None:
    _, address = await serve()
    with pytest.raises(Rejected, match="token is missing or wrong") as caught:
        await ask(address, Ping(), token=token, timeout=10)
    assert caught.value.code == "bad-token"
    assert await still_serves(address)


async def test_no_token_is_asked_for_where_there_is_none(serve: Serve) -> None:
    _, address = await serve(token="")
    assert isinstance(await ask(address, Ping(), token="", timeout=10), Pong)


@pytest.mark.parametrize(
    ("protocol", "says"),
    [
        ("0", "the caller (dlrover 0.9, protocol 0) is older than the master"),
        ("99", "is older than the caller (dlrover 0.9, protocol 99). Upgrade dlrover where the master runs"),
        ("rubbish", "is older than the master"),
    ],
)
async def test_another_protocol_version_is_told_which_side_to_upgrade(serve: Serve, protocol: str, says: str) -> None:
    _, address = await serve()
    metadata = [(key, value) for key, value in call_metadata(TOKEN) if key.endswith("-bin")]
    metadata += [("dlrover-protocol", protocol), ("dlrover-version", "0.9")]
    async with open_channel(address, None) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/{AGENT_METHOD}")(metadata=metadata)
        assert await asyncio.wait_for(stream.code(), 10) is grpc.StatusCode.FAILED_PRECONDITION
        assert says in await stream.details()
        assert "pgrade dlrover" in await stream.details()
    assert await still_serves(address)


async def test_another_grpc_service_is_not_taken_for_a_master() -> None:
    other = grpc.aio.server()
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    try:
        with pytest.raises(Rejected, match="not a DLRover master"):
            await ask(f"127.0.0.1:{port}", Ping(), token=TOKEN, timeout=10)
        agent = Agent(f"127.0.0.1:{port}")
        with pytest.raises(Rejected, match="not a DLRover master"):
            await agent.attached()
    finally:
        await other.stop(0)


async def test_a_client_that_never_reads_is_not_read_from_any_more(serve: Serve, master_loop: PlainLoop) -> None:
    _, address = await serve()
    attach = Attach(launch="l", host="h" * 1000, terms=JobTerms(), local_world_size=1)
    frame = encode_frame([Request(id=number, body=attach) for number in range(1000)])
    async with open_channel(address, None) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/{AGENT_METHOD}")(metadata=call_metadata(TOKEN))

        async def send_on_and_on() -> None:
            while True:
                await stream.write(frame)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send_on_and_on(), 1)
        assert await still_serves(address)
        stream.cancel()
    await master_loop.until("closed")


async def test_a_port_in_use_is_named(serve: Serve) -> None:
    _, address = await serve()
    with pytest.raises(PortTaken, match=f"Port {address.split(':')[1]} of 127.0.0.1 is in use"):
        MasterServer(token="").bind("127.0.0.1", int(address.split(":")[1]))


async def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        MasterServer(token="").bind("192.0.2.1", 0)
