"""
The questions to the environment and to `/proc` that scripts of the original import.

Nothing of ours uses them; they answer as they always did, but for `get_group_rank`, which said 1 where it was not set.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess

import psutil

from dlrover.compat.names.constants import CommunicationType, NodeEnv

log = logging.getLogger(__name__)

_STACK_TIMEOUT = 5.0
"""Seconds that py-spy may take."""


def get_env(env_key: str) -> str | None:
    return os.environ.get(env_key)


def set_env(env_key: str, env_value: object) -> None:
    os.environ[env_key] = str(env_value)


def get_node_rank() -> int:
    """What the platform says, else the rank that the master gave to this node."""
    return _number("NODE_RANK", "WORKER_RANK", "DLROVER_NODE_RANK")


def get_node_id() -> int:
    return _number("NODE_ID", "WORKER_ID")


def get_node_type() -> str:
    return os.environ.get("NODE_TYPE") or os.environ.get("WORKER_TYPE") or "worker"


def get_node_num() -> int:
    return _number("NODE_NUM", "WORKER_NUM", default=1)


def get_rank() -> int:
    return _number("RANK")


def get_local_rank() -> int:
    return _number("LOCAL_RANK")


def get_local_world_size() -> int:
    return _number("LOCAL_WORLD_SIZE", default=1)


def get_group_rank() -> int:
    return _number("GROUP_RANK")


def get_group_world_size() -> int:
    return _number("GROUP_WORLD_SIZE", default=1)


def get_torch_restart_count() -> int:
    return _number("TORCHELASTIC_RESTART_COUNT")


def get_job_uid() -> str:
    return os.environ.get(NodeEnv.JOB_UID, "")


def is_ray_mode() -> bool:
    return get_env(NodeEnv.DLROVER_MASTER_SERVICE_TYPE) == CommunicationType.COMM_SERVICE_RAY


def get_hostname_and_ip() -> tuple[str, str]:
    name = socket.gethostname()
    try:
        return name, socket.gethostbyname(name)
    except OSError:
        return name, "Unknown"


# Processes.


def print_process_list() -> None:
    """Into the log, a line for each process of this machine."""
    for process in psutil.process_iter(["ppid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        log.info("[%d/%s] %s", process.pid, process.info["ppid"], command)


def get_all_child_pids(parent_pid: int | None = None) -> list[int]:
    """Direct children only; none if the process is gone."""
    try:
        return [child.pid for child in psutil.Process(parent_pid).children()]
    except psutil.Error as error:
        log.warning("The children of process %s cannot be listed: %s", parent_pid, error)
        return []


def get_proc_env(pid: int | str) -> dict[str, str] | None:
    """None: the process is gone, or it belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().decode(errors="surrogateescape").split("\0")
    except OSError as error:
        log.warning("The environment of process %s cannot be read: %s", pid, error)
        return None
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def is_worker_process(pid: int | str) -> bool:
    environ = get_proc_env(pid)
    names = (NodeEnv.TORCHELASTIC_RUN_ID, NodeEnv.MASTER_ADDR, NodeEnv.MASTER_PORT)
    return environ is not None and all(name in environ for name in names)


def get_kernel_stack(pid: int) -> tuple[bool, str]:
    """Whether it could be read, and the stack or the reason why not."""
    path = f"/proc/{pid}/stack"
    try:
        with open(path) as file:
            return True, file.read()
    except FileNotFoundError:
        reason = f"not exist: {path}"
    except PermissionError:
        reason = f"permission denied for: {path}"
    except OSError as error:
        reason = f"unexpected error when reading: {path}, {error}"
    log.warning("%s", reason)
    return False, reason


def get_user_stack_pyspy(pid: int) -> tuple[bool, str]:
    """The same for the Python and native stack, by py-spy (the extra `stacks`)."""
    command = ["py-spy", "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STACK_TIMEOUT)
    except subprocess.TimeoutExpired:
        return False, "py-spy timed out"
    except FileNotFoundError:
        return False, "py-spy not installed"
    except OSError as error:
        return False, f"unexpected error: {error}"
    return (True, done.stdout) if done.returncode == 0 else (False, done.stderr)


def _number(*names: str, default: int = 0) -> int:
    """The first of the variables that is set."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), default)
