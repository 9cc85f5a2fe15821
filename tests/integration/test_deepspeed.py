"""DeepSpeed for real, on the CPU over gloo: killed and restored from memory, files that both sides read."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integration.jobs import SCRIPTS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install 'dlrover[frameworks]'"
)
SCRIPT = SCRIPTS / "deepspeed_steps.py"


def lives(folder, rank: int) -> list[str]:
    return (folder / f"lives-{rank}").read_text().splitlines()


def test_zero_stages_1_to_3_go_on_from_memory_and_read_each_others_files(jobs, tmp_path):
    """The script compares weights and steps; see there."""
    job = jobs.run("--nproc-per-node=2", SCRIPT, tmp_path, "1", "2!", "3!", timeout=110)
    assert job.process.returncode == 0, job.err[-5000:]
    assert lives(tmp_path, 0) == lives(tmp_path, 1) == ["1 1", "2 1", "2 7", "3 1", "3 7"]
    for stage in (1, 2, 3):
        directory = tmp_path / f"zero-{stage}"
        names = {path.name for path in directory.iterdir()}
        assert names == {"4", "dlrover_latest.txt", "latest", "zero_to_fp32.py", "zero_to_torch.py"}
        ours = {path.name for path in (directory / "4").iterdir()} - {".dlrover"}
        theirs = {path.name for path in (tmp_path / f"native-{stage}" / "by-itself").iterdir()}
        assert ours == theirs
