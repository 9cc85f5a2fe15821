"""Workers that have ended and are still being taken apart: who is told of what, and who waits for it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.agent.monitor.progress import WorkerWatch
from dlrover.agent.workers.endings import has_memory_for, held_by
from dlrover.agent.workers.group import Failed, WorkerGroup
from dlrover.agent.workers.process_tree import Exit, ProcessTree
from dlrover.agent.workers.spawner import Spawner
from dlrover.host.processes import look_up
from dlrover.protocol.messages.job import FailureKind, StopCause
from tests.agent.lab import DEADLINE, group_of, is_gone, make_config, until, write

LARGE = """
    import os, signal, time
    memory = bytearray(os.urandom(1)) * (384 << 20)
    with open(os.environ["TORCHELASTIC_ERROR_FILE"] + ".ready", "w") as file:
        file.write("ready")
    signal.pause()
    """
NUM_ATTEMPTS = 10
"""The kernel may be done before we look. It takes tens of milliseconds for a worker of this size."""


async def make_ready(group: WorkerGroup, runtime_dir: Path, num_workers: int) -> None:
    await until(lambda: len(list(runtime_dir.rglob("*.ready"))) == num_workers)


async def test_the_failure_is_told_with_its_signal_while_the_kernel_still_frees_the_memory(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    script = write(tmp_path / "train.py", LARGE)
    for attempt in range(NUM_ATTEMPTS):
        runtime_dir = tmp_path / f"rt{attempt}"
        config = make_config(runtime_dir, script)
        async with group_of(spawner, tree, config, watch=WorkerWatch(config.watch)) as group:
            await make_ready(group, runtime_dir, 2)
            victim, survivor = group.pids
            os.kill(victim, signal.SIGKILL)
            outcome = await asyncio.wait_for(group.wait(), DEADLINE)
            seen = look_up(victim)
            was_early = seen is not None and seen.is_exiting and not seen.is_dead
            assert isinstance(outcome, Failed)
            assert [(each.kind, each.signal, each.pid) for each in outcome.failures] == [
                (FailureKind.SIGNAL, signal.SIGKILL, victim)
            ]
            await group.stop(StopCause.FAILURE)
            left = [seen for seen in map(look_up, (victim, survivor)) if seen is not None]
            assert all(seen.is_exiting for seen in left)
            await group.gone()
            assert is_gone(victim)
            assert is_gone(survivor)
        if was_early:
            return
    pytest.fail(f"told {NUM_ATTEMPTS} times only when the kernel had freed everything")


async def test_the_end_of_an_agent_waits_until_nothing_is_left(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "rt", write(tmp_path / "train.py", LARGE))
    async with group_of(spawner, tree, config, watch=WorkerWatch(config.watch)) as group:
        await make_ready(group, tmp_path / "rt", 2)
        pids = group.pids
        await group.stop(StopCause.FAILURE)
        await tree.sweep()
        assert all(map(is_gone, pids))


LEAVES_A_THREAD = """
    import ctypes, os, platform, sys, threading, time
    def stay():
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        os._exit(3)
    threading.Thread(target=stay).start()
    EXIT_OF_ONE_THREAD = {"x86_64": 60, "aarch64": 93}[platform.machine()]
    ctypes.CDLL(None).syscall(EXIT_OF_ONE_THREAD, 3)
    """
"""Its main thread ends, and what it has stays until its other thread ends: as if the kernel took long to free it."""
MORE_THAN_FIT = 1 << 40


async def test_new_workers_wait_for_an_ended_one_only_if_they_need_its_memory(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    script = write(tmp_path / "train.py", LEAVES_A_THREAD)
    config = make_config(tmp_path / "rt", script, str(tmp_path / "go"), local_world_size=1)
    async with group_of(spawner, tree, config, watch=WorkerWatch(config.watch)) as group:
        (pid,) = group.pids
        tree.note_sizes()
        outcome = await asyncio.wait_for(group.wait(), DEADLINE)
        assert isinstance(outcome, Failed)
        assert [failure.exit_code for failure in outcome.failures] == [3]
        await asyncio.wait_for(tree.room(1), DEADLINE)
        assert not is_gone(pid)
        assert "new workers wait" not in caplog.text
        waiting = asyncio.create_task(tree.room(MORE_THAN_FIT))
        await until(
            lambda: (
                f"new workers wait until these processes have ended: pid {pid}: its memory" in caplog.text
                or waiting.done()
            )
        )
        assert not waiting.done()
        (tmp_path / "go").touch()
        await asyncio.wait_for(waiting, DEADLINE)
        assert is_gone(pid)


async def test_threads_that_outlive_the_main_thread_end_with_the_agent(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    """The process looks like a zombie to everyone, and no handler of Python will ever run in it."""
    config = make_config(tmp_path / "rt", write(tmp_path / "train.py", LEAVES_A_THREAD), str(tmp_path / "never"))
    async with group_of(spawner, tree, config, watch=WorkerWatch(config.watch)) as group:
        pids = group.pids
        await until(lambda: all((seen := look_up(pid)) is not None and seen.is_dead for pid in pids))
        await tree.sweep()
        assert all(map(is_gone, pids))


async def test_a_worker_that_becomes_another_program_lives_on(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    program = f"touch $TORCHELASTIC_ERROR_FILE.ready; until [ -e {tmp_path}/go ]; do sleep 0.02; done; exit 3"
    script = write(tmp_path / "train.py", f"import os; os.execv('/bin/sh', ['sh', '-c', {program!r}])")
    config = make_config(tmp_path / "rt", script, local_world_size=1)
    async with group_of(spawner, tree, config, watch=WorkerWatch(config.watch)) as group:
        await make_ready(group, tmp_path / "rt", 1)
        (pid,) = group.pids
        seen = look_up(pid)
        assert seen is not None
        assert not seen.is_exiting
        (tmp_path / "go").touch()
        outcome = await asyncio.wait_for(group.wait(), DEADLINE)
        assert isinstance(outcome, Failed)
        assert [failure.exit_code for failure in outcome.failures] == [3]


def test_what_an_ended_process_may_keep_from_its_successors_is_named(tmp_path: Path) -> None:
    """In a process of its own: that of the tests may hold locks of other tests."""
    code = f"from tests.agent.workers import test_endings; test_endings.hold_and_look({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr


def hold_and_look(directory: str) -> None:
    own = os.getpid()
    assert held_by(own) == ""
    with socket.create_server(("127.0.0.1", 0)):
        assert held_by(own) == "", "the next one gets another port"
    with _server_outside_of_the_kernels_range() as server:
        port = server.getsockname()[1]
        assert held_by(own) == f"port {port}"
        assert held_by(own, (port,)) == ""
    with open(f"{directory}/lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert held_by(own) == "a file lock"
        fcntl.flock(file, fcntl.LOCK_UN)
    assert held_by(own) == ""
    assert held_by(1 << 30) == "", "gone"


def _server_outside_of_the_kernels_range() -> socket.socket:
    for port in range(18_000, 19_000):
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
    raise AssertionError("no port between 18000 and 19000 is free")


def test_memory_is_there_for_as_many_as_fit_beside_the_ended_ones() -> None:
    assert has_memory_for(2, [1 << 20, None])
    assert not has_memory_for(2, [None, 1 << 50])
    assert not has_memory_for(1 << 40, [None, 1 << 20])


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (9, Exit(1, None, 9, False, 0.0)),
        (11 | 0x80, Exit(1, None, 11, True, 0.0)),
        (3 << 8, Exit(1, 3, None, False, 0.0)),
    ],
)
def test_a_status_is_read_as_waitpid_means_it(status: int, expected: Exit) -> None:
    assert Exit.of_status(1, status, 0.0) == expected
