"""DeepSpeed for real, on the CPU over gloo: killed and restored from memory, files that both sides read."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integration.jobs import SCRIPTS

pytestmark = [
    pytest.mark.timeout(240),  # the imports of the frameworks take most of it, once per life of a worker
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: the extra `frameworks`"),
]
SCRIPT = SCRIPTS / "deepspeed_steps.py"


def lives(folder, rank: int) -> list[str]:
    return (folder / f"lives-{rank}").read_text().splitlines()


def test_zero_stages_1_to_3_go_on_from_memory_and_read_each_others_files(jobs, tmp_path):
    """The script compares weights and steps; see there."""
    job = jobs.run("--nproc-per-node=2", SCRIPT, tmp_path, "1", "2!", "3!", timeout=200)
    assert job.process.returncode == 0, job.err[-5000:]
    assert lives(tmp_path, 0) == lives(tmp_path, 1) == ["1 1", "2 1", "2 7", "3 1", "3 7"]
    for stage in (1, 2, 3):
        directory = tmp_path / f"zero-{stage}"
        names = {path.name for path in directory.iterdir()}
        assert names == {"4", "dlrover_latest.txt", "latest", "zero_to_fp32.py", "zero_to_torch.py"}
        ours = {path.name for path in (directory / "4").iterdir()} - {".dlrover"}
        theirs = {path.name for path in (tmp_path / f"native-{stage}" / "by-itself").iterdir()}
        assert ours == theirs


@pytest.mark.chaos
def test_on_two_nodes_each_goes_on_from_its_own_memory(jobs, tmp_path, reserved_port):
    """Of the model, which global rank 0 writes for all, the other node has a copy in its memory and none in storage."""
    common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={reserved_port}"]
    nodes = [jobs.start("dlrover-run", *common, f"--node-rank={rank}", SCRIPT, tmp_path, "2!", "3!") for rank in (0, 1)]
    assert [node.wait(200) for node in nodes] == [0, 0], nodes[0].err[-3000:] + nodes[1].err[-3000:]
    assert lives(tmp_path, 0) == lives(tmp_path, 1) == ["2 1", "2 7", "3 1", "3 7"]


@pytest.mark.chaos
def test_a_break_point_save_is_a_checkpoint_of_deepspeed(jobs, tmp_path):
    job = jobs.run(
        "--nproc-per-node=2", "--max-restarts=0", "--save-at-breakpoint", SCRIPT, tmp_path, "1!", timeout=100
    )
    assert job.process.returncode == 1
    directory = tmp_path / "zero-1"
    assert (directory / "latest").read_text() == "global_step6"
    assert (directory / "dlrover_latest.txt").read_text() == "6"
    assert {path.name for path in (directory / "global_step6").iterdir()} == {
        ".dlrover",
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    }
