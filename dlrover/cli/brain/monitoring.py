"""`dlrover brain monitor`: the process around the monitor of a cluster."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from dlrover.brain.monitor import ClusterMonitor
from dlrover.cli.brain.asking import PATIENCE, BrainWay
from dlrover.cli.tables import echo
from dlrover.platforms.kubernetes.access import find_access
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.protocol.messages.brain import BrainReply, ClusterSeen
from dlrover.protocol.rpc.brain import BrainChannel


async def watch_cluster(cluster: str, kubeconfig: str, way: BrainWay) -> None:
    """Until SIGTERM or SIGINT. Raises ConfigError, Unavailable or Rejected."""
    access = find_access(os.environ, kubeconfig=Path(kubeconfig) if kubeconfig else None)
    channel = BrainChannel(way.address, token=way.token, tls=way.tls)

    async def tell(seen: ClusterSeen) -> BrainReply:
        return await channel.ask(seen, timeout=PATIENCE)

    loop = asyncio.get_running_loop()
    async with ClusterApi(access) as api:
        work = asyncio.ensure_future(ClusterMonitor(api, tell, cluster).run())
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        asked = asyncio.ensure_future(ended.wait())
        echo(f"The monitor reports {cluster or 'the cluster'} at {access.server} to Brain at {way.address}.")
        try:
            await asyncio.wait((work, asked), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            asked.cancel()
            await asyncio.wait((work, asked))
            await channel.close()
