"""The notice of a preemption: told by the kernel where it can, found by a slow look where it cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dlrover.agent.preemption import wait_for_notice
from tests.agent.lab import DEADLINE, descriptors

NEVER = 3600.0


async def noticed(waiting: asyncio.Task[None]) -> None:
    async with asyncio.timeout(DEADLINE):
        await waiting


async def begun(path: Path, slow_look: float) -> asyncio.Task[None]:
    waiting = asyncio.create_task(wait_for_notice(str(path), slow_look=slow_look))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    return waiting


async def test_the_kernel_tells_that_the_file_appeared(tmp_path: Path) -> None:
    waiting = await begun(tmp_path / "notice", NEVER)
    (tmp_path / "another").touch()
    (tmp_path / "notice").touch()
    await noticed(waiting)


async def test_a_file_that_is_moved_there_counts(tmp_path: Path) -> None:
    waiting = await begun(tmp_path / "notice", NEVER)
    (tmp_path / "part").write_text("soon")
    (tmp_path / "part").rename(tmp_path / "notice")
    await noticed(waiting)


async def test_a_notice_from_before_the_start_counts(tmp_path: Path) -> None:
    (tmp_path / "notice").touch()
    await noticed(asyncio.create_task(wait_for_notice(str(tmp_path / "notice"), slow_look=NEVER)))


async def test_a_directory_that_does_not_exist_yet_is_looked_for(tmp_path: Path) -> None:
    waiting = await begun(tmp_path / "later" / "notice", 0.01)
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "notice").touch()
    await noticed(waiting)


async def test_whoever_stops_waiting_leaves_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    waiting = await begun(tmp_path / "notice", NEVER)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert descriptors() <= before
