"""
The user's word on a failure: an extension that is asked what shall follow when workers of this node have failed.

Named `module::Class` (`--dynamic-failover-extension`, or DLROVER_EXTENSION_DYNAMIC_FAILOVER), built without arguments. It runs in a thread with a time limit, and the report
of the failure waits for it: who asks for a say accepts the delay. Whatever goes wrong with it costs a warning, and the usual follows.
The names are the original's; old import paths lead here.
"""

from __future__ import annotations

import abc
import json
import logging
import sys
import time
from dataclasses import dataclass, field

from dlrover.agent.decisions.strategies import FailoverStrategy, told_after
from dlrover.host.extensions import NoAnswer, TimedCalls, UnusableExtension, build
from dlrover.protocol.messages.job import AgentCommand, ReportFailure

log = logging.getLogger("dlrover.agent")

TIME_LIMIT = 5.0
"""Seconds for an answer: the whole job waits for it."""
MAX_TIMEOUTS = 3


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
        self._calls = TimedCalls("failover", time_limit=time_limit, max_timeouts=MAX_TIMEOUTS)

    @classmethod
    def load(cls, name: str, directory: str = "") -> Failover | None:
        """None, with a warning, for what cannot be used: a job does not fail for want of an extension."""
        if directory and directory not in sys.path:
            sys.path.append(directory)
        try:
            extension = build(name, method="get_user_failover_strategy")
        except UnusableExtension as error:
            log.warning("The failover extension %s is not used: %s", name, error)
            return None
        return cls(extension)

    async def decide(self, report: ReportFailure, node_rank: int) -> list[AgentCommand]:
        """What to tell the master, in order."""
        strategy = await self._ask(_describe(report, node_rank))
        if strategy is not FailoverStrategy.NORMAL_FAILOVER:
            log.warning("The failover extension decided: %s", strategy.value)
        return told_after(report, strategy)

    async def _ask(self, info: AgentFailureInfo) -> FailoverStrategy:
        try:
            answer = await self._calls.call(lambda: self._extension.get_user_failover_strategy(info))
        except NoAnswer as error:
            log.warning("The failover extension failed, so the job decides without it: %s", error)
            return FailoverStrategy.NORMAL_FAILOVER
        if not isinstance(answer, FailoverStrategy):
            log.warning("the failover extension must answer with a FailoverStrategy (got %.80r)", answer)
            return FailoverStrategy.NORMAL_FAILOVER
        return answer


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
