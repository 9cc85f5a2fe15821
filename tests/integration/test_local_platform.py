"""`dlrover local`: real nodes that come from a platform, are lost, replaced, scaled, and leave nothing."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dlrover.platforms.local.kernel_claims import tag_of
from dlrover.platforms.local.namespaces import available
from tests.integration.jobs import DEADLINE, SCRIPTS, JobFactory, Launched, kill, kill_together, wait_until

SCRIPT = SCRIPTS / "plain_steps.py"
JOB = "local-test"
NUM_LINES = 50_000


class Line(NamedTuple):
    """Of `plain_steps.py`."""

    life: int
    world_size: int
    coordinator: str
    node_rank: int
    step: int


class LocalJob:
    """One `dlrover local` with workers that do not need torch: the nodes matter here, not what they train."""

    def __init__(
        self,
        jobs: JobFactory,
        folder: Path,
        *options: str,
        node_options: tuple[str, ...] = (),
        script: Path = SCRIPT,
        shell: str = "",
        **environ: str,
    ) -> None:
        """`node_options` are for `dlrover-run`; `shell` is what a shell does before it becomes the host."""
        self.jobs = jobs
        self.folder = folder
        argv = [sys.executable, "-m", "dlrover.cli.main", "local", f"--job-name={JOB}", *options]
        argv += ["--", "--no-warm", "--shutdown-timeout=5", *node_options, str(script), str(folder)]
        if shell:
            argv = ["/bin/sh", "-c", f'{shell}; exec "$@"', "sh", *argv]
        self.host = Launched(argv, jobs.env(**environ), folder, f"local-{len(jobs.launched)}")
        jobs.launched.append(self.host)

    def last(self, rank: int) -> Line:
        """What the worker wrote last."""
        lines = (self.folder / f"steps-{rank}").read_text().splitlines()
        life, size, address, node_rank, step = lines[-1].split()
        return Line(int(life), int(size), address, int(node_rank), int(step))

    def trains(self, *ranks: int, size: int, after: int = -1) -> None:
        """Until all these ranks write steps of a world of this size, in a later life than `after`."""

        def is_so() -> bool:
            try:
                found = [self.last(rank) for rank in ranks]
            except (OSError, ValueError, IndexError):
                return False
            return all(line.life > after and line.world_size == size for line in found)

        wait_until(is_so, explain=lambda: f"{self.host.out}\n{self.host.err}")

    def steps_go_on(self, rank: int = 0) -> None:
        before = self.last(rank).step
        wait_until(lambda: self.last(rank).step > before + 2, explain=lambda: self.host.err)

    def node(self, rank: int) -> tuple[int, int]:
        """Launcher and agent of a node rank."""
        for pid in self.jobs.pids("dlrover.cli.run"):
            if f"NODE_RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                if children:
                    return pid, int(children[0])
        raise AssertionError(f"no node of rank {rank}: {self.jobs.processes()}")

    def command(self, *words: str) -> str:
        """What it printed; while the master is between two lives nothing."""
        done = subprocess.run(
            [sys.executable, "-m", "dlrover.cli.main", *words],
            env=self.jobs.env(),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert done.returncode == 0 or "not reachable" in done.stderr, done.stderr
        return done.stdout

    def finish(self) -> None:
        (self.folder / "stop").touch()
        assert self.host.wait() == 0, self.host.err
        assert self.directories() == []

    def directories(self) -> list[Path]:
        return [path for path in self.jobs.runtime.glob("dlrover-*/*") if path.name != ".lock"]


def test_a_lost_node_is_relaunched_and_the_death_of_the_master_restarts_nobody(jobs, tmp_path):
    job = LocalJob(jobs, tmp_path, "--nodes=2", "--netns=off")
    job.trains(0, 1, size=2)

    (launcher, agent), life = job.node(1), job.last(0).life
    kill_together(launcher, agent)
    job.trains(0, 1, size=2, after=life)
    assert job.node(1)[0] != launcher
    wait_until(lambda: "worker-1 (node 2): started" in job.host.err, explain=lambda: job.host.err)

    [master] = jobs.pids("dlrover.master")
    life = job.last(0).life
    nodes = {job.node(rank) for rank in (0, 1)}
    kill(master)
    job.steps_go_on()
    wait_until(lambda: [pid for pid in jobs.pids("dlrover.master") if pid != master])
    wait_until(lambda: "master epoch 2" in job.command("status", JOB))
    job.steps_go_on()
    assert job.last(0).life == life
    assert {job.node(rank) for rank in (0, 1)} == nodes
    job.finish()


def test_a_master_that_cannot_be_started_again_at_once_is_started_later(jobs, tmp_path):
    """Something stands in the way of a file that is written for it, as on a full disk."""
    job = LocalJob(jobs, tmp_path, "--nodes=1", "--netns=off")
    job.trains(0, size=1)
    [config] = jobs.runtime.rglob("master.json")
    config.unlink()
    config.mkdir()
    kill(jobs.pids("dlrover.master")[0])
    wait_until(lambda: "the master cannot start now" in job.host.err, explain=lambda: job.host.err)
    config.rmdir()
    wait_until(lambda: "master epoch 2" in job.command("status", JOB), explain=lambda: job.host.err)
    job.finish()


def test_a_process_that_was_there_before_outlives_nodes_and_the_job(jobs, tmp_path):
    note = tmp_path / "neighbour"
    job = LocalJob(jobs, tmp_path, "--nodes=1", "--netns=off", shell=f"setsid sleep 300 & echo $! >{note}")
    job.trains(0, size=1)
    neighbour, life = int(note.read_text()), job.last(0).life
    kill_together(*job.node(0))
    job.trains(0, size=1, after=life)
    assert neighbour in jobs.processes()
    job.finish()
    assert neighbour in jobs.processes()
    kill(neighbour)


def test_the_snapshots_of_a_killed_node_go_with_it_and_those_of_the_living_stay(jobs, tmp_path):
    argv = [sys.executable, "-m", "dlrover.cli.main", "local", "--nodes=2", "--netns=off", "--"]
    host = Launched([*argv, str(SCRIPTS / "memory_save.py"), str(tmp_path)], jobs.env(), tmp_path, "local")
    jobs.launched.append(host)

    def homes() -> set[Path]:
        return set(jobs.shared_memory.glob("dlrover-snapshots-*/*.node-*"))

    def num_saved() -> int:
        return len(list(tmp_path.glob("saved-*")))

    wait_until(lambda: num_saved() == 2, explain=lambda: host.err)
    first = homes()
    assert len(first) == 2
    launcher = next(
        pid for pid in jobs.pids("dlrover.cli.run") if b"NODE_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    )
    [agent] = [pid for pid in jobs.pids("dlrover.agent") if _parent(pid) == launcher]
    kill_together(launcher, agent)
    wait_until(lambda: num_saved() >= 4, explain=lambda: host.err)
    wait_until(lambda: (len(homes()), len(homes() & first)) == (2, 1), explain=lambda: f"{homes()}\n{host.err}")
    (tmp_path / "stop").touch()
    assert host.wait() == 0, host.err
    assert homes() == set()


def test_a_launcher_that_is_killed_alone_is_a_lost_node(jobs, tmp_path):
    """Its agent hears it from the kernel, stops its workers and goes; then another node takes the rank."""
    job = LocalJob(jobs, tmp_path, "--nodes=2", "--netns=off")
    job.trains(0, 1, size=2)
    (launcher, _), life = job.node(0), job.last(1).life
    kill(launcher)
    job.trains(0, 1, size=2, after=life)
    assert job.node(0)[0] != launcher
    job.finish()


@pytest.mark.chaos
def test_a_standby_takes_the_place_of_a_lost_node_and_is_replaced(jobs, tmp_path):
    job = LocalJob(jobs, tmp_path, "--nodes=2", "--standby=1", "--netns=off")
    job.trains(0, 1, size=2)
    wait_until(lambda: "standby" in job.command("status", JOB), explain=lambda: job.host.err)
    lost = job.last(1).node_rank  # the two that came first are in the world, whichever they are
    life = job.last(0).life
    kill_together(*job.node(lost))
    job.trains(0, 1, size=2, after=life)
    assert {job.last(0).node_rank, job.last(1).node_rank} == {0, 1, 2} - {lost}
    wait_until(lambda: "standby" in job.command("status", JOB), explain=lambda: job.host.err)
    assert lost not in {job.last(0).node_rank, job.last(1).node_rank}
    job.finish()


def test_the_plug_ins_for_the_order_of_nodes_reach_the_master(jobs, tmp_path):
    (tmp_path / "backwards.py").write_text(
        "class Sorter:\n    def sort(self, nodes):\n        return sorted(nodes, reverse=True)\n"
    )
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))}
    job = LocalJob(
        jobs, tmp_path, "--nodes=2", "--netns=off", node_options=("--topology-sorter=backwards::Sorter",), **environ
    )
    job.trains(0, 1, size=2)
    assert (job.last(0).node_rank, job.last(1).node_rank) == (1, 0)
    job.finish()


def test_the_autopsy_of_a_stopped_worker_is_kept_among_the_logs(jobs, tmp_path):
    logs = tmp_path / "logs"
    job = LocalJob(jobs, tmp_path, "--nodes=2", "--netns=off", f"--log-dir={logs}")
    job.trains(0, 1, size=2)
    life = job.last(0).life
    kill(jobs.pids(f"-u {SCRIPT}")[0], signal.SIGSTOP)  # of a worker, not of a launcher that has it among its words
    wait_until(lambda: list(logs.glob(f"{JOB}-autopsy-*.md")), DEADLINE, lambda: job.host.err)
    job.trains(0, 1, size=2, after=life)
    job.finish()


def test_a_job_is_scaled_up_and_down_while_it_runs(jobs, tmp_path):
    job = LocalJob(jobs, tmp_path, "--nodes=1:2", "--netns=off")
    job.trains(0, 1, size=2)
    job.command("scale", JOB, "--nodes", "1:3")
    job.trains(0, 1, 2, size=3)
    kill(jobs.pids("dlrover.master")[0])  # the next one has the same fleet in its configuration, and knows better
    wait_until(lambda: "master epoch 2" in job.command("status", JOB))
    assert len(jobs.pids("dlrover.cli.run")) == 3
    job.command("scale", JOB, "--nodes", "1")
    job.trains(0, size=1)
    wait_until(lambda: len(jobs.pids("dlrover.cli.run")) == 1, explain=lambda: job.host.err)
    job.finish()


def test_a_suspended_job_has_no_node_until_it_is_resumed_and_then_finishes(jobs, tmp_path):
    job = LocalJob(jobs, tmp_path, "--nodes=2", "--netns=off")
    job.trains(0, 1, size=2)
    former, life = {job.node(rank) for rank in (0, 1)}, job.last(0).life
    job.command("job", "suspend", JOB, "--release")
    wait_until(lambda: not jobs.pids("dlrover.cli.run"), explain=lambda: job.host.err)
    assert "suspended" in job.command("status", JOB)
    assert job.host.process.poll() is None, job.host.err
    job.command("job", "resume", JOB)
    job.trains(0, 1, size=2, after=life)
    assert not former & {job.node(rank) for rank in (0, 1)}
    job.finish()


@pytest.mark.skipif(bool(available()), reason=available() or "-")
def test_nodes_have_addresses_of_their_own_and_an_interrupt_ends_everything(jobs, tmp_path):
    job = LocalJob(jobs, tmp_path, "--nodes=2", "--netns=on")
    job.trains(0, 1, size=2)
    tag = tag_of(job.host.pid)

    def num_namespaces() -> int:
        return sum(name.startswith(f"dlr-{tag}-") for name in os.listdir("/run/netns"))

    assert job.last(0).coordinator.startswith("10.")
    assert num_namespaces() == 3, "one for each node, and the hub"
    job.host.signal(signal.SIGINT)
    assert job.host.wait() == 130
    assert "StoppedByUser" in job.host.err
    assert job.directories() == []
    assert num_namespaces() == 0


def test_a_terminal_that_hangs_up_ends_the_job_with_the_exit_code_of_its_signal(jobs, tmp_path):
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    argv = [sys.executable, "-m", "dlrover.cli.main", "local", "--nodes=1", "--netns=off", "--", "--no-warm"]
    # The leader of a session gets the first terminal that it opens, and its signal.
    host = subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(theirs), *argv, str(SCRIPT), str(tmp_path)],
        env=jobs.env(TERM="xterm"),
        start_new_session=True,
    )
    shown = bytearray()

    def is_training() -> bool:
        with contextlib.suppress(BlockingIOError):
            shown.extend(os.read(ours, 65536))
        return (tmp_path / "steps-0").exists() and b"running" in shown

    try:
        wait_until(is_training, explain=shown.decode)
        for end in (theirs, ours):
            os.close(end)
        assert host.wait(DEADLINE) == 128 + signal.SIGHUP
    finally:
        host.kill()
        host.wait()


def test_a_signal_during_the_last_saves_is_no_success_if_one_is_lost(jobs, tmp_path):
    """Of two jobs that were interrupted so, one gets its save written in time; the other is interrupted again."""
    for is_written in (True, False):
        folder = tmp_path / f"written-{is_written}"
        folder.mkdir()
        job = LocalJob(jobs, folder, "--nodes=1", "--netns=off", script=SCRIPTS / "held_save.py")
        wait_until(lambda job=job: "still write checkpoints" in job.host.err, explain=lambda job=job: job.host.err)
        job.host.signal(signal.SIGINT)
        wait_until(lambda job=job: "stopped by SIGINT: 1 nodes" in job.host.err, explain=lambda job=job: job.host.err)
        if is_written:
            (folder / "go").touch()
            assert job.host.wait() == 0, job.host.err
            assert (folder / "checkpoints" / "dlrover_latest.txt").read_text() == "1"
        else:
            job.host.signal(signal.SIGINT)
            assert job.host.wait() == 128 + signal.SIGINT, job.host.err
            assert "SIGINT stopped the last checkpoints. The unfinished checkpoints of " in job.host.err
            assert "may be lost" in job.host.err
            assert not (folder / "checkpoints" / "dlrover_latest.txt").exists()
        assert job.directories() == []


class UnreadConsole(NamedTuple):
    """What it shows is read by nobody, unless the test does."""

    path: str
    reader: int

    @property
    def shell(self) -> str:
        return f"exec >{self.path} 2>&1"

    def block(self) -> None:
        """From now on it takes nothing. The end of a terminal's room cannot be known: the kernel moves bytes on when it has time."""
        writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        if os.isatty(writer):
            termios.tcflow(writer, termios.TCOOFF)  # as by Ctrl-S
        else:
            for size in (4096, 1):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        os.write(writer, b"." * size)
        os.close(writer)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[UnreadConsole]:
    path = tmp_path / "console"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield UnreadConsole(str(path), reader)
    os.close(reader)


