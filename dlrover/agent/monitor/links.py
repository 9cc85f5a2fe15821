"""
The connections of a worker, as the kernel sees them: where it is connected from, and what it has sent that the peer has not acknowledged.

A peer that is stopped, busy or deadlocked still acknowledges: its kernel does. Only what does not arrive is sent again and again, so this tells a broken
network from a broken rank. Read from /proc, in the network namespace of the worker.
"""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from dlrover.protocol.messages.watch import UnansweredLink

_MAX_SOCKETS = 4096
_MAX_TABLE = 4 << 20
"""Bytes of the kernel's table of connections: some ten thousand."""
MAX_LINKS = 16
MAX_ADDRESSES = 16
_ESTABLISHED, _CONNECTING = 0x01, 0x02
_RESENDING = 1
"""The timer that a connection waits for: to send again what was not acknowledged. Others: to probe a full window, to keep it alive."""


class Links(NamedTuple):
    addresses: tuple[str, ...] = ()
    """Of this end, without those that never leave the machine."""
    unanswered: tuple[UnansweredLink, ...] = ()
    """Those that most was sent again on come first."""


def read_links(pid: int, proc: str = "/proc") -> Links:
    """Nothing of a process that is gone, or another user's."""
    sockets = set(_sockets(f"{proc}/{pid}/fd"))
    if not sockets:
        return Links()
    addresses: dict[str, None] = {}
    unanswered = []
    for name in ("tcp", "tcp6"):
        for line in _table(f"{proc}/{pid}/net/{name}"):
            fields = line.split()
            if len(fields) < 10 or fields[9] not in sockets or int(fields[3], 16) not in (_ESTABLISHED, _CONNECTING):
                continue
            local, remote = _address(fields[1]), _address(fields[2])
            if ipaddress.ip_address(local).is_loopback:
                continue
            addresses[local] = None
            unacknowledged, timer = (int(fields[index].partition(":")[0], 16) for index in (4, 5))
            times = int(fields[6], 16)
            if timer == _RESENDING and (times or unacknowledged):
                unanswered.append(UnansweredLink(local=local, remote=remote, times=times))
    unanswered.sort(key=lambda link: -link.times)
    return Links(tuple(addresses)[:MAX_ADDRESSES], tuple(unanswered[:MAX_LINKS]))


def _sockets(folder: str) -> Iterator[str]:
    """Their numbers."""
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(_MAX_SOCKETS), entries, strict=False):
                try:
                    target = os.readlink(entry.path)
                except OSError:
                    continue  # closed meanwhile
                if target.startswith("socket:["):
                    yield target[8:-1]
    except OSError:
        return


def _table(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read(_MAX_TABLE).splitlines()[1:]
    except OSError:
        return []


def _address(text: str) -> str:
    """From the kernel's way to write it: words of 32 bits in the order of the machine's bytes, then the port."""
    words = text.partition(":")[0]
    raw = b"".join(struct.pack("=I", int(words[start : start + 8], 16)) for start in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
