"""The accountant against a job that knows where its time went, with real processes and a real death."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlrover.cli.history import read_history
from dlrover.protocol.goodput_messages import TimeClass
from tests.integration.jobs import SCRIPTS


@pytest.mark.slow
def test_classes_match_what_was_injected_and_sum_to_the_wall_time(jobs, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    job = jobs.run("--nproc-per-node=2", f"--journal={kept}", SCRIPTS / "injected.py", tmp_path)
    assert job.process.returncode == 0, job.err
    assert "goodput" in job.err, "one line at the end of a job that had a fault"
    [journal] = kept.glob("*.sqlite")
    history = read_history(journal)
    [node] = history.goodput.nodes
    assert sum(node.seconds.values()) == pytest.approx(node.lived, rel=0.001)
    wall = history.goodput.wall
    truth = injected(tmp_path)
    for name in ("compute", "redo", "restore", "data-wait", "checkpoint"):
        assert node.seconds.get(TimeClass(name), 0.0) == pytest.approx(truth[name], abs=0.02 * wall + 0.1), (
            name,
            truth,
            node,
        )
    [fault] = history.faults
    assert (fault.kind, fault.global_rank) == ("worker", 1)
    assert fault.seconds[TimeClass.REDO] == pytest.approx(truth["redo"], abs=0.02 * wall + 0.1)
    assert history.goodput.highest_step == 60


def injected(folder: Path) -> dict[str, float]:
    """Seconds by class, the mean of both workers over both lives."""
    total: dict[str, float] = {}
    for rank in (0, 1):
        for life in (0, 1):
            for name, seconds in json.loads((folder / f"truth-{rank}-{life}.json").read_text()).items():
                total[name] = total.get(name, 0.0) + seconds / 2
    return total
