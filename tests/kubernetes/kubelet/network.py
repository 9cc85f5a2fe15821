"""
The pods' network: each pod has a namespace and an address of its own on one bridge of this machine.

The test makes the bridge (`Namespaces` of the local platform: a hub, and one interface in the machine's own namespace); each
kubelet gets the tag of the bridge and a range of addresses. Everything is named after the tag, so that whatever a
killed test leaves is removed with `dlrover clean`. The default route leads to a namespace in which the cluster's services listen.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

from dlrover.platforms.local import namespaces

_TIMEOUT = 30.0
_PREFIX = 22
"""Bits of the bridge's network; each kubelet has a share of it."""
_CLONE_NEWNET = 0x40000000
_OVERLAY_PROBE = "mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w /mnt/m && mount -t overlay o -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/m"


class NetworkFailed(Exception):
    """`ip` failed; carries its words."""


def available() -> str:
    """Empty if this machine can run pods as processes, else the reason why not."""
    reason = namespaces.available()
    if reason:
        return reason.replace("network namespaces", "pods as processes: network namespaces", 1)
    for program in ("unshare", "nsenter", "mount"):
        if shutil.which(program) is None:
            return f"pods as processes need the command `{program}` (package util-linux)"
    probe = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", _OVERLAY_PROBE],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if probe.returncode == 0 else f"pods as processes need overlay mounts: {probe.stderr.strip()}"


class PodNetwork:
    """Addresses of one kubelet's pods."""

    def __init__(self, tag: str, addresses: ipaddress.IPv4Network, gateway: str) -> None:
        self._tag = tag
        self._hub = f"dlr-{tag}-hub"
        self._free = [str(address) for address in addresses.hosts()]
        self._gateway = gateway

    def add(self) -> str:
        """The address of a new pod."""
        if not self._free:
            raise NetworkFailed("all addresses of this node are in use")
        address = self._free.pop(0)
        name, port = self._name(address), self._port(address)
        self._drop(address)  # what a kubelet before us left under this address
        _ip(f"netns add {name}")
        _ip(f"link add {port} type veth peer name {namespaces.NODE_INTERFACE} netns {name}", netns=self._hub)
        _ip(f"link set {port} master br0 up", netns=self._hub)
        _ip(
            f"addr add {address}/{_PREFIX} dev {namespaces.NODE_INTERFACE}",
            f"link set {namespaces.NODE_INTERFACE} up",
            "link set lo up",
            f"route add default via {self._gateway}",
            netns=name,
        )
        return address

    def adopt(self, address: str) -> None:
        if address in self._free:
            self._free.remove(address)

    def remove(self, address: str) -> None:
        self._drop(address)
        self._free.append(address)  # last: an address is not used again at once

    def cut(self, address: str) -> None:
        """Nothing reaches the pod and nothing leaves it; its link stays up."""
        _ip(f"link set {self._port(address)} nomaster", netns=self._hub)

    def heal(self, address: str) -> None:
        _ip(f"link set {self._port(address)} master br0", netns=self._hub)

    def file(self, address: str) -> str:
        return f"/run/netns/{self._name(address)}"

    def _drop(self, address: str) -> None:
        for line, netns in ((f"link del {self._port(address)}", self._hub), (f"netns del {self._name(address)}", "")):
            try:
                _ip(line, netns=netns)
            except NetworkFailed:
                continue  # it was not there

    def _name(self, address: str) -> str:
        return f"dlr-{self._tag}-{self._port(address)}"

    @staticmethod
    def _port(address: str) -> str:
        return f"p{int(ipaddress.IPv4Address(address)):x}"


class ServiceNetwork:
    """
    The namespace in which the cluster's services listen: the pods' default route leads to it.

    Not the machine's own: API servers of two clusters give the same addresses to their services.
    """

    def __init__(self, tag: str, address: str) -> None:
        self._hub = f"dlr-{tag}-hub"
        self._name = f"dlr-{tag}-svc"
        self._address = address

    def create(self) -> None:
        _ip(f"netns add {self._name}")
        _ip(f"link add svc type veth peer name {namespaces.NODE_INTERFACE} netns {self._name}", netns=self._hub)
        _ip("link set svc master br0 up", netns=self._hub)
        _ip(
            f"addr add {self._address}/{_PREFIX} dev {namespaces.NODE_INTERFACE}",
            f"link set {namespaces.NODE_INTERFACE} up",
            "link set lo up",
            netns=self._name,
        )

    def add(self, address: str) -> None:
        _ip(f"addr replace {address}/32 dev lo", netns=self._name)

    def bind(self, kind: socket.SocketKind, address: str, port: int) -> socket.socket:
        """A socket of that namespace. It stays there, whoever accepts its connections."""
        with ThreadPoolExecutor(1) as thread:  # a namespace is entered by a thread, which ends afterwards
            return thread.submit(self._bind, kind, address, port).result()

    def _bind(self, kind: socket.SocketKind, address: str, port: int) -> socket.socket:
        descriptor = os.open(f"/run/netns/{self._name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(descriptor, _CLONE_NEWNET) != 0:
                raise NetworkFailed(f"setns {self._name}: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(descriptor)
        made = socket.socket(socket.AF_INET, kind)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            made.setblocking(False)
        except OSError:
            made.close()
            raise
        return made


def _ip(*lines: str, netns: str = "") -> None:
    command = ["ip", *(["-n", netns] if netns else []), "-batch", "-"]
    text = "\n".join(lines) + "\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode != 0:
        raise NetworkFailed(f"ip ({text.strip()}): {done.stderr.strip()}")
