"""
The control plane: how fast masters gather nodes, hear heartbeats and keep keys: ours, dlrover 0.6.1's and torch's.

    python benchmarks/control_plane.py                                  everything, three rounds, about 20 minutes
    python benchmarks/control_plane.py --quick                          small sizes, one round, without dlrover 0.6.1
    python benchmarks/control_plane.py --sizes 1000,10000 --parts rendezvous,reattach --json control_plane.json
    python benchmarks/control_plane.py --sizes 10000 --parts door       do the limits for strangers disturb agents?

Every server is a process of its own. Each round measures every system, in turned order, so that a noisy minute of the machine falls on all of
them; figures are medians over the rounds. Before each round and after the last the machine is watched while we do nothing: what others take from it is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from control_plane_report import Sample, report
from peers import PeerUnavailableError, dlrover_061
from process_tree import end_descendants
from rounds import measuring, run_rounds
from servers import CLIENTS, OurMaster, Server, ServerError, dlrover_061_master, our_master, relay_agent, tcp_store
from virtual_agents import VirtualAgent, all_run, beating, connect_all, join_all

from dlrover.protocol.messages.job import JobTerms, Limits, Ping
from dlrover.protocol.messages.kv import KvAdd, KvGet, KvSet

FLOODS = Path(__file__).resolve().parent / "floods.py"
LOOP = Path(__file__).resolve().parent / "loop_transport.py"
PARTS = ("rendezvous", "reattach", "door", "heartbeats", "kv", "stream")
SYSTEMS = ("ours", "dlrover-0.6.1", "torch")
KV_OPERATIONS = ("set", "get", "multi-set", "multi-get")
CLIENT_COUNTS = (1, 16)
MOST_061_NODES = 1000
"""Its world message names every node, so the work grows with the square of their number."""
VALUE = b"v" * 32
TOKEN = "a token of the benchmark"
CROWDS: dict[str, tuple[str, ...]] = {"alone": (), "with strangers": ("settled", "bodies")}
"""Which floods strangers make while agents come."""
STRANGER = "127.0.0.2"
NUM_SPEAKERS = 64
"""Agents that connect at a time. Each speaks as soon as it is connected, as in a process of its own; all of them in one process could not."""
CLIENT_TIMEOUT = 180.0


@dataclass(frozen=True)
class Plan:
    sizes: tuple[int, ...]
    seconds: float
    """How long each rate is measured."""
    c10d_sizes: tuple[int, ...]
    num_heartbeat_agents: int
    num_beats: int
    """Of each of them."""
    parts: tuple[str, ...]


class Bench:
    """One round after the other; keeps what was measured and what could not be."""

    def __init__(self, plan: Plan, folder: Path, python_061: Path | None) -> None:
        self.plan = plan
        self.samples: list[Sample] = []
        self.errors: list[str] = []
        self._folder = folder
        self._python_061 = python_061
        self._num_folders = 0

    def run_round(self, number: int) -> None:
        jobs = [job for part in self.plan.parts for job in getattr(self, f"_{part}_jobs")()]
        systems = list(dict.fromkeys(system for _, system, _ in jobs))
        turned = systems[number % len(systems) :] + systems[: number % len(systems)]
        for what in dict.fromkeys(what for what, _, _ in jobs):
            mine = [job for job in jobs if job[0] == what]
            for _, system, measure in sorted(mine, key=lambda job: turned.index(job[1])):
                self._attempt(what, system, measure)

    def _attempt(self, what: str, system: str, measure: Callable[[], list[Sample]]) -> None:
        try:
            found = measure()
        except (ServerError, OSError, TimeoutError, subprocess.SubprocessError, AssertionError) as error:
            self.errors.append(f"{what}, {system}: {type(error).__name__}: {error}")
            print(f"{what}, {system}: failed: {error}", file=sys.stderr, flush=True)
            return
        finally:
            end_descendants(deadline_at=time.monotonic() + 10)
        for sample in found:
            print(f"{sample}", file=sys.stderr, flush=True)
        self.samples += found

    def _new_folder(self) -> Path:
        self._num_folders += 1
        return self._folder / str(self._num_folders)

    # What each part consists of: (what, system, measurement). Those with the same `what` are measured one after the other.

    def _rendezvous_jobs(self) -> list[tuple[str, str, Callable[[], list[Sample]]]]:
        jobs: list[tuple[str, str, Callable[[], list[Sample]]]] = []
        for size in self.plan.sizes:
            what = f"rendezvous of {size}"
            jobs.append((what, "ours", lambda size=size: self._rendezvous_ours(size)))
            if size > 256:
                jobs.append((what, "ours, no sockets", lambda size=size: self._rendezvous_in_process(size)))
            if size <= MOST_061_NODES and self._python_061 is not None:
                jobs.append((what, "dlrover-0.6.1", lambda size=size: self._rendezvous_061(size)))
            if size in self.plan.c10d_sizes:
                jobs.append((what, "torch c10d", lambda size=size: self._rendezvous_c10d(size)))
        return jobs

    def _reattach_jobs(self) -> list[tuple[str, str, Callable[[], list[Sample]]]]:
        return [(f"reattach of {size}", "ours", lambda size=size: self._reattach(size)) for size in self.plan.sizes]

    def _door_jobs(self) -> list[tuple[str, str, Callable[[], list[Sample]]]]:
        return [
            (f"{size} at the door", name, lambda size=size, kinds=kinds, name=name: self._door(size, kinds, name))
            for size in self.plan.sizes
            for name, kinds in CROWDS.items()
        ]

    def _heartbeats_jobs(self) -> list[tuple[str, str, Callable[[], list[Sample]]]]:
        jobs: list[tuple[str, str, Callable[[], list[Sample]]]] = [("heartbeats", "ours", self._heartbeats_ours)]
        if self._python_061 is not None:
            jobs.append(("heartbeats", "dlrover-0.6.1", lambda: self._clients_061(["heartbeat"])))
        return jobs

    def _kv_jobs(self) -> list[tuple[str, str, Callable[[], list[Sample]]]]:
        jobs: list[tuple[str, str, Callable[[], list[Sample]]]] = [
            ("kv", "ours", self._kv_ours),
            ("kv", "torch TCPStore", self._kv_tcp_store),
        ]
        if self._python_061 is not None:
            jobs.append(("kv", "dlrover-0.6.1", lambda: self._clients_061(KV_OPERATIONS)))
        return jobs

    def _stream_jobs(self) -> list[tuple[str, str, Callable[[], list[Sample]]]]:
        return [("stream", "ours", self._stream)]

    # Rendezvous.

    def _rendezvous_ours(self, size: int) -> list[Sample]:
        with our_master(self._new_folder()) as master:
            return [Sample("rendezvous", "ours", size, asyncio.run(rendezvous(master, size)))]

    def _rendezvous_in_process(self, size: int) -> list[Sample]:
        figures = output_of([sys.executable, str(LOOP), str(size)])
        return [Sample("rendezvous", "ours, no sockets", size, figures)]

    def _rendezvous_061(self, size: int) -> list[Sample]:
        assert self._python_061 is not None
        with dlrover_061_master(self._python_061, self._new_folder(), num_nodes=size) as master:
            figures = clients(
                self._python_061, "dlrover-0.6.1", "rendezvous", master, extra=["--nodes", str(size), "--clients", "16"]
            )
            return [Sample("rendezvous", "dlrover-0.6.1", size, figures | {"rss_mb": master.rss_mb})]

    def _rendezvous_c10d(self, size: int) -> list[Sample]:
        figures = output_of([sys.executable, str(CLIENTS), "c10d", "rendezvous", "--nodes", str(size)])
        return [Sample("rendezvous", "torch c10d", size, figures)]

    def _reattach(self, size: int) -> list[Sample]:
        with our_master(self._new_folder()) as master:
            return [Sample("reattach", "ours", size, asyncio.run(reattach(master, size)))]

    def _door(self, size: int, kinds: Sequence[str], name: str) -> list[Sample]:
        with our_master(self._new_folder(), token=TOKEN) as master:
            return [Sample("door", name, size, asyncio.run(crowd(master, size, kinds)))]

    # Rates.

    def _heartbeats_ours(self) -> list[Sample]:
        with our_master(self._new_folder()) as master:
            figures = asyncio.run(heartbeats(master, self.plan.num_heartbeat_agents, self.plan.num_beats))
        return [Sample("heartbeat", "ours", self.plan.num_heartbeat_agents, figures)]

    def _kv_ours(self) -> list[Sample]:
        found = []
        folder = self._new_folder()
        with our_master(folder) as master, relay_agent(master, folder / "node") as environment:
            for operation, num_clients in kv_cases():
                figures = self._load("ours", operation, master, num_clients, environment=environment)
                found.append(Sample(operation, "ours", num_clients, figures))
        return found

    def _kv_tcp_store(self) -> list[Sample]:
        found = []
        with tcp_store() as store:
            for operation, num_clients in kv_cases():
                figures = self._load("tcpstore", operation, store, num_clients)
                found.append(Sample(operation, "torch TCPStore", num_clients, figures))
        return found

    def _clients_061(self, operations: Sequence[str]) -> list[Sample]:
        assert self._python_061 is not None
        found = []
        with dlrover_061_master(self._python_061, self._new_folder(), num_nodes=max(CLIENT_COUNTS)) as master:
            for operation in operations:
                for num_clients in CLIENT_COUNTS:
                    figures = self._load("dlrover-0.6.1", operation, master, num_clients, python=self._python_061)
                    found.append(Sample(operation, "dlrover-0.6.1", num_clients, figures))
        return found

    def _load(
        self,
        kind: str,
        operation: str,
        server: Server,
        num_clients: int,
        *,
        python: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> dict[str, float]:
        extra = ["--clients", str(num_clients), "--seconds", str(self.plan.seconds)]
        return clients(python or Path(sys.executable), kind, operation, server, extra=extra, environment=environment)

    def _stream(self) -> list[Sample]:
        found = []
        for what, num_agents, depth in (
            ("KvSet", 1, 1),
            ("KvSet", 16, 1),
            ("KvSet", 1, 16),
            ("KvGet", 1, 1),
            ("KvGet", 16, 1),
            ("KvGet", 1, 16),
            ("mixed", 64, 1),
        ):
            with our_master(self._new_folder()) as master:
                figures = asyncio.run(stream_load(master, what, num_agents, depth, self.plan.seconds))
            found.append(Sample(f"{what} on the stream, {depth} at a time", "ours", num_agents, figures))
        return found


def kv_cases() -> list[tuple[str, int]]:
    return [(operation, num_clients) for operation in KV_OPERATIONS for num_clients in CLIENT_COUNTS]


def clients(
    python: Path,
    kind: str,
    operation: str,
    server: Server,
    *,
    extra: Sequence[str],
    environment: dict[str, str] | None = None,
) -> dict[str, float]:
    command = [str(python), str(CLIENTS), kind, operation, "--address", server.address]
    return output_of([*command, "--pid", str(server.process.pid), *extra], environment=environment)


def output_of(command: Sequence[str], *, environment: dict[str, str] | None = None) -> dict[str, float]:
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT,
    )
    if done.returncode:
        raise ServerError(f"exit code {done.returncode}: {' / '.join(done.stderr.strip().splitlines()[-3:])[-400:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


# Virtual agents against our master, each with its own connection.


def make_agents(master: OurMaster, size: int) -> list[VirtualAgent]:
    terms = JobTerms(limits=Limits(min_nodes=size, max_nodes=size))
    return [VirtualAgent(master.address, index, terms) for index in range(size)]


async def rendezvous(master: OurMaster, size: int) -> dict[str, float]:
    agents = make_agents(master, size)
    try:
        async with beating(agents):
            began_at, cpu_before = time.monotonic(), master.cpu
            await connect_all(agents)
            await join_all(agents[:-1])
            last_at, cpu_then = time.monotonic(), master.cpu
            joined = agents[-1].join()
            runs_at = await all_run(agents, timeout=CLIENT_TIMEOUT)
            await joined
            return {
                "gathering": last_at - began_at,
                "gathering_cpu": cpu_then - cpu_before,
                "seconds": runs_at - last_at,
                "cpu": master.cpu - cpu_then,
                "rss_mb": master.rss_mb,
                "message_bytes": max(agent.push_bytes for agent in agents),
                "bytes_per_agent": sum(sum(agent.num_bytes) for agent in agents) / size,
            }
    finally:
        for agent in agents:
            agent.close()


async def reattach(master: OurMaster, size: int) -> dict[str, float]:
    """The world runs; the master is killed and comes back; all agents find it by themselves, in jittered attempts."""
    agents = make_agents(master, size)
    try:
        async with beating(agents):
            await connect_all(agents)
            await join_all(agents)
            await all_run(agents, timeout=CLIENT_TIMEOUT)
            rounds = {agent.world.round for agent in agents if agent.world is not None}
            killed_at = time.monotonic()
            served_at = await asyncio.to_thread(master.restart)
            async with asyncio.timeout(CLIENT_TIMEOUT):
                for agent in agents:
                    while not (agent.is_attached and agent.attached_at > killed_at):
                        agent.has_news.clear()
                        await agent.has_news.wait()
            cpu = master.cpu
            assert {agent.world.round for agent in agents if agent.world is not None} == rounds, "a world was lost"
            return {
                "serving": served_at - killed_at,
                "seconds": max(agent.attached_at for agent in agents) - killed_at,
                "cpu": cpu,
                "rss_mb": master.rss_mb,
            }
    finally:
        for agent in agents:
            agent.close()


async def crowd(master: OurMaster, size: int, kinds: Sequence[str]) -> dict[str, float]:
    """All agents come at once, from one address, to a master that expects none of them; strangers may come from another address."""
    terms = JobTerms(limits=Limits(min_nodes=size, max_nodes=size))
    agents = [VirtualAgent(master.address, index, terms, token=TOKEN) for index in range(size)]
    options = [master.address, "--seconds", "60", "--source", STRANGER]
    floods = [
        subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, str(FLOODS), kind, *options], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        for kind in kinds
    ]
    try:
        async with beating(agents):
            began_at, cpu_before = time.monotonic(), master.cpu
            await connect_all(agents, at_a_time=size, speakers=NUM_SPEAKERS)
            return {
                "seconds": max(agent.attached_at for agent in agents) - began_at,
                "cpu": master.cpu - cpu_before,
                "num_lost": sum(agent.num_lost for agent in agents),
                "rss_mb": master.rss_mb,
            }
    finally:
        for agent in agents:
            agent.close()
        for flood in floods:
            flood.communicate()


async def gathered(master: OurMaster, size: int) -> list[VirtualAgent]:
    agents = make_agents(master, size)
    await connect_all(agents)
    await join_all(agents)
    await all_run(agents, timeout=CLIENT_TIMEOUT)
    return agents


async def heartbeats(master: OurMaster, num_agents: int, num_beats: int) -> dict[str, float]:
    """Each a frame of its own, as agents send them. Nobody answers a heartbeat; a question at the end says that all were heard."""
    agents = await gathered(master, num_agents)
    try:
        began_at, cpu_before = time.monotonic(), master.cpu
        for step in range(num_beats):
            for agent in agents:
                agent.beat(step)
            await asyncio.sleep(0)
        async with asyncio.timeout(CLIENT_TIMEOUT):
            await asyncio.gather(*(agent.call(Ping()) for agent in agents))
        return {
            "num": num_agents * num_beats,
            "seconds": time.monotonic() - began_at,
            "cpu": master.cpu - cpu_before,
            "rss_mb": master.rss_mb,
        }
    finally:
        for agent in agents:
            agent.close()


async def stream_load(master: OurMaster, what: str, num_agents: int, depth: int, seconds: float) -> dict[str, float]:
    """So many agents with so many requests under way each, until the time is over."""
    agents = await gathered(master, num_agents)
    num = 0

    async def ask(agent: VirtualAgent, lane: int) -> None:
        nonlocal num
        key = f"agent-{agent.index}/{lane}"
        number = {"node": agent.node, "incarnation": agent.incarnation}
        await agent.call(KvSet(items={key: VALUE}, **number))
        while time.monotonic() < end_at:
            if what in ("KvSet", "mixed"):
                await agent.call(KvSet(items={key: VALUE}, **number))
                num += 1
            if what in ("KvGet", "mixed"):
                await agent.call(KvGet(keys=(key,)))
                num += 1
            if what == "mixed":
                agent.beat(num)
                await agent.call(KvAdd(key="counter", amount=1, **number))
                await agent.call(Ping())
                num += 3

    try:
        began_at, cpu_before = time.monotonic(), master.cpu
        end_at = began_at + seconds
        async with asyncio.timeout(CLIENT_TIMEOUT):
            await asyncio.gather(*(ask(agent, lane) for agent in agents for lane in range(depth)))
        return {"num": num, "seconds": time.monotonic() - began_at, "cpu": master.cpu - cpu_before}
    finally:
        for agent in agents:
            agent.close()


# The command.


def main() -> int:
    args = parse_args()
    raise_descriptor_limit()
    errors = []
    python_061 = None
    if "dlrover-0.6.1" in args.systems:
        try:
            python_061 = dlrover_061().python
        except PeerUnavailableError as error:
            errors.append(f"dlrover-0.6.1: {error}")
    strangers: list[float] = []
    with measuring("cp-") as folder:
        bench = Bench(args.plan, folder, python_061)
        bench.errors += errors
        run_rounds(args.rounds, bench.run_round, strangers)
    print(report(bench.samples, bench.errors, strangers, num_rounds=args.rounds))
    if args.json:
        machine = {"num_cores": os.cpu_count(), "python": platform.python_version(), "others_percent": strangers}
        found = [sample.as_json() for sample in bench.samples]
        args.json.write_text(json.dumps({"machine": machine, "samples": found}, indent=1) + "\n")
    return 0 if bench.samples and not bench.errors else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="16,64,256,1000,10000", help="of a rendezvous (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each rate (default %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="(default %(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="(default %(default)s)")
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, without dlrover 0.6.1")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds, args.seconds, args.systems = "16,64", 1, 0.5, "ours,torch"
    for name, known in (("parts", PARTS), ("systems", SYSTEMS)):
        given = getattr(args, name).split(",")
        if unknown := [each for each in given if each not in known]:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
        setattr(args, name, given)
    try:
        sizes = tuple(int(size) for size in args.sizes.split(","))
    except ValueError:
        parser.error(f"--sizes {args.sizes}: give numbers of nodes with commas between them")
    if min(sizes) < 2 or args.rounds < 1 or not args.seconds > 0:
        parser.error("--sizes must be at least 2, --rounds at least 1 and --seconds above 0")
    args.plan = Plan(
        sizes=sizes,
        seconds=args.seconds,
        c10d_sizes=tuple(size for size in sizes if size <= 64) if "torch" in args.systems else (),
        num_heartbeat_agents=16 if args.quick else 256,
        num_beats=100,
        parts=tuple(args.parts),
    )
    return args


def raise_descriptor_limit() -> None:
    """Of this process and of the servers it starts: each agent is a connection on both sides."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
