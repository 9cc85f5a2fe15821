"""Real masters: in this process with a real journal and a real port, or as processes that can be killed."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from dlrover.cli.launch.discovery import MasterPort
from dlrover.core.commit_order import decode_record
from dlrover.core.job import Job
from dlrover.master.clock import MasterClock
from dlrover.master.config import MasterConfig, Ready
from dlrover.master.journal.journal import BUSY_TIMEOUT
from dlrover.master.journal.journal_thread import JournalThread
from dlrover.master.loop.loop import MasterLoop
from dlrover.master.topology_plugins import TopologyPlugins
from dlrover.protocol.messages.job import (
    AskStatus,
    Attach,
    Attached,
    Command,
    Desired,
    Incarnation,
    JobStatus,
    JobTerms,
    JoinRendezvous,
    Limits,
    NodeId,
    NodeRank,
    PlatformId,
    Reply,
    Round,
)
from dlrover.protocol.messages.watch import WatchOrder
from dlrover.protocol.rpc.client import AgentChannel, ask
from dlrover.protocol.rpc.server import MasterServer

TOKEN = "token of the test"
TWO_NODES = JobTerms(limits=Limits(min_nodes=2, max_nodes=2))


class Agent:
    """Follows the channel's contract, and does only what the test tells it."""

    def __init__(
        self,
        address: str,
        *,
        launch: str = "l0",
        terms: JobTerms = TWO_NODES,
        token: str = TOKEN,
        node_rank: NodeRank | None = None,
        platform_node: int = -1,
        **details: object,
    ) -> None:
        """`details`: further fields of its attach."""
        self._launch = launch
        self._details = details
        self._platform_node = PlatformId(platform_node)
        self._asked_rank = node_rank
        self._terms = terms
        self._incarnation = Incarnation(0)
        self._num_offers = 0
        self.node = NodeId(-1)
        self.node_rank = NodeRank(-1)
        self.attachments: asyncio.Queue[Attached] = asyncio.Queue()
        self.levels: asyncio.Queue[Desired] = asyncio.Queue()
        self.orders: asyncio.Queue[WatchOrder] = asyncio.Queue()
        self.blocked: list[str] = []
        """Why the master could decide nothing; empty: it could again."""
        self.channel = AgentChannel(
            address,
            token=token,
            tls=None,
            attach=self._attach,
            on_attached=self._on_attached,
            on_desired=self.levels.put_nowait,
            on_order=self.orders.put_nowait,
            on_blocked=self.blocked.append,
        )
        self.running = asyncio.ensure_future(self.channel.run())

    def _attach(self) -> Attach:
        return Attach(
            launch=self._launch,
            host=f"host-{self._launch}",
            terms=self._terms,
            local_world_size=1,
            node_rank=self._asked_rank,
            incarnation=self._incarnation,
            platform_node=self._platform_node,
            **self._details,  # type: ignore[arg-type]
        )

    def _on_attached(self, attached: Attached) -> None:
        self.node, self._incarnation, self.node_rank = attached.node, attached.incarnation, attached.node_rank
        self.attachments.put_nowait(attached)

    @property
    def incarnation(self) -> Incarnation:
        return self._incarnation

    async def attached(self) -> Attached:
        waiting = asyncio.ensure_future(self.attachments.get())
        await asyncio.wait({waiting, self.running}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        if self.running.done():
            waiting.cancel()
            self.running.result()
        return await asyncio.wait_for(waiting, 0.1)

    async def wish(self, kind: type) -> Desired:
        async with asyncio.timeout(20):
            while True:
                desired = await self.levels.get()
                if isinstance(desired.wish, kind):
                    return desired

    def a_join(self, round_number: int = 1) -> JoinRendezvous:
        self._num_offers += 1
        return JoinRendezvous(
            node=self.node,
            incarnation=self._incarnation,
            round=Round(round_number),
            local_world_size=1,
            offer=f"host-{self._launch}:{self._num_offers}",
        )

    async def join(self, round_number: int = 1, *, timeout: float = 20) -> Reply:
        return await self.channel.call(self.a_join(round_number), timeout=timeout)

    async def leave(self) -> None:
        await self.channel.close()
        await asyncio.wait({self.running}, timeout=10)


Connect = Callable[..., Agent]


@pytest_asyncio.fixture
async def connect() -> AsyncIterator[Connect]:
    agents: list[Agent] = []

    def start(address: str, **options: object) -> Agent:
        agents.append(Agent(address, **options))  # type: ignore[arg-type]
        return agents[-1]

    yield start
    for agent in agents:
        await agent.leave()


@dataclass
class Master:
    """A master inside the test's process."""

    address: str
    master_loop: MasterLoop
    journal_thread: JournalThread
    server: MasterServer
    working: asyncio.Future[None]
    is_stopped: bool = False

    async def status(self) -> JobStatus:
        return await status_of(self.address)

    async def stop(self) -> None:
        if self.is_stopped:
            return
        self.is_stopped = True
        await self.server.stop()
        self.working.cancel()
        await asyncio.gather(self.working, return_exceptions=True)
        await self.journal_thread.close()


StartMaster = Callable[..., Awaitable[Master]]


def journalled(path: Path) -> list[Command]:
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT data FROM records ORDER BY number").fetchall()
    connection.close()
    return [decode_record(data).command for (data,) in rows]


@pytest_asyncio.fixture
async def start_master(tmp_path: Path, reserved_port: int) -> AsyncIterator[StartMaster]:
    masters: list[Master] = []

    async def start(
        *,
        port: int = reserved_port,
        make_job: Callable[[Job], Job] = lambda job: job,
        topology: TopologyPlugins | None = None,
        hours_later: int = 0,
        busy_timeout: float = BUSY_TIMEOUT,
    ) -> Master:
        server = MasterServer(token=TOKEN)
        bound = server.bind("127.0.0.1", port)
        journal_thread = await JournalThread.open(
            tmp_path / "journal.sqlite", job_name="job", busy_timeout=busy_timeout
        )
        job = make_job(await journal_thread.restore())
        clock = MasterClock(job.now, wall=lambda: time.time_ns() + hours_later * 3600 * 10**9)
        master_loop = MasterLoop(journal_thread, job, clock, job_name="job", topology=topology)
        await master_loop.begin(journal_thread.master_epoch)
        await server.start(master_loop)
        working = asyncio.ensure_future(master_loop.run())
        masters.append(Master(f"127.0.0.1:{bound}", master_loop, journal_thread, server, working))
        return masters[-1]

    yield start
    for master in masters:
        await master.stop()


class MasterProcess:
    """A master as users have it. `start` returns when it serves."""

    def __init__(self, directory: Path, *, token: str = TOKEN, max_descriptors: int = 0, **options: object) -> None:
        """`max_descriptors`: as many as an administrator allows; 0: as this process has it."""
        self._directory = directory
        self._limit = ["/bin/sh", "-c", f'ulimit -n {max_descriptors}; exec "$@"', "sh"] if max_descriptors else []
        self._seat = MasterPort("127.0.0.1", 0)  # keeps the port between two lives, as that of a launcher does
        self.journal = directory / "journal.sqlite"
        token_file = directory / "token"
        token_file.write_text(token)
        fields: dict[str, object] = {"job_name": "job", "journal": str(self.journal), "token_file": str(token_file)}
        self._fields = fields | {"port": self._seat.port} | options
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: Ready | None = None

    @property
    def address(self) -> str:
        assert self.ready is not None
        return f"127.0.0.1:{self.ready.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> Ready:
        """Each time on the same port."""
        read_fd, write_fd = os.pipe()
        try:
            self._spawn({**self._fields, "ready_fd": write_fd}, write_fd)
        finally:
            os.close(write_fd)
        with os.fdopen(read_fd, "rb") as pipe:
            is_readable, _, _ = select.select([pipe], [], [], 30)
            line = pipe.readline() if is_readable else b""
        assert line, f"the master did not start: {self.log()}"
        self.ready = msgspec.json.decode(line, type=Ready)
        return self.ready

    def run_to_end(self) -> int:
        """For starts that must fail."""
        self._spawn(self._fields, None)
        return self.wait()

    def _spawn(self, fields: dict[str, object], write_fd: int | None) -> None:
        config = self._directory / f"master-{id(self)}.json"
        config.write_bytes(msgspec.json.encode(msgspec.convert(fields, MasterConfig)))
        with open(self._directory / f"master-{id(self)}.log", "ab") as log:
            self.process = subprocess.Popen(
                [*self._limit, sys.executable, "-m", "dlrover.master", "--config", str(config)],
                stdout=log,
                stderr=log,
                pass_fds=() if write_fd is None else (write_fd,),
            )

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(timeout=30)

    def log(self) -> str:
        return (self._directory / f"master-{id(self)}.log").read_text()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=30)
        self._seat.close()


MakeMaster = Callable[..., MasterProcess]


@pytest.fixture
def make_master(tmp_path: Path) -> Iterator[MakeMaster]:
    masters: list[MasterProcess] = []

    def make(directory: Path = tmp_path, **options: object) -> MasterProcess:
        masters.append(MasterProcess(directory, **options))  # type: ignore[arg-type]
        return masters[-1]

    yield make
    for master in masters:
        master.close()


async def status_of(address: str) -> JobStatus:
    status = await ask(address, AskStatus(), token=TOKEN, timeout=10)
    assert isinstance(status, JobStatus)
    return status
