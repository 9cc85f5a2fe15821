"""
The work of a node check, the same on every kind of device: multiply matrices, run a collective, say how long it took.

The result goes to a file, so that the agent need not parse a log; the exit code says which part failed, because only
some failures are the node's own fault. The time is the computation plus the collective, each measured by the device
itself. Waiting for a slower partner to arrive at the first collective is not part of it: it would tell of the partner.
All times are milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import enum
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn

from msgspec import Struct

from dlrover.trainer.torch.node_check.accelerator import Accelerator, CollectiveKind
from dlrover.trainer.torch.node_check.settings import CheckSettings, FaultKind, read


class ExitCode(enum.IntEnum):
    """How the task ended."""

    OK = 0
    COMPUTE = 10
    """Certainly this node's fault."""
    COMMUNICATION = 11
    """This node, a partner, or what is between."""
    SETUP = 12
    """No such device, bad settings, or the group did not come together."""


class CheckTaskResult(Struct, frozen=True, kw_only=True):
    """What is written for the agent."""

    time: float
    local_rank: int
    compute_ms: float
    communication_ms: float
    bandwidth_gbps: float
    """Bus bandwidth of the collective in 10^9 bytes a second; 0 where there is no partner."""


class Bandwidth(Struct, frozen=True, kw_only=True):
    """In 10^9 bytes a second."""

    algorithm: float
    bus: float
    """What the wires really carried: comparable between world sizes."""


class _Failed(Exception):
    def __init__(self, code: ExitCode) -> None:
        super().__init__(code.name)
        self.code = code


def run(prepare: Callable[[MutableMapping[str, str]], Accelerator], environ: MutableMapping[str, str]) -> ExitCode:
    """
    The whole task. `prepare` loads what the device needs; it may set variables, because nothing has read them yet.

    What went wrong is on stderr, and the exit code says in which part.
    """
    try:
        with _part(ExitCode.SETUP):
            settings = read(environ)
            # Nobody computes before all are in the group: whoever still joins would take a failure for one of the setup.
            environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
            accelerator = prepare(environ)
            accelerator.use(settings.local_rank)
            if settings.slot == 0:
                print(f"Node check: {accelerator.describe()}, {accelerator.backend}", flush=True)
            _inject(settings, FaultKind.SETUP)
            _open_group(accelerator, settings)
        with _part(ExitCode.COMPUTE):
            compute_ms = _compute(accelerator, settings)
        with _part(ExitCode.COMMUNICATION):
            communication_ms, bandwidth = _communicate(accelerator, settings)
            _inject(settings, FaultKind.COMMUNICATION)
        with _part(ExitCode.SETUP):
            if settings.slot == 0:
                print(_in_words(accelerator, settings, compute_ms, communication_ms, bandwidth), flush=True)
            result = CheckTaskResult(
                time=round(compute_ms + communication_ms, 3),
                local_rank=settings.slot,
                compute_ms=round(compute_ms, 3),
                communication_ms=round(communication_ms, 3),
                bandwidth_gbps=round(bandwidth.bus, 3),
            )
            write_result(settings.directory, result)
            _close_group()
    except _Failed as failure:
        return failure.code
    return ExitCode.OK


def leave(code: ExitCode) -> NoReturn:
    """
    End the process without taking the interpreter apart, which with torch loaded takes longer than the whole check.

    After success exit handlers run first, so that device libraries give the device back. After a failure they do not:
    they would wait for collectives that will never complete.
    """
    if code is ExitCode.OK:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_result(directory: str, result: CheckTaskResult) -> None:
    """Whole or not at all: the agent may look while we write."""
    if not directory:
        return
    path = os.path.join(directory, f"{result.local_rank}.json")
    temporary = f"{path}.{os.getpid()}.part"
    fields = {name: getattr(result, name) for name in result.__struct_fields__}
    with open(temporary, "w") as file:
        json.dump(fields, file)
    os.replace(temporary, path)


def bandwidth_of(num_bytes: int, time_ms: float, world_size: int, collective: CollectiveKind) -> Bandwidth:
    """`num_bytes` is the size of the whole result on one rank; `time_ms` the time of one collective."""
    if time_ms <= 0 or world_size < 1:
        return Bandwidth(algorithm=0.0, bus=0.0)
    algorithm = num_bytes / time_ms / 1e6
    share = (world_size - 1) / world_size
    return Bandwidth(
        algorithm=algorithm, bus=algorithm * (2 * share if collective is CollectiveKind.ALL_REDUCE else share)
    )


