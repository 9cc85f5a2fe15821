"""
The door of a port: connections that have not shown the job's token are few, and do not stay.

gRPC bounds the streams of a connection, but not the connections of an address, and it has no deadline for a connection without calls. The
server of the page has neither. A relay before them could have both, for the price of a copy and a wake-up for each message of each agent.
The door looks from behind instead: all connections are descriptors of this process, so it can see them and shut them down.

A connection that says nothing need not come that far. Every caller of gRPC speaks first, so the kernel keeps such a connection for a minute, and
hands it over with its first byte (`leave_the_silent_to_the_kernel`).

A connection is *inside* while a call that has shown the token lasts, else *outside*. The door does not look at connections inside.
An address may have some connections outside, and all addresses together some more; the oldest are closed first, so that a new caller has time to show its
token. For a moment a new one does not count as one of too many of its address, unless others of that address were just closed. Ten thousand agents may come at once, from one address, and wait outside until the master has read their calls. So there is more room, and
more time, for agents that a restarted master expects, and for a moment after each connection that is admitted.

Time is counted in looks. A master that was stopped or is busy looks less often, and no connection ends for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from urllib.parse import unquote

from dlrover.protocol.rpc.rarely import Rarely

log = logging.getLogger(__name__)

PERIOD = 0.1
"""Seconds between two looks, or more:"""
SHARE = 20
"""between two looks so many times as long passes as the last one took. Each connection outside takes some microseconds."""
PATIENCE = 50
"""Looks (5 s) within which a connection must show the token."""
LONG_PATIENCE = 300
"""The same (30 s, as long as an agent waits) while there is more room: there may be many calls to read before the next one."""
LINGER = 2
"""Looks after which a refused connection is closed. The refusal must reach the caller: it may be a person with an old token."""
MAX_ANSWERS = 4
"""Calls of a refused connection that are answered. Further ones are held: a stranger opens no stream for one that does not end."""
HOLD = 20
"""Looks after which a connection with held calls is closed. Sooner, the stranger would be back sooner with new ones."""
MAX_CALLS = 64
"""
Refused calls of a connection after which the kernel drops what comes on it until the hold is over. Four are answered and sixteen can be open, so this one
resets its calls, and each costs 0.3 ms. Closed at once, it would be back at once.
"""
MAX_HELD = 256
"""Held calls of all connections together: of each, gRPC keeps up to 64 KiB of its body."""
MAX_OF_ADDRESS = 256
NEW = 5
"""Looks (0.5 s) in which a connection is not closed for that bound: its call may wait to be read, behind hundreds of others that came with it."""
MAX_OF_REFUSED = 16
"""Instead, if a call of that address was refused in the last 50 looks: reading and refusing a call takes 0.3 ms."""
MAX_OUTSIDE = 2048
"""Of all addresses together. A connection that says nothing costs 10 to 15 KB."""
ROOM = 64
"""How many more may be outside for each connection that is admitted."""
FADING = 0.9
"""The part of that room that a look leaves: half of it is gone after 0.7 s."""
RETURN = 600
"""Looks (a minute) for which a restarted master expects its agents back."""

SILENCE = 60
"""
Seconds that the kernel waits for the first byte of a connection, or up to twice as long: it counts in its own retries. The longer, the more rarely a
stranger's thousand silent connections come to the process, all at once, and come back when it has closed them.
"""
SYNCOOKIES = Path("/proc/sys/net/ipv4/tcp_syncookies")

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_BPF_RETURN = 6
_THROW_BYTES = 1024 * 1024
_MAX_THROWN = 64

Place = tuple[str, int]
"""The other end of a connection: its address and port."""


@dataclass(eq=False)
class _Stranger:
    """A descriptor of this process that is not inside."""

    number: int
    inode: int
    place: Place | None = None
    """None: this is not a connection of our port."""
    address: str = ""
    """Who counts as one."""
    num_looks: int = 0


@dataclass
class _Refused:
    """A connection with calls that have shown no token."""

    num_calls: int = 0
    num_held: int = 0
    num_looks: int = 0
    """Since the first of them."""
    is_deaf: bool = False
    """The kernel drops what comes on it."""

    @property
    def is_flooding(self) -> bool:
        return self.num_calls > MAX_CALLS


class Door:
    """For one event loop: the one that handles the calls of the port."""

    def __init__(self, port: int, *, max_outside: int = MAX_OUTSIDE) -> None:
        self.num_expected = 0
        """Agents that have been attached to a former master of this job."""
        self._port = port
        self._max_outside = max_outside
        self._calls: Counter[Place] = Counter()  # admitted and not over
        self._inside: dict[Place, int] = {}  # descriptors of those that were seen since then
        self._seen: dict[int, _Stranger] = {}  # all other descriptors, as of the last look
        self._refused: dict[Place, _Refused] = {}
        self._num_held = 0
        self._over = asyncio.Event()
        self._suspects: dict[str, int] = {}  # addresses, and the looks since the last refusal
        self._watched: dict[str, int] = {}  # the same since the last connection of theirs was closed
        self._room = 0.0
        self._num_looks = 0
        self._rarely = Rarely()

    @contextlib.contextmanager
    def inside(self, place: Place) -> Iterator[None]:
        """While a call lasts that has shown the token."""
        place = _plain(place)
        if not self._calls[place]:
            self._room += ROOM
        self._calls[place] += 1
        try:
            yield
        finally:
            self._calls[place] -= 1
            if not self._calls[place]:
                del self._calls[place]
                self._inside.pop(place, None)  # its descriptor may soon be that of another connection

    def refuse(self, place: Place) -> bool:
        """
        A call has shown no token, or a wrong one. Its connection is closed when the caller has had time to read why.

        False: that need not be read any more. A handler that can hold the call gives it to `hold` instead of an answer.
        """
        place = _plain(place)
        self._suspects[_address_of(place)] = 0
        refused = self._refused.setdefault(place, _Refused())
        refused.num_calls += 1
        return refused.num_calls <= MAX_ANSWERS or self._num_held >= MAX_HELD or bool(self._calls.get(place))

    async def hold(self, place: Place) -> None:
        """Until the connection is closed, which cancels the call, or the door no longer looks."""
        refused = self._refused.get(_plain(place))
        assert refused is not None, "only a refused call is held"
        refused.num_held += 1
        self._num_held += 1
        try:
            await self._over.wait()
        finally:
            refused.num_held -= 1
            self._num_held -= 1

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._keep_looking()
        finally:
            self._over.set()

    async def _keep_looking(self) -> None:
        is_told = False
        took = 0.0
        while True:
            await asyncio.sleep(max(PERIOD, SHARE * took))
            # By another clock a busy machine would make looks rare, and let strangers pile up.
            began_at = time.thread_time()
            try:
                self._look()
                is_told = False
            except OSError as error:  # there is no descriptor left for the look itself
                if not is_told:
                    log.warning("connections cannot be inspected port=%d reason=%s", self._port, error)
                is_told = True
            took = time.thread_time() - began_at

    def _look(self) -> None:
        self._num_looks += 1
        for refused in self._refused.values():
            refused.num_looks += 1
        for addresses in (self._suspects, self._watched):
            for address in addresses:
                addresses[address] += 1
        num_missing = self.num_expected - len(self._calls) if self._num_looks <= RETURN else 0
        for_expected = 2 * max(0, num_missing)
        outside = self._outside()
        num_of = Counter(each.address for each in outside)
        num_outside = len(outside)
        for each in sorted(outside, key=attrgetter("num_looks"), reverse=True):
            self._deafen(each)
            reason = self._reason(each, num_of[each.address], num_outside, for_expected)
            if reason:
                num_of[each.address] -= 1
                num_outside -= 1
                self._watched[each.address] = 0
                self._close(each, reason)
        self._refused = {place: each for place, each in self._refused.items() if each.num_held or not _is_over(each)}
        self._suspects = {address: looks for address, looks in self._suspects.items() if looks <= PATIENCE}
        self._watched = {address: looks for address, looks in self._watched.items() if looks <= PATIENCE}
        self._room = self._room * FADING if self._room > 1 else 0.0

    def _reason(self, each: _Stranger, num_of_address: int, num_outside: int, for_expected: int) -> str:
        """Why this one is to be closed; empty: it is not."""
        assert each.place is not None, "a connection of our port"
        room = self._room + for_expected
        if (refused := self._refused.get(each.place)) is not None and _is_over(refused):
            return "no-token"
        if each.num_looks > (LONG_PATIENCE if room else PATIENCE):
            return "silent"
        is_suspect = each.address in self._suspects
        is_new = each.num_looks <= NEW and not is_suspect and each.address not in self._watched
        if not is_new and num_of_address > (MAX_OF_REFUSED + for_expected if is_suspect else MAX_OF_ADDRESS + room):
            return "too-many-of-address"
        return "too-many" if num_outside > room + self._max_outside else ""

    def _outside(self) -> list[_Stranger]:
        inside = set(self._inside.values())
        seen: dict[int, _Stranger] = {}
        outside: list[_Stranger] = []
        for name in os.listdir("/proc/self/fd"):
            number = int(name)
            each = None if number in inside else self._recognise(number)
            if each is None:
                continue
            if each.place is not None and self._calls.get(each.place):
                self._inside[each.place] = number
                continue
            seen[number] = each
            if each.place is not None:
                each.num_looks += 1
                outside.append(each)
        self._seen = seen
        return outside

    def _recognise(self, number: int) -> _Stranger | None:
        """None: it was closed since it was listed."""
        try:
            status = os.fstat(number)
            known = self._seen.get(number)
            if known is not None and known.inode == status.st_ino:
                return known
            place = None
            if stat.S_ISSOCK(status.st_mode):
                with _copy_of(number) as sock:
                    place = self._place(sock)
        except OSError:
            return None
        return _Stranger(number, status.st_ino, place, _address_of(place) if place is not None else "")

    def _place(self, sock: socket.socket) -> Place | None:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != self._port:
            return None
        try:
            host, port, *_ = sock.getpeername()
        except OSError:  # it listens, or its peer is gone
            return None
        return _plain((host, port))

    def _deafen(self, each: _Stranger) -> None:
        """A client that opens and resets calls shall wait, and not the master. A stranger who is connected, and not heard, does not come again."""
        refused = None if each.place is None else self._refused.get(each.place)
        if refused is None or refused.is_deaf or not refused.is_flooding:
            return
        refused.is_deaf = True
        with contextlib.suppress(OSError), _copy_of(each.number) as sock:
            if os.fstat(sock.fileno()).st_ino == each.inode:
                _drop_all(sock)

    def _close(self, each: _Stranger, reason: str) -> None:
        """By a shutdown, which its owner sees as if the peer had gone."""
        try:
            with _copy_of(each.number) as sock:
                if os.fstat(sock.fileno()).st_ino == each.inode:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(
                            socket.SOL_SOCKET, _SO_DETACH_FILTER, 0
                        )  # the peer's kernel shall hear of the end
                    sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone
        if self._rarely.now():
            log.warning(
                "connections without the job token closed num=%d port=%d newest=%s reason=%s",
                self._rarely.num,
                self._port,
                each.address,
                reason,
            )


def _is_over(refused: _Refused) -> bool:
    return refused.num_looks > (HOLD if refused.num_held or refused.is_deaf else LINGER)


def _drop_all(sock: socket.socket) -> None:
    """
    From now on the kernel drops all that comes on the connection, so it is never confirmed, and the peer's kernel tries ever more rarely. What has come and
    was not read yet is thrown away. Raises OSError where the kernel offers no filters.
    """
    nothing = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(nothing))  # `struct sock_fprog`: of one instruction
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    thrown = bytearray(_THROW_BYTES)  # nothing is written to it: the kernel only wants to know how much
    for _ in range(_MAX_THROWN):
        if not sock.recv_into(thrown, _THROW_BYTES, socket.MSG_TRUNC | socket.MSG_DONTWAIT):
            return


def leave_the_silent_to_the_kernel(port: int, syncookies: Path = SYNCOOKIES) -> None:
    """
    Of a port of this process where callers speak first. A connection costs the process nothing until then.

    The kernel has room for as many as may wait to be accepted, 4,096 by default. Without SYN cookies it would send honest callers away when strangers
    take that room, so then nothing is changed. With them it hands over what has no room at once.
    """
    with contextlib.suppress(OSError):  # another kernel, or one without cookies
        if syncookies.read_text().strip() == "0":
            return
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), _copy_of(int(name)) as sock:
                if _listens(sock, port):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENCE)


def _listens(sock: socket.socket, port: int) -> bool:
    """Raises OSError."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != port:
        return False
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@contextlib.contextmanager
def _copy_of(number: int) -> Iterator[socket.socket]:
    """The same connection under a number of our own, which stays what it is. Raises OSError."""
    copy = os.dup(number)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        yield sock


def place_of(peer: str) -> Place:
    """As gRPC names a peer: `ipv4:10.0.0.1:80` or `ipv6:%5Bfe80::1%25eth0%5D:80`."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0  # `unknown`: the connection is gone


def _plain(place: Place) -> Place:
    """One spelling for an address: without the interface, and IPv4 as such also where a socket takes both kinds."""
    host = place[0].partition("%")[0]
    return host.removeprefix("::ffff:") if "." in host else host, place[1]


def _address_of(place: Place) -> str:
    """An IPv4 address, or an IPv6 network of 64 bits: one machine may use all addresses of that."""
    host = place[0]
    return str(ipaddress.ip_network(f"{host}/64", strict=False)) if ":" in host else host
