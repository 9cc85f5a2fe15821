"""The example of accelerate: a killed rank costs at most the step that it was in, and the end is that of an undisturbed training."""

from __future__ import annotations

import re

import pytest

from tests.integration.jobs import SCRIPTS

pytest.importorskip("accelerate", reason="the extra `frameworks`")
EXAMPLE = SCRIPTS.parents[2] / "examples" / "accelerate" / "train.py"


def test_the_example_goes_on_where_it_was_killed(jobs, tmp_path):
    said = []
    for name, script in (("killed", SCRIPTS / "accelerate_lives.py"), ("undisturbed", EXAMPLE)):
        folder = tmp_path / name
        folder.mkdir()
        job = jobs.run("--standalone", "--nproc-per-node=2", script, folder)
        assert job.process.returncode == 0, job.err
        assert (folder / "dlrover_latest.txt").read_text() == "12"
        said.append(job.out)
    begins = [[int(step) for step in re.findall(r"begins at step (\d+)", text)] for text in said]
    assert begins in [[[1, goes_on], [1]] for goes_on in range(3, 7)], begins  # a busy machine may skip a save
    [killed, undisturbed] = [re.findall(r"ends with weights (\w+)", text) for text in said]
    assert killed == undisturbed
    assert len(killed) == 1
