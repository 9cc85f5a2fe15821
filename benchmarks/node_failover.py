"""
Node failover: how long a job of two nodes stands still when one of them is killed with all its processes.

    python benchmarks/node_failover.py                                   everything, 7 kills of each, about 20 minutes
    python benchmarks/node_failover.py --quick                           ours, 2 kills each
    python benchmarks/node_failover.py --kills 10 --systems ours-standby,torchrun --json node_failover.json
    python benchmarks/node_failover.py --systems ours-standby --other-source OTHER   beside another source tree, in turn

A node is a launcher with its agent and one worker; both run on this machine. The killed one never hosts the master (or the store, or what the
system has instead). `ours-standby` has a third node that waits warm; the others get a new node one second after the kill. The clock runs from
the kill to the end of the first step that nobody had done before, completed by both ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from failover import (
    NUM_RANKS,
    REFERENCE_JOB,
    START_TIMEOUT,
    Kill,
    KillClock,
    Result,
    RunFailedError,
    as_json,
    environment_for,
    look_again,
    median_phase,
    say,
    wait_for_exit,
)
from figures import quietness, ratio, seconds, summarise, table, times
from peers import Launcher, Leftovers, PeerUnavailableError, dlrover_061, of_source, ours, torchrun
from process_tree import end_descendants
from rounds import look_at_others, measuring
from servers import dlrover_061_master, free_port
from timeline import PHASES, EventFolder, first_step_at_ns, lives, num_steps_since, recovery

from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.job import AskStatus, JobStatus
from dlrover.protocol.rpc.client import ask

REPLACEMENT_AFTER = 1.0
"""Seconds from the kill until the replacement's command is given: what a quick platform needs to see a node go."""
TOKEN = "node-failover"
OTHER_STANDBY = "other-standby"
SETTLED = 0.3
"""Seconds in which a waiting node used no processor: it has imported what it wants."""
WARM_UP = "import torch, torch.distributed, torch._dynamo"


@dataclass(frozen=True)
class System:
    """How nodes of a job are started with one launcher."""

    name: str
    launcher: Launcher
    arguments: tuple[str, ...]
    """Of every node; `{port}` stands for the meeting point."""
    num_standby: int = 0
    has_own_master: bool = False
    """Its master is a process apart."""


@dataclass
class Node:
    process: subprocess.Popen[bytes]
    log: Path

    def tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            itself = psutil.Process(self.process.pid)
            return [itself, *itself.children(recursive=True)]
        return []

    def kill(self) -> None:
        """All of it, the launcher first: nobody of it may clean up or say goodbye, as when the power fails."""
        tree = self.tree()
        for process in tree:  # an agent whose launcher has died would leave in good order
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)


