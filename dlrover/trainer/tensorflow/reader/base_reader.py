"""
`ElasticReader`: records by number, handed out in shards by the master.

    class MyReader(ElasticReader):
        def count_data(self):
            self._data_nums = ...

        def read_data_by_index_range(self, start, end):
            return lines from start to before end

A reader is made where the conf class is imported, which every process of the job does. So it opens nothing before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.sharding_client import ShardingClient

MINIBATCHES_PER_SHARD = 2


class ReadingGate(Protocol):
    """Hears when a reader waits for data; a process that must not read on is held at it."""

    def starving(self) -> None: ...

    def fed(self) -> None: ...


class ElasticReader:
    """Subclasses say how many records there are and read ranges of them."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._data_nums: int | None = None
        self._batch_size = 64
        self._num_epochs = 1
        self._enable_dynamic_sharding = True
        self._num_minibatches_per_shard = MINIBATCHES_PER_SHARD
        self.data_shard_client: ShardingClient | None = None
        """Of the dataset named after the path; None before the first record is asked for, and without dynamic sharding."""

    @property
    def path(self) -> str | None:
        return self._path

    def set_path(self, path: str) -> None:
        self._path = path

    def set_num_epochs(self, num_epochs: int) -> None:
        self._num_epochs = num_epochs

    def set_batch_size(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def set_enable_dynamic_sharding(self, value: bool) -> None:
        self._enable_dynamic_sharding = value

    def set_num_minibatches_per_shard(self, num_minibatches: int) -> None:
        self._num_minibatches_per_shard = num_minibatches

    def count_data(self) -> None:
        """Set `_data_nums` to the number of records."""
        raise NotImplementedError(
            f"{type(self).__name__} has no count_data(). Define it, and let it set self._data_nums."
        )

    def read_data_by_index_range(self, start_index: int, end_index: int) -> Iterable[Any]:
        raise NotImplementedError(
            f"{type(self).__name__} has no read_data_by_index_range(start_index, end_index). Define it."
        )

    def iterator(self) -> Iterator[Any]:
        """Record by record, of the shards that this process gets."""
        for batch in self.batches():
            yield from batch

    def batches(self, gate: ReadingGate | None = None) -> Iterator[list[Any]]:
        """The same in batches. A batch never has records of two shards, so the last one of a shard may be smaller."""
        for start, end in self._ranges(gate):
            batch: list[Any] = []
            for record in self.read_data_by_index_range(start, end):
                batch.append(record)
                if len(batch) == self._batch_size:
                    yield batch
                    batch = []
            if batch:
                yield batch

    def whole(self) -> Iterator[list[Any]]:
        """All records once, in batches: for evaluation, which never takes the shards of a training."""
        size = self.size
        for start in range(0, size, self._batch_size):
            yield list(self.read_data_by_index_range(start, min(start + self._batch_size, size)))

    @property
    def size(self) -> int:
        if self._data_nums is None:
            self.count_data()
        if not self._data_nums or self._data_nums < 0:
            raise ConfigError(
                f"{type(self).__name__} found {self._data_nums} records in {self._path!r}. It needs at least one."
            )
        return self._data_nums

    def build_data_shard_client(self) -> ShardingClient | None:
        """Register the dataset with the master. None without dynamic sharding."""
        if not self._enable_dynamic_sharding:
            return None
        if self.data_shard_client is None:
            self.data_shard_client = ShardingClient(
                dataset_name=self._path or type(self).__name__,
                batch_size=min(self._batch_size, self.size),
                num_epochs=self._num_epochs,
                dataset_size=self.size,
                num_minibatches_per_shard=self._num_minibatches_per_shard,
            )
        return self.data_shard_client

    def _ranges(self, gate: ReadingGate | None) -> Iterator[tuple[int, int]]:
        client = self.build_data_shard_client()
        if client is None:
            for _ in range(self._num_epochs):
                yield 0, self.size
            return
        while True:
            if gate is not None:
                gate.starving()
            shard = client.fetch_shard()
            if gate is not None:
                gate.fed()
            if shard is None:
                return
            yield shard.start, shard.end


def in_batches(reader: Any, num_epochs: int, batch_size: int) -> Iterator[list[str]]:
    """Of any object with `iterator()`."""
    for _ in range(num_epochs):
        batch: list[str] = []
        for record in reader.iterator():
            batch.append(record)
            if len(batch) == batch_size:
                yield batch
                batch = []
        if batch:
            yield batch
