"""The accountant against a job that knows where its time went, with real processes and a real death."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlrover.cli.show.history import History, read_history
from dlrover.cli.show.post_mortem import as_markdown
from dlrover.protocol.messages.goodput import TimeClass
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


@pytest.mark.slow
def test_a_script_that_counts_anew_in_each_epoch_is_restarted_and_books_what_it_repeats(jobs, tmp_path):
    """Killed in six epochs at the same step of each: no life reaches a greater number, and each trains an epoch."""
    history = train(jobs, tmp_path, "epochs.py", "adam")
    steps = (tmp_path / "steps").read_text().splitlines()
    assert len(set(steps)) == 200
    assert len(steps) == 224, "four steps of each epoch with a kill were done twice"
    assert history.num_restarts == len(history.faults) == 6
    assert all("failed at step 4:" in fault.cause for fault in history.faults)
    assert history.goodput.is_redo_known
    assert history.goodput.highest_step == 200
    # Shares of steps, not of seconds: how busy the machine was in each life is not known here.
    assert 0.02 < share_of_redo(history) < 0.4


@pytest.mark.slow
def test_redo_of_a_script_that_restores_by_itself_is_what_it_repeats(jobs, tmp_path):
    history = train(jobs, tmp_path, "own_restore.py", "adam")
    steps = (tmp_path / "steps").read_text().splitlines()
    assert len(steps) - len(set(steps)) == 8, "of 60 in its second life"
    assert history.goodput.highest_step == 72
    [fault] = history.faults
    assert fault.is_redo_known
    assert 0.02 < share_of_redo(history) < 0.3
    assert fault.seconds[TimeClass.REDO] == pytest.approx(history.goodput.seconds[TimeClass.REDO], abs=0.01)
    assert "save-every-step" in [each.choice for each in history.goodput.counterfactuals]


@pytest.mark.slow
def test_redo_is_unknown_where_nothing_in_the_restored_state_counts_steps(jobs, tmp_path):
    history = train(jobs, tmp_path, "own_restore.py", "sgd")
    assert not history.goodput.is_redo_known
    [fault] = history.faults
    assert not fault.is_redo_known
    assert TimeClass.REDO not in history.goodput.seconds
    assert "save-every-step" not in [each.choice for each in history.goodput.counterfactuals]
    assert "redo unknown" in jobs.launched[0].err, "the line at the end of the job"
    assert "Redo time is unknown" in as_markdown(history)


def train(jobs, folder: Path, script: str, kind: str) -> History:
    kept = folder / "kept"
    kept.mkdir()
    job = jobs.run(f"--journal={kept}", SCRIPTS / script, folder, kind, timeout=300)
    assert job.process.returncode == 0, job.err
    [journal] = kept.glob("*.sqlite")
    return read_history(journal)


def share_of_redo(history: History) -> float:
    """In all steps."""
    redo, new = (history.goodput.seconds.get(each, 0.0) for each in (TimeClass.REDO, TimeClass.COMPUTE))
    return redo / (redo + new)


def injected(folder: Path) -> dict[str, float]:
    """Seconds by class, the mean of both workers over both lives."""
    total: dict[str, float] = {}
    for rank in (0, 1):
        for life in (0, 1):
            for name, seconds in json.loads((folder / f"truth-{rank}-{life}.json").read_text()).items():
                total[name] = total.get(name, 0.0) + seconds / 2
    return total
