"""The status that readers of today and of the original see."""

from __future__ import annotations

import json
from typing import Any

from dlrover.operator.status import JobCourse, JobPhase, Truth, next_status, status_body, write_at
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, MasterRecord
from dlrover.platforms.kubernetes.objects import decode
from tests.operator.model import START, job_body, make_job


def after(job: ElasticJob, course: JobCourse, now: float = START) -> ElasticJob:
    """The job as it is when the status has been written."""
    body = job_body()
    body["status"] = json.loads(json.dumps(status_body(job, next_status(job, course, (), now))["status"]))
    return decode(ElasticJob, json.dumps(body).encode())


def course(phase: JobPhase, **conditions: Truth) -> JobCourse:
    return JobCourse(phase=phase, reason=f"Because{phase.value}", message="A sentence.", conditions=conditions)


def old_conditions(job: ElasticJob) -> dict[str, str]:
    return {each.type: each.status for each in job.status.status.conditions}


def test_old_readers_find_one_condition_for_each_phase_that_was() -> None:
    job = make_job()
    for phase, expected in (
        (JobPhase.CREATED, {"Created": "True"}),
        (JobPhase.PENDING, {"Created": "True", "Pending": "True"}),
        (JobPhase.RUNNING, {"Created": "True", "Pending": "True", "Running": "True"}),
        (JobPhase.RESTARTING, {"Created": "True", "Pending": "True", "Restarting": "True"}),
        (JobPhase.RUNNING, {"Created": "True", "Pending": "True", "Running": "True"}),
        (JobPhase.FAILED, {"Created": "True", "Pending": "True", "Running": "False", "Failed": "True"}),
    ):
        job = after(job, course(phase))
        assert old_conditions(job) == expected
    assert [each.reason for each in job.status.status.conditions if each.type == "Failed"] == ["JobFailed"]
    again = after(job, course(JobPhase.RUNNING))
    assert old_conditions(again) == old_conditions(job)  # nothing changes after a failure


def test_a_condition_keeps_the_time_of_its_last_change() -> None:
    truth = Truth(is_true=True, reason="A")
    job = after(make_job(), course(JobPhase.RUNNING, Valid=truth))
    job = after(job, course(JobPhase.RUNNING, Valid=Truth(is_true=True, reason="B")), START + 60)
    (valid,) = job.status.conditions
    assert (valid.reason, valid.last_transition_time) == ("B", "2030-01-01T00:00:00Z")
    job = after(job, course(JobPhase.RUNNING, Valid=Truth(is_true=False, reason="C")), START + 120)
    (valid,) = job.status.conditions
    assert (valid.status, valid.last_transition_time) == ("False", "2030-01-01T00:02:00Z")
    assert valid.observed_generation == 1


def test_conditions_that_a_decision_does_not_mention_stay() -> None:
    job = after(make_job(), course(JobPhase.RUNNING, Valid=Truth(is_true=True, reason="A")))
    job = after(job, course(JobPhase.RUNNING, Running=Truth(is_true=True, reason="A")))
    assert [each.type for each in job.status.conditions] == ["Valid", "Running"]


def test_a_status_that_says_the_same_is_not_written() -> None:
    job = after(make_job(), course(JobPhase.RUNNING))
    assert write_at(job, next_status(job, course(JobPhase.RUNNING), (), START + 60), START + 60) is None
    assert write_at(job, next_status(job, course(JobPhase.FAILED), (), START + 60), START + 60) == START + 60


def test_fields_of_the_master_and_fields_without_a_value_are_left_out() -> None:
    body = job_body()
    body["status"] = {"round": 7, "goodput": "0.9", "lastStep": 3}
    job = decode(ElasticJob, json.dumps(body).encode())
    new: Any = status_body(job, next_status(job, course(JobPhase.RUNNING), (), START))
    assert not {"round", "goodput", "lastStep", "scalePlan", "completionTime", "master"} & new["status"].keys()
    assert "completionTime" not in new["status"]["status"]
    assert new["metadata"] == {"name": "demo", "namespace": "team", "uid": "uid-1"}
    assert new["status"]["status"]["lastReconcileTime"] == "2030-01-01T00:00:00Z"


def test_the_record_of_the_master_survives_the_way_through_the_cluster() -> None:
    record = MasterRecord(
        index=3, uid="u", restarts=2, restarted_at="2030-01-01T00:00:00Z", gone_at="", forgiven_crashes=1
    )
    job = after(make_job(), JobCourse(phase=JobPhase.RUNNING, reason="A", master=record))
    assert job.status.master == record
    assert job.status.restarts == 3
