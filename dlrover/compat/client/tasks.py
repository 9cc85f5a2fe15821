"""
Shards one by one, as the original's master client hands them out: a task, its result, the next task.

`ShardingClient` is the better way: it reads ahead and reports in batches. A task that was reported as done is done for good, whatever
model contains it.
"""

from __future__ import annotations

import json
import logging
import threading

from dlrover.compat.client import comm
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.data import (
    AskDataCheckpoint,
    AskDataset,
    Consumption,
    DataCheckpoint,
    DatasetSpec,
    DatasetState,
    ExchangeShards,
    LeasedShard,
    RegisterDataset,
    RestoreDataset,
    ShardError,
    ShardsGiven,
    Supply,
    TaskType,
)
from dlrover.protocol.messages.job import Round
from dlrover.trainer.agent_link import Link
from dlrover.trainer.data import data_steps
from dlrover.trainer.sharding_client import MINIBATCHES_PER_SHARD, beginning_of, shard_of, storage_named

log = logging.getLogger(__name__)


class TaskBook:
    """The tasks that this process holds, of all datasets. For several threads."""

    def __init__(self, link: Link, round_: Round, timeout: float) -> None:
        self._link, self._round, self._timeout = link, round_, timeout
        self._lock = threading.Lock()
        """Guards what is held."""
        self._held: dict[str, dict[int, LeasedShard]] = {}
        self._specs: dict[str, DatasetSpec] = {}

    def register(
        self,
        name: str,
        *,
        batch_size: int,
        num_epochs: int,
        dataset_size: int,
        shuffle: bool,
        num_minibatches_per_shard: int,
        task_type: int,
        storage_type: str,
    ) -> DatasetState:
        """Raises ConfigError or Rejected for what cannot be cut, and Rejected if the dataset is known with another cut."""
        spec = DatasetSpec(
            name=name,
            size=dataset_size,
            shard_size=batch_size * (num_minibatches_per_shard or MINIBATCHES_PER_SHARD),
            num_epochs=num_epochs,
            batch_size=batch_size,
            shuffle=shuffle,
            storage=storage_named(storage_type),
            task_type=TaskType(task_type),
        )
        state = self._told(RegisterDataset(dataset=name, spec=spec, round=self._round))
        self._specs[name] = state.spec
        return state

    def take(self, name: str) -> comm.Task:
        """
        The next task; of type WAIT: others hold the rest; without records and with id -1: the data have ended. Raises Rejected or
        Unavailable.
        """
        if name not in self._specs:  # another process has registered it
            self._specs[name] = self.state(name).spec
        spec = self._specs[name]
        given = self._exchange(name, want=1)
        if not given.shards:
            kind = TaskType.WAIT if given.supply is Supply.WAIT else TaskType.NONE
            return comm.Task(task_id=-1, shard=comm.Shard(start=-1, end=-1), type=kind)
        lease = given.shards[0]
        with self._lock:
            self._held.setdefault(name, {})[lease.id] = lease
        shard = shard_of(spec, lease)
        records = comm.Shard(shard.name, shard.start, shard.end, list(shard.indices))
        return comm.Task(task_id=lease.id, shard=records, type=spec.task_type)

    def finish(self, name: str, task_id: int, error: str = "") -> comm.Response:
        with self._lock:
            lease = self._held.get(name, {}).pop(task_id, None)
        if lease is None:
            reason = f"Dataset {name!r}: this process does not hold task {task_id}, so the report has no effect."
            log.warning("%s", reason)
            return comm.Response(False, reason)
        try:
            if error:
                self._exchange(name, failed=(ShardError(task_id, error),))
            else:
                self._exchange(name, consumed=(Consumption(task_id, lease.end - lease.start),))
        except (Rejected, Unavailable) as refusal:
            log.warning("The result of task %d of dataset %r has no effect: %s", task_id, name, refusal)
            return comm.Response(False, str(refusal))
        return comm.Response(not error, error)

    def state(self, name: str) -> DatasetState:
        reply = self._link.ask(AskDataset(dataset=name), timeout=self._timeout)
        assert isinstance(reply, DatasetState), reply
        return reply

    def num_epochs_begun(self, name: str) -> int:
        state = self.state(name)
        is_untouched = not state.epoch and not state.num_doing and not state.num_consumed
        return 0 if is_untouched else state.epoch + 1

    def num_shards_left(self, name: str) -> int:
        """Of all epochs; what is being read counts."""
        state = self.state(name)
        left = -(-(state.num_todo + state.num_doing) // state.spec.shard_size)
        return left + state.num_shards * max(0, state.spec.num_epochs - state.epoch - 1)

    def checkpoint(self, name: str) -> str:
        reply = self._link.ask(AskDataCheckpoint(dataset=name, round=self._round), timeout=self._timeout)
        assert isinstance(reply, DataCheckpoint), reply
        return reply.content

    def restore(self, content: str) -> None:
        """What this process holds belongs to the past. Raises Rejected if the text cannot be used."""
        try:
            name = str(json.loads(content)["dataset_name"])
        except (ValueError, KeyError, TypeError) as error:
            raise Rejected(
                "A dataset checkpoint must be a JSON object with `dataset_name`.", code=ErrorCode.MALFORMED
            ) from error
        self._told(RestoreDataset(dataset=name, content=content, round=self._round))
        with self._lock:
            self._held.pop(name, None)

    def reset(self, name: str) -> None:
        self.restore(beginning_of(name))

    def _exchange(
        self,
        name: str,
        *,
        consumed: tuple[Consumption, ...] = (),
        failed: tuple[ShardError, ...] = (),
        want: int = 0,
    ) -> ShardsGiven:
        message = ExchangeShards(
            dataset=name,
            round=self._round,
            consumed=consumed,
            failed=failed,
            want=want,
            has_model=data_steps.model_loaded.is_set(),
        )
        reply = self._link.ask(message, timeout=self._timeout)
        assert isinstance(reply, ShardsGiven), reply
        return reply

    def _told(self, command: RegisterDataset | RestoreDataset) -> DatasetState:
        reply = self._link.ask(command, timeout=self._timeout)
        assert isinstance(reply, DatasetState), reply
        return reply
