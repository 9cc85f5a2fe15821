"""
The kubelet as a process: `python -m tests.kubernetes.kubelet --kubeconfig F --node NAME --network TAG --addresses CIDR ...`.

SIGTERM ends the kubelet and leaves its pods running; the next one with the same `--folder` takes them over.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import logging
import signal
import sys
from pathlib import Path

from dlrover.platforms.local.memory_limits import MemoryLimits
from tests.kubernetes.kubelet.agent import Kubelet
from tests.kubernetes.kubelet.client import Cluster
from tests.kubernetes.kubelet.host import Host
from tests.kubernetes.kubelet.network import PodNetwork
from tests.kubernetes.kubelet.node import NodeKeeper

_REPOSITORY = Path(__file__).parents[3]


async def serve(options: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    options.folder.mkdir(parents=True, exist_ok=True)
    environ = {}
    if options.api_address:
        host, _, port = options.api_address.rpartition(":")
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    async with Cluster(options.kubeconfig) as cluster:
        if options.api_authority is not None:
            cluster.authority = options.api_authority.read_bytes()
        host_of_pods = Host(
            name=options.node,
            address=options.gateway,
            folder=options.folder.resolve(),
            claims=(options.claims or options.folder / "claims").resolve(),
            cluster=cluster,
            network=PodNetwork(options.network, ipaddress.IPv4Network(options.addresses), options.gateway),
            limits=MemoryLimits(options.network) if MemoryLimits.available() else None,
            capacity=dict(entry.split("=", 1) for entry in options.capacity.split(",")),
            dns=options.dns,
            cluster_environ=environ,
            back_off=options.back_off,
            pull_back_off=options.back_off,
            image_paths=(str(_REPOSITORY), sys.prefix, sys.base_prefix),
        )
        labels = dict(entry.split("=", 1) for entry in options.label)
        taints = [json.loads(entry) for entry in options.taint]
        keeper = NodeKeeper(host_of_pods, renew_every=options.renew_every, labels=labels, taints=taints)
        kubelet = Kubelet(host_of_pods, keeper)
        running = asyncio.ensure_future(kubelet.run())
        serving = asyncio.ensure_future(kubelet.faults.serve(options.folder / "socket"))
        ending = asyncio.ensure_future(ended.wait())
        done, _ = await asyncio.wait((running, serving, ending), return_when=asyncio.FIRST_COMPLETED)
        for task in (running, serving, ending):
            task.cancel()
        await asyncio.gather(running, serving, ending, return_exceptions=True)
        for task in done:
            task.result()


def main() -> None:
    parser = argparse.ArgumentParser(prog="kubelet", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--node", required=True, help="name of the Node object")
    parser.add_argument("--folder", type=Path, required=True, help="pods, logs and the socket for faults")
    parser.add_argument("--claims", type=Path, help="folder of persistent volume claims, shared by all nodes")
    parser.add_argument("--network", required=True, help="tag of the bridge")
    parser.add_argument("--addresses", required=True, help="range of the pods' addresses, like 10.1.0.64/26")
    parser.add_argument("--gateway", required=True, help="address on the bridge to which the pods' default route leads")
    parser.add_argument("--dns", default="", help="address of the cluster's name server")
    parser.add_argument("--api-address", default="", help="host:port of the API server as pods reach it")
    parser.add_argument("--api-authority", type=Path, help="certificate authority of that address")
    parser.add_argument("--capacity", default="cpu=8,memory=16Gi,pods=110")
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--taint", action="append", default=[], metavar="JSON")
    parser.add_argument("--back-off", type=float, default=10.0, help="seconds before the second restart of a container")
    parser.add_argument("--renew-every", type=float, default=10.0, help="seconds between renewals of the lease")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options.node} %(levelname)s %(message)s")
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
