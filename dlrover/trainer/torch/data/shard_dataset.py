"""
`ShardDataset`: an `IterableDataset` over the shards that this worker of the job gets.

    data = ShardDataset(CsvSource("clicks.csv"), batch_size=64, num_epochs=2, shuffle=True)
    for batch in DataLoader(data, batch_size=None, num_workers=2):
        loss_of(model, batch.data).backward()
        optimizer.step()
        step += 1
        data.used(batch, step)

It makes the batches itself, hence `batch_size=None` for the DataLoader (or torchdata's StatefulDataLoader). Shards are taken and reported by the
process that trains; worker processes ask it for one at a time and only read records. One pass goes through all epochs.

Every worker of the job reads at its own pace, so they do not take equally many batches. For workers that step together there is `StepLoader`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.data import LeasedShard, TaskType
from dlrover.trainer.agent_link import Link
from dlrover.trainer.data.shard_reader import ShardReader, SourceRecords, batches_of, check_same_data, spec_of
from dlrover.trainer.data_sources.source import Source
from dlrover.trainer.older_names import older_names
from dlrover.trainer.torch.data.batch import Batch, Collate, make_batch
from dlrover.trainer.torch.data.shard_service import ShardClient, ShardService

_LOOK = 0.2
"""Seconds that half a batch waits for the rest."""
VERSION = 1


class ShardDataset(IterableDataset[Batch]):  # type: ignore[misc]  # torch is not followed
    def __init__(
        self,
        source: Source,
        *,
        name: str = "",
        batch_size: int,
        num_epochs: int = 1,
        shuffle: bool | str = False,
        seed: int = 0,
        batches_per_shard: int = 0,
        task_type: TaskType = TaskType.TRAINING,
        must_finish: bool | None = None,
        collate_fn: Collate | None = None,
        ahead: int = 0,
        link: Link | None = None,
    ) -> None:
        """
        `name`: of the dataset in the job; by default the source's. `num_epochs`: 0: endless. `shuffle`: "records", "shards", or True: what suits the
        source. `must_finish`: whether a job that leaves records unread has failed; None: if they are for training. `collate_fn`: as of a
        DataLoader, called with the records of a batch.
        """
        spec = spec_of(
            source,
            name=name,
            batch_size=batch_size,
            num_epochs=num_epochs,
            shuffle=shuffle,
            seed=seed,
            batches_per_shard=batches_per_shard,
            task_type=task_type,
            is_required=must_finish,
        )
        self._records = SourceRecords(source, spec)
        self._collate = collate_fn
        self._client: tuple[int, ShardClient] | None = None
        self._owner_pid = os.getpid()
        self._reader = ShardReader(source, spec, ahead=ahead, link=link)
        self._reader.start()
        self._service = ShardService(self._reader)
        self._address = self._service.address

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is None:
            self._reader.give_back()  # what an earlier pass had and did not use
            shards = self._shards_here()
        else:
            client = self._connected()
            client.begin()
            shards = _shards_from(client)
        for pieces in batches_of(shards, self._records.spec.batch_size):
            yield make_batch(self._records.read(pieces), pieces, self._collate)

    def used(self, batch: Batch, step: int) -> None:
        """The model of this step contains the batch. To be said in the order in which batches came, before the step is saved."""
        self._reader.used(batch.pieces, step)

    def stop_early(self, reason: str = "training stopped early") -> None:
        """The rest is left unread on purpose: the job completes without it."""
        self._reader.stop_early(reason)

    def state_dict(self) -> dict[str, Any]:
        """
        What is unread, for another job; the running one keeps its own books. Only rank 0 has it. A worker process, which a
        StatefulDataLoader asks as well, has only the name: the books are not there.
        """
        spec = self._records.spec
        text = None
        is_first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
        if get_worker_info() is None and is_first:
            text = self._reader.checkpoint()
        return {"version": VERSION, "name": spec.name, "fingerprint": spec.fingerprint, "shards": text}

    @older_names(state="state_dict")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Go on there if this job has not used anything yet; otherwise its own books are right, which go back with the model.

        All ranks call it: the first restores, the others wait for that. Raises SourceChanged if the data are others.
        """
        check_same_data(state_dict, self._records.spec)
        if get_worker_info() is not None:
            if not self._connected().is_begun():
                raise ConfigError(
                    "The state of a loader with worker processes does not tell which records are unread. Save "
                    "dataset.state_dict() as well, and call dataset.load_state_dict() before you load the "
                    "loader's state."
                )
            return
        is_grouped = dist.is_available() and dist.is_initialized()
        if state_dict["shards"] is not None and not (is_grouped and dist.get_rank()):
            found = self._reader.state()
            if not found.num_consumed:
                self._reader.restore(state_dict["shards"])
            self._service.is_restored = True
        if is_grouped:
            dist.barrier()

    def close(self) -> None:
        """Give back what was not used. The end of the process does it, too, a little later."""
        if os.getpid() == self._owner_pid:
            self._service.close()
            self._reader.close()

    def _shards_here(self) -> Iterator[LeasedShard | None]:
        is_idle = True
        while True:
            try:
                shard = self._reader.take(None if is_idle else _LOOK)
            except TimeoutError:
                is_idle = True
                yield None
                continue
            if shard is None:
                return
            is_idle = False
            yield shard

    def _connected(self) -> ShardClient:
        if self._client is None or self._client[0] != os.getpid():
            self._client = os.getpid(), ShardClient(self._address)
        return self._client[1]

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned worker process."""
        return {**self.__dict__, "_reader": None, "_service": None, "_client": None}


def _shards_from(client: ShardClient) -> Iterator[LeasedShard | None]:
    is_idle = True
    while True:
        shard, is_end = client.take(is_patient=is_idle)
        if is_end:
            return
        is_idle = shard is None
        yield shard
