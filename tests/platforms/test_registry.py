"""Platforms by name."""

from __future__ import annotations

import pytest

from dlrover.platforms.fake import FakePlatform
from dlrover.platforms.local import LocalPlatform
from dlrover.platforms.registry import build_platform, find_platform
from dlrover.protocol.errors import ConfigError


def test_built_in_platforms_are_found_by_name():
    assert find_platform("local") is LocalPlatform
    assert find_platform("fake") is FakePlatform
    platform = build_platform("local", job_uid="job", options={"socket": "/nowhere", "own_addresses": True})
    assert platform.capabilities.own_addresses


def test_a_class_of_ones_own_is_found_by_its_module():
    assert find_platform("dlrover.platforms.fake::FakePlatform") is FakePlatform


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("moon", "Known are fake, local"),
        ("no_such_module::Moon", "cannot be loaded"),
        ("dlrover.platforms.fake::Moon", "no class 'Moon'"),
        ("dlrover.platforms.base::Capabilities", "cannot be built by name"),
    ],
)
def test_a_platform_that_is_none_gets_a_clear_error(name, what):
    with pytest.raises(ConfigError, match=what):
        find_platform(name)
