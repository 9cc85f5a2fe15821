"""Platforms by name."""

from __future__ import annotations

import sys

import pytest

from dlrover.platforms.fake import FakePlatform
from dlrover.platforms.hosted.client import LocalPlatform
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
        ("moon", "Known are fake, k8s, kubernetes, local, pyk8s"),
        ("no_such_module::Moon", "cannot be loaded"),
        ("dlrover.platforms.fake::Moon", "no class 'Moon'"),
        ("dlrover.platforms.base::Capabilities", "cannot be built by name"),
    ],
)
def test_a_platform_that_is_none_gets_a_clear_error(name, what):
    with pytest.raises(ConfigError, match=what):
        find_platform(name)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
        ("none = {}['moon']", "cannot be loaded: KeyError: 'moon'"),
        ("class Moon:\n    from_options = lambda *_: 1 / 0", "cannot be built: ZeroDivisionError"),
    ],
)
def test_a_platform_of_ones_own_that_breaks_gets_a_clear_error(source, what, tmp_path, monkeypatch):
    (tmp_path / "broken_platform.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_platform", raising=False)
    with pytest.raises(ConfigError, match=what):
        build_platform("broken_platform::Moon", job_uid="job", options={})
