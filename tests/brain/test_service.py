"""The port of masters: strangers, other versions, hostile bytes, floods of one job."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from pathlib import Path

import grpc
import grpc.aio
import pytest
from sqlalchemy.engine import make_url

from dlrover.brain.config import RateTerms, ServiceTerms
from dlrover.brain.rates import SendRates
from dlrover.brain.serving import RunningBrain
from dlrover.brain.store.database import migrate, open_engine
from dlrover.brain.tenants import TokenRole, add_token
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.brain import BrainStored, JobList, JobsAsked, RunsTold, StartPlan
from dlrover.protocol.rpc.brain import BRAIN_QUESTION, BRAIN_SERVICE, MAX_BRAIN_BYTES, BrainChannel
from dlrover.protocol.rpc.transport import ASK_METHOD, call_metadata, open_channel
from tests.brain.conftest import Serve
from tests.brain.jobs import Clock, began, ref, run
from tests.floods import STRANGER, connections_to, needs_cookies


async def asked(brain: RunningBrain, question: object, token: str = "", timeout: float = 30.0) -> object:
    channel = BrainChannel(f"127.0.0.1:{brain.port}", token=token)
    try:
        return await channel.ask(question, timeout=timeout)  # type: ignore[arg-type]
    finally:
        await channel.close()


async def with_token(brain: RunningBrain, tenant: str = "team", role: TokenRole = TokenRole.JOB) -> str:
    token = await brain.store.write(lambda connection: add_token(connection, tenant, role, 1.0))
    brain.doorkeeper._read_at = None  # not in two seconds: now
    await brain.doorkeeper.refresh()
    return token


async def test_a_job_tells_and_people_read(serve: Serve) -> None:
    async with serve() as brain:
        assert isinstance(await asked(brain, began()), StartPlan)
        assert await asked(brain, RunsTold(job=ref(), runs=(run(1),))) == BrainStored(newest_run=1)
        found = await asked(brain, JobsAsked())
        assert isinstance(found, JobList)
        assert [job.num_runs for job in found.jobs] == [1]


async def test_strangers_are_refused_and_learn_nothing(serve: Serve) -> None:
    async with serve() as brain:
        token = await with_token(brain)
        for wrong in ("", token[:-1], "x"):
            with pytest.raises(Rejected, match="token of a tenant of Brain is missing or wrong"):
                await asked(brain, JobsAsked(), wrong)
        assert isinstance(await asked(brain, JobsAsked(), token), JobList)


@needs_cookies
async def test_connections_that_say_nothing_do_not_reach_brain(serve: Serve) -> None:
    """The kernel hands connections over in their order, and the one that asks comes last."""
    async with serve() as brain:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(socket.create_connection(("127.0.0.1", brain.port), source_address=(STRANGER, 0)))
            assert isinstance(await asked(brain, JobsAsked()), JobList)
            assert connections_to(brain.port) <= 1


async def test_another_protocol_version_is_refused_with_what_to_do(serve: Serve) -> None:
    async with serve() as brain:
        channel = open_channel(f"127.0.0.1:{brain.port}", None)
        metadata = [(key, "999" if key == "dlrover-protocol" else value) for key, value in call_metadata("")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{BRAIN_SERVICE}/{ASK_METHOD}")(b"", metadata=metadata, timeout=20)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "Brain" in str(caught.value.details())
        await channel.close()


async def test_without_a_token_it_does_not_serve_other_machines(tmp_path: Path) -> None:
    engine = open_engine(make_url(f"sqlite:///{tmp_path}/brain.sqlite"))
    migrate(engine)
    with pytest.raises(ConfigError, match="dlrover brain tenants add"):
        async with RunningBrain(engine, ServiceTerms(host="0.0.0.0", port=0, http_port=None)):
            raise AssertionError("it serves")


async def test_a_port_that_is_taken_is_named(serve: Serve, tmp_path: Path) -> None:
    async with serve() as brain:
        engine = open_engine(make_url(f"sqlite:///{tmp_path}/served.sqlite"))
        with pytest.raises(ConfigError, match=f"Port {brain.port} .* no Brain can listen"):
            async with RunningBrain(engine, ServiceTerms(port=brain.port, http_port=None)):
                raise AssertionError("it serves")


def mutated(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[at : at + chance.randint(1, 9)]
            case 2:
                changed[at:at] = chance.randbytes(chance.randint(1, 9))
            case _:
                changed[at:at] = changed[: chance.randint(1, 60)]
    return bytes(changed)


async def test_fuzzed_messages_change_nothing_and_leave_it_serving(serve: Serve) -> None:
    """Each is refused with a clear status, or answered as a message that makes sense."""
    chance = random.Random(4)
    samples = [
        BRAIN_QUESTION.encode(each)
        for each in (began("other"), RunsTold(job=ref("other"), runs=(run(1),)), JobsAsked())
    ]
    allowed = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
    async with serve() as brain:
        await asked(brain, began())
        await asked(brain, RunsTold(job=ref(), runs=(run(1),)))
        channel = open_channel(f"127.0.0.1:{brain.port}", None)
        method = channel.unary_unary(f"/{BRAIN_SERVICE}/{ASK_METHOD}")
        refused = 0
        for number in range(1500):
            data = (
                chance.randbytes(chance.randint(0, 200)) if number % 5 == 0 else mutated(chance, chance.choice(samples))
            )
            call = method(data, metadata=call_metadata(""), timeout=30)
            code = await call.code()
            assert code in (grpc.StatusCode.OK, *allowed), data
            refused += code is not grpc.StatusCode.OK
        await channel.close()
        assert refused > 500
        assert "failed" not in brain.metrics.text().decode()
        assert await asked(brain, RunsTold(job=ref(), runs=(run(2),))) == BrainStored(newest_run=2)


async def test_messages_that_are_too_large_are_refused(serve: Serve) -> None:
    async with serve() as brain:
        channel = open_channel(f"127.0.0.1:{brain.port}", None)
        method = channel.unary_unary(f"/{BRAIN_SERVICE}/{ASK_METHOD}")
        for size in (MAX_BRAIN_BYTES + 1, 4 * MAX_BRAIN_BYTES):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(b"x" * size, metadata=call_metadata(""), timeout=30)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await channel.close()
        assert isinstance(await asked(brain, JobsAsked()), JobList)


async def test_nested_bytes_do_not_end_it(serve: Serve) -> None:
    async with serve() as brain:
        channel = open_channel(f"127.0.0.1:{brain.port}", None)
        method = channel.unary_unary(f"/{BRAIN_SERVICE}/{ASK_METHOD}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"\x91" * 500_000, metadata=call_metadata(""), timeout=30)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close()


async def test_a_job_that_sends_too_much_is_sent_away_and_others_are_not(serve: Serve) -> None:
    async with serve(rate=RateTerms(messages=5, size_bytes=1e6)) as brain:
        await asked(brain, began("other"))

        async def flood() -> None:
            for _ in range(40):
                await asked(brain, began())

        with pytest.raises(Unavailable, match="more than 5 messages") as caught:
            await flood()
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 1
        assert isinstance(await asked(brain, began("other")), StartPlan)


def test_a_rate_is_a_mean_over_two_seconds() -> None:
    now = [0.0]
    rates = SendRates(RateTerms(messages=10, size_bytes=1000), clock=lambda: now[0])
    for _ in range(20):
        rates.check("job", 1)
    with pytest.raises(Unavailable) as caught:
        rates.check("job", 1)
    assert caught.value.retry_after == pytest.approx(0.1, abs=0.06)
    rates.check("another", 1)
    now[0] += 0.11
    rates.check("job", 1)
    now[0] += 100
    rates.check("job", 5000)  # alone in these seconds it passes, whatever its size
    with pytest.raises(Unavailable) as caught:
        rates.check("job", 5000)
    assert caught.value.retry_after == pytest.approx(8.0, abs=0.1)


async def test_a_frozen_disk_delays_a_start_only_for_a_while(serve: Serve) -> None:
    async with serve(start_patience=0.2) as brain:
        await asked(brain, began())
        holder = open_engine(brain.store.engine.url)
        with holder.connect().execution_options(writes=True) as connection:
            with connection.begin():  # no other connection can write
                assert isinstance(await asked(brain, began("second")), StartPlan)
                assert isinstance(await asked(brain, JobsAsked()), JobList), "and what is read waits for nothing"
        assert await asked(brain, RunsTold(job=ref("second"), runs=(run(1),))) == BrainStored(newest_run=1)
        holder.dispose()


async def test_ages_count_and_no_clock_of_a_job(serve: Serve) -> None:
    clock = Clock()
    async with serve() as brain:
        brain.store.clock = clock
        await asked(brain, began(age=100.0))
        found = await asked(brain, JobsAsked())
        assert isinstance(found, JobList)
        assert found.jobs[0].began_at == clock.now - 100.0


async def test_a_question_that_fails_ends_no_task_that_asks_another() -> None:
    """A frozen Brain takes connections and says nothing: the start gives up after two seconds, the task beside it goes on asking."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = BrainChannel(f"127.0.0.1:{silent.getsockname()[1]}", token="")
        long = asyncio.ensure_future(channel.ask(JobsAsked(), timeout=60))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await channel.ask(JobsAsked(), timeout=0.2)
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable):
                await long
        await channel.close()
