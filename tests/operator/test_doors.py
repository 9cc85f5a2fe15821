"""The operator's ports beside strangers: everybody in the cluster reaches them."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from dlrover.operator.doors import MAX_CONNECTIONS, OperatorMetrics, open_doors
from dlrover.protocol.errors import ConfigError
from tests.floods import STRANGER

DEADLINE = 60.0
HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


def a_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as seat:
        host, port = seat.getsockname()
        return host, port


def opened(
    health: tuple[str, int], metrics: tuple[str, int], *, patience: float
) -> contextlib.AbstractAsyncContextManager[None]:
    return open_doors(
        health,
        metrics,
        readiness=lambda: None,
        numbers=OperatorMetrics(),
        count=lambda: ["Running"],
        patience=patience,
    )


async def get(door: tuple[str, int], path: str) -> bytes:
    reader, writer = await asyncio.open_connection(*door)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def is_closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    return True


@pytest.mark.parametrize("say", [b"", HALF])
async def test_strangers_who_stay_keep_nobody_out_and_are_few(say: bytes) -> None:
    health, metrics = a_port(), a_port()
    async with asyncio.timeout(DEADLINE), opened(health, metrics, patience=DEADLINE):
        strangers = []
        for _ in range(MAX_CONNECTIONS + 50):
            strangers.append(await asyncio.open_connection(*health, local_addr=(STRANGER, 0)))
            strangers[-1][1].write(say)
            if not len(strangers) % 50:
                assert b"\r\n\r\nok\n" in await get(health, "/healthz")
        assert b'dlrover_operator_jobs{phase="Running"} 1.0' in await get(metrics, "/metrics")
        assert all([await is_closed(reader) for reader, _ in strangers[:50]]), "the oldest went"
        for _, writer in strangers:
            writer.transport.abort()


async def test_no_connection_stays() -> None:
    health, metrics = a_port(), a_port()
    async with asyncio.timeout(DEADLINE), opened(health, metrics, patience=0.2):
        strangers = [await asyncio.open_connection(*door) for door in (health, metrics)]
        strangers[0][1].write(HALF)
        for reader, writer in strangers:
            assert await is_closed(reader)
            writer.close()
        assert b"\r\n\r\nok\n" in await get(health, "/readyz")


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = taken.getsockname()
        with pytest.raises(ConfigError, match=f"The port {place[1]} cannot be opened"):
            async with opened(place, a_port(), patience=DEADLINE):
                raise AssertionError("it is taken")
