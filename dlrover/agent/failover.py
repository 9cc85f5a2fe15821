"""
The user's word on a failure: an extension that is asked what shall follow when workers of this node have failed.

Named `module::Class` (`--dynamic-failover-extension`, or DLROVER_EXTENSION_DYNAMIC_FAILOVER), built without arguments. It runs in a thread with a time limit, and the report
of the failure waits for it: who asks for a say accepts the delay. Whatever goes wrong with it costs a warning, and the usual follows.
The names are the original's; old import paths lead here.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import importlib
import json
import logging
import sys
import time
from dataclasses import dataclass, field

from dlrover.agent import side_thread
from dlrover.protocol.messages.fleet import ErrorLevel, NodeExit, ReportNodeError, RestartJob
from dlrover.protocol.messages.job import AgentCommand, ReportFailure, StopJob

log = logging.getLogger("dlrover.agent")

TIME_LIMIT = 5.0
"""Seconds for an answer: the whole job waits for it."""
GLOBAL_REASON = "USER_FAILOVER_TRIGGER_JOB_RESTART"
ABORTION_REASON = "USER_FAILOVER_TRIGGER_JOB_ABORTION"


class FailoverStrategy(enum.Enum):
    NORMAL_FAILOVER = "NORMAL_FAILOVER"
    """As without an extension."""
    NODE_FAILOVER = "NODE_FAILOVER"
    """Another node instead of this one."""
    GLOBAL_FAILOVER = "GLOBAL_FAILOVER"
    """All workers anew."""
    ABORTION_FAILOVER = "ABORTION_FAILOVER"
    """The job ends."""


@dataclass
class AgentFailureInfo:
    """What failed, as extensions see it."""

    timestamp: int = field(default_factory=lambda: int(time.time()))
    log_content: str = ""
    """JSON: a list of the failures, each with its rank, kind, exit code, message, traceback."""
    extra_info: dict[str, str] = field(default_factory=dict)
    node_rank: int = -1


class DynamicAgentFailoverExtension(abc.ABC):
    @abc.abstractmethod
    def get_user_failover_strategy(self, failure_info: AgentFailureInfo) -> FailoverStrategy: ...


class Failover:
    """One extension, asked at each failure of this node."""

    def __init__(self, extension: DynamicAgentFailoverExtension, *, time_limit: float = TIME_LIMIT) -> None:
        self._extension = extension
        self._time_limit = time_limit
        self._is_busy = False

    @classmethod
    def load(cls, name: str, directory: str = "") -> Failover | None:
        """None, with a warning, for what cannot be used: a job does not fail for want of an extension."""
        module_name, _, class_name = name.partition("::")
        if directory and directory not in sys.path:
            sys.path.append(directory)
        try:
            extension = getattr(importlib.import_module(module_name), class_name)()
            if not isinstance(extension, DynamicAgentFailoverExtension):
                raise TypeError(f"{class_name} is no DynamicAgentFailoverExtension")
        except (Exception, SystemExit) as error:  # importing and building run the user's code, which may raise anything
            log.warning("failover extension %s is left out: %s: %s", name, type(error).__name__, error)
            return None
        return cls(extension)

    async def decide(self, report: ReportFailure, node_rank: int) -> list[AgentCommand]:
        """What to tell the master, in order."""
        strategy = await self._ask(_describe(report, node_rank))
        if strategy is not FailoverStrategy.NORMAL_FAILOVER:
            log.warning("the failover extension decides: %s", strategy.value)
        match strategy:
            case FailoverStrategy.ABORTION_FAILOVER:
                return [StopJob(message=ABORTION_REASON)]
            case FailoverStrategy.GLOBAL_FAILOVER:
                return [report, RestartJob(reason=GLOBAL_REASON, round=report.round)]
            case FailoverStrategy.NODE_FAILOVER:
                wish = ReportNodeError(
                    node=report.node,
                    incarnation=report.incarnation,
                    level=ErrorLevel.NODE,
                    message="the failover extension wants another node",
                    exit_reason=NodeExit.DIAGNOSED,
                )
                return [report, wish]
            case _:
                return [report]

    async def _ask(self, info: AgentFailureInfo) -> FailoverStrategy:
        if self._is_busy:
            return FailoverStrategy.NORMAL_FAILOVER  # an earlier call still runs, and cannot be ended
        call = side_thread.begin(lambda: self._extension.get_user_failover_strategy(info), "failover")
        self._is_busy = True
        call.add_done_callback(self._came_back)
        done, _ = await asyncio.wait([call], timeout=self._time_limit)
        if not done:
            log.warning("the failover extension did not answer within %g s", self._time_limit)
            return FailoverStrategy.NORMAL_FAILOVER
        try:
            answer = call.result()
        except Exception as error:  # an extension may raise anything; then the usual follows
            log.warning("the failover extension failed: %s: %s", type(error).__name__, error)
            return FailoverStrategy.NORMAL_FAILOVER
        if not isinstance(answer, FailoverStrategy):
            log.warning("the failover extension answered %.80r, which is no FailoverStrategy", answer)
            return FailoverStrategy.NORMAL_FAILOVER
        return answer

    def _came_back(self, call: asyncio.Future[FailoverStrategy]) -> None:
        self._is_busy = False
        if not call.cancelled():
            call.exception()  # told above, or too late to be told


def _describe(report: ReportFailure, node_rank: int) -> AgentFailureInfo:
    failures = [
        {
            "global_rank": failure.global_rank,
            "local_rank": failure.local_rank,
            "kind": failure.kind.value,
            "exit_code": failure.exit_code,
            "signal": failure.signal,
            "message": failure.message,
            "traceback": failure.traceback,
        }
        for failure in report.failures
    ]
    extra = {"round": str(report.round), "step": "" if report.step is None else str(report.step)}
    return AgentFailureInfo(log_content=json.dumps(failures), extra_info=extra, node_rank=node_rank)
