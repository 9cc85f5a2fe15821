"""
A role that trains together in actors: rank 0 offers an address, all join, and the role starts again as a whole when one of them is lost.

This is what the historical interface promises for a class or function. Forked workers of an elastic role recover faster, and keep more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from statistics import fmean, median, stdev
from typing import Any

from dlrover.protocol.errors import ConfigError, JobError
from dlrover.unified.shell.messages import InstanceOrder
from dlrover.unified.shell.told_events import ELASTIC_WORKER, ToldEvents
from dlrover.unified.store import KeyValues

PAUSE = 0.02
CHECK_ROUNDS = 20
CHECK_TIMEOUT = timedelta(seconds=300)
CHECK_SIZE = 1 << 20
"""Elements of the sum that checks the communication."""
LEAST_SLOWNESS = 1.1
"""Of the mean. Ranks that differ by less are equally fast, however small their deviation is."""
PATIENCE = 300.0
"""Seconds for a rank to write what the others need of it."""


@contextlib.contextmanager
def joined(order: InstanceOrder, store: KeyValues) -> Iterator[None]:
    """In the user's thread, around the entry point."""
    assert order.process_group is not None
    if not order.is_named_as_of_old and not order.is_device_by_rank:
        _see_devices_of_node(order, store)
    address, held = _coordinator(order, store)
    host, _, port = address.rpartition(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    size = order.local_world_size
    os.environ.update(RANK=str(order.rank), WORLD_SIZE=str(order.num_ranks[order.role]))
    os.environ.update(LOCAL_RANK=str(order.rank % size), LOCAL_WORLD_SIZE=str(size))
    if held is not None:
        held.close()
    if not order.process_group.is_set_up:
        yield
        return
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available() and (device := _cuda_device(order)) != "cpu":
        torch.cuda.set_device(device)
    backend = order.process_group.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=order.process_group.timeout) if order.process_group.timeout else None
    world_size = order.num_ranks[order.role]
    events = ToldEvents(ELASTIC_WORKER, is_told=order.is_named_as_of_old)
    with events.span("#init_process_group", backend=backend):
        dist.init_process_group(
            backend, init_method=f"tcp://{address}", rank=order.rank, world_size=world_size, timeout=limit
        )
    if order.process_group.is_checked:
        with events.span("#comm_check") as span:
            seconds = check_communication(world_size)
            if span is not None:
                span.extra_args(result=seconds[order.rank])
        if order.rank == 0 and (slow := stragglers(seconds)):
            shown = ", ".join(f"rank {rank} took {seconds[rank]:g} s" for rank in slow)
            print(
                f"Role {order.role}: these ranks were slow in the communication check: {shown}; the median is "
                f"{median(seconds):g} s."
            )
    try:
        yield
    finally:
        if sys.exc_info()[0] is None or backend == "gloo":
            dist.destroy_process_group()


def check_communication(world_size: int) -> list[float]:
    """Seconds that each rank needed for its multiplications. Raises `JobError` if they or a sum over all fail: the role starts again then."""
    import torch
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    matrix = torch.eye(256, device=device)
    began = time.monotonic()
    for _ in range(CHECK_ROUNDS):
        matrix = matrix @ matrix
    first = matrix[0, 0].item()  # what runs on a device has ended then
    mine = torch.tensor([time.monotonic() - began], device=device)
    all_ = [torch.zeros_like(mine) for _ in range(world_size)]
    total = torch.ones(CHECK_SIZE, device=device) * first
    try:
        dist.all_reduce(total, async_op=True).wait(CHECK_TIMEOUT)
        dist.all_gather(all_, mine, async_op=True).wait(CHECK_TIMEOUT)
    except RuntimeError as error:
        raise JobError(f"The communication check failed: {error}") from error
    if total[0].item() != world_size or total[-1].item() != world_size:
        raise JobError(f"The communication check summed to {total[0].item():g} over {world_size} instances.")
    return [round(each.item(), 3) for each in all_]


def stragglers(seconds: Sequence[float]) -> list[int]:
    """
    Ranks that are far slower than the others; empty for fewer than three.

    The two fastest are normal. So is the next one, if it is within the mean and three standard deviations of those before it. The first that is
    not, and all slower ones, are stragglers.
    """
    order = sorted(range(len(seconds)), key=lambda rank: seconds[rank])
    for place in range(2, len(order)):
        normal = [seconds[rank] for rank in order[:place]]
        limit = max(fmean(normal) + 3 * stdev(normal), LEAST_SLOWNESS * fmean(normal))
        if seconds[order[place]] > limit:
            return sorted(order[place:])
    return []


