"""
A forked worker's way to the other roles: one unix socket to the node actor above it. The worker needs no ray.

Calls of others come over the same socket and run in threads. A worker that dies closes it, and the actor tells those who wait for an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dlrover.host.ownership import check_server
from dlrover.protocol.errors import ConfigError, Unavailable
from dlrover.unified.runtime.methods import METHODS
from dlrover.unified.runtime.relay_frames import (
    HEAD_BYTES,
    LENGTH_BYTES,
    SOCKET_VARIABLE,
    Message,
    RelayedAnswer,
    RelayedCall,
    ServeCalls,
    ServingCalls,
    WorkerHello,
    WorkerWelcome,
    pack_frame,
    read_head,
    read_lengths,
    read_message,
)
from dlrover.unified.runtime.wire import CallHeader, CallRefused, Parts, Raised, as_raised

CONNECT_TIMEOUT = 20.0
MAX_CALLS = 64
"""Methods that run at a time in one worker. Most of them wait for weights."""


def wire_from_environment() -> RelayWire | None:
    """None: this is no worker of a role."""
    path = os.environ.get(SOCKET_VARIABLE, "")
    if not path:
        return None
    wire = RelayWire(path, int(os.environ.get("RANK", "0")))
    METHODS.on_change = wire.announce
    return wire


class RelayWire:
    def __init__(self, path: str, rank: int) -> None:
        self.rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_TIMEOUT)
        try:
            self._socket.connect(path)
            check_server(self._socket)
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"The node of this worker cannot be reached at {path}: {error}") from error
        self._sending = threading.Lock()  # frames of several threads must not mix
        self._tickets = itertools.count(1)
        self._waiting: dict[int, Future[Parts]] = {}
        self._answer: Callable[[CallHeader, Parts], Parts] | None = None
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="rpc")
        self._send(WorkerHello(rank, os.getpid()))
        message, parts = self._receive()
        assert isinstance(message, WorkerWelcome), f"the node answered WorkerHello with {type(message).__name__}"
        self.welcome = message
        self.config_data = bytes(parts[0])
        self._socket.settimeout(None)
        self._serving = threading.Event()
        self.incarnation = 0
        threading.Thread(target=self._read, name="calls", daemon=True).start()

    def call(self, role: str, rank: int, header: CallHeader, parts: Parts) -> Future[Parts]:
        self.num_ranks(role)
        future: Future[Parts] = Future()
        ticket = next(self._tickets)
        self._waiting[ticket] = future
        self._send(RelayedCall(ticket, role, rank, header), parts)
        return future

    def serve(self, answer: Callable[[CallHeader, Parts], Parts]) -> None:
        """Raises `ConfigError`: the other roles do not know that this one takes calls."""
        role = self.welcome.role
        if not self.welcome.takes_calls:
            raise ConfigError(
                f"Role {role!r} was defined as a script that takes no calls, but {role!r}-{self.rank} calls "
                f"serve(). Give Role.elastic({role!r}, …, takes_calls=True)."
            )
        self._answer = answer
        self.announce()
        self._serving.wait(CONNECT_TIMEOUT)

    def announce(self) -> None:
        if self._answer is not None:
            self._send(ServeCalls(tuple(METHODS.repeatable())))

    def num_ranks(self, role: str) -> int:
        known = self.welcome.num_ranks
        if role not in known:
            raise ConfigError(f"The job has no role {role!r}. It has: {', '.join(known)}.")
        return known[role]

    def roles(self) -> Mapping[str, int]:
        return self.welcome.num_ranks

    def _read(self) -> None:
        try:
            while True:
                message, parts = self._receive()
                match message:
                    case RelayedAnswer(ticket, kind, text, data):
                        future = self._waiting.pop(ticket)
                        if kind:
                            future.set_exception(Raised(kind, text, data))
                        else:
                            future.set_result(parts)
                    case RelayedCall():
                        self._threads.submit(self._run, message, parts)
                    case ServingCalls(incarnation):
                        self.incarnation = incarnation
                        self._serving.set()
                    case _:
                        raise AssertionError(f"unexpected message {type(message).__name__} from the node")
        except (OSError, EOFError) as error:  # the node is gone, and this worker follows it
            for future in list(self._waiting.values()):
                future.set_exception(
                    as_raised(Unavailable(f"The connection of this worker to its node was lost: {error}"))
                )

    def _run(self, ask: RelayedCall, parts: Parts) -> None:
        try:
            if self._answer is None:
                raise as_raised(CallRefused("This worker takes no calls."))
            result = self._answer(ask.header, parts)
        except Raised as error:
            self._send(RelayedAnswer(ask.ticket, error.kind, error.text, error.data))
            return
        self._send(RelayedAnswer(ask.ticket), result)

    def _send(self, message: Message, parts: Parts = ()) -> None:
        with self._sending:
            for buffer in pack_frame(message, parts):
                self._socket.sendall(buffer)

    def _receive(self) -> tuple[Message, list[Any]]:
        size, num_parts = read_head(self._exactly(HEAD_BYTES))
        lengths = read_lengths(self._exactly(LENGTH_BYTES * num_parts))
        message = read_message(self._exactly(size))
        return message, [self._exactly(length) for length in lengths]

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view.nbytes:
            number = self._socket.recv_into(view)
            if not number:
                raise EOFError("the connection was closed")
            view = view[number:]
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
