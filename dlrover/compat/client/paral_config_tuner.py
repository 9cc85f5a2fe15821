"""
`ParalConfigTuner` of the original: the parallel-config file of this node.

Here the agent itself keeps the file (`--auto-tuning`); the class reads and writes the same file, for scripts that use it directly.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from dlrover.compat.client import comm
from dlrover.compat.names.constants import ConfigPath
from dlrover.compat.tools.singleton import Singleton


class ParalConfigTuner(Singleton):
    def __init__(self) -> None:
        self.config_path = os.environ.get(ConfigPath.ENV_PARAL_CONFIG) or ConfigPath.PARAL_CONFIG

    def start(self) -> None:
        """Nothing to start: the agent keeps the file where the job runs with --auto-tuning. Without an agent the file gets the defaults."""
        if not os.path.exists(self.config_path) and os.path.isdir(os.path.dirname(self.config_path)):
            self.write_paral_config(comm.ParallelConfig())

    def read_paral_config(self) -> comm.ParallelConfig | None:
        """None: there is no file, or it is no config."""
        try:
            with open(self.config_path, encoding="utf-8") as file:
                config = json.load(file)
        except (OSError, ValueError):
            return None
        return _config_of(config) if isinstance(config, dict) else None

    def write_paral_config(self, config: comm.ParallelConfig) -> None:
        """Whole or not at all. Without an agent there may be no place for it: then nothing is written."""
        if not os.path.isdir(os.path.dirname(self.config_path)):
            return
        told = {
            "dataloader": vars(config.dataloader),
            "optimizer": vars(config.optimizer),
            "restart": config.restart,
        }
        with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(self.config_path), delete=False) as file:
            json.dump(told, file)
        os.replace(file.name, self.config_path)


def _config_of(config: dict[str, Any]) -> comm.ParallelConfig:
    loader, optimizer = config.get("dataloader") or {}, config.get("optimizer") or {}
    return comm.ParallelConfig(
        dataloader=comm.DataLoaderConfig(**_known(loader, comm.DataLoaderConfig())),
        optimizer=comm.OptimizerConfig(**_known(optimizer, comm.OptimizerConfig())),
        restart=bool(config.get("restart")),
    )


def _known(found: dict[str, Any], example: object) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name in vars(example)}
