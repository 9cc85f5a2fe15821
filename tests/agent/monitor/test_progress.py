"""The agent's half of watching: real processes that stand still in different ways, and what can be told of them."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from dlrover.agent.config import EntryKind, WatchConfig
from dlrover.agent.monitor.native_stacks import NativeStacks, main_frames
from dlrover.agent.monitor.progress import _DUMP_LOOK, WorkerWatch, fit_into_look
from dlrover.agent.monitor.worker_view import WatchedWorker, parse_stacks
from dlrover.agent.workers.process_tree import ProcessTree
from dlrover.agent.workers.spawner import Spawner
from dlrover.agreed.stall_thresholds import PhaseBook, StallPatience
from dlrover.host.processes import descendants
from dlrover.protocol.codec import check_size
from dlrover.protocol.messages.frames import Observed
from dlrover.protocol.messages.job import Incarnation, Micros, NodeId, Round
from dlrover.protocol.messages.watch import (
    MAX_FRAMES,
    MAX_THREADS,
    LookTaken,
    NodeEvent,
    Phase,
    ProgressReport,
    TakeLook,
    ThreadStack,
    WatchObservation,
    WatchOrder,
    WorkerDump,
)
from tests.agent.lab import (
    DEADLINE,
    descriptors,
    environment,
    make_world,
    run_plainly,
    run_worker,
    start_process,
    until,
    write,
)

T = TypeVar("T")
NO_SAMPLER = "py-spy (extra `stacks`) is not installed, or may not look into other processes"

WORKER = """
    import itertools, os, signal, sys, threading
    from dlrover.trainer import environment, phases; from dlrover.trainer.worker import hooks, sigterm
    sigterm.announce()
    hooks.install(environment.read(os.environ))
    lock = threading.Lock()
    lock.acquire()

    def wait_for_a_lock():
        print("ready", flush=True)
        lock.acquire()

    def hold_the_interpreter():
        print("ready", flush=True)
        sum(itertools.repeat(0))

    def read_the_next_line():
        print("ready", flush=True)
        sys.stdin.readline()

    def go_deep(levels=90):
        go_deep(levels - 1) if levels else read_the_next_line()

    writer = phases.current()
    for _ in range(20):
        writer.leave(writer.enter(phases.DATA), phases.AFTER_DATA)
    writer.set_step(20, 0)
    if "restored" in sys.argv:
        phases.tell_step(13)
    if "override" in sys.argv:
        signal.signal(int(os.environ["DLROVER_DUMP_SIGNAL"]), lambda *_: None)
    with phases.span(phases.BACKWARD):
        ways = {"lock": wait_for_a_lock, "gil": hold_the_interpreter, "deep": go_deep}
        ways.get(sys.argv[1], read_the_next_line)()
    read_the_next_line()
