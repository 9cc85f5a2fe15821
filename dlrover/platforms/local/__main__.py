"""`python -m dlrover.platforms.local CONFIG`: a node host on its own, until SIGTERM or the end of its parent."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import msgspec

from dlrover.host.lifeline import follow_parent
from dlrover.platforms.hosted.table import HostConfig, NodeHost
from dlrover.platforms.local.memory_limits import MemoryLimits
from dlrover.platforms.local.starter import LocalStarter, SavingUntil, claim_kernel_names, never_saving


def main(saving_until: SavingUntil = never_saving) -> int:
    if not follow_parent(signal.SIGTERM):
        return 1
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=HostConfig)
    asyncio.run(_serve(config, saving_until))
    return 0


async def _serve(config: HostConfig, saving_until: SavingUntil) -> None:
    wants_memory = MemoryLimits.available()
    claim, networks, memory = claim_kernel_names(wants_networks=False, wants_memory=wants_memory)
    starter = LocalStarter(config, networks=networks, memory=memory, saving_until=saving_until)
    host = NodeHost(config, starter)
    starter.open()
    await host.start()
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    print(msgspec.json.encode({"socket": config.socket, "memory": memory is not None}).decode(), flush=True)
    try:
        await over.wait()
    finally:
        await host.stop()
        await host.close()
        starter.close()
        if claim is not None:
            claim.release()


if __name__ == "__main__":
    raise SystemExit(main())
