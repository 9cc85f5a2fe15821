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
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from dlrover.protocol.errors import JobError
from dlrover.unified.shell.messages import InstanceOrder
from dlrover.unified.store import KeyValues

PAUSE = 0.02
CHECK_SIZE = 1 << 20
"""Elements of the sum that checks the communication."""
PATIENCE = 300.0
"""Seconds for rank 0 to offer its address."""


@contextlib.contextmanager
def joined(order: InstanceOrder, store: KeyValues) -> Iterator[None]:
    """In the user's thread, around the entry point."""
    assert order.process_group is not None
    address, held = _coordinator(order, store)
    host, _, port = address.rpartition(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    os.environ.update(RANK=str(order.rank), WORLD_SIZE=str(order.num_ranks[order.role]))
    if held is not None:
        held.close()
    if not order.process_group.is_set_up:
        yield
        return
    import torch
    import torch.distributed as dist

    backend = order.process_group.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=order.process_group.timeout) if order.process_group.timeout else None
    dist.init_process_group(
        backend, init_method=f"tcp://{address}", rank=order.rank, world_size=order.num_ranks[order.role], timeout=limit
    )
    if order.process_group.is_checked:
        check_communication(order.num_ranks[order.role])
    try:
        yield
    finally:
        if sys.exc_info()[0] is None or backend == "gloo":
            dist.destroy_process_group()


def check_communication(world_size: int) -> float:
    """Seconds that one multiplication and one sum over all instances took. Raises `JobError`: the role starts again then."""
    import torch
    import torch.distributed as dist

    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    matrix = torch.eye(256, device=device)
    total = torch.ones(CHECK_SIZE, device=device) * (matrix @ matrix)[0, 0]
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        raise JobError(f"The communication check failed: {error}") from error
    if total[0].item() != world_size or total[-1].item() != world_size:
        raise JobError(f"The communication check summed to {total[0].item():g} over {world_size} instances.")
    return round(time.monotonic() - began, 3)


def historical_variables(order: InstanceOrder) -> dict[str, str]:
    """By which scripts of the original know who they are."""
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
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if not visible:
        return "cpu"
    local_rank = order.rank % order.local_world_size
    return f"cuda:{local_rank if len(visible) > local_rank else 0}"


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
    deadline = time.monotonic() + PATIENCE
    while (data := store.get(key)) is None:
        if time.monotonic() > deadline:
            raise JobError(f"Rank 0 of role {order.role} offered no address within {PATIENCE:.0f} s.")
        time.sleep(PAUSE)  # the store tells nobody of a new key
    return data.decode(), None
