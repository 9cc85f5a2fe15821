"""
`SpeedMonitor` (later `ThroughputMonitor`, `PerfMonitor`) of the original, for scripts and tests that use it by itself.

The master of this project measures runs (`dlrover.master.statistics`) and does not use it. Workers here are told apart by type and id. A run of equal worker
numbers must be contiguous, and `reset` keeps the running workers: the original gets both wrong.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from dlrover.compat.launch.global_context import DefaultValues


class GlobalStepRecord(NamedTuple):
    global_step: int
    timestamp: float
    worker_num: int


class SpeedMonitor:
    def __init__(self) -> None:
        self._records: deque[GlobalStepRecord] = deque(maxlen=DefaultValues.TRAIN_SPEED_RECORD_NUM)
        self._workers: dict[tuple[str, int], None] = {}
        self._target_worker_num = 0
        self._created_at = time.time()
        self._training_began_at: float | None = None
        self._num_samples = 0
        self._evaluation_began_at: dict[int, float] = {}
        self._evaluation_seconds: dict[int, float] = {}

    # Steps.

    def collect_global_step(self, global_step: int, timestamp: float) -> None:
        """A record is kept only if the step has grown."""
        if self._training_began_at is None:
            self._training_began_at = time.time()
        if not self._records or global_step > self._records[-1].global_step:
            self._records.append(GlobalStepRecord(global_step, timestamp, len(self._workers)))
        self._num_samples += 1

    @property
    def running_speed(self) -> float:
        """Steps per second between the newest two records."""
        if len(self._records) < 2:
            return 0.0
        before, last = self._records[-2], self._records[-1]
        seconds = last.timestamp - before.timestamp
        return (last.global_step - before.global_step) / seconds if seconds > 0 else 0.0

    @property
    def completed_global_step(self) -> int:
        return self._records[-1].global_step if self._records else 0

    @property
    def init_training_time(self) -> int:
        """Seconds from the creation of this object to the first step; 0: there was none."""
        return 0 if self._training_began_at is None else round(self._training_began_at - self._created_at)

    def get_sample_count(self) -> int:
        return self._num_samples

    # Workers.

    @property
    def running_workers(self) -> set[tuple[str, int]]:
        return set(self._workers)

    def add_running_worker(self, type: str, worker_id: int) -> None:  # noqa: A002 (the original's name)
        self._workers[type, worker_id] = None

    def remove_running_worker(self, type: str, worker_id: int) -> None:  # noqa: A002 (the original's name)
        self._workers.pop((type, worker_id), None)

    def set_target_worker_num(self, worker_num: int) -> None:
        self._target_worker_num = worker_num

    def reduce_target_worker_num(self, workers: list[tuple[str, int]]) -> None:
        """By those that run; never to 0."""
        num = sum(tuple(worker) in self._workers for worker in workers)
        if self._target_worker_num > num:
            self._target_worker_num -= num

    def all_worker_joined(self) -> bool:
        return len(self._workers) == self._target_worker_num

    def worker_adjustment_finished(self) -> bool:
        """The wanted number of workers has trained for a minute without a break."""
        if not self._records or self._records[-1].worker_num != self._target_worker_num:
            return False
        last = self._records[-1]
        for record in reversed(self._records):
            if record.worker_num != last.worker_num:
                return False
            if last.timestamp - record.timestamp >= DefaultValues.SEC_FOR_STABLE_WORKER_COUNT:
                return True
        return False

    def reset_running_speed_monitor(self) -> None:
        """What was measured says nothing about the servers that are used now."""
        self._records.clear()

    # Evaluation.

    def set_worker_start_eval_time(self, worker_id: int) -> None:
        self._evaluation_began_at[worker_id] = time.time()

    def update_worker_eval_time(self, worker_id: int) -> None:
        began_at = self._evaluation_began_at.pop(worker_id, None)
        if began_at is not None:
            spent = time.time() - began_at
            self._evaluation_seconds[worker_id] = self._evaluation_seconds.get(worker_id, 0.0) + spent

    def get_worker_eval_time(self, worker_id: int) -> float:
        """Seconds; an evaluation that runs ends with the question."""
        self.update_worker_eval_time(worker_id)
        return self._evaluation_seconds.get(worker_id, 0.0)


ThroughputMonitor = PerfMonitor = SpeedMonitor