def visible_devices(gpus: Sequence[Sequence[str]]) -> list[str]:
    """
    Of the ranks of a node, by what Ray gave to each: the device of local rank N is at place N, further ones come after those.

    Empty: a rank has none, or shares one with others, and sees what Ray shows it.
    """
    if not gpus or not all(gpus):
        return []
    ordered = [each[0] for each in gpus] + [device for each in gpus for device in each[1:]]
    return ordered if len(set(ordered)) == len(ordered) else []


def torch_device(*, gpus: Sequence[str], visible: str | None, local_rank: int, is_by_rank: bool) -> str:
    """`gpus`: ids that Ray gave to this instance. `visible`: CUDA_VISIBLE_DEVICES. Raises `ConfigError`."""
    if is_by_rank:
        return f"cuda:{local_rank}"
    if not gpus:
        return "cpu"
    if visible is None:
        return f"cuda:{gpus[0]}"
    ids = [each.strip() for each in visible.split(",")]
    if gpus[0] not in ids:
        raise ConfigError(
            f"Ray gave GPU {gpus[0]} to this instance, but CUDA_VISIBLE_DEVICES={visible} does not contain it. "
            "Remove this variable from the `env` of the role and of the job."
        )
    return f"cuda:{ids.index(gpus[0])}"


def historical_variables(order: InstanceOrder) -> dict[str, str]:
    """By which scripts of the original know who they are. Raises `ConfigError`."""
    return {
        "JOB": order.job,
        "ROLE": order.role,
        "NAME": historical_name(order.role, order.rank, order.num_ranks[order.role], order.local_world_size),
        "RANK": str(order.rank),
        "WORLD_SIZE": str(order.num_ranks[order.role]),
        "LOCAL_RANK": str(order.rank % order.local_world_size),
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "NODE_RANK": str(order.rank // order.local_world_size),
        "ACCELERATE_TORCH_DEVICE": _device(order),
    }


def historical_name(role: str, rank: int, world_size: int, local_world_size: int) -> str:
    return f"{role}_{world_size}-{rank}_{local_world_size}-{rank % local_world_size}"


def _device(order: InstanceOrder) -> str:
    import ray

    return torch_device(
        gpus=[str(each) for each in ray.get_gpu_ids()],
        visible=order.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")),
        local_rank=order.rank % order.local_world_size,
        is_by_rank=order.is_device_by_rank,
    )


def _cuda_device(order: InstanceOrder) -> str:
    """CUDA that began in the entry point, before the ranks knew each other's GPUs, goes on with the one that Ray showed."""
    import ray
    import torch

    device = _device(order)
    number = int(device.partition(":")[2] or 0)
    if order.is_device_by_rank or "CUDA_VISIBLE_DEVICES" in order.environ:
        return device
    if number < torch._C._cuda_getDeviceCount():  # `torch.cuda.device_count` may read the variable anew
        return device
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(each) for each in ray.get_gpu_ids())
    return _device(order)


def _see_devices_of_node(order: InstanceOrder, store: KeyValues) -> None:
    """
    As below torchrun, a rank sees the GPUs of all ranks of its role on its node, and LOCAL_RANK is the number of its own.

    Ray shows each rank its own GPU alone, as number 0. Too late if the module of the entry point has used CUDA: see `_cuda_device`.
    """
    import ray

    mine = [str(each) for each in ray.get_gpu_ids()]
    if not mine or "CUDA_VISIBLE_DEVICES" in order.environ:
        return
    prefix = f"{order.job_uid}/devices/{order.role}/{order.incarnation}/"
    store.put(f"{prefix}{order.rank}", ",".join(mine).encode())
    first = order.rank - order.rank % order.local_world_size
    found = [
        _await_key(store, f"{prefix}{rank}", f"Rank {rank} of role {order.role} did not report its devices").split(",")
        for rank in range(first, first + order.local_world_size)
    ]
    if devices := visible_devices(found):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)


def _await_key(store: KeyValues, key: str, otherwise: str) -> str:
    """Raises `JobError`."""
    deadline = time.monotonic() + PATIENCE
    while (data := store.get(key)) is None:
        if time.monotonic() > deadline:
            raise JobError(f"{otherwise} within {PATIENCE:.0f} s.")
        time.sleep(PAUSE)  # the store tells nobody of a new key
    return data.decode()


def _coordinator(order: InstanceOrder, store: KeyValues) -> tuple[str, Any]:
    """All ranks of a life of the role have the same incarnation, because they start again together."""
    key = f"{order.job_uid}/coordinator/{order.role}/{order.incarnation}"
    if order.rank == 0:
        import ray

        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        address = f"{ray.util.get_node_ip_address()}:{held.getsockname()[1]}"
        store.put(key, address.encode())
        return address, held
    return _await_key(store, key, f"Rank 0 of role {order.role} did not report its address"), None
