"""
Where a peer is found, and which certificates are trusted there.

The one place that takes `host:port` apart, so that IPv6 literals work everywhere or nowhere, and that says whether a
host is this machine (the launcher for which the master's address is local hosts the master). Knows no gRPC: the
launcher, which must start in milliseconds, uses it too.
"""

from __future__ import annotations

import ipaddress
import socket

from msgspec import Struct

from dlrover.protocol.errors import ConfigError

LOOPBACK = "127.0.0.1"


class Address(Struct, frozen=True):
    """`str()` gives the text form, with brackets around an IPv6 host."""

    host: str
    """Name or literal, without brackets."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TlsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files. A server needs `cert` and `key`; `ca` on the server demands client certificates (mTLS)."""

    ca: str = ""
    cert: str = ""
    key: str = ""


def parse_address(text: str, *, default_port: int | None = None, shown: str = "") -> Address:
    """
    Accepts `host:port`, `[v6]:port`, and without a port (`host`, `[v6]`, `v6`) if a default is given.

    `shown` is how the message of a `ConfigError` names it: with the option or variable that it came from.
    """
    shown = shown or f"address {text!r}"
    host, port_text = _split(text.strip())
    if not host or any(character in host for character in " \t\n/,@[]"):
        raise ConfigError(f"{shown}: give HOST:PORT, with an IPv6 host in brackets like [::1]:29500.")
    if not port_text:
        if default_port is None:
            raise ConfigError(f"{shown}: the port is missing. Give HOST:PORT, for example {Address(host, 29500)}.")
        return Address(host, default_port)
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) <= 65535):
        raise ConfigError(f"{shown}: {port_text!r} is not a port. Give a number from 0 to 65535.")
    return Address(host, int(port_text))


def is_loopback(host: str) -> bool:
    """Reachable from this machine only, whatever the name resolves to."""
    addresses = _resolve(host)
    return bool(addresses) and all(ipaddress.ip_address(_without_zone(name)).is_loopback for _, name, _ in addresses)


def is_local(host: str) -> bool:
    """Whether connections to this host end on this machine. An unknown name is not local."""
    return any(_is_ours(family, name, target) for family, name, target in _resolve(host))


_SocketAddress = tuple[str, int] | tuple[str, int, int, int]


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return "", ""
        return host, rest[1:]
    if text.count(":") > 1:
        return text, ""  # a bare IPv6 literal: there is no telling a port from its last group
    host, _, port = text.partition(":")
    return host, port


def _resolve(host: str) -> list[tuple[int, str, _SocketAddress]]:
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [(family, str(target[0]), target) for family, _, _, _, target in found]  # type: ignore[misc]


def _is_ours(family: int, name: str, target: _SocketAddress) -> bool:
    address = ipaddress.ip_address(_without_zone(name))
    if address.is_loopback or address.is_unspecified:
        return True
    # The kernel's routing table knows best: it reaches our own addresses from that same address. Connecting a datagram
    # socket sends nothing. Trying to bind would lie where net.ipv4.ip_nonlocal_bind is set, as load balancers do.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return bool(probe.getsockname()[0] == target[0])
    except OSError:
        return False


def _without_zone(name: str) -> str:
    return name.partition("%")[0]