@pytest.fixture
def terminal() -> Iterator[UnreadConsole]:
    ours, theirs = pty.openpty()
    yield UnreadConsole(os.ttyname(theirs), ours)
    os.close(theirs)
    os.close(ours)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_master_and_nodes_are_replaced_and_signals_heard_while_nobody_reads_the_console(jobs, tmp_path, request, kind):
    console: UnreadConsole = request.getfixturevalue(kind)
    job = LocalJob(jobs, tmp_path, "--nodes=1", "--netns=off", shell=console.shell, TERM="xterm")
    job.trains(0, size=1)
    console.block()
    [master] = jobs.pids("dlrover.master")
    kill(master)
    wait_until(lambda: [pid for pid in jobs.pids("dlrover.master") if pid != master])
    wait_until(lambda: "master epoch 2" in job.command("status", JOB))
    life = job.last(0).life
    kill_together(*job.node(0))
    job.trains(0, size=1, after=life)
    job.host.signal(signal.SIGTERM)
    assert job.host.wait() == 143
    assert job.directories() == []


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_signal_ends_the_wait_for_a_console_that_takes_no_last_lines(jobs, tmp_path, request, kind):
    console: UnreadConsole = request.getfixturevalue(kind)
    job = LocalJob(jobs, tmp_path, "--nodes=1", "--netns=off", shell=console.shell, TERM="xterm")
    job.trains(0, size=1)
    console.block()
    (tmp_path / "stop").touch()
    wait_until(lambda: list(jobs.processes()) == [job.host.pid], explain=lambda: f"{jobs.processes()}")
    job.host.signal(signal.SIGTERM)
    assert job.host.wait() == 0
    assert job.directories() == []


