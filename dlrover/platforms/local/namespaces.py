"""
Network namespaces: each local node has an address of its own, as if it were a machine.

A namespace called the hub holds a bridge; every node has one end of a cable in it, and so has the master, which stays in
the machine's own namespace with a single interface. Pulling a cable at the hub cuts one node, or the master, off from
all others, while both ends keep their link: exactly what a broken switch looks like. Tests use that.

Done with the `ip` command and not a netlink library: it is on every machine that can do this at all, and a node is set up
in some ten milliseconds.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import shutil
import subprocess

from msgspec import Struct

from dlrover.platforms.local.kernel_claims import KernelTag, tag_of
from dlrover.protocol.errors import ConfigError, Unavailable

NODE_INTERFACE = "eth0"
"""Inside a node's namespace. Told to gloo and NCCL, which would else go by the machine's name, which leads elsewhere."""
_MASTER_PORT = "m0"
_NETNS = "/run/netns"
_IP_TIMEOUT = 10.0
_PREFIX_BITS = 22
"""A thousand nodes at once are more than a machine holds."""
_NUM_TRIES = 50


class NodeNamespaces(Struct, frozen=True):
    """Where a node is."""

    network: str
    """File of its namespace."""
    address: str


class NamespacesFailed(Unavailable):
    """`ip` could not do it; carries what it said."""


def available() -> str:
    """Empty if network namespaces can be made here, else the reason why not."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the `ip` command (package iproute2)"
    try:
        claim = KernelTag()  # so that even a probe that is killed is found by those who clean up
    except ConfigError as error:
        return f"network namespaces cannot be reserved: {error}"
    name = f"dlr-{claim.tag}-probe"
    try:
        _ip(f"netns add {name}")
        _ip("link add dlr0 type bridge", netns=name)
    except NamespacesFailed as error:
        return f"network namespaces cannot be made here: {error}"
    finally:
        remove_namespaces(claim.tag)
        claim.release()
    return ""


