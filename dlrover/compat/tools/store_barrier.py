"""The barrier of the original's `store_util`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from dlrover.trainer.torch.kv_store import store_barrier


def barrier(store: Any, world_size: int, key_prefix: str, barrier_timeout: float = 300) -> None:
    """Wait until `world_size` callers have come here with this prefix, which serves once."""
    store_barrier(store, world_size, key_prefix, timedelta(seconds=barrier_timeout))
