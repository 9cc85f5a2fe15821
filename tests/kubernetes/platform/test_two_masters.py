"""
Two masters at once: the old one stops at each line of a launch and of a removal, the new one
follows, and the old one goes on. What it may still do is the one create or delete that was past the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.pods import PodJob
from dlrover.protocol.messages.fleet import LaunchNode, RemoveNode
from tests.kubernetes.platform.followed import Answer, Order
from tests.kubernetes.platform.lab import TEMPLATES, PodLab
from tests.platforms.contract import DEADLINE, JOB, launch, remove, watching

MOST_LINES = 300


class OldMaster:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def say(self, intent: LaunchNode | RemoveNode, *, stop_at: int = 0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Order(intent=intent, stop_at=stop_at)) + b"\n")
        await self._process.stdin.drain()

    async def hear(self) -> Answer:
        return msgspec.json.decode(await self._line(), type=Answer)

    async def do(self, intent: LaunchNode | RemoveNode) -> Answer:
        await self.say(intent)
        return await self.hear()

    async def stopped(self) -> bool:
        """Whether it stands at its line; False: it was through before it came there."""
        assert self._process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            while True:
                if self.state() == "T":
                    return True
                if self._process.stdout._buffer:  # type: ignore[attr-defined]
                    return False
                await asyncio.sleep(0.001)

    def state(self) -> str:
        with open(f"/proc/{self._process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            line = await self._process.stdout.readline()
        assert line, "the old master has ended"
        return line


@contextlib.asynccontextmanager
async def old_master(lab: PodLab) -> AsyncIterator[OldMaster]:
    job = PodJob(name=JOB, uid=lab.uids[JOB], namespace=lab.namespace, types=TEMPLATES)
    command = (sys.executable, "-m", "tests.kubernetes.platform.followed", str(lab.kubeconfig))
    process = await asyncio.create_subprocess_exec(
        *command,
        msgspec.json.encode(job).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        old = OldMaster(process)
        assert await old._line() == b"ready\n"
        yield old
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.fixture
async def lab(api_server):
    async with PodLab(api_server.kubeconfig, capacity=0) as built:
        yield built


def pod_of(node: int) -> str:
    return names.pod_name(JOB, "worker", node)


async def is_there(lab: PodLab, node: int) -> bool:
    pod = (await lab.pods()).get(pod_of(node))
    return pod is not None and "deletionTimestamp" not in pod["metadata"]


async def gone(lab: PodLab, node: int) -> None:
    async with asyncio.timeout(DEADLINE):
        while await is_there(lab, node):  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.01)


async def check_that_it_is_over(old: OldMaster, *, epoch: int, free_id: int, other: int) -> None:
    """Every later write of the old one fails."""
    for intent in (launch(free_id, master_epoch=epoch), remove(other, master_epoch=epoch)):
        answer = await old.do(intent)
        assert answer.result.startswith("StaleMaster"), answer


@pytest.mark.parametrize("removes_first", [False, True])
async def test_a_launch_that_another_master_follows(lab, removes_first):
    new = lab.platform()
    async with watching(new), old_master(lab) as old:
        await new.apply(launch(0, master_epoch=1))  # stays through all of it
        created = refused = 0
        for stop_at in range(1, MOST_LINES):
            epoch, node = 2 * stop_at + 1, 10 * stop_at
            await old.say(launch(node, rank=1, master_epoch=epoch), stop_at=stop_at)
            stood = await old.stopped()
            # The new master takes over: its first intent raises the epoch.
            if removes_first:
                await new.apply(remove(node, master_epoch=epoch + 1))
            else:
                await new.apply(launch(node + 1, rank=1, master_epoch=epoch + 1))
            if stood:
                old.go_on()
            answer = await old.hear()
            pod_came = await is_there(lab, node)
            if answer.result == "done":
                created += 1
                assert pod_came or removes_first, "it was past the ledger"
            else:
                refused += 1
                assert answer.result.startswith("StaleMaster"), answer
                assert not pod_came
            await check_that_it_is_over(old, epoch=epoch, free_id=node + 5, other=0)
            assert not await is_there(lab, node + 5)
            # Whatever came of it, the new master can remove it, and it does not come back.
            await new.apply(remove(node, master_epoch=epoch + 1))
            await gone(lab, node)
            await new.apply(launch(node, rank=1, master_epoch=epoch + 1))
            assert not await is_there(lab, node)
            if not stood:
                break
        assert not stood, f"a launch has more than {MOST_LINES} lines"
        assert refused > 5
        assert created > 5, "at lines after the ledger was written"
        assert await is_there(lab, 0)


async def test_a_removal_that_another_master_follows(lab):
    new = lab.platform()
    async with watching(new), old_master(lab) as old:
        await new.apply(launch(0, master_epoch=1))
        deleted = refused = 0
        for stop_at in range(1, MOST_LINES):
            epoch, node = 2 * stop_at + 3, 10 * stop_at
            await new.apply(launch(node, rank=1, master_epoch=epoch - 1))
            await old.say(remove(node, master_epoch=epoch), stop_at=stop_at)
            stood = await old.stopped()
            await new.apply(launch(node + 1, rank=2, master_epoch=epoch + 1))
            if stood:
                old.go_on()
            answer = await old.hear()
            if answer.result == "done":
                deleted += 1
                await gone(lab, node)
            else:
                refused += 1
                assert answer.result.startswith("StaleMaster"), answer
                assert await is_there(lab, node)
            await check_that_it_is_over(old, epoch=epoch, free_id=node + 5, other=0)
            assert await is_there(lab, node + 1)
            assert not await is_there(lab, node + 5)
            if not stood:
                break
        assert not stood, f"a removal has more than {MOST_LINES} lines"
        assert refused > 5
        assert deleted > 5, "at lines after the ledger was read"
        assert await is_there(lab, 0)
