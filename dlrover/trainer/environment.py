"""
What the agent tells its workers, read once.

The only place in the trainer that reads our environment variables. Outside `dlrover-run` there is no agent:
`current()` is None then, and whatever would talk to one does nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from msgspec import Struct

from dlrover.protocol.messages import Round


class WorkerEnvironment(Struct, frozen=True, kw_only=True):
    agent_socket: str
    job_name: str
    round: Round
    node_rank: int
    local_rank: int
    """On this node, also under --virtual-local-rank, which shows every script a LOCAL_RANK of 0."""
    global_rank: int
    paral_config_path: str
    metrics_path: str


def read(environ: Mapping[str, str]) -> WorkerEnvironment | None:
    """None outside `dlrover-run`."""
    if not environ.get("DLROVER_AGENT_SOCKET"):
        return None
    return WorkerEnvironment(
        agent_socket=environ["DLROVER_AGENT_SOCKET"],
        job_name=environ.get("DLROVER_JOB_NAME", ""),
        round=Round(int(environ.get("DLROVER_ROUND", "0"))),
        node_rank=int(environ.get("DLROVER_NODE_RANK", "0")),
        local_rank=int(environ.get("DLROVER_LOCAL_RANK", environ.get("LOCAL_RANK", "0"))),
        global_rank=int(environ.get("RANK", "0")),
        paral_config_path=environ.get("DLROVER_PARAL_CONFIG_PATH", ""),
        metrics_path=environ.get("RUNTIME_METRICS_PATH", ""),
    )


@functools.cache
def current() -> WorkerEnvironment | None:
    return read(os.environ)
