"""
The controllers as a process: `python -m tests.kubernetes.controllers --kubeconfig F --network TAG --address A ...`.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import signal
import socket
from pathlib import Path

from tests.kubernetes.controllers.lifecycle import NodeLifecycle
from tests.kubernetes.controllers.pipes import serve_api
from tests.kubernetes.controllers.scheduler import Scheduler
from tests.kubernetes.controllers.services import Services
from tests.kubernetes.kubelet.client import Cluster
from tests.kubernetes.kubelet.network import ServiceNetwork


async def serve(options: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with Cluster(options.kubeconfig) as cluster:
        tasks = [asyncio.ensure_future(ended.wait())]
        if not options.no_scheduler:
            tasks.append(asyncio.ensure_future(Scheduler(cluster).run()))
        if not options.no_lifecycle:
            lifecycle = NodeLifecycle(
                cluster, lease_grace=options.lease_grace, toleration_factor=options.toleration_factor
            )
            tasks.append(asyncio.ensure_future(lifecycle.run()))
        network = ServiceNetwork(options.network, options.address)
        network.create()
        services = Services(cluster, network, ipaddress.IPv4Network(options.service_addresses))
        tasks.append(asyncio.ensure_future(services.run(options.address)))
        listener = network.bind(socket.SOCK_STREAM, options.address, options.api_port)
        front = serve_api(cluster.server, cluster.tls, listener, options.certificate)
        tasks.append(asyncio.ensure_future(front))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()


def main() -> None:
    parser = argparse.ArgumentParser(prog="controllers", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--network", required=True, help="tag of the bridge")
    parser.add_argument("--address", required=True, help="on the bridge: of the name server and the API server")
    parser.add_argument("--api-port", type=int, default=6443)
    parser.add_argument("--certificate", type=Path, required=True, help="certificate and key for that address")
    parser.add_argument("--service-addresses", required=True, help="cluster IPs, where the server gives none")
    parser.add_argument("--no-scheduler", action="store_true", help="a real one runs")
    parser.add_argument("--no-lifecycle", action="store_true", help="a real controller-manager runs")
    parser.add_argument("--lease-grace", type=float, default=50.0, help="seconds until a silent node is unreachable")
    parser.add_argument("--toleration-factor", type=float, default=1.0, help="shortens tolerationSeconds of pods")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
