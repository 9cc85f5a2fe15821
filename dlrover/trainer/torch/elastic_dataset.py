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

from dlrover.protocol.errors import DLRoverError, Rejected
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

    def load_state_dict(self, state: dict[str, str] | None) -> None:
        """
        All ranks call it, with what `state_dict` gave them: rank 0 restores, and all drop what they had taken before. Raises Rejected on all
        of them if the state cannot be used; then reading goes on as before.
        """
        is_grouped = dist.is_available() and dist.is_initialized()
        with self._client.going_back():
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
                raise Rejected(trouble, code="malformed")
        self._client.set_max_shard_count()

    def _restored(self, state: dict[str, str] | None) -> str:
        """Why it cannot be; empty: it is."""
        text = (state or {}).get("shards")
        if text is None:
            return "Rank 0 has no state of the data to load: give it what state_dict() returned there."
        try:
            self._client.restore_books(text)
        except DLRoverError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self._client.close()