@dataclass
class JobOfNodes:
    """The launchers of one run. The first node hosts what the job meets at, and is never killed."""

    system: System
    folder: Path
    port: int
    nodes: list[Node] = field(default_factory=list)
    num_started: int = 0

    def start_node(self) -> Node:
        number, self.num_started = self.num_started, self.num_started + 1
        launcher = self.system.launcher
        log = self.folder / f"node-{number}.log"
        environment = environment_for(launcher, self.folder) | {"DLROVER_JOB_TOKEN": TOKEN}
        if self.system.has_own_master:
            rank = min(number, NUM_RANKS - 1)
            environment |= {"DLROVER_MASTER_ADDR": f"127.0.0.1:{self.port}", "NODE_NUM": str(NUM_RANKS)}
            environment |= {
                "NODE_RANK": str(rank),
                "NODE_ID": str(number),
                "NODE_TYPE": "worker",
                "POD_IP": "127.0.0.1",
            }
        arguments = [word.format(port=self.port) for word in self.system.arguments]
        command = [launcher.command[0], *arguments, str(REFERENCE_JOB), "--dir", str(self.folder)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = Node(process, log)
        self.nodes.append(node)
        return node

    def owner_of(self, pid: int) -> Node:
        for node in self.nodes:
            if any(process.pid == pid for process in node.tree()):
                return node
        raise RunFailedError(f"worker {pid} belongs to none of our nodes")

    def wait_for_standby(self) -> None:
        """Until the wished number of nodes waits, and has nothing left to prepare."""
        if not self.system.num_standby:
            return
        end_at = time.monotonic() + START_TIMEOUT
        while (status := asyncio.run(self._status())) is None or status.num_standby < self.system.num_standby:
            look_again(self.nodes[0].process, self.nodes[0].log, until=end_at, waiting_for="the standby")
        newest = self.nodes[-1]
        spent = -1.0
        while (now := used(newest)) > spent:
            spent = now
            time.sleep(SETTLED)

    async def _status(self) -> JobStatus | None:
        try:
            reply = await ask(f"127.0.0.1:{self.port}", AskStatus(), token=TOKEN, timeout=5)
        except DLRoverError:
            return None
        return reply if isinstance(reply, JobStatus) else None


def used(node: Node) -> float:
    """Seconds of processor time of all its processes."""
    total = 0.0
    for process in node.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def systems() -> dict[str, Callable[[], System]]:
    return {
        "ours-standby": lambda: our_system("ours-standby", num_standby=1),
        "ours-cold": lambda: our_system("ours-cold"),
        "torchrun": torchrun_system,
        "dlrover-0.6.1": dlrover_061_system,
    }


def of_other_source(source: Path) -> System:
    """The same as `ours-standby`, with another version's modules."""
    system = our_system(OTHER_STANDBY, num_standby=1)
    launcher = of_source(system.launcher, source, system.name)
    return replace(system, launcher=launcher, arguments=(*launcher.command[1:3], *system.arguments))


def our_system(name: str, *, num_standby: int = 0) -> System:
    meeting = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench")
    return System(name, ours(), (*meeting, f"--standby={num_standby}", "--max-restarts=1000"), num_standby)


def torchrun_system() -> System:
    meeting = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench")
    launcher = torchrun(is_store_shared=False)
    return System("torchrun", launcher, ("--nnodes=2", "--nproc-per-node=1", *meeting, "--max-restarts=1000"))


def dlrover_061_system() -> System:
    arguments = ("--nnodes=2", "--nproc_per_node=1", "--max_restarts=1000")
    return System("dlrover-0.6.1", dlrover_061(), arguments, has_own_master=True)


@contextlib.contextmanager
def job_of_nodes(system: System, folder: Path) -> Iterator[JobOfNodes]:
    """With both nodes, and the standby if there is one, started; on leaving nothing of it is left."""
    folder.mkdir(parents=True)
    (folder / "tmp").mkdir()
    leftovers = Leftovers.note(system.launcher)
    with contextlib.ExitStack() as stack:
        stack.callback(leftovers.remove)
        stack.callback(lambda: end_descendants(deadline_at=time.monotonic() + 10))
        port = free_port()
        if system.has_own_master:
            master = dlrover_061_master(system.launcher.python, folder / "master", num_nodes=NUM_RANKS)
            port = int(stack.enter_context(master).address.rpartition(":")[2])
        job = JobOfNodes(system, folder, port)
        job.start_node()
        time.sleep(0.5)  # the first one gets the meeting point: nothing outside tells when it has it
        job.start_node()
        yield job


def measure_run(
    system: System, result: Result, folder: Path, num_kills: int, hang_timeout: float, chance: random.Random
) -> None:
    files = EventFolder(folder / "events")
    with job_of_nodes(system, folder) as job:
        first = job.nodes[0]
        end_at = time.monotonic() + START_TIMEOUT
        while first_step_at_ns(files.refresh(), NUM_RANKS) is None:
            look_again(first.process, first.log, until=end_at, waiting_for="the first step")
        say(result, "trains")
        for _ in range(system.num_standby):
            job.start_node()
        for _ in range(num_kills):
            job.wait_for_standby()
            kill = kill_and_watch(job, files, hang_timeout, chance)
            result.kills.append(kill)
            if kill.recovery is None:
                say(result, f"node killed: no new step within {hang_timeout:g} s")
                return
            found = kill.recovery
            say(result, f"node killed: new step after {found.seconds:.3f} s, {found.num_steps_lost} steps lost")
            if system.num_standby:
                job.start_node()


def kill_and_watch(job: JobOfNodes, files: EventFolder, hang_timeout: float, chance: random.Random) -> Kill:
    first = job.nodes[0]
    calm_until = time.monotonic() + START_TIMEOUT
    num_calm_steps = chance.randint(10, 20)
    while (
        not (pids := lives(files.refresh(), NUM_RANKS)) or num_steps_since(files.events, pids.values()) < num_calm_steps
    ):
        look_again(first.process, first.log, until=calm_until, waiting_for=f"{num_calm_steps} steps in a row")
    time.sleep(chance.uniform(0, 0.05))

    owners = {rank: job.owner_of(pid) for rank, pid in pids.items()}
    rank = next(rank for rank, node in owners.items() if node is not first)
    survivors = [os.pidfd_open(pid) for other, pid in pids.items() if other != rank]
    try:
        old_pids = {event.pid for event in files.refresh()}
        clock = KillClock(first.log, victim=pids[rank])
        owners[rank].kill()
        job.nodes.remove(owners[rank])
        replacement_at = clock.killed_at_ns / 1e9 + REPLACEMENT_AFTER
        gone_at_ns = None
        found = None
        while time.monotonic_ns() < clock.killed_at_ns + hang_timeout * 1e9 and found is None:
            if not job.system.num_standby and len(job.nodes) < NUM_RANKS and time.monotonic() >= replacement_at:
                job.start_node()
            if gone_at_ns is None:
                gone_at_ns = wait_for_exit(survivors, timeout=0)
            found = recovery(
                files.refresh(),
                killed_at_ns=clock.killed_at_ns,
                survivors_gone_at_ns=gone_at_ns,
                old_pids=old_pids,
                num_ranks=NUM_RANKS,
                met_at_ns=clock.read(job.system.launcher.met),
            )
            if found is None:
                look_again(first.process, first.log, until=float("inf"), waiting_for="the recovery")
    finally:
        for descriptor in survivors:
            os.close(descriptor)
    return Kill(rank, found)


def measure(results: list[Result], args: argparse.Namespace, folder: Path, imports: list[float]) -> None:
    built: dict[str, System] = {}
    for result in results:
        try:
            is_other = result.name == OTHER_STANDBY
            built[result.name] = of_other_source(args.other_source) if is_other else systems()[result.name]()
        except PeerUnavailableError as error:
            result.errors.append(str(error))
            continue
        result.note = built[result.name].launcher.note
    for python in {system.launcher.python for system in built.values()}:
        subprocess.run([python, "-c", WARM_UP], check=False, stderr=subprocess.DEVNULL)
    chance = random.Random(args.seed)
    for number in range(2 * args.kills):
        open_results = [r for r in results if r.name in built and len(r.kills) < args.kills and len(r.errors) < 3]
        if not open_results:
            return
        imports.append(import_seconds())
        first = number % len(open_results)
        for result in open_results[first:] + open_results[:first]:
            num_kills = min(args.kills_per_run, args.kills - len(result.kills))
            run = folder / f"{number}-{result.name}"
            try:
                measure_run(built[result.name], result, run, num_kills, args.hang_timeout, chance)
            except (RunFailedError, OSError) as error:
                result.errors.append(str(error))
                say(result, f"failed: {error}")
            finally:
                shutil.rmtree(run, ignore_errors=True)


def import_seconds() -> float:
    """What a cold node must do before it can train, with the files in the cache: imports in a fresh interpreter."""
    began_at = time.monotonic()
    subprocess.run([sys.executable, "-c", WARM_UP], check=True)
    return time.monotonic() - began_at


def report(results: list[Result], *, hang_timeout: float, imports: Sequence[float], strangers: Sequence[float]) -> str:
    by_name = {result.name: result.kill_summary() for result in results}
    rows = []
    for result in results:
        kill = result.kill_summary()
        lost = summarise([float(found.num_steps_lost) for found in result.recoveries])
        rows.append(
            [
                result.name,
                seconds(kill.median if kill else None),
                seconds(kill.p95 if kill else None),
                f"{kill.lowest:.3f}-{kill.highest:.3f}" if kill else "-",
                times(ratio(kill, by_name.get("ours-standby"))),
                times(ratio(kill, by_name.get("ours-cold"))),
                f"{result.num_hangs} of {len(result.kills)}",
                f"{lost.median:g} (max {lost.highest:g})" if lost else "-",
            ]
        )
    head = [
        "system",
        "kill to new step, median s",
        "p95",
        "min-max",
        "/ ours-standby",
        "/ ours-cold",
        "hangs",
        "steps lost",
    ]
    phases = [[result.name, *(seconds(median_phase(result, phase)) for _, phase in PHASES[1:])] for result in results]
    lines = [
        quietness(strangers),
        "",
        table(head, rows),
        "",
        f"'hangs' are kills without a new step within {hang_timeout:g} s; they are not in the other figures.",
        "",
        "Where the time goes (medians, s). Detection is part of the rendezvous here: what notices a dead node is on the others.",
        "",
        table(["system", *(phase for _, phase in PHASES[1:])], phases),
        "",
        *budget_lines(
            by_name_median(results), statistics.median(imports) if imports else None, max_lost(results, "ours-standby")
        ),
        "",
        *(f"{result.name}: {result.note}" for result in results if result.note),
        *(
            f"{result.name}: NOT FULLY MEASURED: {error}"
            for result in results
            for error in dict.fromkeys(result.errors)
        ),
    ]
    return "\n".join(lines).strip()


def by_name_median(results: list[Result]) -> dict[str, float]:
    return {result.name: kill.median for result in results if (kill := result.kill_summary())}


def max_lost(results: list[Result], name: str) -> int | None:
    lost = [found.num_steps_lost for result in results if result.name == name for found in result.recoveries]
    return max(lost, default=None)


def budget_lines(medians: dict[str, float], imports: float | None, lost: int | None) -> list[str]:
    """The budgets, each with its verdict; what was not measured has none."""
    standby, cold, old = (medians.get(name) for name in ("ours-standby", "ours-cold", "dlrover-0.6.1"))
    lines = ["Budgets:"]

    def judge(text: str, value: float | None, is_met: bool) -> None:
        verdict = "not measured" if value is None else f"{value:.3g}: {'met' if is_met else 'NOT MET'}"
        lines.append(f"  {text}: {verdict}")

    judge("warm standby, new step within 3 s", standby, standby is not None and standby <= 3)
    faster = None if standby is None or old is None else old / standby
    judge("warm standby at least 4 times faster than dlrover 0.6.1", faster, faster is not None and faster >= 4)
    judge("warm standby, steps lost at most 0", lost, lost == 0)
    text = "cold replacement within 2 s and its imports after its start"
    if cold is None or imports is None:
        judge(text, None, False)
    else:
        judge(f"{text} ({2 + imports:.2f} s)", cold - REPLACEMENT_AFTER, cold - REPLACEMENT_AFTER <= 2 + imports)
    return lines


def main() -> int:
    args = parse_args()
    results = [Result(name) for name in args.systems]
    strangers = [look_at_others()]
    imports: list[float] = []
    with measuring("nf-") as folder:
        measure(results, args, folder, imports)
    strangers.append(look_at_others())
    print(report(results, hang_timeout=args.hang_timeout, imports=imports, strangers=strangers))
    if args.json:
        args.json.write_text(json.dumps(as_json(results) | {"import_seconds": imports}, indent=1) + "\n")
    return 0 if all(result.recoveries for result in results) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(systems())
    parser.add_argument("--kills", type=int, default=7, help="per system (default %(default)s)")
    parser.add_argument("--kills-per-run", type=int, default=3, help="then the job is started anew")
    parser.add_argument("--systems", default=",".join(known), help="(default %(default)s)")
    parser.add_argument(
        "--other-source", type=Path, help="directory of another version's source, measured in turn with a standby"
    )
    parser.add_argument("--hang-timeout", type=float, default=90.0, help="seconds without a new step")
    parser.add_argument("--seed", type=int, default=0, help="for the moments of the kills")
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    parser.add_argument("--quick", action="store_true", help="ours, 2 kills each")
    args = parser.parse_args()
    args.systems = args.systems.split(",")
    if args.quick:
        args.kills, args.kills_per_run, args.systems = 2, 2, ["ours-standby", "ours-cold"]
    if unknown := [name for name in args.systems if name not in known]:
        parser.error(f"--systems: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    if args.other_source is not None:
        args.other_source = args.other_source.resolve()
        args.systems.append(OTHER_STANDBY)
    if args.kills < 1 or args.kills_per_run < 1:
        parser.error("--kills and --kills-per-run must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
