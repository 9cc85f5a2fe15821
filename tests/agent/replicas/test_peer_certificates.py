"""Agents with certificates: what they say to each other is encrypted, and strangers' certificates are not trusted."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time

import pytest
from msgspec.structs import replace

from dlrover.agent.replicas.handshakes import MAX_HANDSHAKES
from dlrover.agent.replicas.wire import PeerConnection, PeerServer, Secret, connect
from dlrover.protocol.addresses import TlsConfig, parse_address
from dlrover.protocol.errors import ConfigError, DLRoverError
from dlrover.protocol.messages.peers import Accepted, ListHeld
from tests.agent.lab import DEADLINE
from tests.protocol.rpc.test_certificates import Authority, half_handshakes

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program for certificates")

SECRET = Secret("token", "job")


def answer(connection: PeerConnection) -> None:
    connection.receive(ListHeld)
    connection.send(Accepted())


def talk(server: PeerServer, tls: TlsConfig | None, *, patience: float = DEADLINE) -> None:
    with connect(server.address, SECRET, tls, deadline=time.monotonic() + patience, stall=patience) as connection:
        connection.send(ListHeld(round=1))
        connection.receive(Accepted)


def test_with_certificates_only_those_of_the_jobs_authority_are_let_in(tmp_path):
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    node = replace(ours.issue("node"), ca=ours.ca)
    server = PeerServer("127.0.0.1", SECRET, node, answer, stall=DEADLINE)
    try:
        talk(server, node)
        stranger = replace(theirs.issue("stranger"), ca=ours.ca)
        for tls in (None, stranger, replace(node, ca=theirs.ca), TlsConfig(ca=ours.ca)):
            with pytest.raises(DLRoverError):
                talk(server, tls, patience=2.0)  # without a certificate both wait for the other to begin
        talk(server, node)
    finally:
        server.close()


def test_strangers_with_half_handshakes_keep_no_node_out_and_do_not_stay(tmp_path):
    """Twice as many as there are slots, and each comes only a part of the way."""
    ours = Authority(tmp_path, "ours")
    node = replace(ours.issue("node"), ca=ours.ca)
    server = PeerServer("127.0.0.1", SECRET, node, answer, stall=DEADLINE)
    place = parse_address(server.address)
    says = half_handshakes("localhost")
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        opened = []
        for number in range(2 * MAX_HANDSHAKES):
            opened.append(stack.enter_context(socket.create_connection((place.host, place.port), timeout=DEADLINE)))
            opened[-1].sendall(says[number % len(says)])
        talk(server, node)
        for stranger in opened:
            with contextlib.suppress(ConnectionError):
                while stranger.recv(65_536):
                    pass
        talk(server, node)


def test_a_job_with_tls_needs_a_certificate_on_each_node():
    with pytest.raises(ConfigError, match="but this node has no certificate"):
        PeerServer("127.0.0.1", SECRET, TlsConfig(ca="somewhere"), answer)
