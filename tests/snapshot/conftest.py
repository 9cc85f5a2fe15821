"""Fixtures of the snapshot tests: a private place in shared memory, and segments with recognisable content."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.snapshot.memory.segment_format import Owner


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dlrover-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def owner() -> Owner:
    return owner_of(0)


def owner_of(rank: int) -> Owner:
    return Owner(job="job", launch="launch", node_rank=0, global_rank=rank, local_rank=rank, pid=os.getpid())
