"""
The parallel-config file: how the wishes of the master's tuner reach the workers of this node.

One question waits at the master; its answer is another version of the wishes. The agent writes it into the file that DLROVER_PARAL_CONFIG_PATH names, whole or not
at all. Workers look at the file between two steps and agree on the version (`ElasticDataLoader.load_config`). The keys are those of the original.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import tempfile
from typing import Any, Protocol

from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.job import Reply
from dlrover.protocol.messages.scaling import AskTuning, TuneOffered

log = logging.getLogger("dlrover.agent")

FILE_NAME = "auto_paral_config.json"
WAIT = 50.0
"""Seconds that the question waits at the master."""
MARGIN = 10.0
_PAUSE = 2.0

DEFAULTS: dict[str, Any] = {
    "dataloader": {
        "version": 0,
        "dataloader_name": "",
        "last_batch_size": 0,
        "batch_size": 0,
        "num_workers": -1,
        "pin_memory": -1,
    },
    "optimizer": {"version": 0, "optimizer_name": "", "learning_rate": 0.0, "weight_decay": 0.0},
    "restart": False,
}
"""0 and -1: as the script says."""


class TunerCall(Protocol):
    async def __call__(self, command: AskTuning, *, timeout: float) -> Reply:
        """Raises Rejected or Unavailable."""


class ConfigTuner:
    def __init__(self, ask: TunerCall, path: str) -> None:
        self._ask = ask
        self._path = path
        self._seen = -1

    async def run(self) -> None:
        """Never returns; cancel it."""
        if not os.path.exists(self._path):
            write_config(self._path, DEFAULTS)
        while True:
            try:
                answer = await self._ask(AskTuning(seen=self._seen, wait=WAIT), timeout=WAIT + MARGIN)
            except (Rejected, Unavailable) as error:
                log.debug("the tuner of the master is not heard: %s", error)
                await asyncio.sleep(_PAUSE * random.uniform(1.0, 2.0))
                continue
            assert isinstance(answer, TuneOffered), "the answer to that question"
            if answer.version > 0 and answer.version != self._seen:
                self._take(answer)
            elif answer.version == self._seen:
                await asyncio.sleep(0)  # a master that answers at once must not keep this task from ending
            self._seen = answer.version

    def _take(self, offered: TuneOffered) -> None:
        try:
            write_config(self._path, with_offer(read_config(self._path), offered))
        except OSError as error:
            log.warning(
                "the tuned settings could not be written, so the script keeps its present settings file=%s reason=%s",
                self._path,
                error.strerror,
            )
            return
        log.info(
            "tuned settings version=%d micro_batch=%d accumulation=%d loader_workers=%d",
            offered.version,
            offered.micro_batch,
            offered.accumulation,
            offered.loader_workers,
        )


def with_offer(config: dict[str, Any], offered: TuneOffered) -> dict[str, Any]:
    """What the file shall say. Learning rate and weight decay change only where the file has them and the tuner wants it."""
    loader = {**DEFAULTS["dataloader"], **_section(config, "dataloader")}
    optimizer = {**DEFAULTS["optimizer"], **_section(config, "optimizer")}
    loader["version"] = offered.version
    if offered.micro_batch:
        loader["last_batch_size"] = offered.last_batch or loader["batch_size"]
        loader["batch_size"] = offered.micro_batch
    if offered.accumulation:
        loader["accumulation"] = offered.accumulation
    if offered.loader_workers >= 0:
        loader["num_workers"] = offered.loader_workers
    if offered.rate_factor != 1.0:
        optimizer["version"] = int(optimizer["version"]) + 1
        for name in ("learning_rate", "weight_decay"):
            optimizer[name] = float(optimizer[name]) * offered.rate_factor
    return {**DEFAULTS, **config, "dataloader": loader, "optimizer": optimizer}


def read_config(path: str) -> dict[str, Any]:
    """Empty: there is no file, or it is no config."""
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def write_config(path: str, config: dict[str, Any]) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(path), delete=False, encoding="utf-8") as file:
        json.dump(config, file)
    os.replace(file.name, path)


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
