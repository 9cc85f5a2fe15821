"""Whether and where a job is shown, as the command line says it."""

from __future__ import annotations

import importlib.util

import pytest

from dlrover.cli import master_command
from dlrover.cli.options.environment import read_environment
from dlrover.cli.options.parser import parse
from dlrover.cli.options.settings import build_settings
from dlrover.cli.options.view_settings import Watching
from dlrover.protocol.errors import ConfigError


def watching(*argv: str) -> Watching:
    return build_settings(parse([*argv, __file__], {}), read_environment({})).watching


def test_nothing_is_served_unless_somebody_asks() -> None:
    assert watching() == Watching()
    assert watching("--dashboard-host", "0.0.0.0") == Watching(dashboard_host="0.0.0.0")


def test_a_port_enables_the_page_and_metrics_have_their_own() -> None:
    assert watching("--enable-dashboard").dashboard_port == 8080
    assert watching("--dashboard-port", "0").dashboard_port == 0
    assert watching("--metrics-port", "9090") == Watching(metrics_port=9090)


@pytest.mark.parametrize(
    "argv", [("--dashboard-port", "70000"), ("--dashboard-port", "-1"), ("--metrics-port", "65536")]
)
def test_what_is_no_port_is_refused(argv: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"0 to 65535"):
        watching(*argv)


@pytest.mark.parametrize("url", ["jobs.example.com", "https://example.com/jobs", "ftp://example.com", "https://"])
def test_the_url_of_a_proxy_has_a_scheme_and_no_path(url: str) -> None:
    assert watching("--dashboard-url", "https://a.example, http://b").dashboard_url == "https://a.example, http://b"
    with pytest.raises(ConfigError, match="--dashboard-url"):
        watching("--dashboard-url", url)


def test_a_missing_extra_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    with pytest.raises(ConfigError, match=r"needs uvicorn.*dlrover\[dashboard\]"):
        watching("--enable-dashboard")
    assert watching("--metrics-port", "0").metrics_port == 0, "metrics need no extra"


def test_the_master_takes_the_original_s_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    assert master_command.main(["--job-name", "j", "--enable_dashboard", "perhaps", "--dashboard_port", "0"]) == 2
    assert "give true or false" in capsys.readouterr().err
