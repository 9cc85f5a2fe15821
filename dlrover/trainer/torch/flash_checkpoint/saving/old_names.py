"""Small functions of the original's engine module that extensions call by name. Our own engine decides in `agreement`."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

_LOOK_AFTER = 0.1


def check_all_rank_ready(group: Any, ready: bool) -> bool:
    """Whether all ranks of the group are ready; without one, whether this rank is."""
    if not group:
        return ready
    unready = torch.tensor([int(not ready)], dtype=torch.int64)
    dist.all_reduce(unready, group=group)
    return bool(unready.item() == 0)


def verify_all_rank_step_consistent(group: Any, step: int) -> bool:
    """Whether all ranks of the group name the same step. As whole numbers: a float would take 16,777,217 for its neighbour."""
    if not group:
        return True
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, torch.tensor([step], dtype=torch.int64), group=group)
    return all(each.item() == step for each in found)


def start_saver_process() -> None:
    """Nothing to start: the agent saves, or a thread of this process where there is no agent."""


def wait_socket_server(socket_file: str, timeout: float = 60) -> None:
    """Until a server's socket file is there. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    while not os.path.exists(socket_file):
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"{socket_file} did not appear within {timeout:g} s. Check that the process that serves it runs."
            )
        time.sleep(_LOOK_AFTER)
