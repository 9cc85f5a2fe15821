"""
Bytes from one connection to another, both ways, until one side ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_CHUNK = 64 * 1024


async def join(near: Side, far: Side) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(near[0], far[1]))
            group.create_task(_copy(far[0], near[1]))
    finally:
        for _, writer in (near, far):
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            return
    writer.transport.abort()


async def serve_api(server: str, tls: ssl.SSLContext | bool, listener: socket.socket, certificate: Path) -> None:
    """
    The API server as pods reach it: with TLS, at an address of the cluster, whatever it speaks itself.

    `certificate` holds certificate and key; it is its own authority.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    parts = urlsplit(server)
    outer = tls if isinstance(tls, ssl.SSLContext) else None

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.open_connection(parts.hostname, parts.port, ssl=outer)
        except OSError:
            writer.transport.abort()
            return
        await join((reader, writer), far)

    front = await asyncio.start_server(connect, sock=listener, ssl=context)
    async with front:
        await front.serve_forever()


def make_certificate(path: Path, address: str) -> None:
    """A certificate for the address, with its key, in one file."""
    key = path.with_suffix(".key")
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-days",
                "2",
            ),
            *("-subj", "/CN=kubernetes", "-addext", f"subjectAltName=IP:{address},DNS:kubernetes.default.svc"),
            *("-keyout", str(key), "-out", str(path)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    with path.open("a") as file:
        file.write(key.read_text())
