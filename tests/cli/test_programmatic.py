"""Launch from Python: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover.cli.programmatic import ElasticLaunchConfig, launch_agent
from dlrover.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "entrypoint"),
    [
        (ElasticLaunchConfig(min_nodes=3, max_nodes=2), print),
        (ElasticLaunchConfig(rdzv_configs={"join_timout": 3}), print),
        (ElasticLaunchConfig(signals_to_handle="SIGNO"), print),
        (ElasticLaunchConfig(), "no-such-program"),
        (ElasticLaunchConfig(), None),
    ],
)
def test_nonsense_is_refused_before_anything_starts(
    config: ElasticLaunchConfig, entrypoint: object, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    with pytest.raises(ConfigError):
        launch_agent(config, entrypoint, [])  # type: ignore[arg-type]
    assert {path.name for path in short_dir.rglob("*") if path.is_file()} <= {".lock"}
