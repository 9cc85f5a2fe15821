"""Addresses as people write them."""

from __future__ import annotations

import socket

import pytest

from dlrover.protocol.addresses import Address, is_local, is_loopback, parse_address
from dlrover.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:29500", Address("host", 29500)),
        ("10.0.0.7:1", Address("10.0.0.7", 1)),
        ("[::1]:29500", Address("::1", 29500)),
        ("[fe80::1%eth0]:5", Address("fe80::1%eth0", 5)),
        ("host", Address("host", 7)),
        ("[::1]", Address("::1", 7)),
        ("2001:db8::1", Address("2001:db8::1", 7)),
        (" host:0 ", Address("host", 0)),
    ],
)
def test_hosts_and_ports_are_told_apart(text: str, expected: Address) -> None:
    assert parse_address(text, default_port=7) == expected
    assert parse_address(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", ":5", "[::1", "[::1]x", "host:", "host:x", "host:-1", "host:65536", "a b:1", "host:٣"]
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT|0 to 65535"):
        parse_address(text)


def test_our_own_addresses_are_local() -> None:
    assert is_local("localhost")
    assert is_local("127.0.0.9")
    assert is_local("::1")
    assert is_local("0.0.0.0")
    assert is_loopback("127.0.0.9")
    assert not is_loopback("0.0.0.0")
    assert not is_local("192.0.2.1")
    assert not is_local("no-such-host.invalid")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return  # a machine without a route has no other address to try
        assert is_local(probe.getsockname()[0])