class Namespaces:
    """Of one node host, named after its claim."""

    def __init__(self, tag: str) -> None:
        """Only names; `create` makes the hub, `find` is for those who want to pull cables of a network that another program made."""
        self._tag = tag
        self._hub = f"dlr-{tag}-hub"
        self._network = ipaddress.ip_network("10.0.0.0/8")
        self._places: dict[int, NodeNamespaces] = {}

    @classmethod
    def create(cls, tag: str) -> Namespaces:
        """Raises `NamespacesFailed`, and leaves nothing then."""
        made = cls(tag)
        made._network = _free_network()
        try:
            _ip(f"netns add {made._hub}")
            _ip("link add br0 type bridge", "link set br0 up", netns=made._hub)
            made._plug(_MASTER_PORT, made._master_interface, netns="")
            _ip(
                f"addr add {made.master_address}/{_PREFIX_BITS} dev {made._master_interface}",
                f"link set {made._master_interface} up",
            )
        except BaseException:
            remove_namespaces(tag)
            raise
        return made

    @classmethod
    def find(cls, host_pid: int) -> Namespaces:
        """Those of a running `dlrover local`. Raises `ConfigError` if it has none."""
        return cls(tag_of(host_pid))

    @property
    def master_address(self) -> str:
        return str(self._network[1])

    @property
    def _master_interface(self) -> str:
        return f"dlr{self._tag}m"

    def add(self, node: int) -> NodeNamespaces:
        """Raises `NamespacesFailed`."""
        name = self._name(node)
        place = NodeNamespaces(f"{_NETNS}/{name}", self._free_address())
        try:
            _ip(f"netns add {name}")
            self._plug(f"n{node}", NODE_INTERFACE, netns=name)
            _ip(
                f"addr add {place.address}/{_PREFIX_BITS} dev {NODE_INTERFACE}",
                f"link set {NODE_INTERFACE} up",
                "link set lo up",
                netns=name,
            )
        except BaseException:
            self._delete(node)
            raise
        self._places[node] = place
        return place

    def remove(self, node: int) -> None:
        if self._places.pop(node, None) is not None:
            self._delete(node)

    def close(self) -> None:
        remove_namespaces(self._tag)
        self._places.clear()

    # Pulling cables.

    def cut(self, node: int) -> None:
        """Nothing reaches the node any more and nothing leaves it; its link stays up."""
        self._set_port(f"n{node}", is_open=False)

    def heal(self, node: int) -> None:
        self._set_port(f"n{node}", is_open=True)

    def cut_master(self) -> None:
        """The nodes still reach each other."""
        self._set_port(_MASTER_PORT, is_open=False)

    def heal_master(self) -> None:
        self._set_port(_MASTER_PORT, is_open=True)

    def delay(self, node: int, seconds: float) -> None:
        """Hold up everything on its way to the node; 0 ends it. Needs the kernel's `netem`."""
        command = ["tc", "-n", self._hub, "qdisc", "replace", "dev", f"n{node}", "root", "netem", "delay"]
        _run([*command, f"{round(seconds * 1e6)}us"], "")

    def _set_port(self, port: str, *, is_open: bool) -> None:
        # Unplugged from the bridge, not taken down: that would be told to the other end, and a real partition is not.
        _ip(f"link set {port} {'master br0' if is_open else 'nomaster'}", netns=self._hub)

    def _plug(self, port: str, interface: str, *, netns: str) -> None:
        """A cable from the hub's bridge to a new interface."""
        where = f"netns {netns}" if netns else f"netns {os.getpid()}"
        _ip(f"link add {port} type veth peer name {interface} {where}", netns=self._hub)
        _ip(f"link set {port} master br0 up", netns=self._hub)

    def _delete(self, node: int) -> None:
        for lines, netns in ((f"link del n{node}", self._hub), (f"netns del {self._name(node)}", "")):
            try:
                _ip(lines, netns=netns)
            except NamespacesFailed:
                continue  # it was not made, or is gone; what stays is removed with the rest

    def _name(self, node: int) -> str:
        return f"dlr-{self._tag}-{node}"

    def _free_address(self) -> str:
        used = {place.address for place in self._places.values()}
        for number in range(2, self._network.num_addresses - 1):
            address = str(self._network[number])
            if address not in used:
                return address
        raise NamespacesFailed(f"all {len(used)} addresses of {self._network} are in use")


def remove_namespaces(tag: str) -> list[str]:
    """Everything with the tag in its name. Interfaces in a namespace go with it."""
    removed = []
    try:
        names = sorted(name for name in os.listdir(_NETNS) if name.startswith(f"dlr-{tag}-"))
    except OSError:
        return []
    try:
        # First the cables: a namespace lives on while a process is in it.
        _ip(f"link del dlr{tag}m")
    except NamespacesFailed:
        pass  # it goes with the hub
    for name in names:
        try:
            _ip(f"netns del {name}")
            removed.append(f"network namespace {name}")
        except NamespacesFailed:
            continue  # somebody else was faster
    return removed


def _free_network() -> ipaddress.IPv4Network:
    """A private range that no route of this machine leads to."""
    routes = json.loads(_run(["ip", "-4", "-j", "route", "show", "table", "all"], "") or "[]")
    used = []
    for route in routes:
        destination = str(route.get("dst", ""))
        if destination[:1].isdigit():
            used.append(ipaddress.IPv4Network(destination, strict=False))
    for _ in range(_NUM_TRIES):
        base = f"10.{random.randrange(64, 192)}.{4 * random.randrange(64)}.0"
        network = ipaddress.IPv4Network(f"{base}/{_PREFIX_BITS}")
        if not any(network.overlaps(other) for other in used if other.prefixlen):
            return network
    raise NamespacesFailed("all private address ranges from 10.64.0.0 to 10.191.255.255 are in use on this machine")


def _ip(*lines: str, netns: str = "") -> None:
    # One process for all lines; `-batch` stops at the first that fails.
    _run(["ip", *(["-n", netns] if netns else []), "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: list[str], text: str) -> str:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_IP_TIMEOUT, check=False, close_fds=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NamespacesFailed(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise NamespacesFailed(f"{' '.join(command)} ({text.strip()}): {done.stderr.strip()}")
    return done.stdout
