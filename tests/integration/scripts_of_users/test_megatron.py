"""Megatron jobs under the launcher: killed after a memory save, on from memory, and files that Megatron reads without us."""

from __future__ import annotations

import pytest

from tests.integration.jobs import SCRIPTS

SCRIPT = SCRIPTS / "megatron_lives.py"


@pytest.mark.parametrize("kind", ["core", "any", pytest.param("lm", marks=pytest.mark.chaos)])
def test_a_killed_megatron_job_goes_on_from_memory(jobs, tmp_path, kind):
    if kind != "lm":
        pytest.importorskip("megatron.core", reason="the extra `frameworks`")
    job = jobs.run("--nproc-per-node=2", SCRIPT, kind, tmp_path)
    assert job.process.returncode == 0, job.err
    for rank in (0, 1):
        assert (tmp_path / f"lives-{rank}").read_text().split() == ["0", "3"]
