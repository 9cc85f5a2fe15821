"""
The reference job: what every launcher is measured with.

A plain torchrun-style script: DDP over gloo on CPU, one thread per worker, AdamW, about 50 ms of real computation a
step and a checkpoint (`torch.save`, atomic rename) after every step. It runs byte for byte the same under all
launchers.

Each rank appends one JSON line per event to `events/rank<R>.jsonl`. Times are CLOCK_MONOTONIC, which all processes of a
machine share, so the benchmark can compare them with the moment it sent SIGKILL.
"""

import time

SCRIPT_BEGAN_NS = time.monotonic_ns()  # before the expensive imports: tells interpreter start from `import torch`

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

IMPORTED_NS = time.monotonic_ns()

WIDTH = 512
NUM_LAYERS = 3
BATCH_SIZE = (
    384  # with one thread: about 50 ms a step on the development machine, forward, backward, AdamW and checkpoint
)
FIRST_STEPS = 3  # of a life; then it becomes as large as it shall be, out of the way of what is measured


class EventFile:
    """Appends whole lines with one write each: a SIGKILL may lose the newest line but never tears one."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._common = {
            "rank": rank,
            "pid": os.getpid(),
            "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        }

    def write(self, event: str, at_ns: int | None = None, **fields: int) -> None:
        line = {"event": event, "at_ns": at_ns or time.monotonic_ns(), **self._common, **fields}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


def process_began_ns() -> int:
    """When the kernel made this process (for a forked worker: the fork), to the 10 ms that /proc offers."""
    with open("/proc/self/stat") as stat:
        ticks_after_boot = int(stat.read().rpartition(")")[2].split()[19])
    booted_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    suspended_ns = booted_ns - time.monotonic_ns()  # starttime counts suspended time, the monotonic clock does not
    return ticks_after_boot * 1_000_000_000 // os.sysconf("SC_CLK_TCK") - suspended_ns


def step_reporter() -> Callable[[int], object]:
    """Under our launcher tell the agent about progress, as a user who cares would; elsewhere this imports nothing."""
    if "DLROVER_AGENT_SOCKET" in os.environ:
        try:
            from dlrover.trainer import report
        except ImportError:
            return lambda step: None
        return report
    return lambda step: None


def save(path: Path, state: dict[str, object]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="for the checkpoint and the event files")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument(
        "--resident-mib", type=int, default=0, help="memory to hold, touched after the first steps of a life"
    )
    args = parser.parse_args()

    events = EventFile(args.dir / "events", int(os.environ["RANK"]))
    events.write("process", process_began_ns())
    events.write("script", SCRIPT_BEGAN_NS)
    events.write("imported", IMPORTED_NS)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    events.write("initialised")

    torch.manual_seed(0)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    events.write("built")
    path = args.dir / "checkpoint.pt"
    step = 0
    if path.exists():
        state = torch.load(path)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    report = step_reporter()
    events.write("restored", step=step)
    ballast_at, ballast = step + FIRST_STEPS, None

    while step < args.steps:
        step += 1
        # The batch depends on step and rank only, so a redone step does exactly the same work.
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        batch = torch.randn(BATCH_SIZE, WIDTH, generator=generator)
        loss = nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            save(path, {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()})
        events.write("step", step=step)
        report(step)
        if step == ballast_at and args.resident_mib:
            ballast = torch.zeros(args.resident_mib << 20, dtype=torch.uint8).fill_(1)
            events.write("resident", step=ballast.numel() >> 20)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
