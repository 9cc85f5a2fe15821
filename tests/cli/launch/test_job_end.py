"""When the launcher takes the end of its master for the end of the job: only when the master said so."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest

from dlrover.protocol.messages.job import (
    ExitReason,
    FailureKind,
    FirstFailure,
    JobEnd,
    Micros,
    NodeRank,
    Round,
    WorkerFailure,
)
from tests.cli.conftest import StandinJob, is_alive

FAILED = JobEnd(
    reason=ExitReason.WORKER_ERROR,
    exit_code=1,
    message="Rank 3 had enough, for the third time.",
    first_failure=FirstFailure(
        failure=WorkerFailure(
            global_rank=3,
            local_rank=1,
            pid=77,
            kind=FailureKind.EXIT_CODE,
            exit_code=7,
            exited_at=Micros(1),
            message="it had enough",
        ),
        node_rank=NodeRank(1),
        host="elsewhere",
        round=Round(4),
        step=12,
    ),
    num_restarts=2,
)


def end_file(job: StandinJob) -> Path:
    """Where the master of this job is told to write."""
    [config] = job.runtime.rglob("master.json")
    return Path(json.loads(config.read_text())["end_file"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_master_that_somebody_asked_to_stop_is_started_again(job: StandinJob, number: signal.Signals) -> None:
    """It ends in good order, with an exit code of its own, and the job has not even noticed."""
    job.start(behaviour="wait")
    agent, *_ = job.event("agent")
    job.event("waiting")
    pid, port, journal = job.event("master")
    os.kill(int(pid), number)
    again, next_port, next_journal = job.event("master")
    assert again != pid
    assert (next_port, next_journal) == (port, journal)
    assert is_alive(int(agent))
    job.open_gate()
    exit_code, said = job.finish()
    assert exit_code == 0
    assert "is started again" in said
    assert job.files_left() == []


@pytest.mark.parametrize(("option", "expected"), [("one", 1), ("worker", 7)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_that_the_agent_did_not_hear_is_reported_by_the_launcher(
    job: StandinJob, option: str, expected: int, number: signal.Signals
) -> None:
    """Whatever ended the master afterwards: that the job is over was written before."""
    job.start("--exit-code", option, behaviour="stubborn")
    job.event("waiting")
    pid, *_ = job.event("master")
    end_file(job).write_bytes(msgspec.json.encode(FAILED))
    os.kill(int(pid), number)
    exit_code, said = job.finish()
    assert exit_code == expected
    assert "agent was not running" in said
    assert "for the third time" in said
    assert "rank 1 on elsewhere" in said
    assert "is started again" not in said
    assert job.files_left() == []


def test_a_good_end_that_the_agent_did_not_hear_is_a_good_end(job: StandinJob) -> None:
    job.start(behaviour="stubborn")
    job.event("waiting")
    pid, *_ = job.event("master")
    end = JobEnd(reason=ExitReason.COMPLETED, exit_code=0, message="The workers of all nodes ended well.")
    end_file(job).write_bytes(msgspec.json.encode(end))
    os.kill(int(pid), signal.SIGTERM)
    exit_code, said = job.finish()
    assert exit_code == 0
    assert "failed" not in said
