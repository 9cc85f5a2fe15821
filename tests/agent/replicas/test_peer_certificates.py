"""Agents with certificates: what they say to each other is encrypted, and strangers' certificates are not trusted."""

from __future__ import annotations

import shutil
import time

import pytest
from msgspec.structs import replace

from dlrover.agent.replicas.wire import PeerConnection, PeerServer, Secret, connect
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.errors import ConfigError, DLRoverError
from dlrover.protocol.messages.peers import Accepted, ListHeld
from tests.agent.lab import DEADLINE
from tests.protocol.rpc.test_certificates import Authority

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


def test_a_job_with_tls_needs_a_certificate_on_each_node():
    with pytest.raises(ConfigError, match="this node has no certificate"):
        PeerServer("127.0.0.1", SECRET, TlsConfig(ca="somewhere"), answer)