"""


class Lab:
    def __init__(self, tmp_path: Path) -> None:
        short = StallPatience(least=0.1, first_step=0.1, start=0.1, unlearned=0.1, factor=1.0)
        self.watch = WorkerWatch(
            WatchConfig(),
            runtime_dir=str(tmp_path),
            book=PhaseBook(short),
            stacks_timeout=DEADLINE,  # dumps are slow on a busy machine
        )
        self.watch.connect(self._on_observation, lambda: (NodeId(7), Incarnation(3)))
        self.observed: list[WatchObservation] = []
        self._script = tmp_path / "worker.py"
        self._script.write_text(textwrap.dedent(WORKER))
        self.workers: list[subprocess.Popen[str]] = []

    def _on_observation(self, observation: WatchObservation) -> None:
        self.observed.append(observation)

    async def start(self, *modes: str, **variables: str) -> None:
        self.watch.open_round(make_world(len(modes), round=Round(4), first_global_rank=10))
        for local_rank, mode in enumerate(modes):
            environ = {**os.environ, **self.watch.environment(local_rank), "DLROVER_AGENT_SOCKET": "none", **variables}
            worker = start_process(
                sys.executable,
                str(self._script),
                *mode.split(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
            )
            self.workers.append(worker)
            self.watch.started(local_rank, worker.pid)
        for worker in self.workers:
            assert worker.stdout is not None
            assert await asyncio.to_thread(worker.stdout.readline) == "ready\n"
        for worker, mode in zip(self.workers, modes, strict=True):
            if "gil" not in mode:
                await until(lambda pid=worker.pid: _state(pid) == "S")  # it says so before it stands still

    def poke(self, number: int) -> None:
        stdin = self.workers[number].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()

    async def observes(self, kind: type[T], like: Callable[[T], bool] = lambda _: True) -> T:
        def found() -> T | None:
            return next((each for each in self.observed if isinstance(each, kind) and like(each)), None)

        result: T = await until(found)
        return result

    async def look(self, round_: int = 4, *, number: int = 1) -> tuple[LookTaken, LookTaken]:
        order = TakeLook(look=number, round=Round(round_), again_after=0.1)
        self.watch.take_order(WatchOrder(id=number, expires_in=DEADLINE, order=order))
        first = await self.observes(LookTaken, lambda each: each.look == number and each.number == 0)
        second = await self.observes(LookTaken, lambda each: each.look == number and each.number == 1)
        return first, second

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()
        self.watch.close_round()


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path)
    running = asyncio.create_task(lab.watch.run())
    yield lab
    running.cancel()
    await asyncio.wait({running})
    lab.close()


def frames(dump: WorkerDump) -> str:
    return "\n".join(next(thread.frames for thread in dump.threads if thread.is_main))


async def test_a_worker_that_stays_in_its_phase_is_told_of_at_once_and_so_is_one_that_moves_again(lab: Lab) -> None:
    await lab.start("line", "line")
    report = await lab.observes(
        ProgressReport,  # not of those who were slow to begin
        lambda each: all(worker.is_stalled and worker.phase is Phase.BACKWARD for worker in each.workers),
    )
    assert (report.node, report.incarnation, report.round) == (7, 3, 4)
    assert [worker.global_rank for worker in report.workers] == [10, 11]
    assert report.workers[0].step == 20
    assert report.workers[0].pid == lab.workers[0].pid
    assert 0.1 <= report.workers[0].phase_seconds < 60
    lab.observed.clear()
    lab.poke(1)
    await lab.observes(ProgressReport, lambda each: [w.phase for w in each.workers] == [Phase.BACKWARD, Phase.FORWARD])


@pytest.fixture(scope="module")
def has_sampler() -> bool:
    with subprocess.Popen(
        [sys.executable, "-c", "import threading; print('ready', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        found = asyncio.run(NativeStacks().read_deaf([process.pid], within=30.0))
        process.stdin.write(b"\n")
    return bool(found)


async def test_a_look_tells_what_each_is_doing_however_it_stands_still(lab: Lab, has_sampler: bool) -> None:
    await lab.start("lock", "gil", "line", "line override")
    lab.workers[2].send_signal(signal.SIGSTOP)
    await until(lambda: _state(lab.workers[2].pid) == "T")
    first, second = await lab.look()
    assert (first.node, first.incarnation) == (7, 3)
    waiting, holding, stopped, overridden = first.workers
    assert "wait_for_a_lock" in frames(waiting)
    assert (waiting.state, waiting.source) == ("S", "faulthandler")
    assert waiting.progress is not None
    assert waiting.progress.phase is Phase.BACKWARD
    # The signal finds even a thread that lets nobody else run.
    assert "hold_the_interpreter" in frames(holding)
    assert (stopped.state, stopped.source) == ("T", "py-spy" if has_sampler else "none")
    # Whoever has its own use for the signal does not get it.
    assert (overridden.source, overridden.threads) == ("none", ())
    assert overridden.state == "S"
    # Between the two only what they did themselves counts.
    again = second.workers[0]
    assert (again.cpu_seconds, again.io_bytes, again.major_faults) == (
        waiting.cpu_seconds,
        waiting.io_bytes,
        waiting.major_faults,
    )
    assert frames(again) == frames(waiting)
    assert second.workers[1].cpu_seconds >= holding.cpu_seconds
    assert all(worker.poll() is None for worker in lab.workers)


async def test_stacks_are_waited_for_until_the_worker_has_written_them(lab: Lab, tmp_path: Path) -> None:
    """However long it is not scheduled meanwhile. Here it writes into a pipe that takes no more, in the middle of its dump."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    await lab.start("deep", DLROVER_DUMP_FILE=str(tmp_path / "pipe"))
    written = os.open(lab.watch.environment(0)["DLROVER_DUMP_FILE"], os.O_WRONLY | os.O_APPEND)

    def pass_on(most_bytes: int) -> int:
        try:
            return os.write(written, os.read(reader, most_bytes))
        except BlockingIOError:
            return 0

    dumping = asyncio.create_task(lab.watch.dump())
    await until(lambda: pass_on(1000))
    done, _ = await asyncio.wait([dumping], timeout=10 * _DUMP_LOOK)
    assert not done
    await until(lambda: pass_on(4096) == 0 and dumping.done())
    (dumped,) = dumping.result()
    assert len(frames(dumped).splitlines()) == MAX_FRAMES
    for descriptor in (reader, written):
        os.close(descriptor)


