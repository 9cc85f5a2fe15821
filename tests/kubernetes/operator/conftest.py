"""An API server and a place for operators, anew for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kubernetes.operator.lab import Lab, open_lab


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with open_lab(tmp_path) as lab:
        yield lab
