"""
Free ports as scripts of the original look for them.

Each function binds, closes and gives the number back, so another process may take the port in between.
`find_free_port_from_env_and_bind` keeps it.
"""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Iterable

from dlrover.compat.names.constants import AscendConstants

log = logging.getLogger(__name__)

_LOWEST, _NUM_PORTS = 20000, 10000
_HIGHEST_FOR_HCCL = 65500
_NUM_TRIES = 10


def is_port_in_use(port: int | str = 0) -> bool:
    """Whether something on this machine listens there."""
    with socket.socket() as sock:
        return sock.connect_ex(("localhost", int(port))) == 0


def find_free_port(port: int = 0) -> int:
    """This port, or any for 0. Raises OSError if it is taken."""
    with socket.socket() as sock:
        sock.bind(("", port))
        found: int = sock.getsockname()[1]
        return found


def find_free_port_in_set(ports: Iterable[int]) -> int:
    """The first that is free. Raises RuntimeError if none is."""
    tried = list(ports)
    found = _first_free(tried)
    if found is None:
        raise RuntimeError(f"None of the ports {tried} is free")
    return found


def find_free_port_in_range(start: int = 0, end: int = 65535, random_port: bool = True) -> int:
    """From `start` to `end`, both included. Raises RuntimeError if none is free."""
    ports = range(start, end + 1)
    found = _first_free(random.sample(ports, len(ports)) if random_port else ports)
    if found is None:
        raise RuntimeError(f"No port from {start} to {end} is free")
    return found


def find_free_port_from_env(default_env_ports: str = "", default_range_start: int = _LOWEST) -> int:
    """Of the list in HOST_PORTS, else one of the 10,000 ports from `default_range_start` on."""
    told = os.environ.get("HOST_PORTS") or default_env_ports
    if told:
        try:
            return find_free_port_in_set(int(port) for port in told.split(","))
        except RuntimeError as error:
            log.warning("HOST_PORTS: %s", error)
    return find_free_port_in_range(default_range_start, default_range_start + _NUM_PORTS)


def find_free_port_from_env_and_bind(addr: str, **named: int | str) -> tuple[int, socket.socket]:
    """The port, and the socket that holds it."""
    for _ in range(_NUM_TRIES):
        sock = socket.socket()
        try:
            sock.bind((addr, find_free_port_from_env(**named)))  # type: ignore[arg-type]
        except OSError as error:
            sock.close()
            log.debug("%s: %s", addr, error)
        else:
            return sock.getsockname()[1], sock
    raise RuntimeError(f"No port could be bound on {addr} in {_NUM_TRIES} tries")


def find_free_port_for_hccl(start: int = AscendConstants.HCCL_PORT_START_DEFAULT) -> int:
    """The first of 16 free ports in a row; 0: there is no such row up to 10,000 ports further."""
    first, last = start, min(start + _NUM_PORTS, _HIGHEST_FOR_HCCL)
    while first <= last:
        row = range(first, first + AscendConstants.NPU_PER_NODE)
        taken = next((port for port in row if _first_free([port]) is None), None)
        if taken is None:
            return first
        first = taken + 1
    return 0


def get_available_port() -> str:
    """`localhost:PORT`."""
    return f"localhost:{find_free_port()}"


def _first_free(ports: Iterable[int]) -> int | None:
    for port in ports:
        try:
            return find_free_port(port)
        except OSError as error:
            log.debug("port %d: %s", port, error)
    return None
