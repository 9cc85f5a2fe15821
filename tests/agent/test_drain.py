"""How long an agent that ends still writes, and that others can know it."""

from __future__ import annotations

import asyncio
import time

import pytest

from dlrover.agent.checkpoints.saver import Saver, SaverConfig
from dlrover.agent.drain import Drain
from tests.agent.checkpoints.test_saver import Trainer, news
from tests.agent.lab import DEADLINE


@pytest.fixture
async def make_saver(tmp_path):
    made = []

    def make(patience_at_signal: float) -> Saver:
        (tmp_path / "run").mkdir()
        config = SaverConfig(
            root=str(tmp_path / "shm"),
            job="job",
            launch="a",
            runtime_dir=str(tmp_path / "run"),
            patience_at_signal=patience_at_signal,
        )
        made.append(Saver(config))
        return made[-1]

    yield make
    for saver in made:
        saver.close()


@pytest.fixture
def start(tmp_path):
    made = []

    def start(saver: Saver, shard: int) -> None:
        """Asks for one shard of a save of two: it ends when both are there."""
        made.append(Trainer(saver, tmp_path / "checkpoints", shard, 2))
        saver.on_saved(news(made[-1].save(6, is_storage=True), is_storage=True))

    yield start
    for trainer in made:
        trainer.close()


def mark_of(tmp_path) -> float:
    try:
        return float((tmp_path / "run" / "saving").read_text() or 0)
    except FileNotFoundError:
        return 0.0


async def look_for(condition) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 (a file tells nobody that it changed)
            await asyncio.sleep(0.01)


async def test_who_is_told_to_end_while_it_writes_has_the_short_patience(make_saver, start, tmp_path, caplog):
    saver, told_to_end = make_saver(0.2), asyncio.Event()
    start(saver, 0)
    finishing = asyncio.ensure_future(Drain(saver, str(tmp_path / "run")).finish(told_to_end, is_hurried=False))
    await look_for(lambda: mark_of(tmp_path) > time.monotonic() + 300)
    told_to_end.set()
    await asyncio.wait_for(finishing, DEADLINE)
    assert "are lost" in caplog.text
    assert not (tmp_path / "run" / "saving").exists()


async def test_who_was_told_before_has_the_short_patience_from_the_beginning(make_saver, start, tmp_path, caplog):
    saver, told_to_end = make_saver(0.2), asyncio.Event()
    start(saver, 0)
    told_to_end.set()
    last = Drain(saver, str(tmp_path / "run"))
    await asyncio.wait_for(last.finish(told_to_end, is_hurried=False), DEADLINE)
    assert "are lost" in caplog.text


async def test_being_told_to_end_disturbs_no_save_and_shortens_the_mark(make_saver, start, tmp_path):
    saver, told_to_end = make_saver(200.0), asyncio.Event()
    start(saver, 0)
    finishing = asyncio.ensure_future(Drain(saver, str(tmp_path / "run")).finish(told_to_end, is_hurried=False))
    await look_for(lambda: mark_of(tmp_path) > time.monotonic() + 300)
    told_to_end.set()
    await look_for(lambda: 0 < mark_of(tmp_path) < time.monotonic() + 300)
    start(saver, 1)
    await asyncio.wait_for(finishing, DEADLINE)
    assert (tmp_path / "checkpoints" / "dlrover_latest.txt").read_text() == "6"


async def test_the_mark_stands_before_anything_is_written_and_goes_at_the_end(make_saver, tmp_path):
    last = Drain(make_saver(0.2), str(tmp_path / "run"))
    last.announce()
    assert mark_of(tmp_path) > time.monotonic()
    await last.finish(asyncio.Event(), is_hurried=False)
    assert list((tmp_path / "run").iterdir()) == []
