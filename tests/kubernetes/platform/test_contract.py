"""Pods keep the contract of every platform, at each API server that there is."""

from __future__ import annotations

import pytest

from tests.kubernetes.platform.lab import PodLab
from tests.platforms.contract import PlatformContract


class TestPodPlatform(PlatformContract):
    @pytest.fixture
    async def lab(self, api_server):
        async with PodLab(api_server.kubeconfig) as built:
            yield built
