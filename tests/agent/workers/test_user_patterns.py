"""The user's regular expressions cannot stop the agent, whatever they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from dlrover.agent.config import LogAction, LogPattern
from dlrover.agent.workers.log_patterns import LogVerdict
from dlrover.agent.workers.user_patterns import UserPatterns
from tests.agent.lab import until

ENDLESS = LogPattern(pattern="(a+)+$", action=LogAction.ABORT)
KILLER = "a" * 60 + "!"
"""The pattern above tries 2 to the power of 60 ways to match it."""
TOKENS = LogPattern(pattern="out of tokens: [0-9]+", action=LogAction.RELAUNCH)


async def test_the_first_pattern_that_is_found_counts_wherever_its_line_is(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("well\nXid (PCI:0): 79, pid 1\n  out of tokens: 17 # left\n")
    xid = LogPattern(pattern=r"Xid .*: 79\b", action=LogAction.RESTART)
    well = LogPattern(pattern="^well$", action=LogAction.ABORT)
    absent = LogPattern(pattern="absent", action=LogAction.ABORT)

    async def find(*patterns: LogPattern, tail: str = "") -> LogVerdict | None:
        return await UserPatterns(patterns).find(tail, str(log))

    assert await find() is None
    assert await find(absent) is None
    assert await find(absent, xid, well) == (LogAction.RESTART, "Xid (PCI:0): 79, pid 1")
    assert await find(TOKENS, xid) == (LogAction.RELAUNCH, "out of tokens: 17 # left")
    assert await find(TOKENS, tail="a\nout of tokens: 3\n") == (LogAction.RELAUNCH, "out of tokens: 3")


def searches_of_ours() -> list[psutil.Process]:
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "pattern_search" in str(child.cmdline())]


async def test_a_pattern_that_never_ends_is_switched_off_while_the_loop_runs_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    patterns = UserPatterns([ENDLESS, TOKENS], limit=0.5)
    tail = f"{KILLER}\nout of tokens: 3\n"
    searches = asyncio.gather(patterns.find(tail), patterns.find(tail))  # two workers failed
    # Seen from the loop while the search goes on: it would see nothing if it stood still.
    (searching,) = await until(searches_of_ours)
    assert not searches.done()
    assert await searches == [(LogAction.RELAUNCH, "out of tokens: 3")] * 2, "the other pattern counts all the same"
    assert not searching.is_running()
    (warning,) = [record.getMessage() for record in caplog.records if "switched off" in record.getMessage()]
    assert repr(ENDLESS.pattern) in warning
    assert await patterns.find(KILLER) is None
    assert "failed" not in caplog.text


async def test_a_search_that_is_given_up_leaves_no_process() -> None:
    patterns = UserPatterns([ENDLESS], limit=1e6)
    search = asyncio.create_task(patterns.find(KILLER))
    (searching,) = await until(searches_of_ours)
    search.cancel()
    with pytest.raises(asyncio.CancelledError):
        await search
    await until(lambda: not searching.is_running() or searching.status() == psutil.STATUS_ZOMBIE)
