"""`RayDataLoaderIter`: batches that actors fetch are those of torch, in the same order, and the actors go when the last batch was given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from dlrover.unified.api.dataloader import RayDataLoaderIter, patch_dataloader_ray
from tests.ray.lab import RayLab


class Squares:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.tensor(place * place)


class Numbers(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


def batches(loader: object) -> list[list[int]]:
    return [batch.tolist() for batch in loader]  # type: ignore[attr-defined]


def test_actors_fetch_the_batches_of_torch_in_its_order(lab: RayLab, monkeypatch: pytest.MonkeyPatch):
    order = torch.utils.data.SequentialSampler(range(10))
    plain = DataLoader(Squares(), batch_size=3, sampler=order)
    expected = batches(plain)
    assert [len(batch) for batch in expected] == [3, 3, 3, 1]
    assert batches(RayDataLoaderIter(plain, num_actors=2)) == expected
    lab.await_nothing_left()

    # Without batches, and as scripts switch it on. What has no places is read as before.
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    single = DataLoader(Squares(), batch_size=None)
    patch_dataloader_ray()
    assert isinstance(iter(plain), RayDataLoaderIter)
    assert [int(item) for item in single] == [place * place for place in range(10)]
    assert list(DataLoader(Numbers(), batch_size=None)) == [0, 1, 2]
    lab.await_nothing_left()


def test_an_error_of_the_dataset_reaches_the_reader(lab: RayLab):
    with pytest.raises(ZeroDivisionError):
        next(RayDataLoaderIter(DataLoader(Broken(), batch_size=2)))
    lab.await_nothing_left()


class Broken(Squares):
    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.tensor(1 // 0)


def test_numbers_that_make_no_sense_are_told(lab: RayLab):
    with pytest.raises(ValueError, match="num_actors must be at least 1"):
        RayDataLoaderIter(DataLoader(Squares()), num_actors=0)
    given = SimpleNamespace(
        prefetch_factor=0, pin_memory=False, dataset=[1, 2], collate_fn=list, _index_sampler=[[0], [1]]
    )
    with pytest.warns(UserWarning, match="prefetch_factor is 0"):
        assert list(RayDataLoaderIter(given)) == [[1], [2]]
    lab.await_nothing_left()
