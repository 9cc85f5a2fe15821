"""Batches from shards through DataLoaders of all kinds: every record once, and what was not used comes again."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.data import ExchangeShards
from dlrover.protocol.messages.job import Reply, WorkerRequest
from dlrover.trainer.data.shard_reader import ShardPiece
from dlrover.trainer.data_sources import CsvSource, DirectoryTail, LineSource, SourceChanged
from dlrover.trainer.stand_in import StandIn
from dlrover.trainer.torch.data import Batch, ShardDataset, StepLoader
from dlrover.trainer.torch.data.shard_service import ShardClient
from dlrover.trainer.torch.data.step_loader import part_of

SIZE = 103
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


class Link:
    """The job's books in this process, and what they were told."""

    def __init__(self) -> None:
        self.inner = StandIn()
        self.asked: list[WorkerRequest] = []

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        self.asked.append(request)
        return self.inner.ask(request, timeout=timeout)

    @property
    def steps(self) -> Counter[int]:
        """Records by the step that contains them."""
        found: Counter[int] = Counter()
        for each in self.asked:
            if isinstance(each, ExchangeShards):
                for part in each.consumed:
                    found[part.step] += part.count
        return found


@pytest.fixture
def source(tmp_path: Path) -> CsvSource:
    path = tmp_path / "numbers.csv"
    path.write_text("n,half\n" + "".join(f"{n},{n / 2}\n" for n in range(SIZE)))
    return CsvSource(path)


class Opened:
    """Datasets and loaders that are closed in the end."""

    def __init__(self) -> None:
        self._all: list[Any] = []

    def __call__(self, made: Any) -> Any:
        self._all.append(made)
        return made

    def close(self) -> None:
        for each in self._all:
            each.close()


@pytest.fixture
def opened() -> Iterator[Opened]:
    found = Opened()
    yield found
    found.close()


def numbers(batch: Batch) -> list[int]:
    return batch.data["n"].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_record_comes_once_with_its_claim(
    source: CsvSource, opened: Opened, loader: Any, num_workers: int
) -> None:
    link = Link()
    data = opened(ShardDataset(source, batch_size=8, num_epochs=2, shuffle=True, batches_per_shard=2, link=link))
    seen: Counter[int] = Counter()
    for step, batch in enumerate(loader(data, batch_size=None, num_workers=num_workers)):
        assert torch.equal(batch.data["half"] * 2, batch.data["n"])
        assert len(batch) == len(numbers(batch)) <= 8
        seen.update(numbers(batch))
        data.used(batch, step)
    assert seen == Counter(dict.fromkeys(range(SIZE), 2))
    assert data._reader.state().is_complete
    assert sum(link.steps.values()) == 2 * SIZE
    assert len(link.steps) == step + 1, "each batch is in the books with its step"


@pytest.mark.chaos  # a new process imports torch anew
def test_worker_processes_may_be_spawned(source: CsvSource, opened: Opened) -> None:
    data = opened(ShardDataset(source, batch_size=50, link=Link()))
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    seen: Counter[int] = Counter()
    for batch in loader:
        seen.update(numbers(batch))
        data.used(batch, 1)
    assert seen == Counter(range(SIZE))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_what_was_not_used_comes_in_the_next_pass(source: CsvSource, opened: Opened, options: dict[str, Any]) -> None:
    data = opened(ShardDataset(source, batch_size=4, batches_per_shard=3, link=Link()))
    loader = DataLoader(data, batch_size=None, **options)
    seen: Counter[int] = Counter()
    iterator = iter(loader)
    for batch in itertools.islice(iterator, 5):
        seen.update(numbers(batch))
        data.used(batch, 1)
    lost = next(iterator)
    del iterator
    for batch in loader:
        seen.update(numbers(batch))
        data.used(batch, 2)
    assert seen == Counter(range(SIZE))
    with pytest.raises(ValueError, match="earlier pass"):
        data.used(lost, 3)


