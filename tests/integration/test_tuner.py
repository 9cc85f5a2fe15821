"""A device without memory: the micro-batch of a real job is halved, and a step stays what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import SCRIPTS, JobFactory

pytestmark = pytest.mark.timeout(600)
PATIENCE = 300.0
BATCH, WORKERS = 8, 2


def told(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.glob(f"{name}-*") for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("from_step", "largest"), [(0, 2), (25, 4)])
def test_a_full_device_halves_the_micro_batch_and_training_goes_on(
    jobs: JobFactory, tmp_path: Path, from_step: int, largest: int
) -> None:
    """In its first step already, when nobody has measured anything yet; and as often as it takes."""
    job = jobs.run(
        "--auto-tuning",
        f"--nproc-per-node={WORKERS}",
        SCRIPTS / "device_memory.py",
        tmp_path,
        str(largest),
        str(from_step),
        timeout=PATIENCE,
    )
    assert job.process.returncode == 0, job.err
    full, steps = told(tmp_path, "full"), told(tmp_path, "steps")
    assert {each["records"] for each in full} == ({BATCH} if largest == 4 else {BATCH, 4}), "each size fails once"
    assert {each["records"] for each in steps} == {BATCH}, "the records of a step stay"
    after = [each for each in steps if each["step"] > from_step]
    assert {(each["largest"], each["passes"]) for each in after} == {(largest, BATCH // largest)}
    assert {each["step"] for each in after} == set(range(from_step + 1, 41))
    last = max(each["at"] for each in full)
    took = min(each["at"] for each in steps if each["at"] > last) - last
    print(f"\nthe next step is done {took:.2f} s after the device was full")
    assert took < 50, "ten times what a quiet machine is allowed"


def test_a_script_that_decides_itself_what_a_step_is_keeps_its_batch(jobs: JobFactory, tmp_path: Path) -> None:
    """Half of its batch would be another step, so the job fails as it would without a tuner."""
    script = tmp_path / "own.py"
    text = (SCRIPTS / "device_memory.py").read_text()
    script.write_text(text.replace("fix_total_batch_size=True", "fix_total_batch_size=False"))
    job = jobs.run("--auto-tuning", script, tmp_path, "4", "0", timeout=PATIENCE)
    assert job.process.returncode == 1
    assert "OutOfMemoryError" in job.err
    assert {each["records"] for each in told(tmp_path, "full")} == {BATCH}
