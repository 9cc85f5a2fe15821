"""Real network namespaces: own addresses, cables that can be pulled, and nothing left. Needs root."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.platforms.local.kernel_claims import KernelTag, dead_tags, tag_of
from dlrover.platforms.local.namespaces import Namespaces, available, remove_namespaces
from dlrover.platforms.local.starter import remove_left_behind
from dlrover.protocol.errors import ConfigError

needs_namespaces = pytest.mark.skipif(bool(available()), reason=available() or "-")

KNOCK = """
import ctypes, os, socket, sys
ctypes.CDLL(None).setns(os.open(sys.argv[1], os.O_RDONLY), 0x40000000)
s = socket.socket()
s.settimeout(float(sys.argv[4]))
try:
    s.connect((sys.argv[2], int(sys.argv[3])))
    print("reached")
except ConnectionRefusedError:
    print("reached")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def networks() -> Iterator[Namespaces]:
    claim = KernelTag()
    made = Namespaces.create(claim.tag)
    yield made
    made.close()
    claim.release()


def reaches(network: str, address: str, port: int = 9) -> bool:
    """Patient: an address that was not found while the cable was out is looked for again after a second, or given up after three."""
    return any(_knock(network, address, port, 5.0) == "reached" for _ in range(4))


def is_cut_off(network: str, address: str) -> bool:
    return _knock(network, address, 9, 0.3) != "reached"


def _knock(network: str, address: str, port: int, timeout: float) -> str:
    argv = [sys.executable, "-I", "-S", "-c", KNOCK, network, address, str(port), str(timeout)]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@needs_namespaces
def test_nodes_reach_each_other_and_the_master_until_a_cable_is_pulled(networks):
    one, two = networks.add(1), networks.add(2)
    assert one.address != two.address
    assert reaches(one.network, two.address)
    assert reaches(one.network, networks.master_address)

    networks.cut(2)
    assert is_cut_off(one.network, two.address)
    assert is_cut_off(two.network, networks.master_address)
    assert reaches(one.network, networks.master_address)
    networks.heal(2)
    assert reaches(one.network, two.address)

    networks.cut_master()
    assert is_cut_off(one.network, networks.master_address)
    assert reaches(one.network, two.address)
    networks.heal_master()
    assert reaches(two.network, networks.master_address)


@needs_namespaces
def test_somebody_else_can_pull_the_cables_of_a_host(networks):
    place = networks.add(7)
    other = Namespaces.find(os.getpid())
    other.cut(7)
    assert is_cut_off(place.network, networks.master_address)
    other.heal(7)
    assert reaches(place.network, networks.master_address)


@needs_namespaces
def test_the_master_is_reached_where_it_listens(networks):
    place = networks.add(0)
    with socket.create_server((networks.master_address, 0)) as server:
        assert reaches(place.network, networks.master_address, server.getsockname()[1])
        connection, (peer, _) = server.accept()
        connection.close()
    assert peer == place.address


@needs_namespaces
def test_an_address_is_given_again_only_when_its_node_is_gone(networks):
    first, second = networks.add(0), networks.add(1)
    networks.remove(0)
    third = networks.add(2)
    assert (third.address, second.address != first.address) == (first.address, True)
    assert not os.path.exists(first.network)


@needs_namespaces
def test_what_a_killed_host_leaves_is_found_and_removed():
    program = """
import os, signal
from dlrover.platforms.local.kernel_claims import KernelTag
from dlrover.platforms.local.namespaces import Namespaces
claim = KernelTag()
Namespaces.create(claim.tag).add(3)
print(claim.tag, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    tag = done.stdout.strip()
    deadline = time.monotonic() + 30
    # Another test may be at it just now: it holds the claim until it is done.
    while Path(f"/run/dlrover/{tag}").exists():
        assert time.monotonic() < deadline, os.listdir("/run/dlrover")
        remove_left_behind()
    assert not [name for name in os.listdir("/run/netns") if tag in name]
    assert remove_namespaces(tag) == []


def test_a_claim_is_dead_only_when_its_holder_is(tmp_path):
    living, dead = KernelTag(tmp_path), KernelTag(tmp_path)
    assert {tag_of(os.getpid(), tmp_path)} <= {living.tag, dead.tag}
    with dead_tags(tmp_path) as tags:
        assert tags == []
    os.close(dead._descriptor)  # as the kernel does when a process ends
    with dead_tags(tmp_path) as tags:
        assert tags == [dead.tag]
    assert [path.name for path in tmp_path.iterdir()] == [living.tag]
    living.release()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="no node host"):
        tag_of(os.getpid(), tmp_path)
