"""The Megatron front ends in two processes, and their smaller pieces in one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.torch.flash_checkpoint import megatron, megatron_dist_ckpt
from dlrover.trainer.torch.flash_checkpoint.replica import CkptReplicaManger, FullCkptReplicaManager

HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Two ranks of a script; what each said."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(memory))

    def start(script: Path) -> list[list[str]]:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(script), str(tmp_path), str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in (0, 1)
        ]
        try:
            said = [rank.communicate(timeout=540)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
        assert not list(memory.rglob("rank-*")), "nothing stays in memory"
        return [[line for line in each.splitlines() if line.endswith(" done")] for each in said]

    return start


def test_two_ranks_save_and_load_through_both_front_ends(run):
    expected = ["replicas done", "stages done", "shares done", "failures done", "damage done", "lost_trackers done"]
    assert run(HERE / "megatron_ranks.py") == [expected, expected]


def test_without_megatron_the_error_says_where_to_get_it():
    with pytest.raises(ImportError, match="Put a clone of Megatron-LM's repository into PYTHONPATH"):
        megatron.find_megatron()


@pytest.mark.parametrize("changes", [{"ckpt_format": "torch_dist"}, {"use_dist_ckpt": True}])
def test_formats_that_cannot_be_collected_are_refused(changes):
    with pytest.raises(ConfigError, match="--ckpt-format torch"):
        megatron.check_format(SimpleNamespace(**changes))


@pytest.mark.parametrize(
    ("load_arg", "args", "expected"),
    [
        ("load", {"save": "/a", "load": "/a"}, True),
        ("load", {"save": "/a", "load": None}, True),
        ("load", {"save": "/a", "load": "/b"}, False),
        ("load", {"save": "/a", "load": "/a", "ckpt_step": 7}, False),
        ("load_teacher", {"save": "/a", "load_teacher": "/a"}, False),
    ],
)
def test_memory_is_only_for_the_training_that_goes_on(load_arg, args, expected):
    assert megatron.is_resuming(SimpleNamespace(**args), load_arg) is expected


def test_strategies_name_directories_as_megatron_does(tmp_path):
    deleted: list[str] = []
    strategy = megatron_dist_ckpt.KeepLatestStepStrategy(2, str(tmp_path))
    for step in (100, 200):
        (tmp_path / f"iter_{step:07d}").mkdir()
        strategy.clean_up(step, deleted.append)
    assert deleted == [str(tmp_path / "iter_0000100")]
    megatron_dist_ckpt.KeepStepIntervalStrategy(150, str(tmp_path)).clean_up(200, deleted.append)
    assert deleted[1:] == [str(tmp_path / "iter_0000200")]
    name = megatron_dist_ckpt.get_dist_optimizer_checkpoint_name("/c", 5)
    assert name == "/c/iter_0000005/rank_00000/distrib_optim.pt"


def test_the_replica_names_carry_their_number():
    made = CkptReplicaManger.create_replica_manager(1, 2)
    assert isinstance(made, FullCkptReplicaManager)
    assert made.has_replica()
