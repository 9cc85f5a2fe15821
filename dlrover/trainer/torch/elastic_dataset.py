"""
`ElasticDataset`: a map-style dataset whose records come from shards on demand.

    class Clicks(ElasticDataset):
        def read_sample(self, index):
            return parse(self.lines[index])

    dataset = Clicks("clicks", dataset_size=len(lines), batch_size=64, epochs=2, shuffle=True)
    for batch in DataLoader(dataset, batch_size=64, num_workers=4):
        train(batch)
        dataset.step()

Records are dealt out in the order of the DataLoader's batches, so `step()` reports those of the oldest batch that was not reported, with any number
of worker processes. It has no sampler and no shuffle of its own: the dataset has. Where other ranks hold what is left, and at the end of the data,
a batch is shorter.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, get_worker_info

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, DLRoverError, Rejected
from dlrover.trainer.sharding_client import ShardingClient
from dlrover.trainer.torch.data.ordered_records import OrderedRecords, RecordClient, RecordService


class ElasticDataset(Dataset[Any], ABC):  # type: ignore[misc]  # torch is not followed
    def __init__(
        self,
        name: str,
        dataset_size: int,
        batch_size: int,
        epochs: int,
        shuffle: bool = False,
        num_minibatches_per_shard: int = 2,
        **options: Any,
    ) -> None:
        self.dataset_size, self.batch_size, self._epochs = dataset_size, batch_size, epochs
        options.pop("num_workers", None)  # the DataLoader says how many it has
        self._client = ShardingClient(
            name,
            batch_size,
            epochs,
            dataset_size,
            shuffle=shuffle,
            num_minibatches_per_shard=num_minibatches_per_shard,
            storage_type="text",
            **options,
        )
        self._client.start()
        self._owner_pid = os.getpid()
        self._line: RecordClient | None = None
        """In a worker process."""
        self._records = OrderedRecords(self._client, batch_size)
        self._service = RecordService(self._records)
        self._address = self._service.address

    @abstractmethod
    def read_sample(self, index: int) -> Any:
        """The record with that number."""

    def __len__(self) -> int:
        return self.dataset_size * self._epochs

    def __getitem__(self, position: int) -> Any:
        """The next record that is this worker's, whichever was asked for."""
        return self.read_sample(self._next([position], is_batch=False)[0])

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """A batch of them; a short one at the end of the data. Raises StopIteration after it."""
        if type(self).__getitem__ is not ElasticDataset.__getitem__:
            return self._one_by_one(positions)
        return [self.read_sample(index) for index in self._next(positions, is_batch=True)]

    def step(self, batch_size: int | None = None, *, step: int = -1) -> None:
        """
        A batch has been used, by a model that is at this step from now on: the oldest that was not reported, or that many records. To be said in
        the order of the batches.
        """
        self._records.used(batch_size, step)

    def get_epoch(self) -> int:
        return self._client.get_current_epoch()

    def state_dict(self) -> dict[str, str] | None:
        """On rank 0; None elsewhere."""
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return None
        return {"shards": self._client.get_shard_checkpoint()}

    def load_state_dict(self, state: dict[str, str] | None) -> None:
        """
        All ranks call it, with what `state_dict` gave them: rank 0 restores, and all drop what they had taken before. Raises Rejected on all
        of them if the state cannot be used; then reading goes on as before.
        """
        is_grouped = dist.is_available() and dist.is_initialized()
        with self._records.going_back():
            if is_grouped:
                dist.barrier()  # nobody takes anything of the old books after this, or of the new ones before all have dropped the old
            trouble = ""
            if not is_grouped or dist.get_rank() == 0:
                trouble = self._restored(state)
            if is_grouped:
                told = [trouble]
                dist.broadcast_object_list(told, src=0)
                trouble = told[0]
            if trouble:
                raise Rejected(trouble, code=ErrorCode.MALFORMED)
            self._service.end_pass()
        self._client.set_max_shard_count()

    def _restored(self, state: dict[str, str] | None) -> str:
        """Why it cannot be; empty: it is."""
        text = (state or {}).get("shards")
        if text is None:
            return (
                "Rank 0 got no data state to load. On rank 0, give load_state_dict() the value that state_dict() "
                "returned there."
            )
        try:
            self._client.restore_books(text)
        except DLRoverError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Give back what was not used. The end of the process does it, too, a little later."""
        if os.getpid() == self._owner_pid:
            self._service.close()
            self._client.close()

    def _next(self, positions: Sequence[int], *, is_batch: bool) -> Sequence[int]:
        if os.getpid() == self._owner_pid:
            records: Sequence[int] = self._records.take(len(positions), is_batch=is_batch)
        else:
            records = self._connected().take(positions, is_batch=is_batch)
        if not records:
            raise StopIteration
        return records

    def _one_by_one(self, positions: Sequence[int]) -> list[Any]:
        """For a subclass that has its own idea of a record."""
        found = []
        for position in positions:
            try:
                found.append(self[position])
            except StopIteration:
                break
        if not found:
            raise StopIteration
        return found

    def _connected(self) -> RecordClient:
        if self._line is None or self._line.pid != os.getpid():
            info = get_worker_info()
            if info is None:
                raise ConfigError(
                    "This process cannot read the ElasticDataset. Only the process that made it and the workers of "
                    "its DataLoader can."
                )
            self._line = RecordClient(self._address, info.seed - info.id, info.num_workers)
        return self._line

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned worker process."""
        return {**self.__dict__, "_client": None, "_records": None, "_service": None, "_line": None}
