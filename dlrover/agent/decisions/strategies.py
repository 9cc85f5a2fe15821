"""
What an extension of the user may want to follow a failure, and what the master is told then.
"""

from __future__ import annotations

import enum
from typing import assert_never

from dlrover.protocol.messages.fleet import ErrorLevel, NodeExit, ReportNodeError, RestartJob
from dlrover.protocol.messages.job import AgentCommand, ReportFailure, StopJob

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


def told_after(report: ReportFailure, strategy: FailoverStrategy) -> list[AgentCommand]:
    """In this order."""
    match strategy:
        case FailoverStrategy.NORMAL_FAILOVER:
            return [report]
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
            assert_never(strategy)
