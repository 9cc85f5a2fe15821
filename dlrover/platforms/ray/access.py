"""
The way into a Ray cluster: the library is imported late, and what goes wrong becomes a sentence.

Importing ray takes seconds and needs the extra `ray`, so no module imports it at its top. Master, agents and workers never do.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

from dlrover.protocol.errors import ConfigError

OLDEST = (2, 40)
"""Older versions were never tried."""
NAMESPACE_PREFIX = "dlrover/"
CONNECT_TIMEOUT = 10.0


def load_ray() -> Any:
    """Raises `ConfigError` if the extra is missing or too old."""
    try:
        ray = importlib.import_module("ray")
        version = str(ray.__version__)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"Ray is not installed here ({error}). Install it with: pip install 'dlrover[ray]'."
        ) from error
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise ConfigError(f"Ray {version} is too old: {'.'.join(map(str, OLDEST))} or newer is needed.")
    return ray


@contextlib.contextmanager
def connected(address: str, *, working_dir: str = "") -> Iterator[Any]:
    """Ray, connected to a running cluster as long as the context lasts. Raises `ConfigError`."""
    ray = load_ray()
    if ray.is_initialized():  # a script that uses Ray itself: its connection is taken and left
        yield ray
        return
    connect(ray, address, working_dir=working_dir)
    try:
        yield ray
    finally:
        ray.shutdown()


def connect(ray: Any, address: str, *, working_dir: str = "") -> None:
    """
    Never starts a cluster: without an address, the one that RAY_ADDRESS names or that runs on this machine.

    `working_dir`: uploaded for this connection. The job's host inherits it, and so keeps Ray from removing it.
    """
    shown = address or os.environ.get("RAY_ADDRESS", "") or "auto"
    if shown == "local":
        raise ConfigError("--address local would start a new Ray cluster. Give the address of a running cluster.")
    if shown.startswith("ray://"):
        raise ConfigError(
            f"{shown} is an address of the Ray client, which cannot tell what the machines have free. Give "
            "HOST:PORT of the head (usually port 6379), or start the job inside the cluster: ray job submit -- "
            "dlrover ray run ..."
        )
    _check_listener(shown)
    try:
        # The nodes' output comes by our own calls; Ray would print the same lines again.
        ray.init(
            address=shown,
            namespace=f"{NAMESPACE_PREFIX}driver",
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"working_dir": working_dir} if working_dir else None,
        )
    except ConnectionError as error:
        raise ConfigError(
            f"No Ray cluster answers at {shown}: {_first_line(error)}. Start one with `ray start --head`, or give --address HOST:PORT."
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        text = _first_line(error)
        if "ersion" in text:
            raise ConfigError(
                f"The Ray cluster at {shown} has another version of Ray or Python than this machine. {text}. "
                "Install the same versions on both."
            ) from error
        raise ConfigError(f"The Ray cluster at {shown} cannot be joined: {text}. Check --address.") from error


def _check_listener(address: str) -> None:
    """Ray itself tries for minutes to reach an address at which no process listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", which Ray looks up on this machine
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"No Ray cluster answers at {address}: {reason}. Start one with `ray start --head`, or give another --address HOST:PORT."
        ) from error


def missing_module(error: BaseException) -> str:
    """What an actor could not import on its machine; empty: its failure has another cause."""
    found = re.search(r"No module named '([\w.]+)'", str(error))
    if found is None and "TemporaryActor" in str(error):
        # Ray 2.40 puts this class in place of one that it cannot import, and does not say why. The package or one of its own is missing.
        return "dlrover"
    return found.group(1) if found else ""


def say_missing(module: str, machine: str) -> str:
    return (
        f"The module {module} is not installed on {machine}. Install the same packages on every machine of the cluster, with "
        "`pip install 'dlrover[ray]'`."
    )


def namespace_of(job_uid: str) -> str:
    return f"{NAMESPACE_PREFIX}{job_uid}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]).rstrip(".") or type(error).__name__
