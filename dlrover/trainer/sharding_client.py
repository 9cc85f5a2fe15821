"""
`ShardingClient` and `IndexShardingClient`: dynamic data sharding as scripts of the original DLRover use it.

    client = ShardingClient("clicks", batch_size=64, num_epochs=2, dataset_size=1_000_000, shuffle=True)
    while (shard := client.fetch_shard()) is not None:
        for batch in read(shard.start, shard.end):
            train(batch)
            client.report_batch_done(len(batch))

A script that names the step of its model with each report (`report_batch_done(n, step=step)`) and restores its model by Flash Checkpoint reads every
record of an epoch exactly once, whatever crashes in between. Without steps a report is final: then a record is read at
least once by some model.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from msgspec import Struct

from dlrover.agreed.permutation import Permutation
from dlrover.host.edges import attempt
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.data import NO_STEP, DatasetSpec, StorageKind, TaskType
from dlrover.protocol.messages.data import LeasedShard as Lease
from dlrover.trainer.agent_link import Link
from dlrover.trainer.data.shard_feed import ShardFeed

log = logging.getLogger("dlrover.trainer.data")

_STORAGES = {
    "": StorageKind.TABLE,
    "table": StorageKind.TABLE,
    "maxcompute_table": StorageKind.TABLE,
    "text": StorageKind.TEXT,
    "stream": StorageKind.STREAM,
    "streaming": StorageKind.STREAM,
    "sls": StorageKind.STREAM,
    "kafka": StorageKind.STREAM,
}

MINIBATCHES_PER_SHARD = 100
"""Where a script gives 0."""
_LOOK = 0.5
"""Seconds after which a thread that waits for others looks whether it shall stop."""


class Shard(Struct, frozen=True):
    """Records that are this worker's to read."""

    name: str
    """Of the dataset; of a stream: the partition."""
    start: int
    end: int
    indices: tuple[int, ...] = ()
    """The records one by one, where they are shuffled; empty: those from `start` to before `end`."""

    @property
    def record_indices(self) -> Sequence[int]:
        return self.indices or range(self.start, self.end)


class Task(Struct, frozen=True):
    task_id: int
    task_type: TaskType
    shard: Shard
    epoch: int = 0


def storage_named(name: str) -> StorageKind:
    if name not in _STORAGES:
        raise ConfigError(
            f"storage_type {name!r} is unknown. Give one of {', '.join(repr(known) for known in _STORAGES)}."
        )
    return _STORAGES[name]


def shard_of(spec: DatasetSpec, lease: Lease) -> Shard:
    """The records behind the places that the master has given."""
    indices = lease.indices
    if not indices and spec.shuffle and spec.storage is StorageKind.TEXT:
        order = Permutation(spec.size, spec.seed, lease.epoch)
        indices = tuple(order.at(place) for place in range(lease.start, lease.end))
    return Shard(lease.partition or spec.name, lease.start, lease.end, indices)


def beginning_of(dataset_name: str) -> str:
    """The dataset checkpoint before the first record of the first epoch."""
    return json.dumps({"dataset_name": dataset_name, "todo": [], "doing": [], "epoch": 0, "splitter": None})


