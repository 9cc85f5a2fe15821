"""The example of reinforcement learning: killed in every part of it, it is the same run as without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.grpo.compare import differences, repeated_keys, rewards
from examples.grpo.run import GrpoRun, new_lab, run
from tests.ray.lab import RayLab

SOLE = {
    "worker": {"worker-0", "worker-1"},
    "rollout": {"rollout-1"},
    "reward": {"reward-0"},
    "stream": {"samples-0"},
    "conductor": {"conductor"},
    "host": {"policy-host"},
}
"""What is another process after a kill. A worker's partner starts again with it, as their world does."""


@pytest.fixture(scope="module")
def grpo_lab(ray_path: None) -> Iterator[RayLab]:
    """With Ray's own health check: on a busy machine the settings that we recommend take a slow raylet for a dead one."""
    with new_lab(settings=None) as lab:
        yield lab


@pytest.mark.timeout(1200)  # two runs, and seven kills of which Ray needs 14 s to see one
def test_kills_of_every_part_leave_the_run_as_it_was(grpo_lab: RayLab, tmp_path: Path):
    undisturbed = run(grpo_lab, tmp_path / "undisturbed", []).record()
    kills = list(zip([*SOLE, "machine"], range(6, 60, 7), strict=False))
    disturbed = run(grpo_lab, tmp_path / "disturbed", kills)
    assert differences(undisturbed, disturbed.record()) == []
    assert repeated_keys(disturbed.record()) == []
    for fault in disturbed.faults:
        if fault.what in SOLE:
            assert set(fault.changed) == SOLE[fault.what], fault
    first, last = rewards(disturbed.record())
    assert last >= 2 * first
    grpo_lab.await_nothing_left(disturbed.job.job_uid)


def test_a_rollout_with_older_weights_than_it_says_is_found(grpo_lab: RayLab, tmp_path: Path):
    folder = tmp_path / "stale"
    folder.mkdir()
    stale = GrpoRun(grpo_lab, folder, num_steps=8, stale=1)
    assert stale.wait() != 0
    assert "were not made with the weights of this step" in stale.report
    grpo_lab.await_nothing_left(stale.job.job_uid)
