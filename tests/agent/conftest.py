from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dlrover.agent.workers.process_tree import ProcessTree
from dlrover.agent.workers.spawner import Spawner
from tests.agent.stage import Stage


@pytest.fixture(scope="session")
def spawner() -> Iterator[Spawner]:
    """A warm zygote for all tests of this directory: its imports cost seconds."""
    spawner = Spawner.start()
    yield spawner
    spawner.close()


@pytest.fixture
async def tree(spawner: Spawner, cold_spawner: Spawner) -> AsyncIterator[ProcessTree]:
    tree = ProcessTree(keep=lambda: (*spawner.zygote_pids, *cold_spawner.zygote_pids))
    yield tree
    await tree.sweep()
    tree.close()


@pytest.fixture(scope="session")
def cold_spawner() -> Iterator[Spawner]:
    spawner = Spawner.start(is_warm=False)
    yield spawner
    spawner.close()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for life in stage.lives:
        await life.die()
