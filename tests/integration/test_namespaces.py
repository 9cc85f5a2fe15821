"""
Nodes with networks of their own: killed, frozen, cut off, brought back, scaled, replaced, while a job trains on.

Real launchers, agents and workers; a collective in every step, so a world that lacks somebody cannot step. Each fault prints
how long it was from the fault to the next step of all ranks, and how long nobody stepped (`pytest -s`; also in `report`
in the test's directory). The bounds asserted are for a machine that does other things, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dlrover.platforms.local import node_entry
from dlrover.platforms.local.kernel_claims import KernelTag
from dlrover.platforms.local.namespaces import NODE_INTERFACE, Namespaces, available
from tests.integration.jobs import SCRIPTS, JobFactory, Launched, kill, wait_until

pytestmark = pytest.mark.skipif(bool(available()), reason=available() or "-")

JOB = "namespaces"
SCRIPT = SCRIPTS / "trained_steps.py"
SILENCE = 4.0
DETECTION = ("--heartbeat=0.5", f"--node-silence={SILENCE:g}", "--node-grace=2")
"""The defaults in a tenth of the time; three quarters of the silence are the lease of a node's workers."""
WITHIN = 60.0
"""Seconds for anything to happen."""
LONGEST_PAUSE = 20.0
"""Seconds without a step, whatever happened and however busy the machine is."""
RESIZED_WITHIN = 3.0
"""The same where everybody is well and a world only grows or shrinks: nobody waits for anything but the others."""


class Step(NamedTuple):
    """A line of the script."""

    round: int
    life: int
    rank: int
    size: int
    step: int
    at: float
    pid: int


