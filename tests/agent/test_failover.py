"""Extensions that have a say in what follows a failure, and those that misbehave."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from dlrover.agent.failover import AgentFailureInfo, DynamicAgentFailoverExtension, Failover, FailoverStrategy
from dlrover.protocol.messages.fleet import ErrorLevel, ReportNodeError, RestartJob
from dlrover.protocol.messages.job import (
    FailureKind,
    Incarnation,
    Micros,
    NodeId,
    ReportFailure,
    Round,
    StopJob,
    WorkerFailure,
)
from tests.agent.lab import DEADLINE, until

BOOM = WorkerFailure(
    global_rank=3, local_rank=1, pid=7, kind=FailureKind.EXCEPTION, exited_at=Micros(0), message="ValueError: boom"
)
REPORT = ReportFailure(node=NodeId(4), incarnation=Incarnation(1), round=Round(2), failures=(BOOM,), step=9, lived=1.0)


class Says(DynamicAgentFailoverExtension):
    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.heard: AgentFailureInfo | None = None
        self.may_go = threading.Event()

    def get_user_failover_strategy(self, failure_info: AgentFailureInfo) -> FailoverStrategy:
        answer, self.heard = self.answer, failure_info
        if answer == "hold":
            self.may_go.wait(DEADLINE)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (FailoverStrategy.NORMAL_FAILOVER, [ReportFailure]),
        (FailoverStrategy.NODE_FAILOVER, [ReportFailure, ReportNodeError]),
        (FailoverStrategy.GLOBAL_FAILOVER, [ReportFailure, RestartJob]),
        (FailoverStrategy.ABORTION_FAILOVER, [StopJob]),
        (ValueError("no"), [ReportFailure]),
        (SystemExit(3), [ReportFailure]),
        ("NODE_FAILOVER", [ReportFailure]),
        (None, [ReportFailure]),
    ],
)
async def test_what_an_extension_answers_is_told_to_the_master(answer: object, told: list[type]) -> None:
    extension = Says(answer)
    commands = await Failover(extension, time_limit=DEADLINE).decide(REPORT, node_rank=5)
    assert [type(command) for command in commands] == told
    assert extension.heard is not None
    assert extension.heard.node_rank == 5
    assert "ValueError: boom" in extension.heard.log_content
    for command in commands:
        if isinstance(command, ReportNodeError):
            assert (command.node, command.level) == (NodeId(4), ErrorLevel.NODE)
        elif isinstance(command, RestartJob):
            assert command.round == REPORT.round, "the agents of one world ask for one restart"


async def test_an_extension_that_hangs_delays_the_first_report_only() -> None:
    extension = Says("hold")
    failover = Failover(extension, time_limit=0.05)
    assert await failover.decide(REPORT, node_rank=0) == [REPORT]
    await until(lambda: extension.heard is not None)
    extension.answer = FailoverStrategy.ABORTION_FAILOVER
    assert await failover.decide(REPORT, node_rank=0) == [REPORT], "the first call still runs"
    extension.may_go.set()


def test_what_cannot_be_loaded_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "my_failover.py").write_text(
        "from dlrover.python.common.enums import FailoverStrategy\n"
        "from dlrover.python.elastic_agent.torch.dynamic_failover import DynamicAgentFailoverExtension\n"
        "class Mine(DynamicAgentFailoverExtension):\n"
        "    def get_user_failover_strategy(self, failure_info):\n"
        "        return FailoverStrategy.NORMAL_FAILOVER\n"
        "class Other: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert Failover.load("my_failover::Mine") is not None
    assert Failover.load("my_failover::Other") is None
    assert Failover.load("my_failover::Missing") is None
    assert Failover.load("no_such_module::Mine") is None
    (tmp_path / "leaving_failover.py").write_text("raise SystemExit(3)")
    assert Failover.load("leaving_failover::Mine") is None
    assert caplog.text.count("is not used") == 4
    sys.modules.pop("my_failover", None)
