"""A stranger floods the port of a master process: honest calls are answered, agents stay attached, and memory and descriptors are kept."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from dlrover.protocol.messages.job import Ping, Pong
from dlrover.protocol.rpc.client import ask
from tests.floods import FEW_CONNECTIONS, Flooding, needs_cookies
from tests.master.conftest import TOKEN, Connect, MakeMaster, MasterProcess

LENGTH = 1.5
"""Seconds of each; `make chaos` has ten."""
MAX_GROWTH = 64 * 2**20
CALL_LIMIT = 5.0
"""Ten times the 0.5 s that `benchmarks/strangers.py` measures on a quiet machine."""


def growth(master: MasterProcess, before: int) -> int:
    return int(psutil.Process(master.pid).memory_info().rss) - before


async def test_floods_cost_honest_callers_and_the_master_nearly_nothing(
    make_master: MakeMaster, connect: Connect
) -> None:
    master = make_master()
    master.start()
    agents = [connect(master.address, launch=f"l{number}") for number in range(2)]
    for agent in agents:
        await agent.attached()
    before = growth(master, 0)
    for kind, connections in FEW_CONNECTIONS.items():
        with Flooding(kind, master.address, seconds=60, connections=connections) as flood:
            await asyncio.to_thread(flood.wait_until_it_began)
            ends_at = time.monotonic() + LENGTH
            while time.monotonic() < ends_at:
                assert isinstance(await ask(master.address, Ping(), token=TOKEN, timeout=CALL_LIMIT), Pong), kind
                assert growth(master, before) < MAX_GROWTH, kind
                await asyncio.sleep(0.02)  # between two calls, as between those of people
            assert flood.end()["connections"], kind
    assert all(agent.attachments.empty() for agent in agents), "an agent had to come again"
    assert master.log().count("strangers") < 60, "refusals are told ever more rarely"
    assert "Traceback" not in master.log()


@needs_cookies
async def test_connections_that_say_nothing_take_no_descriptors_and_are_not_closed(make_master: MakeMaster) -> None:
    """A stranger whose connection is closed opens the next one. While the kernel keeps them it has no reason to."""
    master = make_master()
    master.start()
    assert isinstance(await ask(master.address, Ping(), token=TOKEN, timeout=CALL_LIMIT), Pong)
    before = psutil.Process(master.pid).num_fds()
    with Flooding("idle", master.address, seconds=60, connections=1000) as flood:
        await asyncio.to_thread(flood.wait_until_it_began)
        ends_at = time.monotonic() + LENGTH
        while time.monotonic() < ends_at:
            assert isinstance(await ask(master.address, Ping(), token=TOKEN, timeout=CALL_LIMIT), Pong)
            assert psutil.Process(master.pid).num_fds() < before + 100
            await asyncio.sleep(0.02)  # between two calls, as between those of people
        count = flood.end()
    assert count["connections"] > 100
    assert not count["closed"]


@pytest.mark.parametrize("kind", ["handshakes", "settled"])
async def test_strangers_never_take_the_last_descriptors(make_master: MakeMaster, connect: Connect, kind: str) -> None:
    """A master with 300 of them, and 1000 connections that come again as soon as they are closed."""
    master = make_master(max_descriptors=300)
    master.start()
    first = connect(master.address, launch="l0")
    await first.attached()
    with Flooding(kind, master.address, seconds=30, connections=1000) as flood:
        deadline = time.monotonic() + 30
        while "without the job token closed" not in master.log():
            assert time.monotonic() < deadline, "no flood"
            await asyncio.sleep(0.02)  # for the log, which nobody tells of
        second = connect(master.address, launch="l1")
        await second.attached()
        await second.join()
        await first.join()
        assert psutil.Process(master.pid).num_fds() < 300
        flood.end()
    assert first.attachments.empty()
    assert "Too many open files" not in master.log()
