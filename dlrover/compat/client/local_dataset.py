"""The shards of a dataset for a script that runs without a master: `LocalDataset` of the original."""

from __future__ import annotations

import itertools

from dlrover.compat.client.tasks import TaskBook
from dlrover.compat.names.constants import JobConstant
from dlrover.protocol.messages.data import TaskType
from dlrover.protocol.messages.job import Round
from dlrover.trainer.stand_in import StandIn


class LocalDataset:
    """The shards of one dataset for one process: (start, end) one after the other, (-1, -1) at the end."""

    _names = itertools.count()

    def __init__(
        self,
        batch_size: int,
        num_epochs: int,
        dataset_size: int,
        shuffle: bool = False,
        num_minibatches_per_shard: int = 10,
        task_type: int = TaskType.TRAINING,
    ) -> None:
        if batch_size * num_minibatches_per_shard <= 0:
            raise ValueError(
                f"batch_size {batch_size} x num_minibatches_per_shard {num_minibatches_per_shard} must be at least 1"
            )
        self._tasks = TaskBook(StandIn(), Round(0), JobConstant.MASTER_CLIENT_DEFAULT_TIMEOUT)
        self._name = f"local-{next(self._names)}"
        self._tasks.register(
            self._name,
            batch_size=batch_size,
            num_epochs=num_epochs,
            dataset_size=dataset_size,
            shuffle=shuffle,
            num_minibatches_per_shard=num_minibatches_per_shard,
            task_type=task_type,
            storage_type="",
        )

    def get_task(self) -> tuple[int, int]:
        """A shard that is taken counts as read: one process has no other process to give it back to."""
        task = self._tasks.take(self._name)
        if task.task_id >= 0:
            self._tasks.finish(self._name, task.task_id)
        return task.shard.start, task.shard.end

    def get_current_epoch(self) -> int:
        """How many epochs have begun."""
        return self._tasks.num_epochs_begun(self._name)

    def reset(self) -> None:
        self._tasks.reset(self._name)
