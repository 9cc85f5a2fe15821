"""The loader and the dataset: batch sizes that change, states in the middle, records on demand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlrover.trainer.stand_in import StandIn  # noqa: E402
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader  # noqa: E402
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler  # noqa: E402
from dlrover.trainer.torch.elastic.trainer import LOOK_EVERY, ElasticTrainer  # noqa: E402
from dlrover.trainer.torch.elastic_dataset import ElasticDataset  # noqa: E402

NUMBERS = list(range(40))


def config(path: Path, **section: Any) -> str:
    path.write_text(json.dumps({"dataloader": section, "optimizer": {"version": 3}}))
    return str(path)


def loader(path: Path, **options: Any) -> ElasticDataLoader:
    return ElasticDataLoader(NUMBERS, config_file=str(path), **({"batch_size": 4} | options))


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_batch_size_changes_at_a_batch_boundary(tmp_path: Path, drop_last: bool) -> None:
    data = loader(tmp_path / "c.json", drop_last=drop_last)
    sizes = []
    for batch in data:
        sizes.append(len(batch))
        if len(sizes) == 2:
            data.update_batch_size(6)
    assert sizes == [4, 4, 6, 6, 6, 6, 6] + ([] if drop_last else [2])


def test_only_a_newer_version_of_the_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    data = loader(path)
    assert json.loads(path.read_text())["dataloader"] == {"batch_size": 4, "version": 0}
    config(path, version=1, batch_size=8)
    data.load_config()
    assert data.get_batch_size() == 8
    config(path, version=1, batch_size=16)
    data.update_batch_size()
    assert data.get_batch_size() == 8
    config(path, version=2, batch_size=16)
    data.update_batch_size()
    assert data.get_batch_size() == 16


def test_a_file_that_is_there_is_read_first_and_keeps_its_other_parts(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    config(path, version=5, batch_size=10, num_workers=2)
    assert loader(path).get_batch_size() == 10
    kept = json.loads(path.read_text())
    assert kept["optimizer"] == {"version": 3}
    assert kept["dataloader"] == {"version": 5, "batch_size": 10, "num_workers": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"dataloader": null}', '{"dataloader": {"version": 2, "batch_size": -3}}'])
def test_a_broken_file_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    assert loader(tmp_path / "c.json").get_batch_size() == 4


def test_bad_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        loader(tmp_path / "c.json").update_batch_size(0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_middle_of_an_epoch_goes_on_with_other_ranks(tmp_path: Path, num_workers: int) -> None:
    seen: Counter[int] = Counter()
    states = []
    for rank in range(2):
        sampler = ElasticDistributedSampler(NUMBERS, 2, rank)  # type: ignore[arg-type]
        data = loader(tmp_path / "c.json", sampler=sampler, num_workers=num_workers)
        batches = iter(data)
        for _ in range(3):
            seen.update(next(batches).tolist())
        states.append(data.state_dict())
    assert states[0] == states[1]
    one = loader(tmp_path / "c.json", sampler=ElasticDistributedSampler(NUMBERS, 1, 0), batch_size=5)  # type: ignore[arg-type]
    one.load_state_dict(states[0])
    assert one.get_batch_size() == 4
    for batch in one:
        seen.update(batch.tolist())
    assert seen == Counter(NUMBERS)


def as_columns(records: list[int]) -> Any:
    """As detection models like it: tuples of images, all of them three long."""
    return tuple(zip(*([(torch.tensor([each] * 3), each, each) for each in records]), strict=True))


def as_texts(records: list[int]) -> Any:
    """A list of records as they are, each a dict of tensors as long as its text."""
    return [{"ids": torch.full((7,), each)} for each in records]


def as_lists(records: list[int]) -> Any:
    """What torch makes of dicts of lists: one tensor for each place in the list."""
    return torch.utils.data.default_collate([{"ids": [each] * 3} for each in records])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate", [as_columns, as_texts, as_lists, sum])
def test_the_records_of_a_batch_count_whatever_it_looks_like(tmp_path: Path, collate: Any, num_workers: int) -> None:
    sampler = ElasticDistributedSampler(NUMBERS, 2, 0)  # type: ignore[arg-type]
    data = loader(tmp_path / "c.json", batch_size=6, sampler=sampler, collate_fn=collate, num_workers=num_workers)
    counted = [data.state_dict()["sampler"]["completed_num"] for _ in data]
    assert counted == [12, 24, 36, 40]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_new_batch_size_counts_from_the_batch_that_has_it(tmp_path: Path, options: dict[str, Any]) -> None:
    """Processes have batches of the old size ahead; the next epoch begins with its own."""
    sampler = ElasticDistributedSampler(NUMBERS, 1, 0)  # type: ignore[arg-type]
    data = loader(tmp_path / "c.json", sampler=sampler, collate_fn=as_texts, **options)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        data.update_batch_size(3)
        seen, sizes = 0, set()
        for batch in data:
            data.update_batch_size(5)
            seen += len(batch)
            sizes.add(len(batch))
            assert data.state_dict()["sampler"]["completed_num"] == seen
        assert sizes >= {3, 5}


def test_two_passes_at_once_do_not_take_each_others_sizes(tmp_path: Path) -> None:
    sampler = ElasticDistributedSampler(NUMBERS, 1, 0)  # type: ignore[arg-type]
    data = loader(tmp_path / "c.json", sampler=sampler, collate_fn=as_texts)
    one, other = iter(data), iter(data)
    seen = len(next(one))
    data.update_batch_size(6)
    for each in (other, other, one, other):
        seen += len(next(each))
        assert data.state_dict()["sampler"]["completed_num"] == seen


def test_a_loader_without_our_sampler_does_not_know_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="ElasticDistributedSampler"):
        loader(tmp_path / "c.json").state_dict()


class Squares(ElasticDataset):
    def read_sample(self, index: int) -> int:
        return index * index


def test_a_dataset_hands_out_what_its_shards_say() -> None:
    dataset = Squares("squares", 24, 4, 2, shuffle=True, link=StandIn())
    assert len(dataset) == 48
    seen: Counter[int] = Counter()
    for batch in DataLoader(dataset, 4):
        seen.update(batch.tolist())
        dataset.step()
    assert seen == Counter({index * index: 2 for index in range(24)})
    dataset.close()


def test_a_dataset_goes_back_to_its_state() -> None:
    dataset = Squares("squares", 16, 4, 1, link=StandIn())
    first = [dataset[0] for _ in range(8)]
    dataset.step(8)
    state = dataset.state_dict()
    assert state is not None
    dataset.load_state_dict(state)
    rest = [dataset[0] for _ in range(8)]
    assert sorted(first + rest) == [index * index for index in range(16)]
    assert dataset.get_epoch() == 0
    dataset.close()


def test_processes_that_read_ahead_change_with_the_next_epoch(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    data = loader(path)
    config(path, version=1, num_workers=1, pin_memory=False)
    data.load_config()
    assert (data.num_workers, data.prefetch_factor, data.get_batch_size()) == (1, 2, 4)
    assert sorted(int(record) for batch in data for record in batch) == NUMBERS
    config(path, version=2, num_workers=0)
    data.load_config()
    assert (data.num_workers, data.prefetch_factor) == (0, None)
    assert len(list(data)) == 10


@pytest.mark.parametrize("section", [{"version": "new"}, {"version": 1, "batch_size": []}, 7])
def test_a_file_that_says_something_impossible_changes_nothing(tmp_path: Path, section: Any) -> None:
    path = tmp_path / "c.json"
    data = loader(path)
    path.write_text(json.dumps({"dataloader": section}))
    data.load_config()
    assert data.get_batch_size() == 4


def test_a_trainer_lets_its_loader_follow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    data = loader(path, batch_size=1)
    trainer = ElasticTrainer(torch.nn.Linear(1, 1), data, max_workers=1)
    config(path, version=1, batch_size=5)
    sizes = []
    for batch in data:
        with trainer.step():
            sizes.append(len(batch))
    assert sizes == [1] * LOOK_EVERY + [5] * 4


def test_a_batch_that_is_held_constant_does_not_change(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    sampler = ElasticDistributedSampler(NUMBERS, 1, 0)
    data = loader(path, sampler=sampler)
    ElasticTrainer(torch.nn.Linear(1, 1), max_workers=4).deal(sampler, 4)
    config(path, version=1, batch_size=8)
    data.load_config()
    assert data.get_batch_size() == 4
