"""
Service addresses and names: one proxy per cluster IP and port, and a name server for services and pods.

Both listen in a namespace on the pods' bridge, to which every pod's default route leads. A connection goes to a ready
pod of the service at the moment it is opened, so clients of a service find the next pod when the last one is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
import struct
from typing import cast

from tests.kubernetes.controllers.following import Followed
from tests.kubernetes.controllers.pipes import join
from tests.kubernetes.kubelet.client import ApiError, Body, Cluster
from tests.kubernetes.kubelet.network import ServiceNetwork

_DOMAIN = "svc.cluster.local"
_CONNECT_TIMEOUT = 2.0
_RETRY = 0.2
_A, _IN = 1, 1


class Services:
    def __init__(self, cluster: Cluster, network: ServiceNetwork, addresses: ipaddress.IPv4Network) -> None:
        self._cluster = cluster
        self._network = network
        self._free = [str(address) for address in addresses.hosts()]
        """Cluster IPs for servers that give none."""
        self._changed = asyncio.Event()
        self._pods = Followed(cluster, "/api/v1/pods", self._changed)
        self._services = Followed(cluster, "/api/v1/services", self._changed)
        self._proxies: dict[tuple[str, int], asyncio.Server] = {}

    async def run(self, dns_address: str) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _NameServer(self), sock=self._network.bind(socket.SOCK_DGRAM, dns_address, 53)
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pods.run())
                group.create_task(self._services.run())
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    try:
                        await self._open_all()
                    except (ApiError, OSError):
                        await asyncio.sleep(_RETRY)
                        self._changed.set()
        finally:
            transport.close()

    def addresses_of(self, name: str) -> list[str]:
        """Of `<service>.<namespace>.svc.cluster.local` or `<pod>.<service>.<namespace>.svc.cluster.local`."""
        words = name.rstrip(".").removesuffix(f".{_DOMAIN}").split(".")
        if len(words) not in (2, 3) or not name.rstrip(".").endswith(f".{_DOMAIN}"):
            return []
        host, (service_name, namespace) = ("" if len(words) == 2 else words[0]), words[-2:]
        for service in self._services.objects.values():
            meta = service["metadata"]
            if (meta["name"], meta["namespace"]) != (service_name, namespace):
                continue
            if service["spec"].get("clusterIP") not in (None, "", "None"):
                return [str(service["spec"]["clusterIP"])] if not host else []
            pods = self._endpoints(service)
            if host:
                pods = [
                    pod
                    for pod in pods
                    if (pod["spec"].get("hostname"), pod["spec"].get("subdomain")) == (host, service_name)
                ]
            return [str(pod["status"]["podIP"]) for pod in pods]
        return []

    async def _open_all(self) -> None:
        wanted: dict[tuple[str, int], str] = {}
        for uid, service in self._services.objects.items():
            address = await self._address_of(service)
            if address:
                for port in service["spec"].get("ports") or ():
                    wanted[address, int(port["port"])] = uid
        for key in [key for key in self._proxies if key not in wanted]:
            self._proxies.pop(key).close()
        for (address, port), uid in wanted.items():
            if (address, port) not in self._proxies:
                await asyncio.to_thread(self._network.add, address)

                async def serve(
                    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, uid: str = uid, port: int = port
                ) -> None:
                    await self._connect(uid, port, reader, writer)

                self._proxies[address, port] = await asyncio.start_server(
                    serve, sock=self._network.bind(socket.SOCK_STREAM, address, port)
                )

    async def _address_of(self, service: Body) -> str:
        """Empty: headless, or served elsewhere (the API server's own)."""
        meta, address = service["metadata"], service["spec"].get("clusterIP")
        if address == "None" or (meta["namespace"], meta["name"]) == ("default", "kubernetes"):
            return ""
        if not address:
            address = self._free.pop(0)
            path = f"/api/v1/namespaces/{meta['namespace']}/services/{meta['name']}"
            await self._cluster.patch(path, {"spec": {"clusterIP": address, "clusterIPs": [address]}})
            service["spec"]["clusterIP"] = address
        return str(address)

    async def _connect(self, uid: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        service = self._services.objects.get(uid, {"spec": {}, "metadata": {"namespace": ""}})
        pods = self._endpoints(service)
        ports = {int(each["port"]): each for each in service["spec"].get("ports") or ()}
        target = ports.get(port, {}).get("targetPort", port)
        if not pods:
            writer.transport.abort()  # refused, as without endpoints
            return
        try:
            address = random.choice(pods)["status"]["podIP"]
            far = await asyncio.wait_for(asyncio.open_connection(address, int(target)), _CONNECT_TIMEOUT)
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        await join((reader, writer), far)

    def _endpoints(self, service: Body) -> list[Body]:
        selector = service["spec"].get("selector") or {}
        is_unready_fine = bool(service["spec"].get("publishNotReadyAddresses"))
        return [
            pod
            for pod in self._pods.objects.values()
            if selector
            and pod["metadata"]["namespace"] == service["metadata"]["namespace"]
            and all((pod["metadata"].get("labels") or {}).get(key) == value for key, value in selector.items())
            and (pod.get("status") or {}).get("podIP")
            and pod["status"].get("phase") not in ("Succeeded", "Failed")
            and (is_unready_fine or ("deletionTimestamp" not in pod["metadata"] and _is_ready(pod)))
        ]


def _is_ready(pod: Body) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions") or ())


class _NameServer(asyncio.DatagramProtocol):
    """Answers A questions about the cluster's names; everything else does not exist."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        with contextlib.suppress(struct.error, IndexError, UnicodeDecodeError):  # no question: no answer
            assert self._transport is not None
            self._transport.sendto(self._answer(data), address)

    def _answer(self, data: bytes) -> bytes:
        (number,) = struct.unpack_from("!H", data)
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode("ascii"))
            at += 1 + data[at]
        kind, _ = struct.unpack_from("!HH", data, at + 1)
        question = data[12 : at + 5]
        addresses = self._services.addresses_of(".".join(labels).lower())
        found = [
            struct.pack("!HHHIH4s", 0xC00C, _A, _IN, 1, 4, ipaddress.IPv4Address(each).packed) for each in addresses
        ]
        answers = found if kind == _A else []
        code = 0 if addresses else 3
        return struct.pack("!HHHHHH", number, 0x8580 | code, 1, len(answers), 0, 0) + question + b"".join(answers)
