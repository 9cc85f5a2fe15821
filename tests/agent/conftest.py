from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

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
def kept(spawner: Spawner, cold_spawner: Spawner) -> list[Callable[[], Collection[int]]]:
    """Pids that the tree never touches. Tests may add others."""
    return [lambda: spawner.zygote_pids, lambda: cold_spawner.zygote_pids]


@pytest.fixture
def tree_options() -> dict[str, Any]:
    """How the tree shall stop processes. Tests may say it otherwise."""
    return {}


@pytest.fixture
async def tree(kept: list[Callable[[], Collection[int]]], tree_options: dict[str, Any]) -> AsyncIterator[ProcessTree]:
    tree = ProcessTree(keep=lambda: [pid for pids in kept for pid in pids()], **tree_options)
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