@contextlib.contextmanager
def _part(code: ExitCode) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # The edge of the process: whatever it was, it is shown, and the code tells the agent which part it was.
        traceback.print_exc()
        print(f"Node check failed ({code.name.lower()}): {error}", file=sys.stderr, flush=True)
        raise _Failed(code) from error


def _open_group(accelerator: Accelerator, settings: CheckSettings) -> None:
    import torch.distributed as dist

    host = settings.coordinator_host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    dist.init_process_group(
        accelerator.backend,
        init_method=f"tcp://{host}:{settings.coordinator_port}",
        rank=settings.global_rank,
        world_size=settings.world_size,
        timeout=datetime.timedelta(seconds=settings.timeout),
    )


def _close_group() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def _compute(accelerator: Accelerator, settings: CheckSettings) -> float:
    import torch

    work = accelerator.workload
    shape = (work.matrix_size, work.matrix_size)
    left = torch.rand(shape, device=accelerator.device(), dtype=accelerator.dtype())
    right = torch.rand(shape, device=accelerator.device(), dtype=accelerator.dtype())
    product = left
    for _ in range(work.num_warmup_matmuls):
        product = left @ right
    accelerator.synchronize()
    start = accelerator.mark()
    for _ in range(work.num_matmuls):
        product = left @ right
    compute_ms = accelerator.elapsed_ms(start, accelerator.mark())
    if not bool(torch.isfinite(product).all()):
        raise ArithmeticError("the device computed a wrong result: the product of finite matrices is not finite")
    _inject(settings, FaultKind.COMPUTE)
    if settings.faults.delay:
        time.sleep(settings.faults.delay)
        compute_ms += settings.faults.delay * 1000
    return compute_ms


def _communicate(accelerator: Accelerator, settings: CheckSettings) -> tuple[float, Bandwidth]:
    import torch

    work = accelerator.workload
    _inject(settings, FaultKind.HANG)
    data = torch.ones(work.num_floats, device=accelerator.device(), dtype=torch.float32)
    once, num_bytes = _collective(work.collective, data, settings.world_size)
    for _ in range(work.num_warmup_collectives):
        once()
    accelerator.synchronize()
    start = accelerator.mark()
    for _ in range(work.num_collectives):
        once()
    communication_ms = accelerator.elapsed_ms(start, accelerator.mark())
    each_ms = communication_ms / max(work.num_collectives, 1)
    return communication_ms, bandwidth_of(num_bytes, each_ms, settings.world_size, work.collective)


def _collective(kind: CollectiveKind, data: Any, world_size: int) -> tuple[Callable[[], object], int]:
    """One collective to repeat, and the bytes of its result. The maximum keeps values finite, however often."""
    import torch
    import torch.distributed as dist

    if kind is CollectiveKind.ALL_GATHER:
        parts = [torch.empty_like(data) for _ in range(world_size)]
        return lambda: dist.all_gather(parts, data), world_size * data.numel() * data.element_size()
    return lambda: dist.all_reduce(data, op=dist.ReduceOp.MAX), data.numel() * data.element_size()


def _inject(settings: CheckSettings, kind: FaultKind) -> None:
    if settings.faults.kind is not kind:
        return
    if kind is FaultKind.HANG:
        print("MOCK_ERR_RANK: hanging", file=sys.stderr, flush=True)
        while True:
            signal.pause()
    raise RuntimeError(f"MOCK_ERR_RANK: injected {kind} failure on local rank {settings.slot}")


def _in_words(
    accelerator: Accelerator,
    settings: CheckSettings,
    compute_ms: float,
    communication_ms: float,
    bandwidth: Bandwidth,
) -> str:
    work = accelerator.workload
    return (
        f"Node check: elapsed {compute_ms + communication_ms:.1f} ms; {work.num_matmuls} matmuls of size "
        f"{work.matrix_size} in {compute_ms:.1f} ms. {work.num_collectives} x {work.collective} of {work.num_floats} "
        f"floats over {settings.world_size} ranks in {communication_ms:.1f} ms, algorithm bandwidth "
        f"{bandwidth.algorithm:.2f} GB/s, bus bandwidth {bandwidth.bus:.2f} GB/s"
    )
