"""The server of an agent for other agents, on a node that runs out of something."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dlrover.agent.peers import Connection, PeerServer, Secret
from dlrover.protocol.addresses import parse_address
from dlrover.protocol.peer_messages import Challenge
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
            challenge = Connection(second, deadline=time.monotonic() + DEADLINE).receive(Challenge)
            assert challenge.nonce
        assert len(listening.heard) == 1
        assert "tried again" in listening.heard[0]
    finally:
        server.close()
        logging.getLogger("dlrover.agent").removeHandler(listening)
    accepting.join(DEADLINE)
    assert not accepting.is_alive()
