"""
`ElasticDataset`: a map-style dataset whose records come from shards on demand.

    class Clicks(ElasticDataset):
        def read_sample(self, index):
            return parse(self.lines[index])

    dataset = Clicks("clicks", dataset_size=len(lines), batch_size=64, epochs=2, shuffle=True)
    for batch in DataLoader(dataset, batch_size=64, num_workers=4):
        train(batch)
        dataset.step()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from dlrover.trainer.sharding_client import IndexShardingClient


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
        self._client = IndexShardingClient(
            name,
            batch_size,
            epochs,
            dataset_size,
            shuffle=shuffle,
            num_minibatches_per_shard=num_minibatches_per_shard,
            storage_type="text",
            **options,
        )

    @abstractmethod
    def read_sample(self, index: int) -> Any:
        """The record with that number."""

    def __len__(self) -> int:
        return self.dataset_size * self._epochs

    def __getitem__(self, _: int) -> Any:
        """The next record that is this worker's, whichever was asked for."""
        return self.read_sample(self._client.fetch_sample_index())

    def step(self, batch_size: int | None = None, *, step: int = -1) -> None:
        """A batch has been used, by a model that is at this step from now on."""
        self._client.report_batch_done(batch_size, step=step)

    def get_epoch(self) -> int:
        return self._client.get_current_epoch()

    def state_dict(self) -> dict[str, str] | None:
        """On rank 0; None elsewhere."""
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return None
        return {"shards": self._client.get_shard_checkpoint()}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """All ranks call it: rank 0 restores, the others wait for that."""
        is_grouped = dist.is_available() and dist.is_initialized()
        if not is_grouped or dist.get_rank() == 0:
            self._client.restore_shard_from_checkpoint(state["shards"])
        if is_grouped:
            dist.barrier()
        self._client.set_max_shard_count()

    def close(self) -> None:
        self._client.close()
