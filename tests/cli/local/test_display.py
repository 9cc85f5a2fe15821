"""What `dlrover local` shows, also on a console that takes no bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from msgspec.structs import replace

from dlrover.cli.console import MAX_HELD
from dlrover.cli.local.display import Display
from dlrover.host.console import HELD_BYTES
from dlrover.protocol.codec import Question, Unreadable
from dlrover.protocol.messages.frames import FromAgent
from dlrover.protocol.messages.job import JobStatus, Reply, Round, Stage
from dlrover.protocol.rpc.server import AgentStream, MasterServer

LINE = "x" * 1000
STATUS = JobStatus(
    job_name="j",
    stage=Stage.RUNNING,
    master_epoch=1,
    round=Round(1),
    world_size=2,
    num_restarts=0,
    verdict="2 of 2 nodes start",
    nodes=(),
)


class StandInDesk:
    """A master that is asked for its status, says these, and stays at the last."""

    def __init__(self, *said: JobStatus) -> None:
        self._said = list(said)
        self.is_done = asyncio.Event()

    def receive(self, stream: AgentStream, parcels: Sequence[FromAgent | Unreadable]) -> None:
        """No agent comes."""

    def closed(self, stream: AgentStream) -> None:
        """No agent comes."""

    async def ask(self, question: Question) -> Reply:
        if len(self._said) > 1:
            return self._said.pop(0)
        self.is_done.set()
        return self._said[0]


def display_on(writer: int) -> Display:
    return Display("nowhere:1", "token", tls=None, is_terminal=False, stdout=writer, stderr=writer)


async def read_rest(reader: int, writer: int, display: Display) -> list[str]:
    with os.fdopen(os.dup(reader)) as file:
        text = asyncio.ensure_future(asyncio.to_thread(file.read))
        await display.drain(30.0)
        os.close(writer)
        return (await text).lstrip(".").splitlines()


async def test_what_stops_the_master_is_told_and_so_is_its_end() -> None:
    reader, writer = os.pipe()
    master_loop = StandInDesk(STATUS, replace(STATUS, blocked="Its disk is full."), STATUS)
    server = MasterServer(token="token", tls=None)
    port = server.bind("127.0.0.1", 0)
    await server.start(master_loop, num_expected=0)
    display = Display(f"127.0.0.1:{port}", "token", tls=None, is_terminal=False, stdout=writer, stderr=writer)
    with display:
        showing = asyncio.ensure_future(display.run())
        await asyncio.wait_for(master_loop.is_done.wait(), 60)
        await server.stop()  # gives its last answer
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
    assert (await read_rest(reader, writer, display))[:2] == [
        "dlrover local: running, round 1, 2 workers, 0 nodes: 2 of 2 nodes start",
        "dlrover local: blocked (running), round 1, 2 workers, 0 nodes: Its disk is full.",
    ]


async def test_nodes_wait_for_a_full_console_and_of_our_own_lines_the_newest_are_kept(full_pipe):
    told: list[str] = []
    num_lines = 0
    display = display_on(full_pipe[1])
    with display:
        display.hold, display.release = lambda: told.append("hold"), lambda: told.append("release")
        while not told:
            display.line("worker-0", f"{LINE}\n".encode(), False)
            num_lines += 1
        for number in range(MAX_HELD + 5):
            display.say(str(number))
        await display.drain(0.01)
        assert told == ["hold"]
        assert num_lines * len(LINE) < HELD_BYTES
    lines = await read_rest(*full_pipe, display)
    assert told == ["hold", "release"]
    assert lines[:num_lines] == [f"[worker-0] {LINE}"] * num_lines
    assert lines[num_lines:] == [f"dlrover local: {number}" for number in range(5, MAX_HELD + 5)]


async def test_the_end_does_not_wait_for_ever_and_throws_nothing_away(full_pipe):
    display = display_on(full_pipe[1])
    display.say("the last word")
    await display.drain(0.01)
    assert await read_rest(*full_pipe, display) == ["dlrover local: the last word"]


async def test_our_own_lines_alone_do_not_pile_up(full_pipe):
    max_lines = HELD_BYTES // len(LINE) + MAX_HELD + 1
    display = display_on(full_pipe[1])
    with display:
        for _ in range(2 * max_lines):
            display.say(LINE)
    assert len(await read_rest(*full_pipe, display)) <= max_lines
