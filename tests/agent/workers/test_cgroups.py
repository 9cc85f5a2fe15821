"""Trees that fork faster than anybody can look, killed by the kernel at once, where cgroups of version 2 may be made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dlrover.agent.config import EntryKind
from dlrover.agent.workers.cgroups import Cgroups, clear_recorded, remove_abandoned
from dlrover.agent.workers.process_tree import Exit, ProcessTree
from dlrover.agent.workers.spawner import Spawner
from dlrover.cli.launch.runtime_dir import NodeDirectory, reap
from dlrover.host.cgroup import unified_directory
from dlrover.protocol.messages.job import StopCause
from tests.agent.lab import DEADLINE, environment, is_alive, is_gone, start_process, until, write

RUNNER = """
    # Leaves its session and then runs away: each life forks the next and ends, so that no pid is good for long.
    import os, signal, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(3_000):
                time.sleep(0.01)
                if number == 10:
                    open(sys.argv[1], "w").close()
                if os.fork() != 0:
                    os._exit(0)
            os._exit(0)
        os._exit(0)
    signal.pause()
"""


@pytest.fixture
def cgroups(tmp_path: Path) -> Iterator[Cgroups]:
    cgroups = Cgroups.open(make_runtime_dir(tmp_path))
    if cgroups is None:
        pytest.skip(
            "this process may not make cgroups of version 2 with cgroup.kill (root or a delegated subtree needed)"
        )
    yield cgroups
    clear_recorded(str(tmp_path / f"node-{os.getpid()}"))
    assert not os.path.exists(cgroups.path)


def make_runtime_dir(tmp_path: Path) -> str:
    runtime_dir = tmp_path / f"node-{os.getpid()}"
    runtime_dir.mkdir()
    return str(runtime_dir)


class Node(NamedTuple):
    spawner: Spawner
    tree: ProcessTree


@pytest.fixture
async def node(cgroups: Cgroups, spawner: Spawner, cold_spawner: Spawner) -> AsyncIterator[Node]:
    async with node_in(cgroups, spawner, cold_spawner) as node:
        yield node


@contextlib.asynccontextmanager
async def node_in(cgroups: Cgroups, *others: Spawner) -> AsyncIterator[Node]:
    own = Spawner.start(is_warm=False, cgroups=cgroups.path)
    tree = ProcessTree(keep=lambda: [pid for spawner in (own, *others) for pid in spawner.zygote_pids], cgroups=cgroups)
    try:
        yield Node(own, tree)
    finally:
        await tree.sweep()
        tree.close()
        own.close()


async def start(node: Node, script: str, *args: str) -> tuple[int, asyncio.Future[Exit]]:
    leash = await node.spawner.spawn(
        kind=EntryKind.SCRIPT, target=script, args=args, environ=environment(), streams=(0, 1, 2)
    )
    exited = node.tree.watch(leash.pid)
    await leash.release()
    return leash.pid, exited


def cgroup_of(pid: int) -> str:
    with open(f"/proc/{pid}/cgroup") as file:
        return next(line[3:].strip() for line in file if line.startswith("0::"))


async def until_zygote_left(node: Node, pid: int) -> None:
    await until(lambda: cgroup_of(node.spawner.zygote_pids[0]) != cgroup_of(pid))


async def test_workers_are_born_in_a_cgroup_that_the_zygote_then_leaves(
    node: Node, cgroups: Cgroups, tmp_path: Path
) -> None:
    script = write(tmp_path / "s.py", "import signal; signal.pause()")
    pid, _ = await start(node, script)
    assert os.path.basename(cgroups.path) in cgroup_of(pid)
    await until_zygote_left(node, pid)
    second, _ = await start(node, script)
    assert cgroup_of(second) == cgroup_of(node.spawner.zygote_pids[0]) != cgroup_of(pid)
    await asyncio.wait_for(node.tree.stop([pid, second], cause=StopCause.FAILURE, shutdown_timeout=5), DEADLINE)
    assert is_gone(pid)
    assert is_gone(second)
    assert is_alive(node.spawner.zygote_pids[0])
    assert len([entry for entry in os.scandir(cgroups.path) if entry.is_dir()]) == 1


async def test_a_tree_that_forks_all_the_time_is_killed_by_one_word(
    node: Node, cgroups: Cgroups, tmp_path: Path
) -> None:
    mark = tmp_path / "running"
    pid, exited = await start(node, write(tmp_path / "runner.py", RUNNER), str(mark))
    await until(mark.exists)
    await until_zygote_left(node, pid)
    generation = Path(unified_directory() or "", *Path(cgroup_of(pid)).parts[-2:])
    assert generation.parent == Path(cgroups.path)
    assert (generation / "cgroup.procs").read_text()
    cgroups.kill(keep=node.spawner.zygote_pids)
    assert (await asyncio.wait_for(exited, DEADLINE)).signal == signal.SIGKILL
    await until(lambda: "populated 0" in (generation / "cgroup.events").read_text())
    await asyncio.wait_for(node.tree.sweep(), DEADLINE)
    assert not generation.exists()
    assert is_alive(node.spawner.zygote_pids[0])


async def test_a_cgroup_with_the_zygote_in_it_is_swept_one_by_one(node: Node, cgroups: Cgroups, tmp_path: Path) -> None:
    pid, exited = await start(node, write(tmp_path / "s.py", "import signal; signal.pause()"))
    zygote = node.spawner.zygote_pids[0]
    assert cgroup_of(pid) == cgroup_of(zygote)
    await asyncio.wait_for(node.tree.sweep(), DEADLINE)
    assert exited.result().signal == signal.SIGKILL
    assert node.spawner.zygote_pids == (zygote,)
    assert is_alive(zygote)


async def test_a_warm_zygote_enters_while_it_imports(cgroups: Cgroups) -> None:
    spawner = Spawner.start(cgroups=cgroups.path)
    try:
        await spawner.count_devices("cpu")
        assert spawner.is_warm
        assert os.path.basename(cgroups.path) in cgroup_of(spawner.zygote_pids[0])
        with open(f"/proc/{spawner.zygote_pids[0]}/task/{spawner.zygote_pids[0]}/children") as children:
            assert children.read() == ""
    finally:
        spawner.close()


async def test_after_the_end_no_directory_is_left(
    cgroups: Cgroups, spawner: Spawner, cold_spawner: Spawner, tmp_path: Path
) -> None:
    async with node_in(cgroups, spawner, cold_spawner) as node:
        pid, _ = await start(node, write(tmp_path / "s.py", "import signal; signal.pause()"))
        await until_zygote_left(node, pid)
    cgroups.close()
    assert not os.path.exists(cgroups.path)


@pytest.mark.parametrize("remover", ["next agent", "launcher", "dlrover clean"])
def test_what_a_killed_agent_left_is_killed_and_removed(tmp_path: Path, remover: str) -> None:
    root = str(tmp_path)
    directory = NodeDirectory(root, "job", "abc")
    cgroups = Cgroups.open(directory.path)
    if cgroups is None:
        directory.remove()
        pytest.skip(
            "this process may not make cgroups of version 2 with cgroup.kill (root or a delegated subtree needed)"
        )
    generation = Path(cgroups.path, "1-1")
    generation.mkdir()
    process = start_process(sys.executable, "-c", "import sys; sys.stdin.read()", stdin=subprocess.PIPE)
    (generation / "cgroup.procs").write_text(str(process.pid))
    match remover:
        case "next agent":
            again = Cgroups.open(directory.path)
            assert again is not None
            assert again.path == cgroups.path
            again.close()
            directory.remove()
        case "launcher":
            directory.remove()
        case "dlrover clean":
            directory._release()  # as its death would
            Path(directory.path, "owner.json").unlink()
            assert [left.path for left in reap(root, older_than=0.0)] == [directory.path]
    assert process.wait(DEADLINE) == -signal.SIGKILL
    process.communicate()
    assert not os.path.exists(cgroups.path)
    assert not os.path.exists(directory.path)


@pytest.mark.parametrize("state", ["abandoned", "in use", "young"])
def test_a_directory_whose_record_is_lost_goes_when_nobody_is_in_it(cgroups: Cgroups, state: str) -> None:
    generation = Path(cgroups.path, "1-1")
    generation.mkdir()
    process = start_process(sys.executable, "-c", "import sys; sys.stdin.read()", stdin=subprocess.PIPE)
    try:
        if state == "in use":
            (generation / "cgroup.procs").write_text(str(process.pid))
        os.utime(cgroups.path, None if state == "young" else (0, 0))
        remove_abandoned(older_than=0.0)
        assert os.path.exists(cgroups.path) == (state != "abandoned")
    finally:
        process.communicate()


def test_a_record_that_names_something_else_harms_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "dlrover-precious"
    precious.mkdir()
    (tmp_path / "cgroup").write_text(str(precious))
    clear_recorded(str(tmp_path))
    clear_recorded(str(tmp_path / "absent"))
    assert precious.exists()


def test_without_permission_there_are_none(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    tmp_path.chmod(0o777)
    code = f"""
import os
from dlrover.agent.workers.cgroups import Cgroups
os.setuid(65534)
print(Cgroups.open({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "None\n", done.stderr
    assert not (tmp_path / "cgroup").exists()
