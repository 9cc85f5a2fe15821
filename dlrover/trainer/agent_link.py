"""
The worker's line to the master: requests over the agent's unix socket, and their answers.

Blocking and for many threads at once, without a thread of its own: a thread that waits while no other reads, reads for all.
A fork (a DataLoader worker) opens its own connection. While the agent cannot be reached the link tries again until the
caller's deadline; but a command whose connection broke before its answer came is not sent twice, because it may have
been applied.

A signal handler runs in the middle of whatever its thread does, which may be a request: it must not wait for a lock or an
answer that only the code below it on the stack can give, so its own request goes over a connection of its own. It may also
raise (Ctrl-C, an alarm): what it leaves half sent or half read goes with the connection.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Protocol

import msgspec

from dlrover.host.ownership import check_server
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.local_frames import FrameBuffer, pack
from dlrover.protocol.messages.job import (
    AgentMessage,
    AskMaster,
    Hello,
    MasterAnswer,
    MasterRefusal,
    Query,
    Reply,
    WorkerRequest,
)
from dlrover.trainer import environment

_CONNECT_TIMEOUT = 5.0
_SEND_TIMEOUT = 30
"""Whole seconds for the agent to take a message from the socket, however long the caller may wait for the answer."""
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
_CHUNK_BYTES = 256 * 1024


class Link(Protocol):
    """Something that takes a worker's requests: the agent, or a stand-in where there is none."""

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        """Raises Rejected, or Unavailable: no answer within `timeout` seconds; a command may have been applied then."""


def pause_before_retry(left: float) -> None:
    """For who goes on waiting, for so many seconds, although the agent said at once that it cannot reach the master."""
    time.sleep(random.uniform(0.0, max(0.0, min(left, _LONGEST_PAUSE))))


class AgentLink:
    """One connection to the agent, opened at the first request and whenever it was lost."""

    def __init__(self, where: environment.WorkerEnvironment) -> None:
        self._where = where
        self._begin()
        _links.add(self)

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        me = threading.get_ident()
        if me in self._asking:  # we are in a signal handler
            apart = AgentLink(self._where)
            try:
                return apart.ask(request, timeout=timeout)
            finally:
                apart.close()
        try:
            self._asking.add(me)
            return self._ask(request, timeout)
        finally:
            self._asking.discard(me)

    def close(self) -> None:
        with self._news:
            self._drop(self._connection)

    def _begin(self) -> None:
        self._news = threading.Condition(threading.Lock())
        """Guards all below but the writing end of the socket; notified when answers came or no thread reads any more."""
        self._connection: _Connection | None = None
        self._last_id = 0
        self._asking: set[int] = set()
        """Threads with a request under way. Not guarded: each looks for itself only."""

    def _forked(self) -> None:
        """In the child: the parent's connection is not ours, and its threads, that may hold locks, are not here."""
        connection = self._connection
        self._begin()
        if connection is not None:
            connection.socket.close()

    def _ask(self, request: WorkerRequest, timeout: float) -> Reply:
        end_at = time.monotonic() + timeout
        envelope = _FIRST_PAUSE
        while True:
            try:
                return self._exchange(request, end_at)
            except _LostError as lost:
                if lost.may_have_arrived and not isinstance(request, Query):
                    raise Unavailable(
                        f"The connection to the agent broke before the answer to {type(request).__name__} "
                        "arrived. The agent may have carried out the request."
                    ) from lost
                pause = random.uniform(0, envelope)
                if time.monotonic() + pause >= end_at:
                    raise Unavailable(f"No agent answers at {self._where.agent_socket}: {lost}") from lost
            time.sleep(pause)
            envelope = min(2 * envelope, _LONGEST_PAUSE)

    def _exchange(self, request: WorkerRequest, end_at: float) -> Reply:
        with self._news:
            if self._connection is None:
                self._connection = _Connection(self._where, end_at)
            connection = self._connection
            self._last_id += 1
            number = self._last_id
            connection.pending[number] = None
        try:
            ask = AskMaster(id=number, body=request, timeout=max(end_at - time.monotonic(), 0.0))
            frame = pack(_ENCODER.encode(ask))  # raises Rejected before anything is sent
            self._send(connection, frame)
            answer = self._await(connection, number, end_at)
        finally:
            with self._news:
                connection.pending.pop(number, None)
                if connection.reader == threading.get_ident():  # interrupted, perhaps with others' answers in hand
                    connection.reader = 0
                    self._drop(connection)
        if isinstance(answer, MasterAnswer):
            return answer.reply
        if answer.code == ErrorCode.UNAVAILABLE:
            raise Unavailable(answer.message)
        raise Rejected(answer.message, code=answer.code)

    def _send(self, connection: _Connection, frame: bytes) -> None:
        try:
            with connection.sending:
                connection.socket.sendall(frame)
        except BaseException as error:
            with self._news:
                self._drop(connection)
            if not isinstance(error, OSError):
                raise
            # The agent cannot use a part of a frame.
            raise _LostError(str(error), may_have_arrived=False) from error

    def _await(self, connection: _Connection, number: int, end_at: float) -> AgentMessage:
        while True:
            with self._news:
                if (answer := connection.pending[number]) is not None:
                    return answer
                if connection.is_lost:
                    raise _LostError("the agent closed the connection", may_have_arrived=True)
                left = end_at - time.monotonic()
                if left <= 0:
                    raise Unavailable("The agent did not answer in time.")
                if connection.reader:
                    self._news.wait(left)
                    continue
                connection.reader = threading.get_ident()
            self._read(connection, left)

    def _read(self, connection: _Connection, timeout: float) -> None:
        """Wait for bytes in the name of all threads."""
        answers: Iterable[AgentMessage] = ()
        is_lost = False
        try:
            answers = connection.read(timeout)
        except (OSError, msgspec.DecodeError, Rejected):
            is_lost = True
        finally:
            with self._news:
                for answer in answers:
                    if answer.id in connection.pending:  # else its caller has left
                        connection.pending[answer.id] = answer
                connection.reader = 0
                if is_lost:
                    self._drop(connection)
                if len(connection.pending) > 1:
                    self._news.notify_all()

    def _drop(self, connection: _Connection | None) -> None:
        if connection is None:
            return
        connection.is_lost = True
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it
        if not connection.reader:
            connection.socket.close()
        if self._connection is connection:
            self._connection = None
        self._news.notify_all()


