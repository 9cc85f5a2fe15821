"""
A rendezvous without sockets: the master's loop with its real journal, and agents that are objects in the same process.

    python loop_transport.py NUM_AGENTS

For more agents than a machine has descriptors or processor time for. What gRPC and the kernel would cost is left out, and only that: every
message is encoded and decoded as on the wire, every decision is journalled. It prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from dlrover.core.job import Job
from dlrover.master.clock import MasterClock
from dlrover.master.journal.journal_thread import JournalThread
from dlrover.master.loop.loop import MasterLoop
from dlrover.protocol.codec import decode_from_agent, decode_from_master, encode_frame
from dlrover.protocol.messages.frames import Ack, Answer, FromAgent, FromMaster, Push, Refusal, Request
from dlrover.protocol.messages.job import (
    MAX_REQUESTS_IN_WORK,
    Attach,
    Attached,
    Desired,
    JobTerms,
    Join,
    JoinRendezvous,
    Limits,
    NodeRank,
    Run,
)
from dlrover.protocol.rpc.server import AgentStream


class LoopAgent(AgentStream):
    """Both ends of a stream: what the master's loop sends arrives at once."""

    def __init__(self, index: int, master_loop: MasterLoop, terms: JobTerms) -> None:
        super().__init__(f"simulated:{index}")
        self.index = index
        self._master_loop = master_loop
        self._terms = terms
        self._host = f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}"
        self.attached: Attached | None = None
        self.desired: Desired | None = None
        self.has_joined = False
        self.run_bytes = 0
        self.num_bytes = 0
        self.news = asyncio.Event()

    def send(self, parcel: FromMaster) -> None:
        data = encode_frame([parcel])
        self.num_bytes += len(data)
        for received in decode_from_master(data):
            match received:
                case Answer(body=Attached() as attached):
                    self.attached = attached
                    self._obey(attached.desired, len(data))
                case Answer():
                    self.has_joined = True
                case Push(desired=desired):
                    self._obey(desired, len(data))
                case Refusal():
                    raise AssertionError(f"agent {self.index} refused: {received.message}")
        self.news.set()

    def end(self) -> None:
        raise AssertionError(f"the master ended the stream of agent {self.index}")

    def attach(self) -> None:
        attach = Attach(
            launch=f"launch-{self.index}",
            host=self._host,
            terms=self._terms,
            local_world_size=8,
            node_rank=NodeRank(self.index),
            life=f"life-{self.index}",
        )
        self._say(Request(id=1, body=attach))

    def join(self) -> None:
        assert self.attached is not None, "attach first"
        assert self.desired is not None, "an attach brings a wish"
        assert isinstance(self.desired.wish, Join), f"{self.desired.wish} instead of a wish to join"
        join = JoinRendezvous(
            node=self.attached.node,
            incarnation=self.attached.incarnation,
            round=self.desired.wish.round,
            local_world_size=8,
            offer=f"{self._host}:20001",
        )
        self._say(Request(id=2, body=join, sequence=1))

    def _say(self, parcel: FromAgent) -> None:
        data = encode_frame([parcel])
        self.num_bytes += len(data)
        self._master_loop.receive(self, decode_from_agent(data))

    def _obey(self, desired: Desired, size_bytes: int) -> None:
        self.desired = desired
        if isinstance(desired.wish, Run):
            self.run_bytes = size_bytes
        self._say(Ack(desired.number))


async def measure(num_agents: int, folder: Path) -> dict[str, float]:
    journal_thread = await JournalThread.open(folder / "journal.sqlite", job_name="bench")
    job: Job = await journal_thread.restore()
    master_loop = MasterLoop(journal_thread, job, MasterClock(job.now), job_name="bench")
    await master_loop.begin(journal_thread.master_epoch)
    working = asyncio.ensure_future(master_loop.run())
    terms = JobTerms(limits=Limits(min_nodes=num_agents, max_nodes=num_agents))
    agents = [LoopAgent(index, master_loop, terms) for index in range(num_agents)]
    began_at, cpu_before = time.monotonic(), time.process_time()
    for begin in range(0, num_agents, MAX_REQUESTS_IN_WORK):
        some = agents[begin : begin + MAX_REQUESTS_IN_WORK]
        for agent in some:
            agent.attach()
        await _all(some, lambda agent: agent.attached is not None)
    for begin in range(0, num_agents - 1, MAX_REQUESTS_IN_WORK):
        some = agents[begin : min(begin + MAX_REQUESTS_IN_WORK, num_agents - 1)]
        for agent in some:
            agent.join()
        await _all(some, lambda agent: agent.has_joined)
    last_at, cpu_then = time.monotonic(), time.process_time()
    agents[-1].join()
    await _all(agents, lambda agent: agent.run_bytes > 0)
    ended_at, cpu_after = time.monotonic(), time.process_time()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await journal_thread.close()
    return {
        "gathering": last_at - began_at,
        "gathering_cpu": cpu_then - cpu_before,
        "seconds": ended_at - last_at,
        "cpu": cpu_after - cpu_then,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "message_bytes": max(agent.run_bytes for agent in agents),
        "bytes_per_agent": sum(agent.num_bytes for agent in agents) / num_agents,
    }


async def _all(agents: list[LoopAgent], is_done: object) -> None:
    assert callable(is_done)
    async with asyncio.timeout(300):
        for agent in agents:
            while not is_done(agent):
                agent.news.clear()
                await agent.news.wait()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="loop-") as folder:
        print(json.dumps(asyncio.run(measure(int(sys.argv[1]), Path(folder)))))


if __name__ == "__main__":
    main()
