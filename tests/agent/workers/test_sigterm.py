"""Who is waited for after a failure elsewhere: a worker whose handler runs, and nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dlrover.agent.config import EntryKind
from dlrover.agent.workers.process_tree import Exit, Graces, ProcessTree, longest_grace
from dlrover.agent.workers.sigterm import LOOK_EVERY, Handler, Reaction
from dlrover.agent.workers.spawner import Spawner
from dlrover.host.processes import descendants, look_up
from dlrover.protocol.messages.job import StopCause
from tests.agent.lab import DEADLINE, environment, is_alive, until, write

PRELUDE = """
    import os, signal, time
    def note(name):
        open(os.path.join(os.environ["NOTES"], name), "w").close()
    def linger():
        while True:
            time.sleep(0.001)  # a signal just before `signal.pause()` would be handled when that is over
    def leave(number, frame):
        note("began")
        os._exit(0)  # not through the teardown of torch, which takes long on a busy machine
"""

PATIENCE = DEADLINE
"""Seconds that a handler has in these tests after a failure: nobody needs them, whatever the machine does meanwhile."""
PATIENT = Graces(after_failure=PATIENCE)
WITH_ACCELERATOR: dict[str, Any] = {"graces": PATIENT, "accelerators": ("/dev/zero",)}


class Started(NamedTuple):
    pid: int
    exit: asyncio.Future[Exit]


Start = Callable[..., Awaitable[Started]]


@pytest.fixture
def tree_options() -> dict[str, Any]:
    return {"graces": PATIENT}


@pytest.fixture
def start(tree: ProcessTree, spawner: Spawner, tmp_path: Path) -> Start:
    """Start a script after the prelude; it notes what it does in the test's directory. Returns when it has noted `ready`."""

    async def start(source: str, *, by: Spawner = spawner, ready: str = "ready", **variables: str) -> Started:
        script = write(tmp_path / f"{ready}.py", textwrap.dedent(PRELUDE) + write_out(source))
        leash = await by.spawn(
            kind=EntryKind.SCRIPT,
            target=script,
            args=(),
            environ=environment(NOTES=str(tmp_path), OMP_NUM_THREADS="1", **variables),
            streams=(0, 1, 2),
        )
        exited = tree.watch(leash.pid)
        await leash.release()
        await until(lambda: (tmp_path / ready).exists() or exited.done())
        assert not exited.done(), exited.result()
        return Started(leash.pid, exited)

    return start


def write_out(source: str) -> str:
    """For sources that are joined: each has its own indentation."""
    return "\n" + textwrap.dedent(source)


async def stop(tree: ProcessTree, *pids: int, shutdown_timeout: float = PATIENCE) -> dict[int, float]:
    return await tree.stop(pids, cause=StopCause.FAILURE, shutdown_timeout=shutdown_timeout)


async def until_asleep(pid: int) -> None:
    """Its main thread has not run at all for some looks in a row."""
    seen: list[str] = []

    def is_asleep() -> bool:
        with open(f"/proc/{pid}/task/{pid}/status") as file:
            seen.append("".join(line for line in file if line.startswith(("State:", "voluntary", "nonvoluntary"))))
        return len(seen) > 40 and len(set(seen[-40:])) == 1 and "S (sleeping)" in seen[-1]

    await until(is_asleep)


COLLECTIVES = {
    "all_reduce": """
        note("ready0") if rank == 0 else None
        dist.all_reduce(torch.zeros(4)) if rank == 0 else wait()
    """,
    "backward": """
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        note("ready0") if rank == 0 else None
        model(torch.zeros(1, 4)).sum().backward() if rank == 0 else wait()
    """,
}


