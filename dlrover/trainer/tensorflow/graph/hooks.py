"""
What runs around each step: reports of what was read, saves, and parking.

Parking means that a process trains no further step and keeps its session open, because closing one may block. A process parks after the step that
it is in; or where it is, if it waits for data and has used up all that it got. The thread of `Parking` sees to both, and to the save of the chief.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dlrover.protocol.messages.cluster import ClusterPhase, ParkForSave, ProcessParked
from dlrover.trainer import progress
from dlrover.trainer.tensorflow.graph.checkpoints import ModelCheckpoints
from dlrover.trainer.tensorflow.graph.input import TrainingInput
from dlrover.trainer.tensorflow.link import ClusterLink, VersionOver

log = logging.getLogger("dlrover.trainer.tensorflow")
SessionRunArgs = tf.compat.v1.train.SessionRunArgs

EXIT_FAILED = 1
_PARKED = (ClusterPhase.PARKING, ClusterPhase.SAVING)


class Parking:
    """One per process. Code that is about to go on asks `pass_gate`."""

    def __init__(self, link: ClusterLink, *, flush: Callable[[], None], save: Callable[[], None] | None = None) -> None:
        """`flush` reports all that was read; `save` writes a checkpoint, and only a chief has it."""
        self._link = link
        self._flush = flush
        self._save = save
        self._news = threading.Condition()
        """Guards all below."""
        self._is_stopped = False
        """The training thread waits at the gate."""
        self._is_starving = False
        """The reader waits for data."""
        self._parked_for = 0
        """Number of the park that the master was told of."""
        self._num_given: Callable[[], int] = lambda: 0
        self._num_used = 0
        self._step = 0
        self._thread = threading.Thread(target=self._run, name="parking", daemon=True)

    def start(self, num_given: Callable[[], int]) -> None:
        """`num_given`: batches that the reader has handed out."""
        self._num_given = num_given
        self._thread.start()

    def step_done(self, step: int) -> None:
        """In the training thread, after each step. Does not return if the process shall park."""
        with self._news:
            self._num_used += 1
            self._step = step
            self._news.notify_all()
        if self._link.view.phase in _PARKED and self._link.view.version == self._link.where.cluster_version:
            self._stop()
            self._wait_to_go_on()
            with self._news:
                self._is_stopped = False

    def no_more_steps(self) -> None:
        """In the training thread, when it has made its last one."""
        self._stop()

    def starving(self) -> None:
        """In the reader's thread, before it waits for data."""
        with self._news:
            self._is_starving = True
            self._news.notify_all()

    def fed(self) -> None:
        """In the reader's thread, when data came. Nothing may go on to the training of a process that has parked."""
        with self._news:
            self._is_starving = False
        view = self._link.view
        if view.phase in _PARKED and view.num_parks == self._parked_for:
            self._wait_to_go_on()

    def _stop(self) -> None:
        with self._news:
            self._is_stopped = True
            self._news.notify_all()

    def _wait_to_go_on(self) -> None:
        """Until the version trains again. After a change of the servers it never does: then the agent ends this process."""
        try:
            self._link.wait_for(lambda view: view.phase not in _PARKED)
        except VersionOver:
            self._link.await_end()

    def _run(self) -> None:
        try:
            while True:
                view = self._link.wait_for(lambda view: view.phase in _PARKED and view.num_parks > self._parked_for)
                if self._park(view.num_parks):
                    self._save_when_all_have_parked(view.num_parks)
        except VersionOver:
            return  # the agent ends this process
        except Exception:  # the edge of the thread: the training thread waits for its end and could tell nobody
            log.exception("This process could not save or wait for the next cluster version, so it ends.")
            os._exit(EXIT_FAILED)

    def _park(self, number: int) -> bool:
        """False: it was too late for that."""
        with self._news:
            while not self._can_park():
                self._news.wait()  # each step tells; the agent ends a process that comes too late for a change
                if not self._is_wanted(number):
                    return False
            self._parked_for = number
        self._flush()
        self._link.tell(ProcessParked(step=self._step))
        return True

    def _is_wanted(self, number: int) -> bool:
        view = self._link.view
        return view.phase in _PARKED and view.num_parks == number

    def _save_when_all_have_parked(self, number: int) -> None:
        if self._save is None:
            return
        view = self._link.wait_for(lambda view: view.phase is not ClusterPhase.PARKING or view.num_parks != number)
        if view.phase is ClusterPhase.SAVING and view.num_parks == number:
            self._save()

    def _can_park(self) -> bool:
        """A training thread that has used all batches and a reader that has no more: there is no step under way."""
        return self._is_stopped or (self._is_starving and self._num_given() == self._num_used)