class _LostError(Exception):
    def __init__(self, message: str, *, may_have_arrived: bool) -> None:
        super().__init__(message)
        self.may_have_arrived = may_have_arrived


class _Connection:
    def __init__(self, where: environment.WorkerEnvironment, end_at: float) -> None:
        """Raises _LostError when no agent listens."""
        self.pending: dict[int, AgentMessage | None] = {}
        """Requests under way, and the answers of those that have one."""
        self.reader = 0
        """The thread that waits for bytes in the name of all."""
        self.is_lost = False
        self.sending = threading.Lock()
        """Frames of two threads must not be mixed; apart from the other lock, because it is held while the agent reads."""
        self._frames = FrameBuffer()
        sock = self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, min(_CONNECT_TIMEOUT, end_at - time.monotonic())))
            sock.connect(where.agent_socket)
            check_server(sock)
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT, 0))
            hello = Hello(local_rank=where.local_rank, round=where.round, pid=os.getpid())
            sock.sendall(pack(_ENCODER.encode(hello)))
        except OSError as error:
            sock.close()
            raise _LostError(str(error), may_have_arrived=False) from error
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def read(self, timeout: float) -> list[AgentMessage]:
        """What comes next, or nothing within the time."""
        if not self._poll.poll(timeout * 1000):
            return []
        data = self.socket.recv(_CHUNK_BYTES)
        if not data:
            raise ConnectionResetError("the agent closed the connection")
        return [_DECODER.decode(frame) for frame in self._frames.feed(data)]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(MasterAnswer | MasterRefusal)

_links: weakref.WeakSet[AgentLink] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_links):
        link._forked()


os.register_at_fork(after_in_child=_after_fork)


_current: dict[str, Link] = {}
"""At most one."""


def current_link() -> Link:
    """The process's one line to its agent, or the stand-in outside `dlrover-run`."""
    return _current.get("") or _current.setdefault("", _new_link())  # of two threads that come first both get the same


def _new_link() -> Link:
    where = environment.current()
    if where is not None:
        return AgentLink(where)
    from dlrover.trainer.stand_in import StandIn  # the whole core: workers of a job restart without it

    return StandIn()
