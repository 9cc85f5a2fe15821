"""Roles that train in actors: which device is whose, and who is slow in the communication check (spec 11, §7 and §10)."""

from __future__ import annotations

import pytest

from dlrover.protocol.errors import ConfigError
from dlrover.unified.shell.process_group import stragglers, torch_device, visible_devices


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([0.1, 0.2, 0.3], []),
        ([0.1, 3, 0.3], [1]),
        ([0.1, 3, 0.3, 4], [1, 3]),
        ([0.1, 9.0], []),
        ([1.0, 1.0, 1.05, 1.0], []),
        ([1.0, 1.0, 2.0, 1.0], [2]),
        ([], []),
    ],
)
def test_slow_ranks_are_those_far_beyond_the_normal_ones(seconds: list[float], slow: list[int]):
    assert stragglers(seconds) == slow


@pytest.mark.parametrize(
    ("gpus", "visible", "local_rank", "is_by_rank", "device"),
    [
        (["5"], "5", 0, False, "cuda:0"),
        (["4", "5"], "4,5", 3, False, "cuda:0"),
        (["5"], "5", 7, False, "cuda:0"),
        (["0"], None, 7, True, "cuda:7"),
        (["5"], "4,5,6,7", 1, True, "cuda:1"),
        (["5"], "4, 5", 0, False, "cuda:1"),
        (["5"], None, 0, False, "cuda:5"),
        ([], None, 3, False, "cpu"),
        ([], "0,1", 3, False, "cpu"),
    ],
)
def test_the_device_of_an_instance(
    gpus: list[str], visible: str | None, local_rank: int, is_by_rank: bool, device: str
):
    """Rows of the table of spec 11, §7, and what has none of Ray's GPUs."""
    assert torch_device(gpus=gpus, visible=visible, local_rank=local_rank, is_by_rank=is_by_rank) == device


def test_a_device_that_is_hidden_is_said():
    with pytest.raises(ConfigError, match="Ray gave GPU 5 to this instance, but CUDA_VISIBLE_DEVICES=0,1"):
        torch_device(gpus=["5"], visible="0,1", local_rank=0, is_by_rank=False)


@pytest.mark.parametrize(
    ("gpus", "visible"),
    [
        ([["2"], ["5"]], ["2", "5"]),
        ([["0", "1"], ["2", "3"]], ["0", "2", "1", "3"]),  # LOCAL_RANK is a device of its own here, too
        ([["0"], ["0"]], []),  # each has a half of it
        ([["0"], []], []),
        ([], []),
    ],
)
def test_the_device_at_the_place_of_a_local_rank_is_its_own(gpus: list[list[str]], visible: list[str]):
    assert visible_devices(gpus) == visible
