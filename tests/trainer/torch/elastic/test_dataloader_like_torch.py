"""`ElasticDataLoader` against torch's own `DataLoader`: the same calls, attributes, errors, warnings and batches."""

from __future__ import annotations

import copy
import inspect
import json
import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    get_worker_info,
)

from dlrover.trainer.torch.elastic.dataloader import ElasticBatchSampler, ElasticDataLoader  # noqa: E402
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler  # noqa: E402

FORK = multiprocessing.get_context("fork")
PARAMETERS = [each for each in inspect.signature(DataLoader.__init__).parameters.values() if each.name != "self"]


class Squares(Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        if index >= 23:
            raise IndexError(index)
        return index * index


class Stream(IterableDataset):  # type: ignore[misc]
    """Shares its numbers between worker processes."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from range(first, 23, step)


class LongStream(Stream):
    def __len__(self) -> int:
        return 23


class Bare:
    """A batch sampler that has no batch size and no length."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [5], [7, 8])


def as_list(records: list[Any]) -> list[Any]:
    return list(records)


def shift(worker: int) -> None:
    assert get_worker_info().id == worker
    os.environ["OF_WORKER"] = str(worker)


def with_worker(records: list[int]) -> tuple[str, list[int]]:
    return os.environ["OF_WORKER"], records


def seeded() -> Any:
    return torch.Generator().manual_seed(7)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLROVER_PARAL_CONFIG_PATH", str(tmp_path / "c.json"))
    return tmp_path / "c.json"


def heard(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [f"{each.category.__name__}: {each.message}" for each in caught]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def tell(loader: Any) -> list[Any]:
    """What two epochs of it give, and what torch's dice show afterwards."""
    try:
        length: Any = len(loader)
    except TypeError as error:
        length = str(error)
    epochs = [[plain(batch) for batch in loader] for _ in range(2)]
    begun = iter(loader)
    dice = torch.rand(1).item()  # who has begun has thrown them
    first = plain(next(begun))
    return [length, epochs, dice, first]


CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "nothing": lambda: ((Squares(),), {}),
    "by name": lambda: ((), {"dataset": Squares(), "batch_size": 4}),
    "shuffle": lambda: ((Squares(), 4, True), {}),
    "shuffle none": lambda: ((Squares(), 4, None), {}),
    "generator": lambda: ((Squares(), 4, True), {"generator": seeded()}),
    "drop_last": lambda: ((Squares(),), {"batch_size": 4, "drop_last": True}),
    "sampler": lambda: ((Squares(), 4, False, SequentialSampler(range(9))), {}),
    "random sampler": lambda: ((Squares(), 4), {"sampler": SubsetRandomSampler(range(9), generator=seeded())}),
    "any iterable": lambda: ((Squares(), 4), {"sampler": [3, 1, 2, 0, 9]}),
    "elastic sampler": lambda: ((Squares(), 4), {"sampler": ElasticDistributedSampler(Squares(), 2, 1)}),
    "batch_sampler": lambda: ((Squares(),), {"batch_sampler": BatchSampler(SequentialSampler(range(9)), 4, True)}),
    "bare batch_sampler": lambda: ((Squares(), 1, None, None, Bare()), {}),
    "no batches": lambda: ((Squares(), None), {}),
    "no batches, elastic": lambda: ((Squares(), None), {"sampler": ElasticDistributedSampler(Squares(), 2, 1)}),
    "stream": lambda: ((Stream(), 4), {}),
    "stream of a length": lambda: ((LongStream(), 4), {"drop_last": True}),
    "stream without batches": lambda: ((LongStream(), None), {}),
    "collate": lambda: ((Squares(), 4), {"collate_fn": as_list}),
    "dictionary": lambda: (({number: number for number in range(9)}, 4), {}),
    "pinned": lambda: ((Squares(), 4), {"pin_memory": True}),
    "device": lambda: ((Squares(), 4), {"pin_memory": True, "pin_memory_device": "cuda"}),
    "all by position": lambda: (
        (Squares(), 4, False, None, None, 2, with_worker, False, True, 60.0, shift, "fork", seeded()),
        {},
    ),
    "workers": lambda: (
        (Squares(), 4),
        {"num_workers": 2, "prefetch_factor": 3, "multiprocessing_context": FORK, "worker_init_fn": shift},
    ),
    "workers that stay": lambda: (
        (Squares(), 4),
        {"num_workers": 2, "persistent_workers": True, "sampler": ElasticDistributedSampler(Squares(), 2, 1)},
    ),
    "workers of a stream": lambda: ((Stream(), 4), {"num_workers": 2, "persistent_workers": True}),
    "workers without batches": lambda: ((Squares(), None), {"num_workers": 1}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_does_what_torchs_own_loader_does(name: str) -> None:
    told = []
    for kind in (DataLoader, ElasticDataLoader):
        args, options = CALLS[name]()
        torch.manual_seed(3)
        told.append(heard(lambda kind=kind, args=args, options=options: tell(kind(*args, **options))))
    assert told[1] == told[0]


@pytest.mark.parametrize("name", CALLS)
def test_it_has_the_attributes_of_torchs_own_loader(name: str) -> None:
    args, options = CALLS[name]()
    given = inspect.signature(DataLoader).bind(*args, **options).arguments
    ours, _ = heard(lambda: ElasticDataLoader(*args, **options))
    theirs, _ = heard(lambda: DataLoader(*args, **options))
    seen = {name: value for name, value in vars(ours).items() if not name.startswith("_")}
    wanted = {name: value for name, value in vars(theirs).items() if not name.startswith("_")}
    assert seen.keys() - wanted.keys() == {"config_file", "script_batch_size"}
    assert wanted.keys() <= seen.keys()
    assert ours.multiprocessing_context is theirs.multiprocessing_context
    for name, value in wanted.items():
        if name == "batch_sampler" and ours.batch_size is not None:
            assert isinstance(seen[name], BatchSampler)
            assert seen[name].sampler is ours.sampler
            assert (seen[name].batch_size, seen[name].drop_last) == (value.batch_size, value.drop_last)
        elif name == "sampler" and given.get("sampler") is None:
            assert type(seen[name]) is type(value)
        else:
            assert seen[name] is value or seen[name] == value
    assert set(dir(DataLoader)) <= set(dir(ours))


def test_a_sampler_that_was_given_is_the_sampler() -> None:
    sampler = ElasticDistributedSampler(Squares(), 2, 0)
    loader = ElasticDataLoader(Squares(), batch_size=4, sampler=sampler)
    assert loader.sampler is sampler
    assert loader.batch_sampler.sampler is sampler
    assert loader.batch_size == 4
    loader.sampler.set_epoch(2)
    assert loader.sampler.epoch == 2
    state = loader.sampler.state_dict(1, loader.batch_size)
    assert (state["epoch"], state["completed_num"]) == (2, 8)
    again = ElasticDataLoader(Squares(), 4, sampler=ElasticDistributedSampler(Squares(), 2, 0))
    again.sampler.load_state_dict(state)
    assert list(again.sampler) == list(sampler)[4:]
    again.sampler.load_state_dict({})  # as in the original's guide: checkpoint.get("sampler", {})
    assert (again.sampler.epoch, len(again.sampler)) == (0, 12)
    batches = BatchSampler(sampler, 3, False)
    assert ElasticDataLoader(Squares(), batch_sampler=batches).batch_sampler is batches


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda each: each.name)
def test_every_parameter_of_torchs_loader_is_one_of_ours(parameter: inspect.Parameter) -> None:
    given = Squares() if parameter.default is parameter.empty else parameter.default
    rest = {} if parameter.name == "dataset" else {"dataset": Squares()}
    assert ElasticDataLoader(**rest, **{parameter.name: given}).batch_size == 1
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
        before = PARAMETERS[: PARAMETERS.index(parameter)]
        values = [Squares(), *(each.default for each in before[1:])] if before else []
        assert ElasticDataLoader(*values, given).batch_size == 1


BAD: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((Squares(), 4), {"sampler": SequentialSampler(range(9)), "shuffle": True}),
    ((Squares(), 4), {"batch_sampler": [[1]]}),
    ((Squares(),), {"batch_sampler": [[1]], "drop_last": True}),
    ((Squares(),), {"batch_sampler": [[1]], "shuffle": True}),
    ((Squares(),), {"batch_sampler": [[1]], "sampler": [1]}),
    ((Squares(), None), {"drop_last": True}),
    ((Squares(), 0), {}),
    ((Squares(), 2.5), {}),
    ((Squares(),), {"drop_last": "yes"}),
    ((Squares(),), {"num_workers": -1}),
    ((Squares(),), {"timeout": -1}),
    ((Squares(),), {"prefetch_factor": 2}),
    ((Squares(),), {"num_workers": 1, "prefetch_factor": -2}),
    ((Squares(),), {"persistent_workers": True}),
    ((Squares(),), {"multiprocessing_context": "fork"}),
    ((Squares(),), {"num_workers": 1, "multiprocessing_context": "teleport"}),
    ((Squares(),), {"num_workers": 1, "multiprocessing_context": 5}),
    ((Squares(),), {"no_such_thing": 1}),
    ((Stream(), 4, True), {}),
    ((Stream(), 4), {"sampler": [1]}),
    ((Stream(),), {"batch_sampler": Bare}),
    (([], 4, True), {}),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_torch_refuses_is_refused_with_torchs_words(number: int) -> None:
    args, options = BAD[number]
    told = []
    for kind in (DataLoader, ElasticDataLoader):
        try:
            told.append(tell(kind(*args, **options)))
        except Exception as error:  # whatever it is: the same is wanted
            told.append([type(error), str(error).replace("ElasticDataLoader", "DataLoader")])
    assert told[1] == told[0]


def test_attributes_that_torch_protects_stay_protected() -> None:
    ours = ElasticDataLoader(Squares(), 4, num_workers=1)
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"):
        with pytest.raises(ValueError, match=f"{name} attribute should not be set after ElasticDataLoader"):
            setattr(ours, name, None)
    with pytest.raises(ValueError, match="valid start method"):
        ours.multiprocessing_context = "teleport"
    ours.multiprocessing_context = "fork"
    assert ours.multiprocessing_context.get_start_method() == "fork"
    ours.multiprocessing_context = None
    assert ours.multiprocessing_context is None
    ours.collate_fn, ours.timeout, ours.pin_memory, ours.generator = as_list, 60, False, seeded()
    assert next(iter(ours)) == [0, 1, 4, 9]


def test_too_many_workers_are_warned_of_as_torch_does() -> None:
    _, told = heard(lambda: DataLoader(Squares(), num_workers=10_000).check_worker_number_rationality())
    _, ours = heard(lambda: ElasticDataLoader(Squares(), num_workers=10_000).check_worker_number_rationality())
    assert ours == told
    assert len(told) == 2


def test_workers_that_need_not_keep_the_order_lose_nothing() -> None:
    sampler = ElasticDistributedSampler(Squares(), 1, 0)
    ours = ElasticDataLoader(Squares(), 4, sampler=sampler, num_workers=2, in_order=False, collate_fn=as_list)
    assert Counter(record for batch in ours for record in batch) == Counter(number**2 for number in range(23))
    assert ours.state_dict()["sampler"]["completed_num"] == 23


def test_an_error_of_the_dataset_comes_out_and_the_iterator_goes_on() -> None:
    told = []
    for kind in (DataLoader, ElasticDataLoader):
        batches = iter(kind(Squares(), 2, sampler=[1, 2, 99, 3, 4], collate_fn=as_list))
        told.append([next(batches)])
        with pytest.raises(IndexError, match="99"):
            next(batches)
        told[-1] += list(batches)
    assert told[1] == told[0] == [[1, 4], [16]]


def test_a_copy_reads_the_same_and_counts_for_itself() -> None:
    ours = ElasticDataLoader(Squares(), 4, sampler=ElasticDistributedSampler(Squares(), 2, 0))
    other = copy.deepcopy(ours)
    assert [plain(batch) for batch in other] == [plain(batch) for batch in ours]
    assert other.state_dict() == ours.state_dict()
    assert other.sampler is not ours.sampler


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_iterator_knows_its_length_and_workers_that_stay_have_one(num_workers: int) -> None:
    sampler = ElasticDistributedSampler(Squares(), 2, 0)
    ours = ElasticDataLoader(Squares(), 4, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)
    one = iter(ours)
    assert len(one) == 3
    next(one)
    other = iter(ours)
    assert (other is one) == (num_workers > 0)
    next(one)
    assert ours.state_dict()["sampler"]["completed_num"] == 16


def test_a_loader_made_from_the_parts_of_another_counts_too() -> None:
    """As frameworks do it that put their own settings into a loader that they are given."""
    sampler = ElasticDistributedSampler(Squares(), 1, 0)
    given = ElasticDataLoader(Squares(), 4, sampler=sampler)
    made = ElasticDataLoader(given.dataset, batch_sampler=given.batch_sampler)
    assert isinstance(given.batch_sampler, ElasticBatchSampler)
    next(iter(made))
    made.update_batch_size(6)
    assert (made.state_dict()["sampler"]["completed_num"], made.get_batch_size(), made.batch_size) == (4, 6, None)


def tuned(file: Path, version: int, size: int) -> None:
    file.write_text(json.dumps({"dataloader": {"version": version, "batch_size": size}}))


def test_the_attributes_follow_a_tuned_batch_size(file: Path) -> None:
    ours = ElasticDataLoader(Squares(), batch_size=4)
    tuned(file, 1, 6)
    ours.update_batch_size()
    assert (ours.batch_size, ours.batch_sampler.batch_size, ours.get_batch_size(), len(ours)) == (6, 6, 6, 4)
    ours.update_batch_size(8)
    assert (ours.batch_size, len(ours)) == (8, 3)
    assert [len(batch) for batch in ours] == [8, 8, 7]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_changes_its_batch_size_too(file: Path, num_workers: int) -> None:
    ours = ElasticDataLoader(LongStream(), 4, num_workers=num_workers, collate_fn=as_list)
    sizes = []
    for batch in ours:
        sizes.append(len(batch))
        ours.update_batch_size(2)
    ahead = 2 * num_workers
    assert sizes[: 1 + ahead] == [4] * (1 + ahead)
    assert set(sizes[1 + ahead : -1]) == {2}
    assert sum(sizes) == 23
    assert len(ours) == 12


def test_a_batch_sampler_of_the_caller_takes_a_tuned_size_if_it_has_one(file: Path) -> None:
    ours = ElasticDataLoader(Squares(), batch_sampler=BatchSampler(SequentialSampler(range(9)), 4, False))
    tuned(file, 1, 5)
    ours.load_config()
    assert ([len(batch) for batch in ours], ours.batch_size, ours.get_batch_size()) == ([5, 4], None, 5)
    tuned(file, 2, 9)
    for bare in (
        ElasticDataLoader(Squares(), batch_sampler=Bare()),
        ElasticDataLoader(Squares(), batch_size=None),
    ):
        assert bare.get_batch_size() is None
        with pytest.raises(ValueError, match="batch size of this loader cannot change"):
            bare.update_batch_size(5)


def test_records_without_batches_count_one_by_one() -> None:
    sampler = ElasticDistributedSampler(Squares(), 2, 0)
    ours = ElasticDataLoader(Squares(), batch_size=None, sampler=sampler)
    records = iter(ours)
    for _ in range(3):
        next(records)
    state = ours.state_dict()
    assert (state["sampler"]["completed_num"], state["batch_size"]) == (6, None)
    ours.load_state_dict(state)
    assert len(list(ours)) == 9
