"""
`TF_CONFIG` for the workers of a world, as `MultiWorkerMirroredStrategy` wants it: the address of each, in the order of their ranks.

Each worker chooses a port and tells it to the others through the store of its round, before the user's script begins. TensorFlow binds the port itself and
refuses to share it, so for a moment it is free: who loses it to another process fails to start, and the next round has other ports.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.kv import MAX_WAIT, KvGet, KvSet, KvValues
from dlrover.trainer.agent_link import Link, current_link
from dlrover.trainer.environment import WorkerEnvironment
from dlrover.trainer.tensorflow.config import VARIABLE, WORKER, TfConfig, TfTask

PATIENCE = 600.0
"""Seconds for all workers of the round to tell their addresses."""
_MARGIN = 5.0
_PREFIX = "tf-config/"


def join_world(
    where: WorkerEnvironment,
    environ: Mapping[str, str] = os.environ,
    link: Link | None = None,
    *,
    patience: float = PATIENCE,
    longest_wait: float = MAX_WAIT,
) -> None:
    """Raises TimeoutError. Waits for all workers of the round."""
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    link = current_link() if link is None else link
    address = f"{_in_brackets(where.node_host)}:{_free_port(where.node_host)}"
    link.ask(KvSet(items={f"{_PREFIX}{rank}": address.encode()}, round=where.round), timeout=patience)
    config = TfConfig(
        cluster={WORKER: _addresses(where, size, link, patience, longest_wait)},
        task=TfTask(type=WORKER, index=rank),
    )
    os.environ[VARIABLE] = config.to_text()


def _addresses(where: WorkerEnvironment, size: int, link: Link, patience: float, longest_wait: float) -> list[str]:
    keys = tuple(f"{_PREFIX}{rank}" for rank in range(size))
    end_at = time.monotonic() + patience
    while True:
        try:
            found = link.ask(KvGet(keys=keys, wait=longest_wait, round=where.round), timeout=longest_wait + _MARGIN)
        except Rejected as error:
            if error.code != ErrorCode.KV_TIMEOUT:
                raise
            if time.monotonic() > end_at:
                raise TimeoutError(
                    f"Not all {size} workers of round {where.round} reported their address within {patience:g} s."
                ) from error
            continue
        assert isinstance(found, KvValues), found
        return [value.decode() for value in found.values]


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host
