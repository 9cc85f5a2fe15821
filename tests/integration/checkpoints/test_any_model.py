"""`dlrover.Checkpointer` with each kind of model: killed, restored from memory and from storage. The script compares the states; see there."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integration.jobs import SCRIPTS

NEEDS = {"deepspeed": "deepspeed", "megatron": "megatron.core"}


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["plain", "sharded", "deepspeed", "megatron"])
def test_a_killed_job_goes_on_from_memory_whatever_its_model_is(jobs, tmp_path, kind):
    if kind in NEEDS and not is_there(NEEDS[kind]):
        pytest.skip(f"needs {NEEDS[kind]}: the extra `frameworks`")
    job = jobs.run("--nproc-per-node=2", SCRIPTS / "any_model.py", kind, tmp_path, timeout=300)
    assert job.process.returncode == 0, job.err[-5000:]
    for rank in (0, 1):
        assert (tmp_path / f"lives-{rank}").read_text().split() == ["1", "6"]
