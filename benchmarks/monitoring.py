"""
What watching costs: the same training step with and without the hooks, each hook by itself, and the agent's share.

    python benchmarks/monitoring.py [--rounds 12] [--steps 10]

Two processes train the same model, one hooked and one not, and take turns, a few steps each, so that whatever else the machine does
meets both. Compared are medians over the rounds, of wall time and of processor time; the processor time is what a loaded machine still
tells truly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from figures import summarise, table

from dlrover.agent.config import WatchConfig
from dlrover.agent.monitor.progress import WorkerWatch
from dlrover.agent.monitor.worker_view import WatchedWorker
from dlrover.protocol.messages.job import Incarnation, NodeId, Round, WorldSpec
from dlrover.protocol.messages.watch import WatchObservation

STEP_SECONDS = 0.05
NUM_CALLS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="in each turn")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve()
        return
    steps(arguments.rounds, arguments.steps)
    asyncio.run(agent_side())


def steps(num_rounds: int, num_steps: int) -> None:
    seats = [WatchedWorker(local_rank=0, global_rank=0) for _ in range(2)]
    trainers = {
        "hooked": _start(seats[0], is_hooked=True),
        "plain": _start(seats[1], is_hooked=False),
    }
    try:
        _ask(trainers["plain"], {"repeat": _ask(trainers["hooked"], {"calibrate": STEP_SECONDS})})
        wall: dict[str, list[float]] = {name: [] for name in trainers}
        cpu: dict[str, list[float]] = {name: [] for name in trainers}
        for number in range(num_rounds + 1):
            # Who is first changes: the second finds the caches of the first.
            for name in sorted(trainers, reverse=number % 2 == 1):
                took = _ask(trainers[name], {"steps": num_steps})
                if number:  # the first turn warms up
                    wall[name].append(took["wall"])
                    cpu[name].append(took["cpu"])
        hooks = _ask(trainers["hooked"], {"hooks": NUM_CALLS})
    finally:
        for trainer in trainers.values():
            trainer.kill()
            trainer.communicate()
        for seat in seats:
            seat.close()
    rows = []
    for kind, samples in (("wall", wall), ("processor", cpu)):
        hooked, plain = summarise(samples["hooked"]), summarise(samples["plain"])
        assert hooked is not None, "no rounds"
        assert plain is not None, "no rounds"
        rows.append(
            [
                f"step, {kind} time",
                f"{hooked.median * 1e3:.3f} ms",
                f"{plain.median * 1e3:.3f} ms",
                f"{(hooked.median / plain.median - 1) * 100:+.2f} %",
            ]
        )
    print(table(["of a step with a batch, a collective and a report", "hooked", "plain", "more"], rows))
    per_step = sum(hooks.values())
    print()
    print(table(["one hook", "adds"], [[name, f"{ns:.0f} ns"] for name, ns in hooks.items()]))
    print(f"\nall of them once: {per_step / 1e3:.1f} us, {per_step / STEP_SECONDS / 1e7:.4f} % of a step of 50 ms\n")


async def agent_side() -> None:
    observed: list[WatchObservation] = []
    with tempfile.TemporaryDirectory() as directory:
        watch = WorkerWatch(WatchConfig(), runtime_dir=directory, disks=[directory])
        watch.connect(observed.append, lambda: (NodeId(1), Incarnation(1)))
        watch.open_round(
            WorldSpec(
                round=Round(1),
                group_rank=0,
                group_world_size=1,
                first_global_rank=0,
                local_world_size=8,
                world_size=8,
                coordinator="localhost:1",
                restart_count=0,
            )
        )
        report = _cpu_of(watch.report, 200)
        look = _cpu_of(watch._look_at_pages, 200)
        monitor = watch._monitor
        assert monitor is not None
        begun = time.process_time()
        for _ in range(20):
            await monitor.sample()
        sample = (time.process_time() - begun) / 20
        watch.close_round()
    # A report each 5 s, a look at the pages at most each 2 s, a sample each 10 s.
    share = report / 5 + look / 2 + sample / 10
    rows = [
        ["progress report of 8 workers", f"{report * 1e6:.0f} us"],
        ["look at 8 pages", f"{look * 1e6:.0f} us"],
        ["sample of the node's resources", f"{sample * 1e3:.2f} ms"],
        ["together, of one core", f"{share * 100:.4f} %"],
    ]
    print(table(["the agent's side", "processor time"], rows))


def _cpu_of(call: Callable[[], object], count: int) -> float:
    begun = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begun) / count


def _start(seat: WatchedWorker, *, is_hooked: bool) -> subprocess.Popen[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    if is_hooked:
        environ |= {**seat.environment(), "DLROVER_AGENT_SOCKET": "none", "DLROVER_PROGRESS_HOOKS": "1"}
    return subprocess.Popen(
        [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )


def _ask(trainer: subprocess.Popen[str], question: dict[str, Any]) -> Any:
    assert trainer.stdin is not None, "started with a pipe"
    assert trainer.stdout is not None, "started with a pipe"
    trainer.stdin.write(json.dumps(question) + "\n")
    trainer.stdin.flush()
    return json.loads(trainer.stdout.readline())


# In the trainers.


def serve() -> None:
    from dlrover.trainer import environment
    from dlrover.trainer.worker import hooks as worker_hooks

    worker_hooks.install(environment.read(os.environ))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer(torch, dist)
    for line in sys.stdin:
        question = json.loads(line)
        if "calibrate" in question:
            answer: Any = trainer.calibrate(question["calibrate"])
        elif "repeat" in question:
            answer = trainer.repeat = question["repeat"]
        elif "steps" in question:
            wall, cpu = time.perf_counter(), time.thread_time()
            trainer.train(question["steps"])
            taken = question["steps"]
            answer = {"wall": (time.perf_counter() - wall) / taken, "cpu": (time.thread_time() - cpu) / taken}
        else:
            answer = trainer.hooks(question["hooks"])
        print(json.dumps(answer), flush=True)


class Trainer:
    def __init__(self, torch: Any, dist: Any) -> None:
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        self._torch, self._dist = torch, dist
        self._model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        self._loader = DataLoader(TensorDataset(torch.randn(64 * 256, 256)), batch_size=256)
        self._batches = iter(self._loader)
        self._step = 0
        self.repeat = 1

    def calibrate(self, seconds: float) -> int:
        self.train(3)
        begun = time.thread_time()
        self.train(5)
        self.repeat = max(1, round(seconds / ((time.thread_time() - begun) / 5)))
        return self.repeat

    def train(self, count: int) -> None:
        from dlrover.trainer import report

        for _ in range(count):
            try:
                (batch,) = next(self._batches)
            except StopIteration:
                self._batches = iter(self._loader)
                (batch,) = next(self._batches)
            out = batch
            for _ in range(self.repeat):
                out = self._model(out)
            loss = out.square().mean()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            shown = loss.detach().clone()
            self._dist.all_reduce(shown)
            self._step += 1
            report(self._step, loss=float(shown))

    def hooks(self, count: int) -> dict[str, float]:
        """Nanoseconds that each adds to what it is put around."""
        from dlrover.trainer import phases
        from dlrover.trainer.torch.hooks import progress_hooks

        writer = phases.current()
        assert writer is not None, "this trainer has no page"
        torch, tensor = self._torch, self._torch.ones(4, 4)

        def nothing(*_args: Any, **_kwargs: Any) -> None:
            return None

        seen = progress_hooks._Collectives(torch, sys.modules["torch.distributed.distributed_c10d"])  # type: ignore[arg-type]
        stepping = progress_hooks._StepHooks(torch, None)

        def step() -> None:
            stepping.before(self._optimizer, (), {})
            stepping.after(self._optimizer, (), {})

        def tell() -> None:
            writer.set_step(7, 2)
            writer.set_metrics({"loss": 1.0})
            writer.touch()

        backward = progress_hooks._around(torch, phases.BACKWARD)(nothing)
        batch = progress_hooks._around_batches(nothing)
        collective = seen.around("all_reduce", nothing)
        idle = min(_ns(lambda: nothing(tensor), count) for _ in range(5))
        calls: dict[str, Callable[[], Any]] = {
            "batch": lambda: batch(tensor),
            "backward": lambda: backward(tensor),
            "optimizer step": step,
            "collective": lambda: collective(tensor),
            "report, into the page": tell,
        }
        return {name: max(0.0, min(_ns(call, count) for _ in range(5)) - idle) for name, call in calls.items()}


def _ns(call: Callable[[], object], count: int) -> float:
    """The least of several, by processor time: what it costs when nobody interferes."""
    begun = time.thread_time_ns()
    for _ in range(count):
        call()
    return (time.thread_time_ns() - begun) / count


if __name__ == "__main__":
    main()
