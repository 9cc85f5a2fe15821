"""
Thousands of failure reports at once: the master stays small, keeps answering, and keeps what tells something.

The full storms (10,000 of 64 KiB, 10,000 of 1 MB) are run by `make chaos`; each test run has a breeze of the same kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dlrover.core.failures.blame import NUM_DISTINCT
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    MAX_FAILURE_BYTES,
    Detection,
    FailureKind,
    JobTerms,
    Limits,
    Micros,
    Ping,
    Pong,
    ReportFailure,
    Round,
    Run,
    WorkerFailure,
)
from dlrover.protocol.rpc.client import ask
from tests.master.conftest import TOKEN, Agent, Connect, MakeMaster, MasterProcess, status_of
from tests.master.loop.test_loop import journalled

NUM_AGENTS = 20
MOST_BYTES = 1_000_000_000


def a_report(agent: Agent, number: int, size_bytes: int) -> ReportFailure:
    """Of each agent every tenth is of a kind of its own."""
    is_rare = number // NUM_AGENTS % 10 == 5
    head = f"Traceback of bug {number}\n" if is_rare else "Traceback of the usual bug\n"
    failure = WorkerFailure(
        global_rank=agent.node_rank,
        local_rank=0,
        pid=1,
        kind=FailureKind.EXCEPTION,
        exited_at=Micros(number),
        message="RuntimeError: boom",
        traceback=("x" * (size_bytes - 1000)) + head,
    )
    return ReportFailure(node=agent.node, incarnation=agent.incarnation, round=Round(1), failures=(failure,), lived=1.0)


async def the_gathered(master: MasterProcess, connect: Connect) -> list[Agent]:
    # They send no heartbeats, and a storm may take longer than silent nodes are waited for.
    detection = Detection(silence=600.0)
    terms = JobTerms(limits=Limits(min_nodes=NUM_AGENTS, max_nodes=NUM_AGENTS), detection=detection)
    agents = [connect(master.address, launch=f"l{number}", terms=terms) for number in range(NUM_AGENTS)]
    for agent in agents:
        await agent.attached()
    await asyncio.gather(*(agent.join() for agent in agents))
    await asyncio.gather(*(agent.wish(Run) for agent in agents))
    return agents


async def storm(agents: list[Agent], num_reports: int, size_bytes: int) -> list[object]:
    """All at once; each agent has its share."""
    shares = [(agents[number % NUM_AGENTS], number) for number in range(num_reports)]
    calls = [agent.channel.call(a_report(agent, number, size_bytes), timeout=100) for agent, number in shares]
    return await asyncio.gather(*calls, return_exceptions=True)


@contextlib.asynccontextmanager
async def asked_all_the_while(address: str) -> AsyncIterator[None]:
    """The master keeps answering somebody else; how long that one waited at most is printed."""
    waits: list[float] = []
    is_over = asyncio.Event()

    async def ask_again_and_again() -> None:
        while not is_over.is_set():
            began_at = time.monotonic()
            assert isinstance(await ask(address, Ping(), token=TOKEN, timeout=60), Pong)
            waits.append(time.monotonic() - began_at)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), 0.1)

    asking = asyncio.create_task(ask_again_and_again())
    await asyncio.sleep(0)  # its first question leaves before the storm
    try:
        yield
    finally:
        is_over.set()
        await asking
    print(f"{len(waits)} questions on the way, the longest wait {max(waits):.2f} s")


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell the peak")


FULL = pytest.param(10_000, marks=pytest.mark.chaos)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_reports", [1000, FULL])
async def test_a_storm_of_reports_of_the_greatest_size(
    make_master: MakeMaster, connect: Connect, num_reports: int
) -> None:
    master = make_master()
    master.start()
    agents = await the_gathered(master, connect)
    async with asked_all_the_while(master.address):
        answers = await storm(agents, num_reports, MAX_FAILURE_BYTES)
    assert not [answer for answer in answers if isinstance(answer, BaseException)]
    assert peak_bytes(master.pid) < MOST_BYTES

    told = (await status_of(master.address)).distinct_failures
    assert len(told) == NUM_DISTINCT
    assert (told[0].kind, told[0].message) == (FailureKind.EXCEPTION, "RuntimeError: boom")
    assert told[0].count == num_reports * 9 // 10, "the usual bug came first, and is counted, not stored"
    assert len({each.traceback_digest for each in told}) == NUM_DISTINCT


@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_reports", [200, FULL])
async def test_reports_that_are_too_large_are_refused_by_size_and_change_nothing(
    make_master: MakeMaster, connect: Connect, num_reports: int
) -> None:
    master = make_master()
    master.start()
    agents = await the_gathered(master, connect)
    async with asked_all_the_while(master.address):
        for _ in range(0, num_reports, 200):  # not all in our own memory
            refused = await storm(agents, 200, 1024 * 1024)
            assert {error.code for error in refused if isinstance(error, Rejected)} == {"too-large"}
            assert not [answer for answer in refused if not isinstance(answer, Rejected)]
            assert f"the limit is {MAX_FAILURE_BYTES}" in str(refused[0])
    assert peak_bytes(master.pid) < MOST_BYTES
    status = await status_of(master.address)
    assert (status.round, status.num_restarts, status.distinct_failures) == (1, 0, ())
    assert not [command for command in journalled(master.journal) if isinstance(command, ReportFailure)]
