"""
Events by which tools of the original follow a multi-role job that comes from its interface. Other jobs write none.

They go where the events of training processes go: a file of each process, by the settings `DLROVER_EVENT_*`. No call raises.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from dlrover.unified.core.messages import EnsembleStatus, StageOfJob

if TYPE_CHECKING:
    from dlrover.trainer.events.process import DurationSpan, Process

CONTROLLER, WORKER, ELASTIC_WORKER = "DLROVER_Controller", "DLROVER_worker", "DLROVER_elastic_worker"


class ToldEvents:
    """Of one process under one target."""

    def __init__(self, target: str, *, is_told: bool) -> None:
        self._process: Process | None = None
        if is_told:
            from dlrover.trainer.events.process import Process

            self._process = Process(target)

    def instant(self, name: str, **content: object) -> None:
        if self._process is not None:
            self._process.instant(name, content)

    def span(self, name: str, **content: object) -> AbstractContextManager[Any]:
        return nullcontext() if self._process is None else self._process.duration(name, content)

    def begun(self, name: str) -> DurationSpan | None:
        """A span that its caller ends."""
        return None if self._process is None else self._process.duration(name).begin()


class ControllerEvents:
    """Tells what has changed since the last look at a job."""

    def __init__(self, events: ToldEvents) -> None:
        self._events = events
        self._stage = StageOfJob.INIT
        self._num_restarts = 0
        self._restarting: DurationSpan | None = None
        self._stopping: DurationSpan | None = None

    def begin(self, status: EnsembleStatus) -> None:
        """Of this conductor: what was before it is no news."""
        self._stage, self._num_restarts = status.stage, status.num_job_restarts
        self._events.instant("#inited")

    def look(self, status: EnsembleStatus) -> None:
        if status.num_job_restarts > self._num_restarts and self._restarting is None:
            self._restarting = self._events.begun("#restarting")
        self._num_restarts = status.num_job_restarts
        if status.stage is not self._stage:
            is_straight = (self._stage, status.stage) == (StageOfJob.INIT, StageOfJob.RUNNING)
            for stage in (StageOfJob.READY, StageOfJob.RUNNING) if is_straight else (status.stage,):
                self._enter(stage, status)

    def _enter(self, stage: StageOfJob, status: EnsembleStatus) -> None:
        former, self._stage = self._stage, stage
        self._events.instant("#stage_changed", old_stage=former.value, new_stage=stage.value)
        if stage is StageOfJob.RUNNING and self._restarting is not None:
            self._restarting.success()
            self._restarting = None
            self._events.instant("#failover_success")
        if stage is StageOfJob.STOPPING:
            self._events.instant("#stop_requested", reason=status.verdict, code=status.exit_code)
            if status.exit_code:
                self._events.instant("#failover_stop", stage=former.value)
            self._stopping = self._events.begun("#stopping")
        if stage is StageOfJob.STOPPED and self._stopping is not None:
            self._stopping.success(code=status.exit_code)
