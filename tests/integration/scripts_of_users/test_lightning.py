"""The example of Lightning: a killed rank costs at most the step that it was in, and the end is that of an undisturbed training."""

from __future__ import annotations

import re

import pytest

from tests.integration.jobs import SCRIPTS

pytest.importorskip("lightning", reason="needs lightning (extra `frameworks`): `make setup` installs it")
pytest.importorskip("torchdata", reason="needs torchdata (extra `frameworks`)")
EXAMPLE = SCRIPTS.parents[2] / "examples" / "lightning" / "train.py"


def test_the_example_goes_on_where_it_was_killed(jobs, tmp_path):
    """The kill is in the second epoch, in the middle."""
    said = []
    for name, script in (("killed", SCRIPTS / "lightning_lives.py"), ("undisturbed", EXAMPLE)):
        folder = tmp_path / name
        folder.mkdir()
        job = jobs.run("--standalone", "--nproc-per-node=2", script, folder)
        assert job.process.returncode == 0, job.err
        assert (folder / "dlrover_latest.txt").read_text() == "12"
        said.append(job.out)
    begins = [[int(step) for step in re.findall(r"begins after step (\d+)", text)] for text in said]
    assert begins in [[[0, goes_on], [0]] for goes_on in range(5, 9)], begins  # a busy machine may skip a save
    [killed, undisturbed] = [re.findall(r"ends with weights (\w+)", text) for text in said]
    assert killed == undisturbed
    assert len(killed) == 1
