"""The user's shutdown timeout reaches the master: it has to wait so long for the nodes to leave."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dlrover.agent.config import AgentConfig
from tests.cli.conftest import StandinJob


def test_the_terms_of_the_job_carry_the_shutdown_timeout(job: StandinJob) -> None:
    job.start("--shutdown-timeout", "77", behaviour="wait")
    job.event("waiting")
    (path,) = Path(job.runtime).rglob("agent.json")
    config = msgspec.json.decode(path.read_bytes(), type=AgentConfig)
    assert config.shutdown_timeout == config.terms.shutdown_timeout == 77
    job.open_gate()
    assert job.finish()[0] == 0