class ShardingClient:
    """One per dataset and process. Registers the dataset at once; the first registration of a name counts, another cut is refused."""

    def __init__(
        self,
        dataset_name: str,
        batch_size: int,
        num_epochs: int,
        dataset_size: int,
        shuffle: bool = False,
        task_type: int = TaskType.TRAINING,
        num_minibatches_per_shard: int = 10,
        storage_type: str = "",
        *,
        seed: int = 0,
        partitions: Mapping[str, int] | None = None,
        ahead: int = 0,
        must_finish: bool | None = None,
        skip_bad_data: bool = False,
        link: Link | None = None,
    ) -> None:
        """
        `must_finish`: whether a job that leaves records unread has failed; None: if they are for training. `skip_bad_data`: the job may
        complete although some records could not be read.
        """
        self._batch_size = batch_size
        self._spec = DatasetSpec(
            name=dataset_name,
            size=dataset_size,
            shard_size=batch_size * (num_minibatches_per_shard or MINIBATCHES_PER_SHARD),
            num_epochs=num_epochs,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            storage=storage_named(storage_type),
            task_type=TaskType(task_type),
            partitions=dict(partitions or {}),
            is_required=must_finish,
            is_bad_data_skipped=skip_bad_data,
        )
        self._feed = ShardFeed(self._spec, link=link, ahead=ahead)
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Lease, Task]] = {}
        """In the order of fetching."""
        self._left: dict[int, int] = {}
        """Records of pending tasks that are not reported."""
        self._num_batches = 0
        self._num_fetched = 0
        self._has_limit, self._max_shards = False, 0

    @property
    def dataset_name(self) -> str:
        return self._spec.name

    def fetch_shard(self, timeout: float | None = None) -> Shard | None:
        """
        The next shard, waiting for it if need be; None at the end of the data. Raises TimeoutError: ranks that step together must
        not wait for each other here and there.
        """
        task = self.get_task(timeout)
        return None if task is None else task.shard

    def get_task(self, timeout: float | None = None) -> Task | None:
        with self._lock:
            if self._has_limit and self._num_fetched >= self._max_shards:
                self._feed.leave_rest("every rank takes equally many shards")
                return None
        lease = self._feed.take(timeout)
        if lease is None:
            return None
        task = Task(lease.id, self._spec.task_type, shard_of(self._spec, lease), lease.epoch)
        with self._lock:
            self._num_fetched += 1
            self._pending[lease.id] = (lease, task)
            self._left[lease.id] = lease.end - lease.start
        return task

    def report_batch_done(
        self, batch_size: int | None = None, err_msg: str = "", task_ids: Sequence[int] = (), *, step: int = NO_STEP
    ) -> bool:
        """
        So many more records (by default a batch) are done, of the shards in the order in which they were fetched, or of those
        given. Whether a shard was completed by it.

        `step`: of the model that contains them. With `err_msg` the shards are given back as unreadable.
        """
        with self._lock:
            ids = [id_ for id_ in task_ids if id_ in self._pending] if task_ids else list(self._pending)
            if not ids:
                return False
            self._num_batches += 1
            if err_msg:
                self._fail(ids[:1] if not task_ids else ids, err_msg)
                return True
            return self._consume(ids, self._batch_size if batch_size is None else batch_size, step)

    def report_all_task_error(self, err_msg: str) -> None:
        """All shards that this worker holds go back: their data cannot be read."""
        with self._lock:
            self._fail(list(reversed(self._pending)), err_msg)

    def get_current_task(self) -> Task | None:
        with self._lock:
            return next((task for _, task in self._pending.values()), None)

    def get_minibatch_count_per_epoch(self) -> int:
        return self._spec.size // self._batch_size

    def get_total_sample_num(self) -> int:
        return self._spec.size * self._spec.num_epochs

    def get_current_epoch(self) -> int:
        """0-based; of the shards that are given out now."""
        return self._feed.books.state().epoch

    def get_shard_checkpoint(self, step: int = NO_STEP) -> str:
        """What a model of this step has still to read, as text; by default of the newest, what is being read counted as unread."""
        self._feed.flush()
        return self._feed.books.checkpoint(step)

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """For a change of the books: what was fetched before it belongs to the past. If it fails all stays as it was."""
        with self._feed.going_back():
            yield
        with self._lock:
            self._pending.clear()
            self._left.clear()
            self._num_fetched = 0

    def start(self) -> None:
        """Before processes are forked that will read: no thread may start meanwhile. Nothing is fetched yet."""
        self._feed.start()

    def restore_books(self, checkpoint: str) -> None:
        """Within `going_back`. Raises Rejected if the text cannot be used."""
        self._feed.books.restore(checkpoint)

    def restore_shard_from_checkpoint(self, checkpoint: str) -> bool:
        """
        Go back to it. What was fetched before belongs to the past. False, with a warning, if the text cannot be used: then reading goes on as
        before.
        """
        try:
            with self.going_back():
                self.restore_books(checkpoint)
        except Rejected as error:
            log.warning("%s", error)
            return False
        return True

    def set_max_shard_count(self) -> None:
        """
        Let every worker of a synchronous job take the same number of shards: what is left, divided by WORLD_SIZE.

        To be called when the model is loaded, by all before any of them reports: what others hold counts as left. Parts of shards that a crash or a
        slow worker left count as shards.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "0"))
        if world_size <= 0:
            return
        state = self._feed.books.state()
        if self._spec.storage is StorageKind.STREAM:
            num_left = state.num_shards * max(1, self._spec.num_epochs)
        else:
            # At least so many: no part is greater than a shard.
            num_left = -(-(state.num_todo + state.num_doing) // self._spec.shard_size)
            num_left += state.num_shards * max(0, self._spec.num_epochs - state.epoch - 1)
        with self._lock:
            # Of a stream nobody may know how many there are. Otherwise nothing for each is a limit, too.
            self._has_limit = self._spec.storage is not StorageKind.STREAM or num_left >= world_size
            self._max_shards = self._num_fetched - len(self._pending) + num_left // world_size

    def reset_dataset(self) -> None:
        """Begin anew, from the first record of the first epoch. Raises Rejected for a stream, which goes on as before."""
        with self.going_back():
            self.restore_books(beginning_of(self._spec.name))

    def stop_early(self, reason: str = "training stopped early") -> None:
        """The rest of the data is left unread on purpose: the job completes without it."""
        self._feed.waive(reason)
        self._feed.flush()

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until the master knows all that was reported; whether it does."""
        return self._feed.flush(timeout)

    def close(self) -> None:
        """Give back what was not read. At the end of the process the node's end does the same, later."""
        self._feed.close()

    def __enter__(self) -> ShardingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _consume(self, ids: Sequence[int], count: int, step: int) -> bool:
        is_any_complete = False
        for id_ in ids:
            part = min(count, self._left[id_])
            if not part:
                break
            lease, _task = self._pending[id_]
            self._feed.consumed(lease, part, step)
            count -= part
            self._left[id_] -= part
            if not self._left[id_]:
                del self._left[id_], self._pending[id_]
                is_any_complete = True
        return is_any_complete

    def _fail(self, ids: Sequence[int], message: str) -> None:
        for id_ in ids:
            lease, _task = self._pending.pop(id_)
            del self._left[id_]
            self._feed.failed(lease, message)


