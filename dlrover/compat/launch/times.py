"""The original's `time_util`: seconds since the epoch, compared."""

from __future__ import annotations

import time

from dlrover.compat.launch.global_context import Context
from dlrover.compat.names.constants import JobConstant


def has_expired(timestamp: float, time_period: float) -> bool:
    return timestamp + time_period <= time.time()


def timestamp_diff_in_seconds(timestamp1: float, timestamp2: float) -> float:
    return abs(timestamp1 - timestamp2)


def get_pending_timeout() -> float:
    """0: pending nodes are waited for without limit."""
    limit: float = Context.singleton_instance().seconds_to_wait_pending_pod
    return 0 if limit <= 0 else max(limit, JobConstant.PENDING_NODE_TIMEOUT_DEFAULT_MIN)
