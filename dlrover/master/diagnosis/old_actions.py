"""
The action classes of the original's diagnosis, for extensions that were written for it, and the queue they wait in.

An action says what should be done, who shall do it and for how long that makes sense. What it means here is a command of the job
(`dlrover.master.diagnosis.pre_check_runner`) or a verdict (`dlrover.master.diagnosis.old_diagnosticians`): nothing runs an action by itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

DEFAULT_LIFE = 300.0
"""Seconds, where the creator gives none."""
MAX_QUEUED = 1000
"""For one target; then the oldest of the least important is dropped."""


class DiagnosisConstant:
    MASTER_INSTANCE = -1
    ANY_INSTANCE = -2
    ANY_WORKER_INSTANCE = ANY_INSTANCE
    LOCAL_INSTANCE = -3


class DiagnosisActionType:
    NONE = "no_action"
    ANY = "any_action"
    LOG = "log"
    EVENT = "event"
    COLLECT_METRIC = "collect_metric"
    RESTART_WORKER = "restart_worker"
    RELAUNCH_WORKER = "relaunch_worker"
    MASTER_RELAUNCH_WORKER = "master_relaunch_worker"
    JOB_RESTART = "job_restart"
    JOB_ABORT = "job_abortion"
    RESTART_JOB = "restart_job"
    ABORT_JOB = "abort_job"


_PRIORITY = {
    DiagnosisActionType.JOB_ABORT: 6,
    DiagnosisActionType.JOB_RESTART: 5,
    DiagnosisActionType.MASTER_RELAUNCH_WORKER: 4,
    DiagnosisActionType.RELAUNCH_WORKER: 4,
    DiagnosisActionType.RESTART_WORKER: 3,
    DiagnosisActionType.COLLECT_METRIC: 2,
    DiagnosisActionType.EVENT: 1,
}
"""Who changes more goes first: what comes after it may be needless by then."""


@dataclass(kw_only=True)
class DiagnosisAction:
    """What all actions have is given by name, so that positions are those of each action's own fields."""

    action_type: str = DiagnosisActionType.NONE
    instance: int = DiagnosisConstant.MASTER_INSTANCE
    """Who shall run it: a node's id, the master, any node, or the one that holds it."""
    timestamp: float = 0.0
    """Creation, in seconds since the epoch; 0: now."""
    expired_time_period: float = 0.0
    """Seconds after creation from which on it is not run any more; 0: 300."""
    executable_time_period: float = 0.0
    """Seconds after creation before which it is not run."""

    def __post_init__(self) -> None:
        self.timestamp = self.timestamp or time.time()
        self.expired_time_period = self.expired_time_period if self.expired_time_period > 0 else DEFAULT_LIFE

    def is_expired(self, now: float | None = None) -> bool:
        return self.timestamp + self.expired_time_period <= (time.time() if now is None else now)

    def is_executable(self, now: float | None = None) -> bool:
        return self.timestamp + self.executable_time_period <= (time.time() if now is None else now)

    def is_needed(self, now: float | None = None) -> bool:
        return self.action_type != DiagnosisActionType.NONE and not self.is_expired(now)

    def update_executable_time_period(self, seconds: float) -> None:
        self.executable_time_period = seconds

    @property
    def priority(self) -> int:
        return _PRIORITY.get(self.action_type, 0)

    def is_same(self, other: DiagnosisAction) -> bool:
        """Whether running both would do the same thing twice."""
        apart = ("timestamp", "expired_time_period", "executable_time_period")
        ours, theirs = (
            {key: value for key, value in asdict(each).items() if key not in apart} for each in (self, other)
        )
        return type(self) is type(other) and ours == theirs

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Any:
        """Unknown keys are ignored. Raises ValueError for what is no object."""
        said = json.loads(text)
        if not isinstance(said, dict):
            raise ValueError(f"an action must be a JSON object (got {type(said).__name__})")
        known = {each.name for each in fields(cls) if each.init}
        return cls(**{key: value for key, value in said.items() if key in known})


@dataclass(kw_only=True)
class NoAction(DiagnosisAction):
    instance: int = DiagnosisConstant.LOCAL_INSTANCE


@dataclass
class EventAction(DiagnosisAction):
    """Tell people."""

    action_type: str = field(default=DiagnosisActionType.EVENT, kw_only=True)
    event_type: str = "info"
    event_instance: str = ""
    event_action: str = ""
    event_msg: str = ""
    event_labels: dict[str, str] = field(default_factory=dict)

    def is_same(self, other: DiagnosisAction) -> bool:
        """The labels may count something: the same news with other labels is no news."""
        if not isinstance(other, EventAction):
            return False
        said = [
            (each.instance, each.event_type, each.event_instance, each.event_action, each.event_msg)
            for each in (self, other)
        ]
        return said[0] == said[1]


@dataclass
class NodeAction(DiagnosisAction):
    action_type: str = field(default=DiagnosisActionType.MASTER_RELAUNCH_WORKER, kw_only=True)
    node_id: int = -1
    node_type: str = "worker"
    node_status: str = ""
    reason: str = ""


@dataclass
class JobAction(DiagnosisAction):
    reason: str = ""
    msg: str = ""


@dataclass
class JobAbortionAction(JobAction):
    action_type: str = field(default=DiagnosisActionType.JOB_ABORT, kw_only=True)


@dataclass
class JobRestartAction(JobAction):
    action_type: str = field(default=DiagnosisActionType.JOB_RESTART, kw_only=True)


def is_same_action(action1: DiagnosisAction, action2: DiagnosisAction) -> bool:
    return action1.is_same(action2)


class DiagnosisActionQueue:
    """For each target the most important first, and the oldest of these. What has expired never stands in the way of anything."""

    def __init__(self, clock: Callable[[], float] = time.time, *, max_queued: int = MAX_QUEUED) -> None:
        self._clock = clock
        self._max_queued = max_queued
        self._actions: dict[int, list[DiagnosisAction]] = {}
        self._lock = threading.Lock()

    def add_action(self, action: DiagnosisAction) -> bool:
        """Whether it was taken: not if it is over, or the same one waits already."""
        now = self._clock()
        if not action.is_needed(now):
            return False
        with self._lock:
            waiting = [each for each in self._actions.get(action.instance, []) if not each.is_expired(now)]
            if any(each.is_same(action) for each in waiting):
                self._actions[action.instance] = waiting
                return False
            waiting.append(action)
            waiting.sort(key=lambda each: -each.priority)
            if len(waiting) > self._max_queued:
                least = waiting[-1].priority
                del waiting[next(index for index, each in enumerate(waiting) if each.priority == least)]
            self._actions[action.instance] = waiting
            return True

    def next_action(self, instance: int = DiagnosisConstant.LOCAL_INSTANCE) -> DiagnosisAction:
        """Removed from the queue. Who may not run yet keeps its place; `NoAction`: there is none."""
        now = self._clock()
        with self._lock:
            waiting = [each for each in self._actions.get(instance, []) if not each.is_expired(now)]
            found = next((each for each in waiting if each.is_executable(now)), None)
            self._actions[instance] = [each for each in waiting if each is not found]
            return NoAction() if found is None else found

    def clear_actions(self, instance: int | None = None) -> None:
        with self._lock:
            if instance is None:
                self._actions.clear()
            else:
                self._actions.pop(instance, None)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._actions.values()))
