"""TLS and mutual TLS over a real connection, with certificates made for the test."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.errors import ConfigError, Unavailable
from dlrover.protocol.messages.job import Ping, Pong
from dlrover.protocol.rpc.client import ask
from dlrover.protocol.rpc.server import MasterServer
from dlrover.protocol.rpc.transport import open_channel
from tests.floods import STRANGER
from tests.protocol.conftest import TOKEN, Agent, Serve

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program for certificates")


class Authority:
    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                      "-subj", f"/CN={name}", "-keyout", self.path("key"), "-out", self.path("pem"))  # fmt: skip

    @property
    def ca(self) -> str:
        return self.path("pem")

    def issue(self, who: str) -> TlsConfig:
        self._openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={who}",
                      "-keyout", self.path(f"{who}.key"), "-out", self.path(f"{who}.csr"))  # fmt: skip
        extensions = Path(self.path(f"{who}.ext"))
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        self._openssl("x509", "-req", "-in", self.path(f"{who}.csr"), "-CA", self.ca, "-CAkey", self.path("key"),
                      "-CAcreateserial", "-days", "2", "-extfile", str(extensions),
                      "-out", self.path(f"{who}.pem"))  # fmt: skip
        return TlsConfig(cert=self.path(f"{who}.pem"), key=self.path(f"{who}.key"))

    def path(self, suffix: str) -> str:
        return str(self._directory / f"{self._name}.{suffix}")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


async def test_a_client_that_trusts_the_authority_gets_in(
    serve: Serve, connect: Callable[..., Agent], ours: Authority
) -> None:
    _, address = await serve(tls=ours.issue("master"))
    tls = TlsConfig(ca=ours.ca)
    assert isinstance(await ask(address, Ping(), token=TOKEN, tls=tls, timeout=10), Pong)
    assert (await connect(address, tls=tls).attached()).node == 7


async def test_a_client_of_another_authority_or_without_tls_does_not_get_in(
    serve: Serve, ours: Authority, theirs: Authority
) -> None:
    _, address = await serve(tls=ours.issue("master"))
    for tls in (TlsConfig(ca=theirs.ca), None):
        with pytest.raises(Unavailable):
            await ask(address, Ping(), token=TOKEN, tls=tls, timeout=5)


async def test_with_mutual_tls_only_certified_clients_get_in(serve: Serve, ours: Authority, theirs: Authority) -> None:
    master = ours.issue("master")
    _, address = await serve(tls=TlsConfig(ca=ours.ca, cert=master.cert, key=master.key))
    agent, stranger = ours.issue("agent"), theirs.issue("agent")
    good = TlsConfig(ca=ours.ca, cert=agent.cert, key=agent.key)
    assert isinstance(await ask(address, Ping(), token=TOKEN, tls=good, timeout=10), Pong)
    for tls in (TlsConfig(ca=ours.ca), TlsConfig(ca=ours.ca, cert=stranger.cert, key=stranger.key)):
        with pytest.raises(Unavailable):
            await ask(address, Ping(), token=TOKEN, tls=tls, timeout=5)
    assert isinstance(await ask(address, Ping(), token=TOKEN, tls=good, timeout=10), Pong)


async def test_missing_files_are_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        MasterServer(token="", tls=TlsConfig(cert=missing, key=missing)).bind("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="both cert and key"):
        MasterServer(token="", tls=TlsConfig(cert=missing)).bind("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        open_channel("127.0.0.1:1", TlsConfig(ca=missing))
    with pytest.raises(ConfigError, match="both cert and key"):
        open_channel("127.0.0.1:1", TlsConfig(cert=missing))


DEADLINE = 60.0


def half_handshakes(name: str) -> list[bytes]:
    """Nothing, part of a header, a header that announces 16 KiB, half of a hello, and a whole one that the answer to the master's never follows."""
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()
    return [b"", hello[:3], b"\x16\x03\x01\x40\x00" + bytes(64), hello[: len(hello) // 2], hello]


async def test_half_handshakes_do_not_stay_and_keep_nobody_out(
    serve: Serve, connect: Callable[..., Agent], ours: Authority
) -> None:
    """Also a whole handshake that nothing follows. Who says nothing at all stays in the kernel: see `test_door`."""
    _, address = await serve(tls=ours.issue("master"))
    tls = TlsConfig(ca=ours.ca)
    agent = connect(address, tls=tls)
    await agent.attached()
    host, port = address.rsplit(":", 1)
    opened = []
    for say in filter(None, half_handshakes("localhost") * 10):
        opened.append(await asyncio.open_connection(host, int(port), local_addr=(STRANGER, 0)))
        opened[-1][1].write(say)
    context = ssl.create_default_context(cafile=ours.ca)
    context.set_alpn_protocols(["h2"])
    opened += [await asyncio.open_connection(host, int(port), ssl=context, local_addr=(STRANGER, 0)) for _ in range(10)]
    try:
        assert isinstance(await ask(address, Ping(), token=TOKEN, tls=tls, timeout=DEADLINE), Pong)
        await connect(address, tls=tls).attached()
        async with asyncio.timeout(DEADLINE):
            for reader, _writer in opened:
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    while await reader.read(65_536):
                        pass
    finally:
        for _reader, writer in opened:
            writer.transport.abort()
    assert agent.attachments.empty(), "an agent had to come again"
    assert agent.channel.outage() == 0.0
