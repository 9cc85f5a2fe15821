"""The server of an agent for other agents: on a node that runs out of something, and beside strangers."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dlrover.agent.replicas.handshakes import MAX_HANDSHAKES
from dlrover.agent.replicas.wire import MAX_CONNECTIONS, PeerConnection, PeerServer, Secret, connect
from dlrover.protocol.addresses import parse_address
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.peers import Challenge
from tests.agent.lab import DEADLINE


class Listening(logging.Handler):
    """Hears of warnings as they are written."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []
        self.has_heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())
        self.has_heard.set()


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """No new ones: those of the standard streams are taken, whatever an earlier test gives back meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """The next thread would need more memory than there are addresses."""
    usual = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(usual)


@pytest.mark.parametrize("shortage", [without_descriptors, without_threads])
def test_a_shortage_does_not_end_the_service_for_other_nodes(shortage) -> None:
    listening = Listening()
    logging.getLogger("dlrover.agent").addHandler(listening)
    before = set(threading.enumerate())
    server = PeerServer("127.0.0.1", Secret("token", "job"), None, lambda connection: None)
    (accepting,) = {thread for thread in threading.enumerate() if thread.name == "dlrover-peers"} - before
    address = parse_address(server.address)
    try:
        with socket.socket() as first, socket.socket() as second:
            with shortage():
                first.connect((address.host, address.port))
                assert listening.has_heard.wait(DEADLINE)
            second.connect((address.host, address.port))
            challenge = PeerConnection(second, deadline=time.monotonic() + DEADLINE).receive(Challenge)
            assert challenge.nonce
        assert len(listening.heard) == 1
        assert "keeps trying" in listening.heard[0]
    finally:
        server.close()
        logging.getLogger("dlrover.agent").removeHandler(listening)
    accepting.join(DEADLINE)
    assert not accepting.is_alive()


SECRET = Secret("token", "job")


@contextlib.contextmanager
def serving(serve=lambda connection: None, **options: float) -> Iterator[tuple[PeerServer, Listening]]:
    listening = Listening()
    logging.getLogger("dlrover.agent").addHandler(listening)
    server = PeerServer("127.0.0.1", SECRET, None, serve, **options)
    try:
        yield server, listening
    finally:
        server.close()
        logging.getLogger("dlrover.agent").removeHandler(listening)


@contextlib.contextmanager
def callers(server: PeerServer, count: int) -> Iterator[list[socket.socket]]:
    """Connections that hold a slot: each has been challenged and has said nothing yet."""
    place = parse_address(server.address)
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection((place.host, place.port), timeout=DEADLINE)))
            assert opened[-1].recv(4096), "a challenge"
        yield opened


def test_strangers_who_keep_all_slots_do_not_keep_other_nodes_out() -> None:
    with serving(patience=DEADLINE) as (server, _), callers(server, MAX_HANDSHAKES + MAX_CONNECTIONS):
        connect(server.address, SECRET, None, deadline=time.monotonic() + DEADLINE, stall=DEADLINE).close()


def test_a_proof_that_comes_byte_by_byte_comes_too_late() -> None:
    """Each byte alone comes in time."""
    ends_at = time.monotonic() + DEADLINE
    with serving(handshake=0.5) as (server, _), callers(server, 1) as [stranger]:
        stranger.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            stranger.sendall((4000).to_bytes(4, "little") + bytes(4))
            while time.monotonic() < ends_at:
                stranger.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    assert not stranger.recv(1)
                    break
        assert time.monotonic() < ends_at, "it was never closed"


def test_wrong_proofs_are_told_ever_more_rarely_and_large_ones_are_not_read() -> None:
    with serving() as (server, listening):
        with callers(server, 1) as [stranger]:
            stranger.sendall((1024 * 1024).to_bytes(4, "little") + bytes(4))
            assert not stranger.recv(1)
        assert "the limit is 4096" in listening.heard[0]
        guessed = Secret("guessed", "job")
        for _ in range(40):
            with pytest.raises(Rejected, match="does not have this job's token"):
                connect(server.address, guessed, None, deadline=time.monotonic() + DEADLINE, stall=DEADLINE)
        assert len(listening.heard) <= 6