class ExactSaves:
    """Asks the master to park all for a save, once for each that is due."""

    def __init__(self, link: ClusterLink) -> None:
        self._link = link
        self._asked_for = -1
        """Number of the last park when it was asked."""

    def ask(self) -> None:
        view = self._link.view
        if view.phase is ClusterPhase.TRAINING and view.num_parks != self._asked_for:
            self._asked_for = view.num_parks
            self._link.tell(ParkForSave())


class TrainingHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Of every process that trains: begins the input, reports what each step has read, parks."""

    def __init__(self, source: TrainingInput | None, parking: Parking) -> None:
        """`source`: None if the script reads by itself."""
        self._source = source
        self._parking = parking
        self._step: Any = None

    def begin(self) -> None:
        self._step = tf.compat.v1.train.get_or_create_global_step()

    def after_create_session(self, session: Any, coord: Any) -> None:
        source = self._source
        if source is None:
            self._parking.start(lambda: 0)
        else:
            session.run(source.initializer)
            self._parking.start(lambda: source.num_given)

    def before_run(self, run_context: Any) -> Any:
        return SessionRunArgs([self._step] if self._source is None else [self._step, self._source.num_records])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        step, *num_records = (int(value) for value in run_values.results)
        client = None if self._source is None else self._source.client
        if client is not None:
            client.report_batch_done(*num_records, step=step)
        progress.report(step)
        self._parking.step_done(step)


class SavingHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Of the chief: tells what it restored, and saves at the beginning, by steps or seconds, and at the end."""

    def __init__(
        self,
        checkpoints: ModelCheckpoints,
        *,
        newest: str | None,
        is_attaching: bool,
        is_data_kept: bool,
        flush: Callable[[], None],
        wait_for_workers: Callable[[], None],
        save_steps: int | None,
        save_secs: float | None,
        park_for_save: Callable[[], None] | None = None,
    ) -> None:
        """
        `newest`: the checkpoint that TensorFlow restores. `is_attaching`: the variables live already, nothing is restored. `park_for_save`: asks
        for an exact save, which the parking thread makes.
        """
        self._checkpoints = checkpoints
        self._newest = newest
        self._is_attaching = is_attaching
        self._is_data_kept = is_data_kept
        self._flush = flush
        self._wait_for_workers = wait_for_workers
        self._save_steps, self._save_secs = save_steps, save_secs
        self._park_for_save = park_for_save
        self._saved_step, self._saved_at = 0, time.monotonic()
        self.scaffold: Any = None
        """Of the model: it has the saver, the user's or TensorFlow's own."""
        self._session: Any = None
        self._step: Any = None
        self._lock = threading.Lock()
        """A save of the training thread and one of the parking thread must not meet."""

    def begin(self) -> None:
        self._step = tf.compat.v1.train.get_or_create_global_step()

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._session = session
        if not self._is_attaching:
            self._checkpoints.restored(session, self._step, self._newest, is_data_kept=self._is_data_kept)
            if self._newest is None:
                self.save()  # a model that is lost before its first save would begin with other values
        self._saved_step, self._saved_at = int(session.run(self._step)), time.monotonic()

    def before_run(self, run_context: Any) -> Any:
        return SessionRunArgs(self._step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        step = int(run_values.results)
        is_due = self._save_steps is not None and step - self._saved_step >= self._save_steps
        is_due = is_due or (self._save_secs is not None and time.monotonic() - self._saved_at >= self._save_secs)
        if is_due and self._park_for_save is not None:
            self._park_for_save()
        elif is_due:
            self.save()

    def end(self, session: Any) -> None:
        """The last checkpoint has the steps of all: a worker may still train when no shard is left for the chief."""
        self._session = session
        self._wait_for_workers()
        self.save()

    def save(self) -> None:
        with self._lock:
            self._flush()
            self._saved_step = self._checkpoints.save(self._session, self._saver(), self._step)
            self._saved_at = time.monotonic()

    def _saver(self) -> Any:
        assert self.scaffold is not None, "given with the model"
        return self.scaffold.saver
