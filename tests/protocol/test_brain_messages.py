"""What jobs and Brain say to each other: bounded, typed, and the same part of a run on both sides."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.brain import (
    AllowanceAsked,
    BrainQuestion,
    JobBegan,
    JobRef,
    NodeEnded,
    NodeEndKind,
    PlanStage,
    RunsTold,
    digest_of,
    kept_of,
    stage_of,
)
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import Micros, PlatformId
from dlrover.protocol.messages.scaling import Configuration, GroupSize, MemoryPoint, RunMeasured, TypeUse
from dlrover.protocol.rpc.brain import BRAIN_QUESTION, MAX_BRAIN_BYTES

JOB = JobRef(uid="job-1")


def a_run(number: int, *, seconds: float = 60.0) -> RunMeasured:
    return RunMeasured(
        number=number,
        configuration=Configuration(groups=(GroupSize(NodeType.WORKER, 4, 8.0, 16_384),)),
        seconds=seconds,
        steps=600,
        step_time=0.1,
        types=(TypeUse(node_type=NodeType.WORKER, cpu=6.0, memory=(MemoryPoint(Micros(1), 10, 9000.0),)),),
    )


def test_what_is_told_arrives_as_it_was() -> None:
    question = RunsTold(job=JOB, runs=(a_run(1), a_run(2)))
    assert BRAIN_QUESTION.decode(BRAIN_QUESTION.encode(question)) == question


@pytest.mark.parametrize(
    "question",
    [
        NodeEnded(job=JOB, node=PlatformId(3), node_type=NodeType.PS, kind=NodeEndKind.OOM, memory_mb=math.nan),
        NodeEnded(job=JOB, node=PlatformId(3), node_type=NodeType.PS, kind=NodeEndKind.OOM, memory_mb=1e300),
        NodeEnded(job=JOB, node=PlatformId(3), node_type=NodeType.PS, kind=NodeEndKind.OOM, age=-1.0),
        JobBegan(job=JOB, age=math.inf),
        JobBegan(job=JobRef(uid="")),
        JobBegan(job=JobRef(uid="j" * 200)),
        JobBegan(job=JOB, name="n" * 200),
        AllowanceAsked(job=JOB, min_nodes=0, max_nodes=1),
        AllowanceAsked(job=JOB, min_nodes=1, max_nodes=1, remaining=math.nan),
        RunsTold(job=JOB, runs=tuple(a_run(number) for number in range(1, 258))),
    ],
)
def test_what_is_out_of_bounds_is_refused_when_it_is_read(question: BrainQuestion) -> None:
    with pytest.raises(Rejected):
        BRAIN_QUESTION.decode(BRAIN_QUESTION.encode(question))


def test_a_message_longer_than_its_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(Rejected, match="the limit is"):
        BRAIN_QUESTION.decode(b"\xc1" * (MAX_BRAIN_BYTES + 1))


def test_the_digest_does_not_depend_on_the_order_and_changes_with_each_run() -> None:
    runs = [a_run(1), a_run(2), a_run(3)]
    assert digest_of(runs) == digest_of(reversed(runs)) == digest_of(map(kept_of, runs))
    assert digest_of(runs) != digest_of(runs[:2])
    assert digest_of(runs) != digest_of([*runs, a_run(3)])
    assert digest_of(runs) != digest_of([*runs[:2], replace(runs[2], seconds=61.0)])


def test_every_historical_spelling_of_a_stage_is_known() -> None:
    assert stage_of("job_stage_ps_running") is stage_of("job_stage_worker_running") is PlanStage.RUNNING
    assert stage_of("job_stage_create") is PlanStage.CREATE
    assert stage_of("job_stage_final") is None
