"""A master whose journal was lost, among agents that remember its former lives."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dlrover.protocol.messages.job import Done, Run
from tests.master.conftest import Connect, StartMaster


async def test_agents_obey_a_master_that_begins_with_an_empty_journal(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    master = await start_master()
    port = int(master.address.split(":")[1])
    await master.stop()
    master = await start_master(port=port)
    agents = [connect(master.address, launch=launch) for launch in "ab"]
    assert [(await agent.attached()).master_epoch for agent in agents] == [2, 2]
    await master.stop()
    for file in tmp_path.glob("journal.sqlite*"):
        file.unlink()

    master = await start_master(port=port)
    assert {(await agent.attached()).master_epoch for agent in agents} == {3}
    assert (await master.status()).master_epoch == master.journal_thread.master_epoch == 3
    assert await asyncio.gather(*(agent.join() for agent in agents)) == [Done(), Done()]
    assert [(await agent.wish(Run)).master_epoch for agent in agents] == [3, 3]
    await master.stop()

    master = await start_master(port=port)  # what it was raised to is as durable as all else
    assert {(await agent.attached()).master_epoch for agent in agents} == {4}
