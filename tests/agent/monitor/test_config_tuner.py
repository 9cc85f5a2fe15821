"""The parallel-config file: the master's wishes, whole or not at all, with the keys of the original."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from dlrover.agent.monitor.config_tuner import DEFAULTS, ConfigTuner, read_config, with_offer
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.job import Reply
from dlrover.protocol.messages.scaling import AskTuning, TuneOffered


class Master:
    """Answers as the real one: at once with another version, else when there is one."""

    def __init__(self) -> None:
        self.offer = TuneOffered()
        self.changed = asyncio.Event()
        self.is_away = True

    async def __call__(self, command: AskTuning, *, timeout: float) -> Reply:
        if self.is_away:
            self.is_away = False
            raise Unavailable("it starts")
        while command.seen == self.offer.version:
            self.changed.clear()
            await self.changed.wait()
        return self.offer

    def tune(self, offer: TuneOffered) -> None:
        self.offer = offer
        self.changed.set()


async def until(path: Path, version: int) -> dict[str, dict[str, float]]:
    async with asyncio.timeout(60):
        while read_config(str(path)).get("dataloader", {}).get("version") != version:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.02)
    found: dict[str, dict[str, float]] = json.loads(path.read_text())
    return found


async def test_a_wish_of_the_master_reaches_the_file(tmp_path: Path) -> None:
    path, master = tmp_path / "auto_paral_config.json", Master()
    task = asyncio.create_task(ConfigTuner(master, str(path)).run())
    try:
        assert await until(path, 0) == DEFAULTS
        master.tune(TuneOffered(version=1, micro_batch=16, accumulation=4, last_batch=8))
        found = await until(path, 1)
        assert (found["dataloader"]["batch_size"], found["dataloader"]["last_batch_size"]) == (16, 8)
        assert found["dataloader"]["accumulation"] == 4
        master.tune(TuneOffered(version=2, loader_workers=3))
        found = await until(path, 2)
        assert (found["dataloader"]["batch_size"], found["dataloader"]["num_workers"]) == (16, 3)
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
    finally:
        task.cancel()


def test_only_the_historical_tuner_changes_rates_and_other_keys_stay() -> None:
    config = {"optimizer": {"learning_rate": 0.01, "version": 1}, "mine": 5}
    quiet = with_offer(config, TuneOffered(version=3, micro_batch=4))
    assert (quiet["optimizer"]["learning_rate"], quiet["mine"], quiet["restart"]) == (0.01, 5, False)
    scaled = with_offer(config, TuneOffered(version=3, micro_batch=177, rate_factor=(177 / 32) ** 0.5))
    assert scaled["optimizer"]["version"] == 2
    assert scaled["optimizer"]["learning_rate"] == 0.01 * (177 / 32) ** 0.5


def test_a_broken_file_is_replaced() -> None:
    assert with_offer({"dataloader": "no"}, TuneOffered(version=1, micro_batch=2))["dataloader"]["batch_size"] == 2
