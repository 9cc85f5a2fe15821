"""
The job of the fault corpus: data-parallel training on gloo in which any rank can be told to go wrong, in any way of `FAULTS`.

Told by a file: `FOLDER/fault.json` with {"number": 3, "kind": "deadlock-lock", "rank": 2, "after_step": 40}. The rank does it once, at the first step
beyond, and writes `FOLDER/injected-3` at that moment. Everybody writes `FOLDER/step-RANK`: step and life. Steps go on where the last life ended, as
with a checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diagnosis_machine as machine
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from dlrover.trainer import report

STEP = 0.03
"""Seconds of work that each step pretends to do."""


_TRACER = """
import ctypes, os, sys, time
pid, mark = int(sys.argv[1]), sys.argv[2]
assert ctypes.CDLL(None).ptrace(16, pid, None, None) == 0  # PTRACE_ATTACH
os.waitpid(pid, 0x40000000)  # until it stands
open(mark, "w").write(f"{pid} 0\\n")
time.sleep(100000)
"""


class Samples(Dataset):  # type: ignore[type-arg]
    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if (self.folder / f"stuck-{self.rank}").exists():
            threading.Event().wait()
        return torch.full((16,), float(index % 7))


class Trainer:
    def __init__(self, folder: Path, *, num_loaders: int) -> None:
        self.folder = folder
        self.told: dict[str, Any] = {}
        """What was said of the fault."""
        self.mark = Path()
        """The file that tells of it."""
        self.rank = int(os.environ["RANK"])
        self.life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.trouble: Callable[[], None] | None = None
        self.loss: float | None = None
        self.tensor_size = 8
        self.operation = "all_reduce"
        self.ballast: list[bytearray] = []
        self.leak_mb = 0
        dist.init_process_group("gloo")
        self.second_group = dist.new_group(backend="gloo")
        self.logging_group = dist.new_group(backend="gloo")
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        (folder / f"stuck-{self.rank}").unlink(missing_ok=True)
        loader = DataLoader(Samples(folder, self.rank), batch_size=4, num_workers=num_loaders, prefetch_factor=2)
        self.batches = iter(loader)
        self.slowness = 0.0

    def run(self) -> None:
        start = torch.tensor([self._last_step()])
        dist.broadcast(start, 0)
        for step in itertools.count(int(start.item()) + 1):
            fault = self._fault(step)
            self.step(step, fault)
            (self.folder / f"step-{self.rank}.new").write_text(f"{step} {self.life}")
            (self.folder / f"step-{self.rank}.new").rename(self.folder / f"step-{self.rank}")
            if (self.folder / "end").exists():
                return

    def step(self, step: int, fault: Callable[[], None] | None) -> None:
        batch = next(self.batches)
        if fault is not None:
            fault()
        time.sleep(STEP + self.slowness)
        if self.leak_mb:
            self.ballast.append(bytearray(os.urandom(1) * (self.leak_mb << 20)))
        self.optimizer.zero_grad()
        loss = self.model(batch).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.synchronise()
        told = loss.item() if self.loss is None else self.loss
        report(step, loss=told)

    def synchronise(self) -> None:
        """A collective of the script's own, as for logging a mean."""
        total = torch.ones(self.tensor_size)
        if self.operation == "skip":
            return
        if self.operation == "broadcast":
            dist.broadcast(total, 3, group=self.logging_group)
        else:
            dist.all_reduce(total, group=self.logging_group)

    def _last_step(self) -> int:
        try:
            return int((self.folder / "step-0").read_text().split()[0])
        except (FileNotFoundError, IndexError):
            return 0

    def _fault(self, step: int) -> Callable[[], None] | None:
        try:
            told = json.loads((self.folder / "fault.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        mark = self.folder / f"injected-{told['number']}"
        if told["rank"] not in (self.rank, -1) or step <= told["after_step"]:
            return None
        if mark.exists() and not told["kind"].startswith(("crash-loop", "all-")):
            return None
        if told["number"] == self.told.get("number") and told["kind"] in _LATER:
            return None

        def go_wrong() -> None:
            self.told, self.mark = told, mark
            if told["kind"] not in _LATER:
                with mark.open("a") as file:
                    file.write(f"{os.getpid()} {step}\n")
            FAULTS[told["kind"]](self)

        return go_wrong


def _stop(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segv(trainer: Trainer) -> None:
    ctypes.string_at(0)


def _lock(trainer: Trainer) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _queue(trainer: Trainer) -> None:
    queue.Queue().get()  # type: ignore[var-annotated]


def _pipe(trainer: Trainer) -> None:
    os.read(os.pipe()[0], 1)


def _socket(trainer: Trainer) -> None:
    here, there = socket.socketpair()
    here.recv(1)
    there.close()


def _sleep(trainer: Trainer) -> None:
    time.sleep(1e6)


def _child(trainer: Trainer) -> None:
    subprocess.run(["sleep", "100000"], check=False)


def _skip(trainer: Trainer) -> None:
    trainer.operation = "skip"


def _extra(trainer: Trainer) -> None:
    dist.all_reduce(torch.ones(4), group=trainer.second_group)


def _shape(trainer: Trainer) -> None:
    trainer.tensor_size = 4096


def _operation(trainer: Trainer) -> None:
    trainer.operation = "broadcast"


def _threads(trainer: Trainer) -> None:
    """A second thread begins a collective of the group that the main thread uses at the end of the step."""
    source = (trainer.rank + 1) % dist.get_world_size()
    begun = threading.Event()

    def share() -> None:
        begun.set()
        dist.broadcast(torch.ones(1000), source, group=trainer.logging_group)

    threading.Thread(target=share, name="sharing", daemon=True).start()
    begun.wait()
    time.sleep(0.5)  # until it is inside: nothing says so


def _slow(trainer: Trainer) -> None:
    trainer.slowness = 4 * STEP


def _busy(trainer: Trainer) -> None:
    while True:
        pass


def _hold_gil(trainer: Trainer) -> None:
    sum(itertools.repeat(0))


def _loader_stuck(trainer: Trainer) -> None:
    (trainer.folder / f"stuck-{trainer.rank}").touch()
    for _ in range(100):
        next(trainer.batches)


def _loader(trainer: Trainer, number: int) -> None:
    for process in trainer.batches._workers:  # type: ignore[union-attr]
        os.kill(process.pid, number)
    for _ in range(100):
        next(trainer.batches)


def _leak(trainer: Trainer) -> None:
    trainer.leak_mb = 3


def _bad_loss(value: float) -> Callable[[Trainer], None]:
    def fault(trainer: Trainer) -> None:
        trainer.loss = value

    return fault


def _flip_bit(trainer: Trainer) -> None:
    weight = next(trainer.model.parameters()).data.view(-1).view(torch.int32)
    weight[3] ^= 1 << 12


def _full_disk(trainer: Trainer) -> None:
    Path(trainer.told["path"], "checkpoint").write_bytes(bytes(1 << 20))


def _disk_stall(trainer: Trainer) -> None:
    """The server of a file system hangs, and so does who reads from it."""
    os.kill(trainer.told["pid"], signal.SIGSTOP)
    Path(trainer.told["path"]).read_bytes()


def _network_loss(trainer: Trainer) -> None:
    machine.lose_all_packets()
    trainer.mark.write_text(f"{os.getpid()} 0\n")


def _clock_jump(trainer: Trainer) -> None:
    machine.move_clock(trainer.told["path"], 900.0 if trainer.told["number"] % 2 else -300.0)


def _fork_limit(trainer: Trainer) -> None:
    """Children that do not end, until the system gives no more."""
    machine.limit_processes(trainer.told["path"], 20)
    while True:
        subprocess.Popen(["sleep", "100000"])


def _memory_kill(trainer: Trainer) -> None:
    """More memory than the container has: the kernel kills the largest."""
    machine.limit_memory(trainer.told["path"], 96 << 20)
    for _ in range(64):
        trainer.ballast.append(bytearray(os.urandom(1) * (16 << 20)))
    time.sleep(10)  # the kernel is about to


def _process_limit(trainer: Trainer) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
    threading.Thread(target=time.sleep, args=(1,)).start()


def _memory_error(trainer: Trainer) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    bytearray(1 << 32)


def _raise(trainer: Trainer) -> None:
    raise ValueError("the data are not what they should be")


def _exit(trainer: Trainer) -> None:
    sys.exit(3)


def _save_stall(trainer: Trainer) -> None:
    path = trainer.folder / f"fifo-{time.monotonic_ns()}"
    os.mkfifo(path)  # nobody reads it: opening it does not return
    torch.save({"weights": torch.ones(8)}, path)


def _uninterruptible(trainer: Trainer) -> None:
    """A parent of vfork sleeps like one that waits for a disk, until its child goes on."""
    library = trainer.folder / "stall.so"
    if not library.exists():
        source = "#include <unistd.h>\nvoid stall(void) { if (vfork() == 0) { pause(); _exit(0); } }\n"
        partial = trainer.folder / f"stall-{os.getpid()}.so"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(partial)], input=source.encode(), check=True
        )
        partial.rename(library)
    ctypes.CDLL(str(library)).stall()


def _debugger(trainer: Trainer) -> None:
    """Somebody attaches a debugger and forgets about it: at whatever moment it is ready, and that one is noted."""
    subprocess.Popen([sys.executable, "-c", _TRACER, str(os.getpid()), str(trainer.mark)], stdin=subprocess.DEVNULL)


def _data_error(trainer: Trainer) -> None:
    raise OSError(5, "Input/output error")


_LATER = ("debugger", "network-loss")
"""They note the moment themselves."""
FAULTS: dict[str, Callable[[Trainer], None]] = {
    "kill": _kill,
    "segmentation-fault": _segv,
    "stop": _stop,
    "debugger": _debugger,
    "deadlock-lock": _lock,
    "deadlock-queue": _queue,
    "deadlock-pipe": _pipe,
    "deadlock-socket": _socket,
    "endless-sleep": _sleep,
    "waits-for-child": _child,
    "skipped-collective": _skip,
    "extra-collective": _extra,
    "mismatched-shape": _shape,
    "mismatched-operation": _operation,
    "threads-in-one-group": _threads,
    "slow-rank": _slow,
    "busy-loop": _busy,
    "gil-held": _hold_gil,
    "loader-stuck": _loader_stuck,
    "loader-stopped": lambda trainer: _loader(trainer, signal.SIGSTOP),
    "loader-killed": lambda trainer: _loader(trainer, signal.SIGKILL),
    "checkpoint-stall": _save_stall,
    "uninterruptible": _uninterruptible,
    "io-error": _data_error,
    "leak": _leak,
    "nan": _bad_loss(math.nan),
    "loss-spike": _bad_loss(1e9),
    "flipped-bit": _flip_bit,
    "full-disk": _full_disk,
    "disk-stall": _disk_stall,
    "network-loss": _network_loss,
    "clock-jump": _clock_jump,
    "fork-limit": _fork_limit,
    "memory-kill": _memory_kill,
    "process-limit": _process_limit,
    "memory-error": _memory_error,
    "exception": _raise,
    "exit-code": _exit,
    "crash-loop": _raise,
}


def _vary(trainer: Trainer, variation: str) -> Callable[[], None]:
    """What healthy jobs do."""

    def pause_with_cpu() -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            sum(range(10_000))

    def pause_with_io() -> None:
        until = time.monotonic() + 30
        path = trainer.folder / f"scratch-{trainer.rank}"
        while time.monotonic() < until:
            path.write_bytes(os.urandom(1 << 20))
            time.sleep(0.2)

    def evaluate() -> None:
        trainer.model.eval()
        with torch.no_grad():
            until = time.monotonic() + 12
            while time.monotonic() < until:
                trainer.model.module(torch.ones(4, 16))
                time.sleep(0.05)
        trainer.model.train()

    known: dict[str, Callable[[], None]] = {
        "pause-with-cpu": pause_with_cpu,
        "pause-with-io": pause_with_io,
        "short-pause": lambda: time.sleep(5.0),
        "evaluation": evaluate,
        "slow-first-step": lambda: time.sleep(20.0),
    }
    return known[variation]


for _name in ("pause-with-cpu", "pause-with-io", "short-pause", "evaluation", "slow-first-step"):
    FAULTS[_name] = lambda trainer, name=_name: _vary(trainer, name)()  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--loaders", type=int, default=1)
    parser.add_argument("--network", default="", help="network namespace to enter")
    parser.add_argument("--coordinator", default="", help="address of rank 0 in these networks")
    options: Any = parser.parse_args()
    if options.network:
        machine.enter_network(options.network)
        os.environ.update(MASTER_ADDR=options.coordinator, GLOO_SOCKET_IFNAME="eth0")
    trainer = Trainer(options.folder, num_loaders=options.loaders)
    trainer.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