@pytest.mark.parametrize("collective", COLLECTIVES)
async def test_a_worker_inside_a_collective_is_not_waited_for(
    start: Start, tree: ProcessTree, kept: list[Callable[[], Collection[int]]], tmp_path: Path, collective: str
) -> None:
    source = """
        import torch, torch.distributed as dist
        signal.signal(signal.SIGTERM, leave)
        def wait():
            note("ready1")
            signal.pause()
        rank = int(os.environ["RANK"])
        store = dist.FileStore(os.path.join(os.environ["NOTES"], "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    """
    source = write_out(source) + write_out(COLLECTIVES[collective])
    stuck, peer = await asyncio.gather(*(start(source, ready=f"ready{rank}", RANK=str(rank)) for rank in range(2)))
    await until_asleep(stuck.pid)
    # Its peer, as if on another node, must outlive it: gloo leaves the collective when a connection breaks.
    kept.append(lambda: (peer.pid,))
    given = await stop(tree, stuck.pid)
    assert is_alive(peer.pid)
    kept.pop()
    # Usually for no longer than it is looked at; but the signal wakes it for an instant, which lasts while others have the processor.
    assert given[stuck.pid] < PATIENCE
    assert stuck.exit.result().signal == signal.SIGKILL
    assert not (tmp_path / "began").exists()


async def test_a_handler_that_saves_its_state_may_finish(start: Start, tree: ProcessTree, tmp_path: Path) -> None:
    worker = await start(
        """
        def save(number, frame):
            time.sleep(0.7)
            note("saved")
            os._exit(0)
        signal.signal(signal.SIGTERM, save)
        note("ready")
        linger()
        """
    )
    assert await stop(tree, worker.pid) == {worker.pid: PATIENCE}
    assert worker.exit.result().exit_code == 0
    assert (tmp_path / "saved").exists()


async def test_a_worker_without_a_handler_needs_no_time(start: Start, tree: ProcessTree) -> None:
    worker = await start("note('ready'); signal.pause()")
    assert await stop(tree, worker.pid) == {worker.pid: PATIENT.without_handler}
    assert worker.exit.result().signal == signal.SIGTERM


async def test_one_long_call_into_c_is_no_collective(start: Start, tree: ProcessTree, tmp_path: Path) -> None:
    worker = await start("signal.signal(signal.SIGTERM, leave); note('ready'); sum(range(12_000_000)); time.sleep(60)")
    await stop(tree, worker.pid)
    assert worker.exit.result().exit_code == 0
    assert (tmp_path / "began").exists()


ENDLESS = """
    import itertools
    device = open("/dev/zero")
    signal.signal(signal.SIGTERM, leave)
    {}
    note("ready")
    sum(itertools.repeat(0))
"""


async def until_computing(pid: int) -> None:
    """It said that it is ready before it began its one long call."""
    now = Path(f"/proc/{pid}/stat")
    began = _ticks(now)
    await until(lambda: _ticks(now) > began + 2)


def _ticks(stat: Path) -> int:
    """Of processor time that the process has used outside of the kernel."""
    return int(stat.read_text().rpartition(")")[2].split()[11])


@pytest.mark.parametrize(("tree_options", "has_accelerator"), [(WITH_ACCELERATOR, True), ({"graces": PATIENT}, False)])
async def test_computing_means_nothing_where_waiting_for_a_device_looks_the_same(
    start: Start, tree: ProcessTree, has_accelerator: bool
) -> None:
    worker = await start(ENDLESS.format(""))
    await until_computing(worker.pid)
    limit = 2.5 * LOOK_EVERY
    given = await stop(tree, worker.pid, shutdown_timeout=limit)
    assert given == {worker.pid: LOOK_EVERY if has_accelerator else limit}
    assert worker.exit.result().signal == signal.SIGKILL


