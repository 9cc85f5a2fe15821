"""Pods keep the contract of every platform, at each API server that there is."""

from __future__ import annotations

import pytest

from tests.kubernetes.platform.lab import PodLab
from tests.kubernetes.platform.plan_lab import PlanLab
from tests.platforms.contract import PlatformContract


class TestPodPlatform(PlatformContract):
    @pytest.fixture
    async def lab(self, api_server):
        async with PodLab(api_server.kubeconfig) as built:
            yield built


class TestPlanPlatform(PlatformContract):
    """Mode `k8s`: the operator creates and deletes what the master plans."""

    @pytest.fixture
    async def lab(self, api_server):
        async with PlanLab(api_server.kubeconfig) as built:
            yield built