class IndexShardingClient(ShardingClient):
    """
    Hands out single records to several processes: those of a DataLoader, forked or spawned after this was made.

    A thread of the process that made it fills a queue; `report_batch_done` is called there, too. It takes no shard before the first record is
    wanted: until then the ranks may still agree on where the data go on.

    Reports count records in the order of the queue. Who reads in several processes and makes batches of what each got reports others than those
    in the batch, unless all that is queued is used before anything is saved: `ElasticDataset` deals out records by batch instead.
    """

    def __init__(self, *args: Any, num_workers: int = 1, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_workers = max(1, num_workers)
        self._context = multiprocessing.get_context()
        self._owner_pid = os.getpid()
        self._start_filling()

    def fetch_sample_index(self) -> int:
        """The number of the next record. Raises StopIteration at the end of the data, in every process that asks."""
        self._is_wanted.set()
        index = self._indices.get()
        if isinstance(index, str):
            self._indices.put(index)  # for the others
            raise DataEnd(index) if index else StopIteration
        return int(index)

    def clear_shard_queue(self) -> None:
        """Forget what is queued here; it stays ours until it is reported."""
        while True:
            try:
                self._indices.get_nowait()
            except queue.Empty:
                return

    @contextmanager
    def going_back(self) -> Iterator[None]:
        self._pause_filling()
        try:
            with super().going_back():
                yield
        except BaseException:
            self._fill_on()
            raise
        self._indices.cancel_join_thread()
        self._indices.close()
        self._start_filling()

    def close(self) -> None:
        if os.getpid() == self._owner_pid:
            self._pause_filling()
            self._indices.cancel_join_thread()
            self._indices.close()
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned process: the queue, and nothing that belongs to this one."""
        shared = {"_indices": self._indices, "_is_wanted": self._is_wanted}
        return {**shared, "_owner_pid": self._owner_pid, "_num_workers": self._num_workers}

    def _start_filling(self) -> None:
        # Bounded: shards that lie here cannot be given to others.
        self._indices: Any = self._context.Queue(maxsize=max(2 * self._spec.shard_size, 2 * self._batch_size))
        self._is_wanted: Any = self._context.Event()
        """Some process has asked for a record."""
        self._rest: Iterator[int] = iter(())
        """Of the shard that is being queued."""
        self._fill_on()

    def _fill_on(self) -> None:
        self._stopping = threading.Event()
        self._filler = threading.Thread(target=self._fill, name="dlrover-indices", daemon=True)
        self._filler.start()

    def _pause_filling(self) -> None:
        """What is queued stays there, for the case that filling goes on."""
        self._stopping.set()
        self._filler.join()

    def _fill(self) -> None:
        # Readers in other processes must hear of an error.
        end = attempt(self._fill_to_end, lambda error: f"{type(error).__name__}: {error}")
        if end is not None:
            self._put(end)

    def _fill_to_end(self) -> str | None:
        while not self._is_wanted.wait(_LOOK):
            if self._stopping.is_set():
                return None
        while self._queue_rest() and (task := self._next_task()) is not None:
            self._rest = iter(task.shard.record_indices)
        return ""

    def _queue_rest(self) -> bool:
        """False: filling shall stop."""
        for index in self._rest:
            if not self._put(index):
                self._rest = chain((index,), self._rest)
                return False
        return not self._stopping.is_set()

    def _next_task(self) -> Task | None:
        while True:
            try:
                return self.get_task(_LOOK)
            except TimeoutError:
                if self._stopping.is_set():
                    return None

    def _put(self, value: int | str) -> bool:
        while not self._stopping.is_set():
            try:
                self._indices.put(value, timeout=_LOOK)
                return True
            except queue.Full:
                continue
        return False


class DataEnd(RuntimeError):
    """The records stopped for another reason than their end; the message says which."""
