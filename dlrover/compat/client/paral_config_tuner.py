"""
`ParalConfigTuner` of the original: the parallel-config file of this node.

Here the agent itself keeps the file (`--auto-tuning`); the class reads and writes the same file, for scripts that use it directly.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from typing import Any

from dlrover.compat.client import comm
from dlrover.compat.names.constants import ConfigPath
from dlrover.compat.tools.singleton import Singleton
from dlrover.host.ownership import NotOurs, check_directory, open_checked

log = logging.getLogger(__name__)


class ParalConfigTuner(Singleton):
    def __init__(self) -> None:
        self.config_path = os.environ.get(ConfigPath.ENV_PARAL_CONFIG) or ConfigPath.PARAL_CONFIG

    def start(self) -> None:
        """Nothing to start: the agent keeps the file where the job runs with --auto-tuning. Without an agent the file gets the defaults."""
        if not os.path.exists(self.config_path) and os.path.isdir(os.path.dirname(self.config_path)):
            self.write_paral_config(comm.ParallelConfig())

    def read_paral_config(self) -> comm.ParallelConfig | None:
        """None: there is no file, it is no config, or another user of this machine wrote it."""
        try:
            with open(open_checked(self.config_path, os.O_RDONLY), encoding="utf-8") as file:
                config = json.load(file)
        except NotOurs as error:
            log.warning("the parallel config changes nothing: %s", error)
            return None
        except (OSError, ValueError):
            return None
        return _config_of(config) if isinstance(config, dict) else None

    def write_paral_config(self, config: comm.ParallelConfig) -> None:
        """Whole or not at all. Without an agent there may be no place for it, or another user's: then nothing is written."""
        folder = os.path.dirname(self.config_path)
        if not os.path.isdir(folder):
            return
        try:
            check_directory(folder)
        except NotOurs as error:
            log.warning("the parallel config is not written: %s", error)
            return
        told = {
            "dataloader": vars(config.dataloader),
            "optimizer": vars(config.optimizer),
            "restart": config.restart,
        }
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
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