@pytest.mark.parametrize("tree_options", [WITH_ACCELERATOR])
async def test_the_handler_of_a_child_is_not_the_workers(start: Start, tree: ProcessTree, tmp_path: Path) -> None:
    child = """
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, lambda *_: note("began"))
        note("child")
        linger()
    """
    worker = await start(ENDLESS.format(child))
    await until((tmp_path / "child").exists)
    (below,) = descendants(worker.pid)
    os.kill(below.pid, signal.SIGTERM)
    await until((tmp_path / "began").exists)
    assert Reaction(below.pid).has_begun()
    await until_computing(worker.pid)
    assert await stop(tree, worker.pid) == {worker.pid: LOOK_EVERY}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("signal.signal(signal.SIGTERM, leave)", Handler.ANNOUNCED),
        ("from signal import signal as install; install(15, leave)", Handler.ANNOUNCED),
        ("import asyncio; loop = asyncio.new_event_loop(); loop.add_signal_handler(15, leave)", Handler.ANNOUNCED),
        ("signal.signal(15, leave); signal.signal(15, signal.SIG_DFL)", Handler.NONE),
        ("signal.signal(15, signal.SIG_IGN)", Handler.NONE),
        ("import faulthandler; faulthandler.register(15)", Handler.SILENT),
        ("signal.signal(15, lambda *_: None); os.kill(os.getpid(), 15)", Handler.SILENT),
    ],
    ids=["python", "by another name", "asyncio", "taken back", "ignored", "of C code", "begun before"],
)
async def test_handlers_are_told_apart(start: Start, source: str, expected: Handler) -> None:
    worker = await start(f"{source}; note('ready'); signal.pause()")
    assert Reaction(worker.pid).handler is expected
    assert is_alive(worker.pid)


async def test_a_cold_workers_handler_is_silent_and_gets_its_time(start: Start, cold_spawner: Spawner) -> None:
    worker = await start("signal.signal(15, leave); note('ready'); signal.pause()", by=cold_spawner)
    assert Reaction(worker.pid).handler is Handler.SILENT


async def test_who_executes_another_program_announces_nothing_any_more(start: Start, tree: ProcessTree) -> None:
    worker = await start("signal.signal(15, leave); note('ready'); os.execvp('sleep', ['sleep', '1000'])")
    await until(lambda: Reaction(worker.pid).handler is Handler.NONE)


async def test_a_script_sees_its_own_handlers_only(start: Start, tree: ProcessTree, tmp_path: Path) -> None:
    worker = await start(
        """
        from signal import SIG_DFL, SIGRTMAX, getsignal
        assert getsignal(15) is SIG_DFL
        assert signal.signal(15, leave) is SIG_DFL
        assert getsignal(15) is leave
        assert signal.signal(15, SIG_DFL) is leave
        assert signal.signal.__name__ == "signal"
        own = lambda number, frame: note("own")
        for number in range(SIGRTMAX - 9, SIGRTMAX + 1):
            signal.signal(number, own)
        signal.signal(15, leave)
        assert all(getsignal(number) is own for number in range(SIGRTMAX - 9, SIGRTMAX + 1))
        try:
            signal.signal(15, "no handler")
        except TypeError:
            assert getsignal(15) is leave
            note("ready")
        linger()
        """
    )
    await stop(tree, worker.pid)
    assert worker.exit.result().exit_code == 0
    assert (tmp_path / "began").exists()
    assert not (tmp_path / "own").exists()


def test_the_longest_grace_depends_on_the_cause() -> None:
    for handler in Handler:
        expected = 0.2 if handler is Handler.NONE else 3.0
        assert longest_grace(StopCause.FAILURE, handler, 30) == expected
        assert longest_grace(StopCause.FAILURE, handler, 0.1) == 0.1
        assert longest_grace(StopCause.MEMBERSHIP, handler, 30) == 5.0
        assert longest_grace(StopCause.END_OF_JOB, handler, 30) == 30
        assert longest_grace(StopCause.PREEMPTION, handler, 30) == 30


def test_a_process_that_is_gone_has_no_handler_and_will_not_come_back() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert look_up(pid) is None
    gone = Reaction(pid)
    assert gone.handler is Handler.NONE
    assert not gone.has_begun()
    assert not gone.is_on_its_way(LOOK_EVERY)