async def test_an_order_that_comes_too_late_is_left_alone(lab: Lab) -> None:
    await lab.start("line")
    lab.watch.connect(lab.observed.append, lambda: (NodeId(7), Incarnation(3)), lambda: Micros(100_000_000))
    look = TakeLook(look=8, round=Round(4), again_after=0.1)
    lab.watch.take_order(WatchOrder(id=8, expires_in=12.0, order=look, at=Micros(87_000_000)))
    await lab.look(number=9)
    assert not [each for each in lab.observed if isinstance(each, LookTaken) and each.look == 8]


async def test_an_order_is_run_once_and_only_for_the_round_it_means(lab: Lab) -> None:
    await lab.start("line")
    first, second = await lab.look(round_=3, number=5)
    assert first.workers == second.workers == ()
    lab.observed.clear()
    lab.watch.take_order(WatchOrder(id=5, expires_in=30.0, order=TakeLook(look=6, round=Round(4))))
    await lab.look(number=7)
    assert not [each for each in lab.observed if isinstance(each, LookTaken) and each.look == 6]
    lab.watch.attached()
    lab.observed.clear()
    await lab.look(number=5)  # the next master begins with the same numbers


async def test_a_worker_that_does_not_end_is_written_about_before_it_is_killed(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    await lab.start("lock")
    lab.watch.note_stuck([lab.workers[0].pid])
    event = await lab.observes(NodeEvent)
    assert (event.name, event.rank, event.level) == ("stuck-worker", 10, "warn")
    assert "wait_for_a_lock" in event.text
    assert "wait_for_a_lock" in caplog.text


async def test_the_historical_file_is_read_where_the_script_says_nothing_else(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "runtime_metrics.json"
    file.write_text('{"step": 900}')  # of a former round
    await lab.start("line")
    assert not file.exists()
    for text, step in (("{broken", None), ('{"step": "9"}', None), ('{"step": 41, "timestamp": 1}', 41)):
        file.write_text(text)
        assert lab.watch.named_step(Round(4)) == step


@pytest.mark.parametrize(("has_step_file", "step"), [(True, 41), (False, None)])
def test_the_historical_file_is_left_alone_where_the_monitor_is_switched_off(
    has_step_file: bool, step: int | None, tmp_path: Path
) -> None:
    """MONITOR_ENABLED=false."""
    watch = WorkerWatch(WatchConfig(has_step_file=has_step_file), runtime_dir=str(tmp_path))
    watch.open_round(make_world(0, round=Round(4)))
    (tmp_path / "runtime_metrics.json").write_text('{"step": 41}')
    assert watch.named_step(Round(4)) == step


async def test_a_step_has_a_number_if_the_script_or_its_checkpoint_gave_it_one(lab: Lab) -> None:
    await lab.start("line", "line restored")
    assert lab.watch.named_step(Round(4)) == 13, "the other's 20 was counted by hooks, which begin anew in each life"
    assert lab.watch.named_step(Round(5)) is None


async def test_nothing_of_a_round_is_left(lab: Lab) -> None:
    before = descriptors()
    for _ in range(3):
        lab.watch.open_round(make_world(4))
    lab.watch.close_round()
    assert descriptors() <= before


@pytest.mark.parametrize("kind", [EntryKind.SCRIPT, EntryKind.MODULE])
async def test_a_script_that_is_watched_from_a_cold_start_sees_no_difference(
    cold_spawner: Spawner, tree: ProcessTree, tmp_path: Path, kind: EntryKind
) -> None:
    script = write(
        tmp_path / "facts.py",
        "import sys; print(sys.argv, sys.orig_argv, sys.path, __name__, __file__, sorted(globals())); sys.exit(3)",
    )
    seat = WatchedWorker(local_rank=0, global_rank=0)
    try:
        environ = environment(PYTHONPATH=os.getcwd(), DLROVER_AGENT_SOCKET="none", **seat.environment())
        target = script if kind is EntryKind.SCRIPT else "facts"
        ended = await run_worker(
            cold_spawner, tree, target, "a b", scratch=tmp_path, kind=kind, environ=environ, cwd=str(tmp_path)
        )
        options = [] if kind is EntryKind.SCRIPT else ["-m"]
        plain = run_plainly(target, "a b", scratch=tmp_path, environ=environ, options=options, cwd=str(tmp_path))
        assert (ended.code, ended.stdout, ended.stderr) == (3, plain.stdout, plain.stderr)
        reading = seat.read()
        assert (reading.pid, reading.phase) == (ended.pid, Phase.END)
    finally:
        seat.close()


def test_native_frames_are_those_of_the_main_thread() -> None:
    frame = {"name": "poll", "filename": "libc.so", "line": 0}
    threads = [{"thread_name": "other", "frames": []}, {"thread_name": "MainThread", "frames": [frame] * 100}]
    assert main_frames(json.dumps(threads).encode()) == ("libc.so:0 poll",) * 64
    assert main_frames(b"") == main_frames(b"[1]") == main_frames(b'[{"thread_name": "MainThread"}]') == ()


async def test_native_frames_come_with_the_second_dump_and_the_worker_goes_on(lab: Lab, has_sampler: bool) -> None:
    if not has_sampler:
        pytest.skip(NO_SAMPLER)
    await lab.start("lock")
    order = TakeLook(look=1, round=Round(4), again_after=6.0)
    lab.watch.take_order(WatchOrder(id=1, expires_in=DEADLINE, order=order))
    second = await lab.observes(LookTaken, lambda each: each.number == 1)
    assert "wait_for_a_lock" in "\n".join(second.workers[0].native)
    assert second.workers[0].state == "S"
    assert "py-spy" not in [name_of(each.pid) for each in descendants(os.getpid())]


async def test_the_stack_of_a_worker_that_is_stopped_is_read_without_its_help(lab: Lab, has_sampler: bool) -> None:
    if not has_sampler:
        pytest.skip(NO_SAMPLER)
    await lab.start("lock")
    pid = lab.workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: _state(pid) == "T")
    (dumped,) = await lab.watch.dump()
    assert (dumped.state, dumped.source) == ("T", "py-spy")
    assert any("wait_for_a_lock" in frame for frame in dumped.threads[0].frames)
    assert _state(pid) == "T"


def test_stacks_are_read_as_python_writes_them() -> None:
    text = textwrap.dedent(
        """\
        Thread 0x00007f01 (most recent call first):
          File "/a b.py", line 3 in wait
          File "/b.py", line 4 in <module>

        Current thread 0x00007f02 (most recent call first):
          File "/c.py", line 5 in f
          <no Python frame>
          File "/d.py", li"""
    )
    main, other = parse_stacks(text, 0x7F02)
    assert (main.is_main, main.frames) == (True, ("/c.py:5 f",))
    assert other.frames == ("/a b.py:3 wait", "/b.py:4 <module>")
    assert parse_stacks("\\xff\\x00 rubbish", 1) == ()
    assert len(parse_stacks("Thread 0x1 (most recent call first):\n" * 100, 1)) == 32


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # gone meanwhile


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_what_very_many_workers_do_fits_into_one_message() -> None:
    """Else it would end the stream, and nobody would learn where they stand still."""
    frames = tuple(
        f"/usr/lib/python3/site-packages/a/module/{number}.py:{number} function" for number in range(MAX_FRAMES)
    )
    main = ThreadStack(name="main", frames=frames, is_main=True)
    others = tuple(ThreadStack(name=f"thread {number}", frames=frames) for number in range(MAX_THREADS - 1))

    def dumps(num_workers: int) -> tuple[WorkerDump, ...]:
        return tuple(
            WorkerDump(local_rank=rank, global_rank=rank, pid=rank, state="S", threads=(main, *others))
            for rank in range(num_workers)
        )

    assert fit_into_look(dumps(8)) == dumps(8)
    many = fit_into_look(dumps(300))
    check_size(Observed(LookTaken(node=NodeId(1), incarnation=Incarnation(1), look=1, number=0, workers=many)))
    assert [dump.threads for dump in many] == [(main,)] * 300


async def test_a_shortage_of_descriptors_does_not_end_the_watch(lab: Lab) -> None:
    """The agent would end with it, and the workers with the agent."""
    await lab.start("line")
    await lab.observes(ProgressReport, lambda report: report.workers[0].is_stalled)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        lab.poke(0)
        await lab.observes(
            ProgressReport,
            lambda report: report.workers[0].phase is Phase.FORWARD and report.workers[0].is_stalled,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