class Training:
    """What the workers of a job wrote, and what the faults cost."""

    def __init__(self, jobs: JobFactory, folder: Path) -> None:
        self.jobs = jobs
        self.folder = folder
        self.report: list[str] = []
        self._read: dict[Path, int] = {}
        self._steps: list[Step] = []

    @property
    def steps(self) -> list[Step]:
        """All so far, in no order. Only what is new is read."""
        for path in self.folder.glob("steps-*"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                numbers, at = line.split()[:5], line.split()[5]
                self._steps.append(Step(*map(int, numbers), float(at), int(path.name.partition("-")[2])))
        return self._steps

    @property
    def newest(self) -> Step:
        return max(self.steps, key=lambda step: (step.round, step.step))

    def world(self) -> dict[int, int]:
        """Global rank -> pid of the newest round."""
        newest = self.newest.round
        return {step.rank: step.pid for step in self.steps if step.round == newest}

    def trains(self, size: int, *, after: int = 0) -> int:
        """Until all ranks of a world of this size have stepped in a later round than `after`, which is returned."""
        found = 0

        def is_so() -> bool:
            nonlocal found
            ranks: dict[int, set[int]] = {}
            for step in self.steps:
                if step.round > after and step.size == size:
                    ranks.setdefault(step.round, set()).add(step.rank)
            found = max((each for each, those in ranks.items() if len(those) == size), default=0)
            return bool(found)

        wait_until(is_so, WITHIN, self.explain)
        return found

    def recovers(self, fault: str, size: int, *, since: float, after: int, longest_pause: float = LONGEST_PAUSE) -> int:
        """As `trains`, and the time goes into the report."""
        new = self.trains(size, after=after)
        begins = [step.at for step in self.steps if step.round == new]
        pause = min(begins) - max(step.at for step in self.steps if step.round < new)
        took = min(begins) - since
        self.say(f"{fault}: {took:.2f} s to the next step, {pause:.2f} s without one, round {after} -> {new}")
        assert pause < longest_pause, self.explain()
        return new

    def goes_on(self, num_steps: int = 5) -> None:
        """Nothing may have happened: the same round steps on."""
        before = self.newest
        wait_until(lambda: self.newest.step >= before.step + num_steps, WITHIN, self.explain)
        assert self.newest.round == before.round, self.explain()

    def say(self, line: str) -> None:
        self.report.append(line)
        (self.folder / "report").write_text("\n".join(self.report) + "\n")
        print(line, flush=True)

    def command(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dlrover.cli.main", *words],
            env=self.jobs.env(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    def explain(self) -> str:
        last = {step.round: step for step in sorted(self.steps, key=lambda step: step.at)}
        said = "\n".join(f"{job.err_path.name}:\n{job.err[-6000:]}" for job in self.jobs.launched)
        return f"last steps {list(last.values())}\n{self.command('status', JOB)}\n{said}"

    def processes(self, variable: str, value: int) -> list[int]:
        """Of a node: all whose environment says so."""
        needle = f"\0{variable}={value}\0".encode()
        found = []
        for pid in self.jobs.processes():
            try:
                if needle in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
            except OSError:
                continue  # it just ended
        return found

    def check_rounds(self, journal: Path) -> None:
        """None was skipped, and none disturbed a later one."""
        lines = [json.loads(line) for line in self.command("replay", "--json", str(journal)).splitlines()]
        assert lines[-1]["verified"], lines[-1]
        run = [
            int(effect.split("run round ")[1].split()[0])
            for line in lines
            for effect in line.get("effects", [])
            if "run round " in effect
        ]
        assert sorted(set(run)) == list(range(1, max(run) + 1)), run
        trained = {step.round for step in self.steps}
        self.say(f"rounds 1 to {max(run)}; without a step: {sorted(set(run) - trained) or 'none'}")
        self.check_nobody_is_late()

    def check_nobody_is_late(self) -> None:
        """
        No step of a round after the next one began.

        A worker that was frozen or cut off behind its last collective may still write the line of that step, which was whole for
        itself, if not for the others; it never takes part in another.
        """
        began = {}
        for step in sorted(self.steps, key=lambda step: step.at):
            began.setdefault(step.round, step.at)
        for step in self.steps:
            next_at = min((at for each, at in began.items() if each > step.round), default=float("inf"))
            done = max(other.step for other in self.steps if other.round == step.round and other.at < next_at)
            assert step.at < next_at or step.step <= done + 1, f"{step} after {next_at}"


class ByHand(Training):
    """A master and `dlrover-run` several times, each in a network of its own; nobody replaces anybody."""

    def __init__(self, jobs: JobFactory, folder: Path, networks: Namespaces, *options: str) -> None:
        super().__init__(jobs, folder)
        self.networks = networks
        self.options = options
        self.journal = folder / "journal.sqlite"
        self.address = f"{networks.master_address}:29600"
        argv = [sys.executable, "-m", "dlrover.cli.main", "master", f"--job-name={JOB}", "--port=29600"]
        argv += [f"--host={networks.master_address}", f"--journal={self.journal}"]
        self.master = Launched(argv, self._env(), folder, "master")
        jobs.launched.append(self.master)
        self.launchers: dict[int, Launched] = {}

    def _env(self, **more: str) -> dict[str, str]:
        return self.jobs.env(DLROVER_JOB_TOKEN="of-this-test-alone", **more)

    def start(self, *nodes: int) -> None:
        for node in nodes:
            place = self.networks.add(node)
            env = self._env(
                TEST_NODE=str(node),
                GLOO_SOCKET_IFNAME=NODE_INTERFACE,
                DLROVER_MASTER_ADDR=self.address,
                ELASTIC_JOB_NAME=JOB,
                POD_IP=place.address,
            )
            argv = [sys.executable, node_entry.__file__, f"--host-pid={os.getpid()}", f"--network={place.network}"]
            argv += ["--", sys.executable, "-m", "dlrover.cli.run", "--shutdown-timeout=5", *DETECTION, *self.options]
            self.launchers[node] = Launched([*argv, str(SCRIPT), str(self.folder)], env, self.folder, f"node-{node}")
            self.jobs.launched.append(self.launchers[node])

    def command(self, *words: str) -> str:
        if words[0] != "replay":
            words = (words[0], f"--addr={self.address}", f"--token-file={self._token()}", *words[1:])
        return super().command(*words)

    def _token(self) -> Path:
        path = self.folder / "token"
        path.write_text("of-this-test-alone")
        path.chmod(0o600)
        return path

    def of(self, node: int) -> list[int]:
        return self.processes("TEST_NODE", node)

    def agent(self, node: int) -> int:
        [pid] = [pid for pid in self.jobs.pids("dlrover.agent") if pid in self.of(node)]
        return pid

    def worker(self, node: int) -> int:
        """Pid of its worker in the newest world."""
        [pid] = set(self.of(node)) & set(self.world().values())
        return pid

    def finish(self, *nodes: int) -> None:
        (self.folder / "stop").touch()
        for node in nodes:
            assert self.launchers[node].wait() == 0, self.launchers[node].err
        assert self.master.wait() == 0, self.master.err
        self.check_rounds(self.journal)
        super().command("clean")  # what killed launchers could not remove


class OnPlatform(Training):
    """`dlrover local`: who is lost is replaced."""

    def __init__(self, jobs: JobFactory, folder: Path, nodes: str, *options: str) -> None:
        super().__init__(jobs, folder)
        argv = [
            sys.executable,
            "-m",
            "dlrover.cli.main",
            "local",
            f"--job-name={JOB}",
            f"--nodes={nodes}",
            "--netns=on",
        ]
        # The platform tells of nodes that ended. The grace is for agents that their launchers start again, on a busy machine, too.
        detection = (*DETECTION, "--node-grace=15")
        argv += ["--", "--shutdown-timeout=5", f"--journal={folder / 'journal'}", *detection, *options]
        self.host = Launched([*argv, str(SCRIPT), str(folder)], jobs.env(), folder, "local")
        jobs.launched.append(self.host)

    @property
    def networks(self) -> Namespaces:
        return Namespaces.find(self.host.pid)

    def node(self, rank: int) -> int:
        """The newest node of a rank, by its number on the platform."""
        found = [-1]
        for pid in self.processes("NODE_RANK", rank):
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it just ended
            found += [int(word.partition(b"=")[2]) for word in words if word.startswith(b"DLROVER_NODE_ID=")]
        return max(found)

    def of(self, node: int) -> list[int]:
        return self.processes("DLROVER_NODE_ID", node)

    def finish(self) -> None:
        (self.folder / "stop").touch()
        assert self.host.wait() == 0, self.explain()
        [journal] = (self.folder / "journal").rglob("*.sqlite")
        self.check_rounds(journal)


@pytest.fixture
def networks() -> Iterator[Namespaces]:
    claim = KernelTag()
    made = Namespaces.create(claim.tag)
    yield made
    made.close()
    claim.release()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_trains_on_whatever_happens_to_its_nodes(jobs, tmp_path, networks):
    job = ByHand(jobs, tmp_path, networks, "--nnodes=2:4")
    job.start(0, 1, 2, 3)
    now = job.trains(4)

    since = time.monotonic()
    kill(job.agent(1))
    now = job.recovers("kill -9 of an agent", 4, since=since, after=now)

    since = time.monotonic()
    networks.cut(2)
    now = job.recovers("a node is cut off", 3, since=since, after=now)
    since = time.monotonic()
    networks.heal(2)
    now = job.recovers("it is back", 4, since=since, after=now)

    now = _freeze_and_wake(job, 3, now)

    world = job.world()
    networks.cut_master()
    _wait(1.5 * SILENCE)
    job.goes_on()
    networks.heal_master()
    wait_until(lambda: job.command("status").count("alive") == 4, WITHIN, job.explain)
    job.goes_on(100)
    assert job.world() == world, "nobody restarted"
    job.say(f"the master was cut off for {1.5 * SILENCE:g} s: nobody restarted")

    since = time.monotonic()
    job.command("scale", "--nodes=2:3")
    job.recovers("scaled from 4 to 3", 3, since=since, after=now)
    job.finish(*job.launchers)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_job_waits_below_its_minimum_and_outlives_long_and_short_partitions(jobs, tmp_path, networks):
    job = ByHand(jobs, tmp_path, networks, "--nnodes=2:4")
    job.start(0, 1, 2)
    now = job.trains(3)
    world = job.world()

    networks.cut(1)
    _wait(SILENCE / 4)
    networks.heal(1)
    job.goes_on()
    job.say("a node was cut off for a moment: nobody restarted")

    networks.cut_master()
    _wait(45)  # both sides have closed the connections by then
    job.goes_on()
    networks.heal_master()
    wait_until(lambda: job.command("status").count("alive") == 3, WITHIN, job.explain)
    job.goes_on(500)
    assert job.world() == world, job.explain()
    job.say("the master was cut off for 45 s: nobody restarted")

    for pid in (*job.of(1), *job.of(2)):
        with contextlib.suppress(ProcessLookupError):
            kill(pid)  # some end with those before
    wait_until(lambda: "1 of at least 2 nodes wait" in " ".join(job.command("status").split()), WITHIN, job.explain)
    since = time.monotonic()
    job.start(3)
    new = job.trains(2, after=now)
    took = min(step.at for step in job.steps if step.round == new) - since
    job.say(f"below the minimum it waits; another node comes: {took:.2f} s to the next step")
    job.finish(0, 3)


def _wait(seconds: float) -> None:
    """For the length of a fault; nothing else can tell that it is over."""
    ends_at = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > ends_at, seconds + 1)


def _freeze_and_wake(job: ByHand, node: int, now: int) -> int:
    frozen = job.of(node)
    worker = job.worker(node)
    since = time.monotonic()
    for pid in frozen:
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGSTOP)
    now = job.recovers("a node freezes", 3, since=since, after=now)
    assert worker not in job.world().values()
    job.goes_on()
    since = time.monotonic()
    for pid in frozen:
        with contextlib.suppress(ProcessLookupError):  # ended by the one that was woken before
            kill(pid, signal.SIGCONT)
    wait_until(lambda: worker not in job.jobs.processes(), WITHIN, job.explain)
    job.say(f"it wakes up: its workers are gone after {time.monotonic() - since:.2f} s")
    return job.recovers("it is back", 4, since=since, after=now)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_platform_replaces_who_is_lost(jobs, tmp_path):
    job = OnPlatform(jobs, tmp_path, "2:4")
    now = job.trains(4)

    now = _kill_agent(job, now)

    lost = job.node(2)
    since = time.monotonic()
    for pid in job.of(lost):
        kill(pid)
    now = job.recovers("kill -9 of a whole node, which is replaced", 4, since=since, after=now)
    assert job.node(2) != lost

    now = _freeze_and_replace(job, 3, now)

    lost = job.node(1)
    since = time.monotonic()
    job.networks.cut(lost)
    now = job.recovers("a node is cut off", 3, since=since, after=now)
    now = job.recovers("and replaced", 4, since=since, after=now)
    assert job.node(1) != lost
    wait_until(lambda: not job.of(lost), WITHIN, job.explain)

    job.finish()


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_platform_brings_and_takes_nodes_when_a_job_is_scaled(jobs, tmp_path):
    job = OnPlatform(jobs, tmp_path, "2")
    now = job.trains(2)
    for size in (4, 3):
        since = time.monotonic()
        job.command("scale", JOB, f"--nodes=2:{size}")
        now = job.recovers(f"scaled to {size}", size, since=since, after=now, longest_pause=RESIZED_WITHIN)
    job.finish()


def _kill_agent(job: OnPlatform, now: int) -> int:
    node = job.node(1)
    [agent] = [pid for pid in job.jobs.pids("dlrover.agent") if pid in job.of(node)]
    since = time.monotonic()
    kill(agent)
    now = job.recovers("kill -9 of an agent", 4, since=since, after=now)
    assert job.node(1) == node, "its launcher started another one"
    return now


def _freeze_and_replace(job: OnPlatform, rank: int, now: int) -> int:
    """The platform would kill it some seconds later; it wakes up before, when the others train on without it."""
    node = job.node(rank)
    frozen = job.of(node)
    [worker] = set(frozen) & set(job.world().values())
    since = time.monotonic()
    for pid in frozen:
        kill(pid, signal.SIGSTOP)
    now = job.recovers("a node freezes", 3, since=since, after=now)
    since = time.monotonic()
    for pid in frozen:
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGCONT)
    wait_until(lambda: worker not in job.jobs.processes(), WITHIN, job.explain)
    job.say(f"it wakes up: its workers are gone after {time.monotonic() - since:.2f} s")
    now = job.recovers("it is replaced", 4, since=since, after=now)
    assert job.node(rank) != node
    wait_until(lambda: not job.of(node), WITHIN, job.explain)
    return now
