"""
What the agent tells its workers, read once.

The only place in the trainer that reads our environment variables. Outside `dlrover-run` there is no agent:
`current()` is None then, and whatever would talk to one does nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from dlrover.protocol.messages.job import Round


class WorkerEnvironment(Struct, frozen=True, kw_only=True):
    agent_socket: str
    round: Round
    local_rank: int
    """On this node, also under --virtual-local-rank, which shows every script a LOCAL_RANK of 0."""
    job_name: str = ""
    node_rank: int = 0
    snapshot_home: str = ""
    """Where the segments of this node's workers are; empty: the agent keeps none."""
    snapshot_fallback: str = ""
    """For segments that do not fit into shared memory."""
    max_nodes: int = 0
    """Of the full world; 0: not told."""
    num_restarts: int = 0
    """How often the workers of the job were started again so far."""
    job_age: float = 0.0
    """Seconds from the first start of workers to this one."""
    turns: tuple[tuple[int, int], ...] = ()
    """Rounds and the steps that their ranks went on with: what older rounds trained beyond that was given up."""
    progress_page: str = ""
    """Shared memory into which this worker writes what it is doing; empty: no agent watches."""
    node_pages: tuple[str, ...] = ()
    """The same of all workers of this node, by local rank."""
    dump_file: str = ""
    dump_signal: int = 0
    """When it comes, the stacks of all threads go to `dump_file`; 0: never."""
    recorder_pipe: str = ""
    recorder_file: str = ""
    """When something comes through the pipe, torch's record of collectives goes into the file."""
    has_hooks: bool = False
    """What the worker is doing is found out by hooks in torch."""
    cluster_version: int = 0
    """Of the parameter-server cluster that this process belongs to; 0: it belongs to none."""
    task_type: str = ""
    """What it is there: ps, chief, worker or evaluator."""
    task_rank: int = 0
    """Among those of its type."""
    framework: str = "torch"
    """What the workers of a world train with; `tensorflow`: each of them needs a `TF_CONFIG`."""
    node_host: str = "localhost"
    """Under which other nodes reach this one."""
    canary_every: int = 0
    """A digest of the parameters each so many steps; 0: none."""
    is_step_counted: bool = False
    """In an earlier life the script's numbers of steps were seen to grow by one with each guarded step."""


def read(environ: Mapping[str, str]) -> WorkerEnvironment | None:
    """None outside `dlrover-run`."""
    if not environ.get("DLROVER_AGENT_SOCKET"):
        return None
    return WorkerEnvironment(
        agent_socket=environ["DLROVER_AGENT_SOCKET"],
        round=Round(int(environ.get("DLROVER_ROUND", "0"))),
        local_rank=int(environ.get("DLROVER_LOCAL_RANK", environ.get("LOCAL_RANK", "0"))),
        job_name=environ.get("DLROVER_JOB_NAME", ""),
        node_rank=int(environ.get("DLROVER_NODE_RANK", "0")),
        snapshot_home=environ.get("DLROVER_SNAPSHOT_HOME", ""),
        snapshot_fallback=environ.get("DLROVER_SNAPSHOT_FALLBACK", ""),
        max_nodes=int(environ.get("DLROVER_MAX_NODES", "0")),
        num_restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        job_age=float(environ.get("DLROVER_JOB_AGE", "0")),
        turns=_read_turns(environ.get("DLROVER_TURNS", "")),
        progress_page=environ.get("DLROVER_PROGRESS_PAGE", ""),
        node_pages=tuple(filter(None, environ.get("DLROVER_NODE_PAGES", "").split(","))),
        dump_file=environ.get("DLROVER_DUMP_FILE", ""),
        dump_signal=int(environ.get("DLROVER_DUMP_SIGNAL", "0")),
        recorder_pipe=environ.get("DLROVER_RECORDER_PIPE", ""),
        recorder_file=environ.get("DLROVER_RECORDER_FILE", ""),
        has_hooks=environ.get("DLROVER_PROGRESS_HOOKS", "") == "1",
        cluster_version=int(environ.get("DLROVER_CLUSTER_VERSION", "0")),
        task_type=environ.get("DLROVER_TASK_TYPE", ""),
        task_rank=int(environ.get("DLROVER_TASK_RANK", "0")),
        framework=environ.get("DLROVER_FRAMEWORK", "torch"),
        node_host=environ.get("DLROVER_NODE_HOST", "localhost"),
        canary_every=int(environ.get("DLROVER_CANARY_EVERY", "0")),
        is_step_counted=environ.get("DLROVER_STEP_COUNTED", "") == "1",
    )


def _read_turns(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (each.split(":") for each in text.split(",") if each)
    return tuple((int(round_), int(step)) for round_, step in pairs)


def snapshot_dir() -> Path:
    """Where a trainer without an agent puts its segments."""
    return Path(os.environ.get("DLROVER_SNAPSHOT_DIR") or "/dev/shm")


@functools.cache
def client_timeout() -> float | None:
    """MASTER_CLIENT_TIMEOUT: seconds for an answer of the master, where a script waits for nothing else; None: the usual."""
    try:
        return float(os.environ.get("MASTER_CLIENT_TIMEOUT") or 0) or None
    except ValueError:
        return None  # the launcher has refused it; a script that runs without one is not stopped by it


@functools.cache
def current() -> WorkerEnvironment | None:
    return read(os.environ)
