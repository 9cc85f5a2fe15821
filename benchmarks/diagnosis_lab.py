"""Real jobs that faults are injected into: started, watched through files and the master's answers, and ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diagnosis_machine as machine
from diagnosis_kinds import NUM_RANKS

from dlrover.protocol.messages.goodput import AskGoodput, GoodputStatus
from dlrover.protocol.messages.watch import AskDiagnosis, Culprit, Diagnosis
from dlrover.protocol.rpc.client import ask

JOB = Path(__file__).with_name("diagnosis_job.py")
TOKEN = "a token for the corpus"
_names = itertools.count()


class Job:
    """One job, from its start to its end."""

    def __init__(self, folder: Path, *, of_nodes: bool = False, first: str = "") -> None:
        """`of_nodes`: four nodes with a network and a clock of their own each. `first`: what rank 0 does in its very first step."""
        self.folder = folder
        self.num_acted = 0
        """How often workers were restarted because they stood still: after six times in an hour a job ends."""
        self._name = f"corpus-{os.getpid()}-{next(_names)}"
        folder.mkdir(parents=True)
        if first:
            told = {"number": 0, "kind": first, "rank": 0, "after_step": 0}
            (folder / "fault.json").write_text(json.dumps(told))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._runtime = tempfile.mkdtemp(prefix="dlr-")
        self._segments = tempfile.mkdtemp(prefix="dlr-", dir="/dev/shm")
        self.num_faults = 0
        self._parts: dict[str, Any] = {}
        """What was made for it on this machine, to be removed with it."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._read_until: dict[Path, int] = {}
        self._ranks_of_nodes: dict[int, int] | None = None
        if of_nodes:
            subnet = (os.getpid() * 8 + int(self._name.rsplit("-", 1)[1])) % 250
            self._parts["networks"] = machine.Networks(f"dlrc{os.getpid()}-{subnet}", NUM_RANKS, subnet)
            for rank in range(NUM_RANKS):
                self._parts[f"clock-{rank}"] = machine.Clock(folder, f"clock-{rank}")
                self._start(rank)
        else:
            if not machine.why_not(("root", "memory")):
                self._parts["memory"] = machine.Cgroup("memory", self._name)
            self._start(None)

    def _start(self, node_rank: int | None) -> None:
        name = "all" if node_rank is None else f"node-{node_rank}"
        places = [Path(self._runtime, name), Path(self._segments, name)]
        for place in places:
            place.mkdir()
        environment = {
            **os.environ,
            "TMPDIR": str(places[0]),
            "DLROVER_SNAPSHOT_DIR": str(places[1]),
            "DLROVER_JOB_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
            "DLROVER_LOG_LEVEL": "INFO",
        }
        command = [
            sys.executable, "-m", "dlrover.trainer.torch.main", "--canary=20", f"--rdzv-endpoint={self.address}",
            f"--log-dir={self.folder / 'logs' / name}",
        ]  # fmt: skip
        script = [str(JOB), str(self.folder)]
        if node_rank is None:
            command += [f"--nproc-per-node={NUM_RANKS}", *script]
        else:
            environment |= self._parts[f"clock-{node_rank}"].environment
            networks = self._parts["networks"]
            script += ["--network", networks.paths[node_rank], "--coordinator", networks.addresses[0]]
            command += [f"--nnodes={NUM_RANKS}", f"--node-rank={node_rank}", "--nproc-per-node=1", *script]
        if "memory" in self._parts:  # born in it
            procs = self._parts["memory"].path / "cgroup.procs"
            command = ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *command]
        with (self.folder / f"out-{name}").open("wb") as out:
            self._processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
                )
            )

    @property
    def is_over(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def steps(self) -> list[tuple[int, int]]:
        """Step and life of each rank."""
        found = []
        for rank in range(NUM_RANKS):
            try:
                step, life = (self.folder / f"step-{rank}").read_text().split()
                found.append((int(step), int(life)))
            except (FileNotFoundError, ValueError):
                found.append((0, -1))
        return found

    @property
    def life(self) -> int:
        return max(life for _, life in self.steps())

    @property
    def stepped_at(self) -> float:
        """When the last rank finished its newest step."""
        return max((self.folder / f"step-{rank}").stat().st_mtime for rank in range(NUM_RANKS))

    def train(self, num_steps: int, *, timeout: float = 180.0) -> None:
        """All ranks in one life, and so many steps more."""

        def together() -> bool:
            lives = {life for _, life in self.steps()}
            return len(lives) == 1 and -1 not in lives

        self._wait(together, timeout)
        goal = max(step for step, _ in self.steps()) + num_steps
        self._wait(lambda: min(step for step, _ in self.steps()) >= goal and together(), timeout)

    def inject(self, kind: str, rank: int) -> float:
        """The moment at which it happened."""
        self.num_faults += 1
        told = {"number": self.num_faults, "kind": kind, "rank": rank, "after_step": max(self.steps())[0] + 3}
        told |= self._prepare(kind, rank)
        self._read_until = {path: path.stat().st_size for path in self.folder.glob("out-*")}
        (self.folder / "fault.new").write_text(json.dumps(told))
        (self.folder / "fault.new").rename(self.folder / "fault.json")
        mark = self.folder / f"injected-{self.num_faults}"
        self._wait(mark.exists, 60)
        return mark.stat().st_mtime

    def has_stalled(self) -> bool:
        """Since the last fault some agent has found that a rank stands still, which is when it is looked at."""
        for path, start in self._read_until.items():
            with path.open("rb") as file:
                file.seek(start)
                if b"stalled ranks: [" in file.read():
                    return True
        return False

    def _prepare(self, kind: str, rank: int) -> dict[str, Any]:
        """What the fault needs of the machine, and how to find it."""
        match kind:
            case "full-disk":
                if "small-disk" not in self._parts:
                    self._parts["small-disk"] = machine.SmallDisk(self.folder / "small-disk")
                return {"path": str(self._parts["small-disk"].place)}
            case "disk-stall":
                if "disk" not in self._parts:
                    self._parts["disk"] = machine.PausableDisk(self.folder / "disk")
                disk = self._parts["disk"]
                return {"path": str(disk.place / "data"), "pid": disk.pid}
            case "fork-limit":
                name = f"{self._name}-{self.num_faults}"
                self._parts[name] = machine.Cgroup("pids", name)
                return {"path": str(self._parts[name].path)}
            case "memory-kill":
                return {"path": str(self._parts["memory"].path)}
            case "clock-jump":
                return {"path": str(self._parts[f"clock-{rank}"].path)}
        return {}

    def undo(self, kind: str, rank: int) -> None:
        """The cause goes away; whom it has caught is another matter."""
        (self.folder / "fault.json").unlink(missing_ok=True)
        match kind:
            case "disk-stall":
                self._parts["disk"].go_on()
            case "network-loss":
                self._parts["networks"].heal(rank)
            case "memory-kill":
                self._parts["memory"].lift()

    def release(self) -> None:
        """Whoever is still in trouble is killed, and the job goes on."""
        mark = self.folder / f"injected-{self.num_faults}"
        for line in mark.read_text().splitlines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)

    def diagnosis(self) -> Diagnosis:
        answer = asyncio.run(ask(self.address, AskDiagnosis(last=100), token=TOKEN, timeout=10))
        assert isinstance(answer, Diagnosis)
        return answer

    def rank_of(self, culprit: Culprit) -> int:
        """A verdict about a node names no rank: in a job of nodes with one rank each that is the node's."""
        if culprit.global_rank >= 0 or len(self._processes) == 1:
            return culprit.global_rank
        if self._ranks_of_nodes is None:
            answer = asyncio.run(ask(self.address, AskGoodput(), token=TOKEN, timeout=10))
            assert isinstance(answer, GoodputStatus)
            self._ranks_of_nodes = {node.node: node.node_rank for node in answer.nodes}
        return self._ranks_of_nodes.get(culprit.node, -1)

    def close(self) -> None:
        (self.folder / "end").touch()
        until = time.monotonic() + 20
        for process in self._processes:
            self._end(process, until)
        for part in self._parts.values():
            if hasattr(part, "close"):
                part.close()
        shutil.rmtree(self._runtime, ignore_errors=True)
        shutil.rmtree(self._segments, ignore_errors=True)

    def _end(self, process: subprocess.Popen[bytes], until: float) -> None:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait(self, condition: Callable[[], bool], timeout: float) -> None:
        until = time.monotonic() + timeout
        while not condition():
            if self.is_over:
                said = "".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("out-*")))
                raise RuntimeError(f"the job ended: {said[-2000:]}")
            if time.monotonic() > until:
                raise RuntimeError(f"not within {timeout:g} s; see {self.folder}")
            time.sleep(0.05)  # files of other processes: nothing tells when they change
