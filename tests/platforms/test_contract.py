"""The contract of a platform, kept by the fake one and by real local processes."""

from __future__ import annotations

import pytest

from dlrover.platforms.fake import FakeCloud, FakePlatform
from dlrover.protocol.messages.identity import PlatformId
from tests.platforms.contract import JOB, PlatformContract


class FakeLab:
    def __init__(self) -> None:
        self.cloud = FakeCloud()
        self.cloud.capacity = 3

    def platform(self, job_uid: str = JOB) -> FakePlatform:
        return FakePlatform(self.cloud, job_uid)

    def end(self, node: int, exit_code: int, job_uid: str = JOB) -> None:
        self.cloud.exit(job_uid, PlatformId(node), exit_code)

    def exhaust_memory(self, node: int) -> None:
        self.cloud.exit(JOB, PlatformId(node), 137, is_out_of_memory=True)


class TestFakePlatform(PlatformContract):
    @pytest.fixture
    async def lab(self):
        return FakeLab()


class TestLocalPlatform(PlatformContract):
    @pytest.fixture
    def lab(self, local_lab):
        return local_lab
