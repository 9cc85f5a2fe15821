"""The Trainer of transformers for real, on the CPU over gloo: killed, restored from memory, read by plain transformers."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integration.jobs import SCRIPTS

pytestmark = [
    pytest.mark.timeout(240),  # the imports of the frameworks take most of it, once per life of a worker
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers: the extra `frameworks`"
    ),
]
SCRIPT = SCRIPTS / "hf_steps.py"


def lives(folder, rank: int) -> list[int]:
    return [int(line) for line in (folder / f"lives-{rank}").read_text().splitlines()]


def assert_goes_on_from_memory(jobs, folder, *mode: str) -> None:
    """The script compares weights and files; see there. Step 4 is in storage, so what is later came from memory."""
    job = jobs.run("--nproc-per-node=2", SCRIPT, folder, *mode, timeout=200)
    assert job.process.returncode == 0, job.err[-5000:]
    check(folder)


def check(folder) -> None:
    assert lives(folder, 0) == lives(folder, 1)
    first, second = lives(folder, 0)
    assert first == 0
    assert second in (5, 6)
    ours, theirs = folder / "flash" / "checkpoint-10", folder / "plain" / "checkpoint-10"
    found = {path.relative_to(ours).as_posix() for path in ours.rglob("*") if ".dlrover" not in path.parts}
    assert found == {path.relative_to(theirs).as_posix() for path in theirs.rglob("*")}
    names = {path.name for path in (folder / "flash").iterdir()}
    assert names == {"checkpoint-10", "dlrover_latest.txt"}, "save_total_limit is 1, and nothing half-done remains"


def test_a_killed_training_goes_on_from_memory_and_plain_transformers_reads_its_files(jobs, tmp_path):
    assert_goes_on_from_memory(jobs, tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_with_deepspeed_too(jobs, tmp_path, stage):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: the extra `frameworks`")
    assert_goes_on_from_memory(jobs, tmp_path, "deepspeed", stage)


@pytest.mark.chaos
def test_on_two_nodes_what_global_rank_0_had_reaches_the_other(jobs, tmp_path, reserved_port):
    common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={reserved_port}"]
    nodes = [jobs.start("dlrover-run", *common, f"--node-rank={rank}", SCRIPT, tmp_path) for rank in (0, 1)]
    assert [node.wait(200) for node in nodes] == [0, 0], nodes[0].err[-3000:] + nodes[1].err[-3000:]
    check(tmp_path)
