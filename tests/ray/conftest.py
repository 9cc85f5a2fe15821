"""A real Ray of several raylets on this machine, with a directory of its own. Everything in here is skipped where Ray is not installed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed: use `make test-ray`")

from tests.ray.lab import RayLab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray and what it brings along warn of many things that are not ours."""
    for item in items:
        if "tests/ray" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def ray_dir() -> Iterator[str]:
    """Short, because Ray puts unix sockets far below it."""
    path = tempfile.mkdtemp(prefix="dr-", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def lab(ray_dir: str) -> Iterator[RayLab]:
    """A head without processors and three machines with one each."""
    lab = RayLab(ray_dir)
    try:
        for _ in range(3):
            lab.add_machine()
        yield lab
    finally:
        lab.close()


@pytest.fixture
def own_lab(ray_dir: str) -> Iterator[RayLab]:
    """For a test that hurts machines: a cluster of its own."""
    lab = RayLab(ray_dir)
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture(autouse=True, scope="session")
def no_stray_signals() -> Iterator[None]:
    """Ray's own handler for SIGTERM would end the whole run of tests."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)
    os.environ.pop("RAY_ADDRESS", None)