def test_nothing_that_nodes_print_is_lost_when_the_console_is_read_late(jobs, tmp_path, pipe):
    """Far more than is held: the one who prints waits until somebody reads."""
    script = tmp_path / "talk.py"
    script.write_text(f"for number in range({NUM_LINES}): print('line', number, '{'x' * 50}')\n")
    job = LocalJob(jobs, tmp_path, "--nodes=1", "--netns=off", script=script, shell=pipe.shell)

    def is_held() -> bool:
        return any(_num_unread_bytes(pid) > 60_000 for pid in jobs.pids("dlrover.cli.run"))

    wait_until(is_held)
    kill(*jobs.pids("dlrover.master"))
    wait_until(lambda: "master epoch 2" in job.command("status", JOB))
    wait_until(is_held)
    os.set_blocking(pipe.reader, True)
    with os.fdopen(os.dup(pipe.reader), encoding="utf-8") as file:
        lines = [line.split()[2] for line in file if line.startswith("[worker-0] line ")]
    assert lines == [str(number) for number in range(NUM_LINES)]
    assert job.host.wait() == 0


def test_nodes_follow_a_host_that_is_killed_and_clean_removes_the_rest(jobs, tmp_path):
    job = LocalJob(jobs, tmp_path, "--nodes=2")
    job.trains(0, 1, size=2)
    job.host.signal(signal.SIGKILL)
    wait_until(lambda: not jobs.processes(), explain=lambda: f"{jobs.processes()}")
    assert "removed" in job.command("clean")
    assert job.directories() == []


def test_a_failure_is_reported_once_and_gives_the_exit_code(jobs, tmp_path):
    argv = [sys.executable, "-m", "dlrover.cli.main", "local", "--nodes=2", "--netns=off"]
    argv += [
        "--max-relaunches=0",
        "--",
        "--no-warm",
        "--max-restarts=0",
        "--exit-code=worker",
        str(SCRIPTS / "bad_end.py"),
    ]
    host = Launched(argv, jobs.env(), tmp_path, "failing")
    jobs.launched.append(host)
    assert host.wait() == 7, host.err
    assert host.err.count("first failure ") == 1, host.err


def _num_unread_bytes(pid: int) -> int:
    """In the pipe that a process has as its standard output."""
    try:
        end = os.open(f"/proc/{pid}/fd/1", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return 0  # it has just ended
    found = array.array("i", [0])
    fcntl.ioctl(end, termios.FIONREAD, found)
    os.close(end)
    return found[0]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
