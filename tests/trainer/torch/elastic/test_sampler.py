"""The sampler: the middle of an epoch goes on with any number of ranks, and nothing is lost or seen twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.protocol.errors import ConfigError

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler  # noqa: E402


class Numbers(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def world(size: int, num_ranks: int, **options: Any) -> list[ElasticDistributedSampler]:
    return [ElasticDistributedSampler(Numbers(size), num_ranks, rank, **options) for rank in range(num_ranks)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 7, 8, 60])
def test_an_undisturbed_epoch_is_torchs_own(size: int, drop_last: bool, shuffle: bool) -> None:
    for rank, ours in enumerate(world(size, 4, shuffle=shuffle, drop_last=drop_last, seed=3)):
        theirs = DistributedSampler(Numbers(size), 4, rank, shuffle=shuffle, drop_last=drop_last, seed=3)
        for epoch in range(2):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


def test_the_examples_of_the_original() -> None:
    sampler = ElasticDistributedSampler(Numbers(60_001), 2, 0, shuffle=False)
    state = sampler.state_dict(4, 8)
    assert state["completed_num"] == 64
    resumed = ElasticDistributedSampler(Numbers(60_001), 3, 0, shuffle=False)
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == 64
    assert len(resumed) == 19_979
    resumed.set_epoch(1)
    assert next(iter(resumed)) == 0
    eight = ElasticDistributedSampler(Numbers(60_000), 8, 0, shuffle=False).state_dict(4, 8)
    assert eight["completed_num"] == 256
    six = ElasticDistributedSampler(Numbers(60_000), 6, 0, shuffle=False)
    six.load_state_dict(eight)
    records = iter(six)
    assert [next(records) for _ in range(3)] == [256, 262, 268]


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5),
    st.booleans(),
)
def test_any_sequence_of_worlds_sees_each_record_once(size: int, worlds: list[tuple[int, int]], shuffle: bool) -> None:
    """Each world takes some steps of 2 records a rank, saves, and ends; the last one reads the rest."""
    state, seen = None, Counter()
    for num_ranks, num_steps in worlds:
        samplers = world(size, num_ranks, shuffle=shuffle)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        if samplers[0].epoch:
            break
        left = size - (0 if state is None else state["completed_num"])
        taken = min(num_steps, left // (2 * num_ranks))  # padding would be seen twice, as in torch
        for sampler in samplers:
            seen.update(list(sampler)[: 2 * taken])
            for _ in range(taken):
                sampler.count_batch(2)
        states = [sampler.state_dict() for sampler in samplers]
        assert all(each == states[0] for each in states)
        state = states[0]
    else:
        rest = ElasticDistributedSampler(Numbers(size), 1, 0, shuffle=shuffle)
        assert state is not None
        rest.load_state_dict(state)
        if rest.epoch == 0:
            seen.update(rest)
        assert seen == Counter(range(size))


def test_a_state_counts_on_from_the_one_it_was_restored_from() -> None:
    state = ElasticDistributedSampler(Numbers(100), 4, 0).state_dict(10, 1)
    two = ElasticDistributedSampler(Numbers(100), 2, 0)
    two.load_state_dict(state)
    assert two.state_dict(15, 1)["completed_num"] == 50, "a caller that counts on"
    assert two.state_dict(5, 1)["completed_num"] == 50, "a caller that counts from the restart"


def test_steps_may_count_through_epochs_or_not() -> None:
    sampler = ElasticDistributedSampler(Numbers(40), 2, 0)
    sampler.set_epoch(1)
    assert sampler.state_dict(10 + 3, 2)["completed_num"] == 12
    assert sampler.state_dict(3, 2)["completed_num"] == 12


@pytest.mark.parametrize("is_read", [True, False])
def test_the_last_step_of_the_second_epoch_is_not_the_beginning_of_it(is_read: bool) -> None:
    """A caller that counts from the beginning of each epoch says there what one that counts through them says at its beginning."""
    sampler = ElasticDistributedSampler(Numbers(40), 2, 0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        if is_read:
            assert len(list(sampler)) == 20
    assert sampler.state_dict(10, 2)["completed_num"] == 40


def test_the_beginning_of_the_second_epoch_is_not_the_end_of_it() -> None:
    """A caller that counts through the epochs, and saves before the first step."""
    sampler = ElasticDistributedSampler(Numbers(40), 2, 0)
    assert len(list(sampler)) == 20
    sampler.set_epoch(1)
    assert sampler.state_dict(10, 2)["completed_num"] == 0, "nothing was read yet"
    records = iter(sampler)
    for _ in range(4):
        next(records)
    assert sampler.state_dict(10, 2)["completed_num"] == 0, "two batches were read, perhaps ahead"
    assert sampler.state_dict(12, 2)["completed_num"] == 8
    assert len(list(records)) == 16
    sampler.set_epoch(2)
    assert len(list(sampler)) == 20
    assert sampler.state_dict(20, 2)["completed_num"] == 0, "it was seen to count through the epochs"


@given(st.sampled_from(["training", "epoch", "restart", "epoch from the restart"]), st.data())
def test_however_a_caller_counts_what_it_saves_is_what_was_used(counting: str, data: st.DataObject) -> None:
    """Three epochs of ten steps, restored in the first one; the caller saves at every so manyth step of its count, before which nothing is read ahead."""
    restored_at = data.draw(st.integers(0, 9), "restored at")
    every = data.draw(st.integers(1, max(1, restored_at)), "every")
    sampler = ElasticDistributedSampler(Numbers(40), 2, 0)
    sampler.load_state_dict(sampler.state_dict(restored_at, 2))
    since_restart = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        records = iter(sampler)
        done = 0 if epoch else restored_at
        for step in range(done + 1, 11):
            assert len([next(records), next(records)]) == 2
            since_restart += 1
            told = {
                "training": 10 * epoch + step, "epoch": step, "restart": since_restart,
                "epoch from the restart": step if epoch else since_restart,
            }[counting]  # fmt: skip
            if told % every == 0:
                assert sampler.state_dict(told, 2)["completed_num"] == 4 * step


def test_a_caller_that_counts_from_the_restart_goes_on_so() -> None:
    state = ElasticDistributedSampler(Numbers(400), 2, 0).state_dict(40, 2)
    sampler = ElasticDistributedSampler(Numbers(400), 2, 0)
    sampler.load_state_dict(state)
    assert sampler.state_dict(40, 2)["completed_num"] == 160, "saved before anything was read"
    assert len(list(sampler)) == 120
    counted = [sampler.state_dict(step, 2)["completed_num"] for step in (40, 50, 60)]
    assert counted == [160 + 4 * step for step in (40, 50, 60)]


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    state = ElasticDistributedSampler(Numbers(10), 4, 0).state_dict(3, 1)
    resumed = ElasticDistributedSampler(Numbers(10), 4, 0)
    resumed.load_state_dict(state)
    assert (resumed.epoch, len(resumed)) == (1, 3)


def test_a_state_of_the_original_is_understood() -> None:
    sampler = ElasticDistributedSampler(Numbers(100), 2, 0, shuffle=False)
    sampler.load_state_dict({"epoch": 2, "completed_num": 230})
    assert (sampler.epoch, next(iter(sampler))) == (2, 30)


@pytest.mark.parametrize("other", [{"seed": 1}, {"shuffle": False}])
def test_a_state_of_another_order_is_refused(other: dict[str, Any]) -> None:
    state = ElasticDistributedSampler(Numbers(100), 2, 0).state_dict(3, 4)
    with pytest.raises(ConfigError, match="Its position would name other records"):
        ElasticDistributedSampler(Numbers(100), 2, 0, **other).load_state_dict(state)
    with pytest.raises(ConfigError, match="dataset_size 100"):
        ElasticDistributedSampler(Numbers(99), 2, 0).load_state_dict(state)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_few_ranks_read_for_each_step_what_many_would(num_ranks: int) -> None:
    batch, size = 3, 50
    full = world(size, 4, seed=2)
    for sampler in full:
        sampler.play(4, batch)
    shares = [list(sampler) for sampler in full]
    steps = [[share[at : at + batch] for share in shares] for at in range(0, len(shares[0]), batch)]
    assert len(steps) == 5, "50 records in steps of 12, the last one padded"
    assert steps[0] == [list(sampler)[:batch] for sampler in world(size, 4, seed=2)], "as torch deals them"
    samplers = world(size, num_ranks, seed=2)
    for sampler in samplers:
        sampler.play(4, batch)
    batches = [[each.tolist() for each in DataLoader(Numbers(size), batch, sampler=sampler)] for sampler in samplers]
    for number, wanted in enumerate(steps):
        read = []
        for sampler, own in zip(samplers, batches, strict=True):
            roles = len(sampler.roles)
            read += own[number * roles : (number + 1) * roles]
            assert len(own) == roles * len(steps)
        assert sorted(read) == sorted(wanted)


def test_whole_steps_can_be_had_without_padding() -> None:
    [sampler] = world(50, 1, drop_last=True, shuffle=False)
    sampler.play(4, 3)
    assert Counter(sampler) == Counter(range(48))
    with pytest.raises(ValueError, match="must be"):
        sampler.play(0, 3)