def test_batches_are_reported_in_their_order(source: CsvSource, opened: Opened) -> None:
    data = opened(ShardDataset(source, batch_size=4, link=Link()))
    one, two = itertools.islice(data, 2)
    with pytest.raises(ValueError, match="in the order"):
        data.used(two, 1)
    data.used(one, 1)
    data.used(two, 1)
    with pytest.raises(ValueError, match="in the order"):
        data.used(two, 2)


def test_a_source_that_changes_stops_the_loop_and_loses_nothing(
    source: CsvSource, opened: Opened, tmp_path: Path
) -> None:
    link = Link()
    data = opened(ShardDataset(source, batch_size=4, batches_per_shard=1, link=link))
    batches = iter(DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=1))
    data.used(next(batches), 1)
    path = tmp_path / "numbers.csv"
    content = path.read_text()
    path.write_text(content[: len(content) // 2])

    def go_on() -> None:
        for batch in batches:
            data.used(batch, 1)

    with pytest.raises(SourceChanged, match="Restore the old"):
        go_on()
    batches._shutdown_workers()  # collected with the traceback it would wait for some seconds
    data.close()
    found = data._reader.state()
    assert found.num_doing == 0
    assert found.num_consumed + found.num_todo == SIZE
    with pytest.raises(Rejected, match="not those that it was registered with"):
        ShardDataset(CsvSource(path), batch_size=4, batches_per_shard=1, link=_same_size(link))


class _SameSize(Link):
    """The same books; the size is made the same, so that only the content differs."""

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        from msgspec.structs import replace

        from dlrover.protocol.messages.data import RegisterDataset

        if isinstance(request, RegisterDataset):
            request = replace(request, spec=replace(request.spec, size=SIZE))
        return self.inner.ask(request, timeout=timeout)


def _same_size(link: Link) -> Link:
    found = _SameSize()
    found.inner = link.inner
    return found


# States.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_goes_on_in_another_job(source: CsvSource, opened: Opened, num_workers: int) -> None:
    def make() -> tuple[ShardDataset, StatefulDataLoader[Any]]:
        data = opened(ShardDataset(source, batch_size=8, shuffle="shards", batches_per_shard=1, link=Link()))
        return data, StatefulDataLoader(data, batch_size=None, num_workers=num_workers)

    data, loader = make()
    seen: Counter[int] = Counter()
    batches = iter(loader)
    for batch in itertools.islice(batches, 6):
        seen.update(numbers(batch))
        data.used(batch, 1)
    state, of_loader = data.state_dict(), loader.state_dict()
    assert sum(seen.values()) == 48
    del batches

    data, loader = make()
    if num_workers:
        client = opened(ShardClient(data._address))
        assert not client.is_begun(), "what worker processes ask when they get the loader's state"
        data.load_state_dict(state)
        assert client.is_begun()
    loader.load_state_dict(of_loader)  # without worker processes it holds the dataset's
    for batch in loader:
        seen.update(numbers(batch))
        data.used(batch, 2)
    assert seen == Counter(range(SIZE))


@pytest.mark.chaos  # the loader gives its worker processes some seconds to end
def test_the_state_of_a_loader_with_worker_processes_is_not_enough(source: CsvSource, opened: Opened) -> None:
    loaders = [
        StatefulDataLoader(opened(ShardDataset(source, batch_size=8, link=Link())), batch_size=None, num_workers=1)
        for _ in range(2)
    ]
    next(iter(loaders[0]))
    loaders[1].load_state_dict(loaders[0].state_dict())
    with pytest.raises(ConfigError, match="does not tell which records are unread"):
        next(iter(loaders[1]))


def test_a_job_that_has_begun_believes_its_own_books(source: CsvSource, opened: Opened) -> None:
    link = Link()
    data = opened(ShardDataset(source, batch_size=8, link=link))
    early = data.state_dict()
    seen: Counter[int] = Counter()
    batches = iter(data)
    for batch in itertools.islice(batches, 3):
        seen.update(numbers(batch))
        data.used(batch, 1)
    data.load_state_dict(early)
    for batch in batches:
        seen.update(numbers(batch))
        data.used(batch, 2)
    assert seen == Counter(range(SIZE))
    with pytest.raises(SourceChanged, match="fingerprint"):
        data.load_state_dict({**early, "fingerprint": "other"})


# Bad input.


def test_bad_parameters_are_named(source: CsvSource, tmp_path: Path) -> None:
    for options, said in (
        ({"batch_size": 0}, r"`batch_size` must be at least 1 \(got 0\)"),
        ({"batch_size": 4, "batches_per_shard": -1}, r"batches per shard at least 0 \(got -1\)"),
        ({"batch_size": 4, "shuffle": "all"}, "shuffle` must be"),
    ):
        with pytest.raises(ConfigError, match=said):
            ShardDataset(source, link=Link(), **options)  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="fewer than one batch"):
        ShardDataset(source, batch_size=SIZE + 1, link=Link())
    with pytest.raises(ConfigError, match="cannot be shuffled"):
        ShardDataset(DirectoryTail(tmp_path), batch_size=4, shuffle=True, link=Link())  # type: ignore[arg-type]


# A stream.


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_directory_is_read_while_it_is_written(tmp_path: Path, opened: Opened, num_workers: int) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a").write_text("a0\na1\na2\n")
    data = opened(ShardDataset(DirectoryTail(folder), batch_size=2, link=Link()))  # type: ignore[arg-type]
    batches = iter(
        DataLoader(data, batch_size=None, num_workers=num_workers, prefetch_factor=1 if num_workers else None)
    )
    seen: list[str] = []

    def read(count: int) -> None:
        while len(seen) < count:
            batch = next(batches)
            seen.extend(batch.data)
            data.used(batch, 1)

    read(3)
    with (folder / "a").open("a") as file:
        file.write("a3\n")
    read(4)
    (folder / "b").write_text("b0\nb1")
    read(5)
    (folder / "_END").touch()
    read(6)
    assert seen == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert list(batches) == []


# Ranks that step together.


def test_a_step_is_split_among_the_ranks_and_weighed() -> None:
    pieces = [ShardPiece(1, 0, 10, 17), ShardPiece(2, 0, 40, 44)]
    for world_size in (1, 2, 3, 11, 16):
        parts = [part_of(pieces, rank, world_size) for rank in range(world_size)]
        read = [place for part in parts if part.size for piece in part.own for place in range(piece.start, piece.end)]
        assert read == [*range(10, 17), *range(40, 44)]
        assert all(part.own for part in parts), "a rank without a share reads one record that does not count"
        assert sum(part.weight for part in parts) == pytest.approx(world_size)
        assert all(part.weight == 0 for part in parts if not part.size)


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_steps_have_the_same_records_after_the_model_went_back(source: CsvSource, opened: Opened, loader: Any) -> None:
    def make(link: Link) -> StepLoader:
        options = {"num_workers": 2} if loader is DataLoader else {}
        return opened(  # type: ignore[no-any-return]
            StepLoader(
                source,
                batch_size=10,
                num_epochs=2,
                shuffle=True,
                batches_per_shard=3,
                link=link,
                loader=loader,
                **options,
            )
        )

    undisturbed = [numbers(batch) for batch in make(Link())]
    assert [len(batch) for batch in undisturbed] == ([10] * 10 + [3]) * 2
    assert Counter(n for batch in undisturbed for n in batch) == Counter(dict.fromkeys(range(SIZE), 2))

    link = Link()
    steps = make(link)
    seen = []
    for step, batch in enumerate(itertools.islice(steps, 7)):
        seen.append(numbers(batch))
        steps.used(batch, step)
    state = steps.state_dict()
    steps.close()
    steps = make(Link())
    steps.load_state_dict(state)
    for step, batch in enumerate(steps, 7):
        seen.append(numbers(batch))
        steps.used(batch, step)
    assert seen == undisturbed


def test_lines_need_no_code(tmp_path: Path, opened: Opened) -> None:
    (tmp_path / "lines").write_text("one\ntwo\nthree")
    data = opened(ShardDataset(LineSource(tmp_path / "lines"), batch_size=2, link=Link()))
    assert [batch.data for batch in data] == [["one", "two"], ["three"]]
