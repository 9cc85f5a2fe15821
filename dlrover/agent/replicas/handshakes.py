"""
Callers of the replica port that have not proved yet that they know the job's token: few at a time, and not for long.

They have slots of their own, so strangers never take those of other nodes. When all are taken the caller that has been there longest leaves: a node proves
itself in milliseconds, and a stranger who waits would keep the next one out.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from dlrover.protocol.errors import Unavailable

HANDSHAKE = 5.0
"""Seconds for the whole of it, certificates included."""
MAX_HANDSHAKES = 64
MAX_OF_ADDRESS = 32
"""Of one address at a time: nodes of one machine share theirs."""


class Caller:
    """One connection, from its acceptance to its end. TLS puts another socket in the place of the first."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.socket = sock
        self.address = address

    def shut_down(self) -> None:
        """From any thread: the one that serves the caller sees the end of the connection."""
        with contextlib.suppress(OSError):  # it is gone, or has never been connected
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # that of TLS would change what the other thread uses


class Handshakes:
    def __init__(self) -> None:
        self._callers: dict[Caller, None] = {}  # who came first is first
        self._lock = threading.Lock()  # between the thread that accepts and those of the callers

    def begin(self, caller: Caller) -> None:
        """Makes room for this one if there is none."""
        with self._lock:
            same = [each for each in self._callers if each.address == caller.address]
            oldest = None
            if len(same) >= MAX_OF_ADDRESS:
                oldest = same[0]
            elif len(self._callers) >= MAX_HANDSHAKES:
                oldest = next(iter(self._callers))
            if oldest is not None:
                del self._callers[oldest]
                oldest.shut_down()
            self._callers[caller] = None

    def succeed(self, caller: Caller) -> None:
        """It has proved itself. Raises Unavailable if its slot went to another one meanwhile."""
        with self._lock:
            if caller not in self._callers:
                raise Unavailable("the proof of the token arrived too late")
            del self._callers[caller]

    def end(self, caller: Caller) -> None:
        with self._lock:
            self._callers.pop(caller, None)
