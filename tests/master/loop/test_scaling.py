"""Scaling through the real loop: what the job decides reaches the agents."""

from __future__ import annotations

import asyncio

import pytest

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import ScaleJob
from dlrover.protocol.messages.job import (
    BlockRendezvous,
    Done,
    Join,
    Leave,
    Run,
    UnblockRendezvous,
    Wait,
)
from dlrover.protocol.rpc.client import ask
from tests.master.conftest import TOKEN, Agent, Connect, StartMaster


async def scale(address: str, low: int, high: int) -> None:
    assert await ask(address, ScaleJob(min_nodes=low, max_nodes=high), token=TOKEN, timeout=10) == Done()


async def two_and_a_spare(address: str, connect: Connect) -> list[Agent]:
    """Two run in round 1, the third waits for the next."""
    agents = []
    for launch in "abc":
        agents.append(connect(address, launch=launch))
        await agents[-1].attached()
    await asyncio.gather(*(agent.join() for agent in agents[:2]))
    await asyncio.gather(*(agent.wish(Run) for agent in agents[:2]))
    await agents[2].join(2)
    await agents[2].wish(Wait)
    return agents


async def test_a_one_shot_client_scales_a_job_up_and_down(start_master: StartMaster, connect: Connect) -> None:
    master = await start_master()
    agents = await two_and_a_spare(master.address, connect)

    await scale(master.address, 2, 3)
    for agent in agents[:2]:
        await agent.wish(Join)
    await asyncio.gather(*(agent.join(2) for agent in agents[:2]))
    sizes = [(await agent.wish(Run)).wish.world.group_world_size for agent in agents]
    assert sizes == [3, 3, 3]

    await scale(master.address, 1, 2)
    highest = max(agents, key=lambda agent: agent.node_rank)
    assert (await highest.wish(Leave)).wish == Leave("the job was scaled down", 0)
    status = await master.status()
    assert (status.min_nodes, status.max_nodes, status.limits_version) == (1, 2, 2)


async def test_bad_limits_are_answered_with_the_reason(start_master: StartMaster, connect: Connect) -> None:
    master = await start_master()
    await connect(master.address).attached()
    with pytest.raises(Rejected, match="0 < MIN <= MAX"):
        await scale(master.address, 3, 2)
    assert (await master.status()).limits_version == 0


async def test_blocks_travel_on_the_stream(start_master: StartMaster, connect: Connect) -> None:
    master = await start_master()
    agents = [connect(master.address, launch=launch) for launch in "ab"]
    for agent in agents:
        await agent.attached()
    first = agents[0]
    block = BlockRendezvous(node=first.node, incarnation=first.incarnation, reason="it converts a checkpoint")
    assert await first.channel.call(block, timeout=10) == Done()
    await asyncio.gather(*(agent.join() for agent in agents))
    label = f"node rank {first.node_rank} (host-a)"
    assert f"blocked by {label}: it converts a checkpoint" in (await master.status()).verdict
    unblock = UnblockRendezvous(node=first.node, incarnation=first.incarnation)
    assert await first.channel.call(unblock, timeout=10) == Done()
    await asyncio.gather(*(agent.wish(Run) for agent in agents))
