"""Labs for tests of the platform."""

from __future__ import annotations

import pytest

from tests.kubernetes.platform.lab import PodLab
from tests.kubernetes.server import ApiServer


@pytest.fixture
async def server():
    async with ApiServer() as running:
        yield running


@pytest.fixture
async def lab(server):
    async with PodLab(server.kubeconfig) as built:
        yield built
