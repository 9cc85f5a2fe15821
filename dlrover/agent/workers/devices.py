"""How many workers this node runs, where the user left it to the node."""

from __future__ import annotations

from dlrover.agent.config import AgentConfig
from dlrover.agent.workers.spawner import Spawner
from dlrover.protocol.errors import ConfigError


async def resolve_local_world_size(config: AgentConfig, spawner: Spawner) -> int:
    """`--nproc-per-node` as a number. Words are answered by a throw-away child of the zygote, which has torch."""
    asked = config.local_world_size
    if isinstance(asked, str) and not asked.isdecimal():
        return await spawner.count_devices(asked)
    number = int(asked)
    if number < 1:
        raise ConfigError(f"--nproc-per-node={asked}: give a number of at least 1, or auto, cpu, gpu, xpu.")
    return number
