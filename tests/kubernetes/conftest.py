"""A test that takes `api_server` runs against each API server that there is: ours, and a real one if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes import servers


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "api_server" in metafunc.fixturenames:
        version = servers.real_version()
        names = ["ours", f"kube-apiserver-{version}"] if version else ["ours"]
        metafunc.parametrize("api_server", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def api_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    directory = tmp_path_factory.mktemp("api-server")
    make = servers.ours if request.param == "ours" else servers.real
    with make(directory) as running:
        yield running


def pytest_terminal_summary(terminalreporter: Any) -> None:
    version = servers.real_version()
    asked = f"ours and kube-apiserver {version}" if version else "ours (KUBEBUILDER_ASSETS names no real one)"
    terminalreporter.write_line(f"API servers: {asked}")
