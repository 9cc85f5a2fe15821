"""
The chief of a coordinator's cluster: it reads, schedules batches on workers, reports what they have trained, saves, and parks.

Batches are settled in the order in which they were scheduled, with a bounded number under way. A save waits for all of them, so it is exact. A worker
that is lost comes back at the same address, and TensorFlow runs its batch again. Nothing else is repaired in here: for a lost server, and for workers
that come later, the chief asks the master for the next version.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dlrover.protocol.messages.cluster import (
    FRESH,
    MAX_REASON,
    NO_CUT,
    ClusterPhase,
    CutTaken,
    ModelRestored,
    ModelSaved,
    ProcessParked,
    RenewVersion,
    ServerBound,
    TakeCut,
    VersionView,
)
from dlrover.trainer import progress
from dlrover.trainer.tensorflow.conf import CONTINUE, Conf
from dlrover.trainer.tensorflow.coordinator import fitting
from dlrover.trainer.tensorflow.coordinator.program import Program
from dlrover.trainer.tensorflow.coordinator.serving import PARKED
from dlrover.trainer.tensorflow.link import ClusterLink
from dlrover.trainer.tensorflow.reader.base_reader import ElasticReader, in_batches
from dlrover.trainer.tensorflow.seen_data import BASE_NAME, SeenData, point_to, read_seen, write_seen
from dlrover.trainer.tensorflow.util.column_info import label_of
from dlrover.trainer.tensorflow.util.decoding import decode

log = logging.getLogger("dlrover.trainer.tensorflow")

AHEAD = 2
"""Batches under way for each worker: one that it trains and one that waits for it."""
_LOOK = 0.2
"""Seconds that the reader waits for a shard before it settles what is under way: the rest of an epoch may wait for just that."""
_FLUSH = 60.0
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)


def train(conf: Conf, link: ClusterLink) -> None:
    """The whole work of the chief. Raises `VersionOver`."""
    where = link.where
    link.start()
    address = f"{where.node_host}:{_free_port()}"
    link.tell(ServerBound(address=address, is_coordinator=True))
    view = link.wait_for(lambda view: bool(view.servers) and view.phase is not ClusterPhase.GATHERING)
    if view.restored_step is not None:
        renew(link, "the coordinator has started again")
    view = _wait_for_workers(link, conf.worker_join_interval)
    try:
        Coordination(conf, link, view, _strategy(view, address)).run()
    except _LOST as error:
        renew(link, f"the coordinator has lost a server: {str(error).splitlines()[0]}")


def renew(link: ClusterLink, reason: str) -> None:
    """Never returns."""
    log.info("version %d ends: %s", link.where.cluster_version, reason)
    link.tell(RenewVersion(reason=reason[:MAX_REASON]))
    link.await_end()


class Coordination:
    """One version, from its restore to the end of the data or of the version."""

    def __init__(self, conf: Conf, link: ClusterLink, view: VersionView, strategy: Any) -> None:
        self._conf, self._link = conf, link
        self._workers = dict(view.workers)
        self._began_at = time.monotonic()
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            self._program: Program = conf.build(conf)
            if self._program.model is not None:
                fitting.prepare(self._program)
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="global_step")
        self._checkpoint = tf.train.Checkpoint(global_step=self._steps, **self._program.objects)
        os.makedirs(conf.model_dir, exist_ok=True)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, conf.model_dir, max_to_keep=conf.keep_checkpoint_max, checkpoint_name=BASE_NAME
        )
        self._run_batch = _batch_function(self._program, conf, self._steps, strategy)
        self._reader = conf.train_set.reader
        self._client: Any = None
        if isinstance(self._reader, ElasticReader):
            self._reader.set_batch_size(conf.train_set.batch_size)
            self._reader.set_num_epochs(conf.train_set.epoch)
            self._client = self._reader.build_data_shard_client()
        self._under_way: deque[tuple[int, Any]] = deque()
        """Number of records of each batch, and its result to come."""
        self._step = 0
        """Of the newest batch that is settled."""
        self._result: Any = None
        """Loss or metrics of it."""
        self._has_read_all = False
        self._saved_step = -1
        """Of the newest checkpoint that this process knows."""
        self._saved_at = time.monotonic()
        self._parked_for = 0

    def run(self) -> None:
        self._restore()
        log.info(
            "chief-0 trains in version %d with %d servers and %d workers (pid %d)",
            self._link.where.cluster_version, len(self._link.view.servers), len(self._workers), os.getpid(),
        )  # fmt: skip
        if self._program.model is None:
            for batch in self._allowed_batches():
                self._train(batch)
        else:
            fitting.fit(self._program, self._allowed_batches(), self._train, self._settle_all, self._step)
        self._settle_all()
        if self._client is not None and not self._has_read_all:
            self._client.stop_early("training ended, by the last step or by a hook of the script")
        self._save()

    def _restore(self) -> None:
        newest = tf.train.latest_checkpoint(self._conf.model_dir)
        seen = None
        if newest is not None:
            self._checkpoint.restore(newest).assert_existing_objects_matched()
            seen = read_seen(newest)
        self._step = int(self._steps)
        self._saved_step = -1 if seen is None else self._step
        self._link.tell(
            ModelRestored(
                step=FRESH if newest is None else self._step,
                cut=NO_CUT if seen is None else seen.cut,
                data_state="" if seen is None else seen.data_state,
                is_data_kept=self._conf.data_on_restore == CONTINUE,
            )
        )
        if newest is None:
            self._save()  # a model that is lost before its first save would begin with other values

    def _allowed_batches(self) -> Iterator[list[Any]]:
        for batch in self._batches():
            if self._conf.max_steps is not None and self._step + len(self._under_way) >= self._conf.max_steps:
                return
            yield batch
        self._has_read_all = True

    def _train(self, batch: list[Any]) -> Any:
        """Schedule it, and settle those before it. Gives the newest result that is known."""
        scheduled = self._coordinator.schedule(self._run_batch, args=(tf.constant(batch),))
        self._under_way.append((len(batch), scheduled))
        if len(self._under_way) > AHEAD * len(self._workers):
            self._settle_one()
        self._look()
        return self._result

    def _batches(self) -> Iterator[list[Any]]:
        """A worker that waits for a shard settles meanwhile what is under way, and parks."""
        settings = self._conf.train_set
        if self._client is None:
            is_ours = isinstance(self._reader, ElasticReader)
            yield from (
                self._reader.batches() if is_ours else in_batches(self._reader, settings.epoch, settings.batch_size)
            )
            return
        while True:
            try:
                shard = self._client.fetch_shard(timeout=_LOOK)
            except TimeoutError:
                self._settle_all()
                self._look()
                continue
            if shard is None:
                return
            batch: list[Any] = []
            for record in self._reader.read_data_by_index_range(shard.start, shard.end):
                batch.append(record)
                if len(batch) == settings.batch_size:
                    yield batch
                    batch = []
            if batch:
                yield batch

    def _settle_one(self) -> None:
        """Wait for the oldest batch and report it."""
        count, result = self._under_way.popleft()
        step, self._result = self._fetch(result)
        self._step = max(self._step, int(step))
        if self._client is not None:
            self._client.report_batch_done(count, step=self._step)
        progress.report(self._step)

    def _fetch(self, result: Any) -> Any:
        """Raises one of `_LOST` if a server is lost."""
        try:
            return result.fetch()
        except _LOST as error:
            log.info("a batch has no result yet, because a server or a worker was lost: %s", str(error).splitlines()[0])
            self._coordinator.join()  # of a worker: TensorFlow has the batch run again; of a server: it raises
            return result.fetch()

    def _settle_all(self) -> Any:
        while self._under_way:
            self._settle_one()
        return self._result

    def _look(self) -> None:
        """After each batch that was scheduled: whether to save or to park."""
        view = self._link.view
        if view.phase in PARKED and view.num_parks > self._parked_for:
            self._park(view.num_parks)
        elif self._is_save_due():
            self._settle_all()
            self._save()
            self._take_in_workers()

    def _is_save_due(self) -> bool:
        conf = self._conf
        if conf.save_secs:
            return bool(time.monotonic() - self._saved_at >= conf.save_secs)
        return bool(conf.save_steps) and self._step - self._saved_step >= conf.save_steps

    def _park(self, number: int) -> None:
        self._settle_all()
        self._flush()
        self._parked_for = number
        self._link.tell(ProcessParked(step=self._step))
        view = self._link.wait_for(lambda view: view.phase is not ClusterPhase.PARKING or view.num_parks != number)
        if view.phase is ClusterPhase.SAVING and view.num_parks == number:
            self._save()
        self._link.wait_for(lambda view: view.phase not in PARKED)

    def _flush(self) -> None:
        if self._client is not None:
            self._client.flush(_FLUSH)

    def _save(self) -> None:
        """Nothing is under way: what is reported is in the checkpoint, and nothing else is."""
        began_at = time.monotonic()
        self._flush()
        taken = self._link.tell(TakeCut())
        assert isinstance(taken, CutTaken), taken
        step = int(self._steps)
        prefix = os.path.join(self._conf.model_dir, f"{BASE_NAME}-{step}")
        write_seen(prefix, SeenData(step=step, cut=taken.cut, data_state=taken.data_state))
        if step != self._saved_step:  # else the very same model is there already
            self._manager.save(checkpoint_number=step)
        point_to(prefix, step)
        self._saved_step, self._saved_at = step, time.monotonic()
        self._link.tell(ModelSaved(step=step, cut=taken.cut))
        log.info("saved step %d with cut %d in %.2f s", step, taken.cut, time.monotonic() - began_at)

    def _take_in_workers(self) -> None:
        """After a save, and not too often: others have joined, or one listens elsewhere. A coordinator cannot be told of them."""
        workers = self._link.view.workers
        strangers = [f"worker-{rank}" for rank, address in workers.items() if self._workers.get(rank) != address]
        if strangers and time.monotonic() - self._began_at >= self._conf.worker_join_interval:
            renew(self._link, f"{', '.join(strangers)} joins")


def _strategy(view: VersionView, address: str) -> Any:
    cluster = {
        "chief": [address],
        "ps": list(view.servers),
        "worker": [view.workers[rank] for rank in sorted(view.workers)],
    }
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(max_shards=len(view.servers))
    return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)


def _batch_function(program: Program, conf: Conf, steps: Any, strategy: Any) -> Any:
    columns, delimiter = list(conf.train_set.columns), conf.train_set.field_delim
    label_of(columns)
    train_step = program.train_step or fitting.step_of(program)

    def run_batch(lines: Any) -> Any:
        features, label = decode(lines, columns, delimiter)
        result = strategy.run(train_step, args=(features, label))  # optimizers want the context of a replica
        with tf.control_dependencies(tf.nest.flatten(result)):
            return steps.assign_add(1, read_value=True), result

    return tf.function(run_batch)


def _wait_for_workers(link: ClusterLink, patience: float) -> VersionView:
    try:
        return link.wait_for(lambda view: 0 < view.num_wanted_workers <= len(view.workers), patience)
    except TimeoutError:
        log.warning("Not all workers arrived within %g s. The others join with the next version.", patience)
        return link.wait_for(lambda view: bool(view.workers))


def _free_port() -> int:
    """TensorFlow binds it a moment later."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
