"""
Reads numbers in Prometheus' text form from an HTTP address near this node: of a kernel profiler, of a device exporter, of the training itself.

An own few lines instead of an HTTP library, because the agent may wait for nothing: one GET of version 1.0 over asyncio, with a deadline and a limit of
bytes for all of it. Whatever answers, the worst that comes out is an error in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from dlrover.host import side_thread
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.watch import MAX_SERIES

TIMEOUT = 5.0
"""Seconds for connecting, asking and reading together."""
MAX_BYTES = 1 << 20
MAX_NAME = 256
XPU_TIMER = "xpu-timer"
"""A profiler that is preloaded into workers; it serves its metrics on the node."""
_XPU_TIMER_PREFIX = "XPU_TIMER_COMMON_"


class ScrapeError(Exception):
    """Nothing could be read, and why."""


class Scrape:
    """One address, as a collector."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        prefixes: Sequence[str] = (),
        interval: float = 60.0,
        is_optional: bool = False,
    ) -> None:
        """
        `prefixes`: only series whose name begins so; empty: all, as far as there is room. `is_optional`: an address where no program listens is no trouble.
        """
        self.name = name
        self._is_optional = is_optional
        self.interval = interval
        self._url = check_url(url)
        self._prefixes = tuple(prefixes)

    async def collect(self) -> Mapping[str, float]:
        """Raises ScrapeError."""
        try:
            return parse(await fetch(self._url), self._prefixes)
        except ScrapeError as error:
            if self._is_optional and isinstance(error.__cause__, ConnectionRefusedError):
                return {}
            raise


def xpu_timer(port: int) -> Scrape:
    return Scrape(XPU_TIMER, f"http://127.0.0.1:{port}/metrics", prefixes=(_XPU_TIMER_PREFIX,), is_optional=True)


def check_url(url: str, option: str = "--scrape") -> str:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_sound = False
    if not is_sound or not url.isascii() or any(letter <= " " for letter in url):
        raise ConfigError(f"{option} {url[:200]}: give addresses such as http://127.0.0.1:9400/metrics.")
    return url


async def fetch(url: str, *, timeout: float = TIMEOUT, max_bytes: int = MAX_BYTES) -> str:
    """The body. Raises ScrapeError."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    writer = None
    try:
        async with asyncio.timeout(timeout):
            host = await _resolve(parts.hostname or "")
            reader, writer = await asyncio.open_connection(
                host, port, ssl=is_tls or None, server_hostname=parts.hostname if is_tls else None
            )
            writer.write(
                f"GET {path} HTTP/1.0\r\nHost: {parts.netloc.rpartition('@')[2]}\r\nAccept: text/plain\r\n\r\n".encode()
            )
            await writer.drain()
            answer = await _read(reader, max_bytes)
    except TimeoutError as error:
        raise ScrapeError(f"{url} did not answer within {timeout:g} s") from error
    except (OSError, ValueError) as error:
        raise ScrapeError(f"{url}: {error}") from error
    finally:
        if writer is not None:
            writer.transport.abort()  # closing in good order could wait
    head, separator, body = answer.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    if not separator or len(status) < 2 or not status[0].startswith("HTTP/"):
        raise ScrapeError(f"{url} does not speak HTTP")
    if status[1] != "200":
        raise ScrapeError(f"{url} answered {' '.join(status[1:])[:80]}")
    return body.decode("utf-8", "replace")


async def _resolve(host: str) -> str:
    """In a thread of its own: a name server may take long, and the loop's own threads are few."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    found = await side_thread.begin(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), "resolver")
    return str(found[0][4][0])


async def _read(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """To the end, or as much as may be: the rest is cut, and with it the last line."""
    data = b""
    while len(data) < max_bytes and (block := await reader.read(65536)):
        data += block
    return data if len(data) < max_bytes else data[:max_bytes].rpartition(b"\n")[0]


def parse(text: str, prefixes: Sequence[str] = (), *, max_series: int = MAX_SERIES) -> dict[str, float]:
    """Series to number. What is no number in this form, or is none at all, is left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith(("#", "exposer")) or (prefixes and not line.startswith(tuple(prefixes))):
            continue
        series, value = _parse_line(line)
        if not series or len(series) > MAX_NAME or not math.isfinite(value):
            continue
        found[series] = value
        if len(found) >= max_series:
            break
    return found


def _parse_line(line: str) -> tuple[str, float]:
    end = line.rfind("}")
    if end < 0:
        series, _, rest = line.partition(" ")
    else:
        series, rest = line[: end + 1], line[end + 1 :]
    words = rest.split()
    try:
        return (series, float(words[0])) if 1 <= len(words) <= 2 else ("", 0.0)
    except ValueError:
        return "", 0.0


def scrapes(urls: Sequence[str], xpu_timer_port: int | None) -> list[Scrape]:
    """What the user asked for, each under a name of its own."""
    made = [] if xpu_timer_port is None else [xpu_timer(xpu_timer_port)]
    return made + [Scrape(f"scrape-{urlsplit(url).netloc.rpartition('@')[2]}", url) for url in urls]
