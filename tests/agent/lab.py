"""Real workers for tests: start one or a group, wait for the end with a deadline, look at what it left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover.agent.config import AgentConfig, Entry, EntryKind, WorkerLogConfig
from dlrover.agent.workers.group import PortOffer, WorkerGroup
from dlrover.agent.workers.output import WorkerOutput
from dlrover.agent.workers.process_tree import Exit, ProcessTree
from dlrover.agent.workers.socket import WorkerSocket
from dlrover.agent.workers.spawner import Spawner
from dlrover.protocol.messages.job import JobTerms, Micros, NodeRank, RestartPolicy, Round, WorldSpec

DEADLINE = 60.0
"""Of nothing that a test is about: on a busy machine the imports of torch alone take half of it."""


@dataclass
class Ended:
    code: int
    """As `subprocess` tells it: negative for a signal."""
    stdout: str
    stderr: str
    pid: int = 0


def write(path: Path, source: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return str(path)


def environment(**extra: str) -> dict[bytes, bytes]:
    return {**os.environb, **{os.fsencode(name): os.fsencode(value) for name, value in extra.items()}}


async def run_worker(
    spawner: Spawner,
    tree: ProcessTree,
    target: str,
    *args: str,
    scratch: Path,
    kind: EntryKind = EntryKind.SCRIPT,
    environ: Mapping[bytes, bytes] | None = None,
    cwd: str = "",
    deadline: float = DEADLINE,
) -> Ended:
    """One worker from its fork to its end."""
    out, err = scratch / f"out{time.monotonic_ns()}", scratch / f"err{time.monotonic_ns()}"
    with open(out, "wb") as stdout, open(err, "wb") as stderr, open(os.devnull, "rb") as stdin:
        leash = await spawner.spawn(
            kind=kind,
            target=target,
            args=args,
            environ=environment() if environ is None else environ,
            streams=(stdin.fileno(), stdout.fileno(), stderr.fileno()),
            cwd=cwd,
        )
    exited = tree.watch(leash.pid)
    await leash.release()
    ended = await asyncio.wait_for(exited, deadline)
    return Ended(code_of(ended), out.read_text(), err.read_text(), leash.pid)


def run_plainly(
    target: str,
    *args: str,
    scratch: Path,
    environ: Mapping[bytes, bytes] | None = None,
    options: Sequence[str] = (),
    cwd: str | None = None,
) -> Ended:
    """The same under `python -u`, with files as streams, as torchrun would start it."""
    out, err = scratch / f"out{time.monotonic_ns()}", scratch / f"err{time.monotonic_ns()}"
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        done = subprocess.run(
            [sys.executable, "-u", *options, target, *args],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment() if environ is None else dict(environ),
            start_new_session=True,
            timeout=DEADLINE,
            cwd=cwd,
            check=False,
        )
    return Ended(done.returncode, out.read_text(), err.read_text())


def start_process(*command: str, **options: Any) -> subprocess.Popen[str]:
    """A child that the test itself watches or kills."""
    return subprocess.Popen(command, text=True, **options)


def code_of(ended: Exit) -> int:
    return ended.exit_code if ended.exit_code is not None else -(ended.signal or 0)


async def until(condition: Callable[[], Any], *, within: float = DEADLINE) -> Any:
    """For facts that no event announces: another process's files, the process table."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {within:g} s: {condition}")
        await asyncio.sleep(0.005)
    return value


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def is_gone(pid: int) -> bool:
    """Not even a zombie is left."""
    return not os.path.exists(f"/proc/{pid}")


def descriptors() -> set[tuple[str, str]]:
    """
    What this process has open. A leak is what was not among them before; less may be there at any time, when something of an
    earlier test is closed at last.
    """
    return descriptors_of("self")


def descriptors_of(pid: int | str) -> set[tuple[str, str]]:
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that the list was read from
            found.add((number, os.readlink(f"/proc/{pid}/fd/{number}")))
    return found


def make_config(runtime_dir: Path, target: str, *args: str, **changes: Any) -> AgentConfig:
    values: dict[str, Any] = {
        "job_name": "a-job",
        "run_id": "a-run",
        "launch": "a-launch",
        "master_addr": "127.0.0.1:1",
        "token_file": "",
        "runtime_dir": str(runtime_dir),
        "host": "127.0.0.1",
        "terms": JobTerms(restarts=RestartPolicy(max_restarts=3)),
        "local_world_size": 2,
        "entry": Entry.of(changes.pop("kind", EntryKind.SCRIPT), target, args),
        "log": WorkerLogConfig(),
    }
    return AgentConfig(**(values | changes))


def make_world(local_world_size: int = 2, **changes: Any) -> WorldSpec:
    values: dict[str, Any] = {
        "round": Round(1),
        "group_rank": 0,
        "group_world_size": 1,
        "first_global_rank": 0,
        "local_world_size": local_world_size,
        "world_size": local_world_size,
        "coordinator": "127.0.0.1:29555",
        "restart_count": 0,
    }
    return WorldSpec(**(values | changes))


@contextlib.asynccontextmanager
async def group_of(
    spawner: Spawner,
    tree: ProcessTree,
    config: AgentConfig,
    world: WorldSpec | None = None,
    *,
    kind_of_output: type[WorkerOutput] = WorkerOutput,
    **options: Any,
) -> AsyncIterator[WorkerGroup]:
    """A started group; whatever the test did, nothing of it is left afterwards."""
    output = kind_of_output(
        config.log, role=config.role, run_id=config.run_id, runtime_dir=config.runtime_dir, patience=DEADLINE
    )
    worker_socket = await WorkerSocket.open(config.runtime_dir)
    offer = PortOffer.bind("127.0.0.1")
    group = WorkerGroup(
        config,
        world or make_world(int(config.local_world_size), coordinator=offer.address),
        node_rank=NodeRank(0),
        spawner=spawner,
        tree=tree,
        output=output,
        worker_socket=worker_socket,
        master_now=lambda: Micros(time.time_ns() // 1000),
        **options,
    )
    try:
        await group.start(offer)
        yield group
    finally:
        offer.release()
        group.kill()
        await tree.sweep()
        output.close()
        await worker_socket.close()
