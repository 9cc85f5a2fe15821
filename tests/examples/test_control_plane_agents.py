"""Virtual agents against a real master in this process: the handmade HTTP/2 is good enough for gRPC, and for the benchmark."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loop_transport import measure
from virtual_agents import VirtualAgent, all_run, beating, connect_all, hpack_integer, join_all

from dlrover.core.job import Job
from dlrover.master.clock import MasterClock
from dlrover.master.journal.journal_thread import JournalThread
from dlrover.master.loop.loop import MasterLoop
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import JobTerms, Limits, Ping, Pong
from dlrover.protocol.messages.kv import KvGet, KvSet, KvValues
from dlrover.protocol.rpc.server import MasterServer


async def test_virtual_agents_meet_under_a_real_master(tmp_path: Path) -> None:
    journal_thread = await JournalThread.open(tmp_path / "journal.sqlite", job_name="bench")
    job: Job = await journal_thread.restore()
    master_loop = MasterLoop(journal_thread, job, MasterClock(job.now), job_name="bench")
    await master_loop.begin(journal_thread.master_epoch)
    server = MasterServer(token="secret")
    port = server.bind("127.0.0.1", 0)
    await server.start(master_loop)
    working = asyncio.ensure_future(master_loop.run())
    terms = JobTerms(limits=Limits(min_nodes=20, max_nodes=20))
    agents = [VirtualAgent(f"127.0.0.1:{port}", index, terms, token="secret") for index in range(20)]
    try:
        async with beating(agents, every=0.5):
            await connect_all(agents, timeout=20)
            await join_all(agents, timeout=20)
            await all_run(agents, timeout=20)
        places = sorted(agent.world.group_rank for agent in agents if agent.world is not None)
        assert places == list(range(20))
        assert isinstance(await agents[3].call(Ping()), Pong)
        large = b"x" * 200_000  # more than the first window of a stream: we must wait until the master allows more
        who = {"node": agents[5].node, "incarnation": agents[5].incarnation}
        await agents[5].call(KvSet(items={"k": large}, **who))
        assert await agents[6].call(KvGet(keys=("k",))) == KvValues((large,))
        with pytest.raises(Rejected):
            await agents[6].call(KvGet(keys=("missing",)))
        sent, received = agents[6].num_bytes
        assert sent > 0
        assert received > len(large)
    finally:
        for agent in agents:
            agent.close()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await server.stop()
        await journal_thread.close()


async def test_the_loop_alone_gathers_agents_with_messages_of_one_size(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    few = await measure(4, tmp_path / "few")
    many = await measure(300, tmp_path)
    assert many["message_bytes"] - few["message_bytes"] <= 8
    assert many["seconds"] > 0


@pytest.mark.parametrize(("number", "data"), [(0, b"\0"), (126, b"~"), (127, b"\x7f\0"), (300, b"\x7f\xad\x01")])
def test_lengths_are_written_as_hpack_wants_them(number: int, data: bytes) -> None:
    assert hpack_integer(number) == data
