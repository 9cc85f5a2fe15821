"""What people write into a job's objects, as commands of the job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import ElasticJob
from dlrover.platforms.kubernetes.job.ledger_state import LedgerState, decode_state, encode_state
from dlrover.platforms.kubernetes.objects import decode
from dlrover.platforms.kubernetes.orders import commands as orders
from dlrover.platforms.kubernetes.scale_plan import PlanObject
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import (
    MigrateNode,
    NodeType,
    Resource,
    ResumeJob,
    ScaleJob,
    ScaleReplicas,
    Strategy,
    SuspendJob,
)
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.job import StopJob


def job(annotations: dict[str, str] | None = None, **spec: Any) -> ElasticJob:
    spec.setdefault("replicaSpecs", {"worker": {"replicas": 4}, "ps": {"replicas": 2}})
    body = {"metadata": {"name": "demo", "annotations": annotations or {}}, "spec": spec}
    return decode(ElasticJob, json.dumps(body).encode())


def plan(labels: dict[str, str] | None = None, phase: str = "", **spec: Any) -> PlanObject:
    labels = {names.JOB_NAME: "demo", names.SCALE_TYPE: "manual"} if labels is None else labels
    body = {"metadata": {"name": "p", "labels": labels}, "spec": spec, "status": {"phase": phase}}
    return decode(PlanObject, json.dumps(body).encode())


def test_suspend_is_a_level_and_releases_the_nodes() -> None:
    assert orders.suspension_of(job(suspend=True)) == SuspendJob(reason="spec.suspend is true", is_releasing=True)
    for spec in ({}, {"suspend": False}):
        assert orders.suspension_of(job(**spec)) == ResumeJob()


def test_the_annotation_stops_the_job_with_its_reason() -> None:
    assert orders.stop_of(job()) is None
    assert orders.stop_of(job({names.STOP: "enough"})) == StopJob(message="enough")


def test_only_numbers_that_changed_are_told() -> None:
    known = {"worker": 3, "ps": 2}
    assert list(orders.resizes(job(), known, Strategy.ALLREDUCE)) == [ScaleJob(min_nodes=4, max_nodes=4)]
    assert list(orders.resizes(job(), known, Strategy.PS)) == [ScaleReplicas(node_type=NodeType.WORKER, count=4)]
    assert list(orders.resizes(job(), {"worker": 4, "ps": 2}, Strategy.PS)) == []
    assert list(orders.resizes(job(), {}, Strategy.PS)) == [], "the first numbers are those that the job starts with"


def test_the_minimum_of_the_job_stays() -> None:
    elastic = job(replicaSpecs={"worker": {"replicas": 5, "minReplicas": 2}})
    assert list(orders.resizes(elastic, {"worker": 3}, Strategy.ALLREDUCE)) == [ScaleJob(min_nodes=2, max_nodes=5)]
    smaller = job(replicaSpecs={"worker": {"replicas": 1, "minReplicas": 2}})
    assert list(orders.resizes(smaller, {"worker": 3}, Strategy.ALLREDUCE)) == [ScaleJob(min_nodes=1, max_nodes=1)]


@pytest.mark.parametrize(
    ("labels", "phase", "is_ours"),
    [
        ({names.JOB_NAME: "demo", names.SCALE_TYPE: "manual"}, "", True),
        ({names.OLD_JOB_NAME: "demo", names.SCALE_TYPE: "manual"}, "Scaling", True),
        ({names.JOB_NAME: "other", names.SCALE_TYPE: "manual"}, "", False),
        ({names.JOB_NAME: "demo", names.SCALE_TYPE: "auto"}, "", False),
        ({names.JOB_NAME: "demo"}, "", False),
        ({names.JOB_NAME: "demo", names.SCALE_TYPE: "manual"}, "Succeeded", False),
        ({names.JOB_NAME: "demo", names.SCALE_TYPE: "manual"}, "Failed", False),
    ],
)
def test_which_plans_are_for_the_job(labels: dict[str, str], phase: str, is_ours: bool) -> None:
    assert orders.is_for(plan(labels, phase), "demo") is is_ours


def test_a_plan_becomes_commands_and_zero_counts() -> None:
    spec = {"worker": {"replicas": 3}, "ps": {"replicas": 0, "resource": {"cpu": 4}}}
    wanted = orders.plan_of(plan(replicaResourceSpecs=spec), job(), Strategy.PS)
    assert wanted.commands == (
        ScaleReplicas(node_type=NodeType.WORKER, count=3),
        ScaleReplicas(node_type=NodeType.PS, count=0),
    )
    assert wanted.note == "Without effect: resource of ps."


def test_pods_are_exchanged_by_name_or_id() -> None:
    pods = [
        {"name": "demo-edljob-ps-7", "resource": {"cpu": "8", "memory": "2Gi"}},
        {"id": 3, "resource": {"cpu": "500m"}},
    ]
    wanted = orders.plan_of(plan(migratePods=pods), job(), Strategy.PS)
    assert wanted.commands == (
        MigrateNode(node=PlatformId(7), resource=Resource(cpu=8.0, memory_mb=2048)),
        MigrateNode(node=PlatformId(3), resource=Resource(cpu=0.5)),
    )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "changes nothing"),
        ({"replicaResourceSpecs": {"evaluator": {"replicas": 1}}}, "no nodes of type evaluator. It has worker, ps"),
        ({"replicaResourceSpecs": {"ps": {"resource": {"cpu": 4}}}}, "gives only a resource for ps"),
        ({"createPods": [{"name": "a"}]}, "names no pods to create"),
        ({"migratePods": [{"name": "demo"}]}, "names no node"),
        ({"migratePods": [{"id": 1, "resource": {"cpu": "many"}}]}, "many"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_says_why(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        orders.plan_of(plan(**spec), job(), Strategy.PS)


def test_the_ledger_keeps_the_sizes_that_were_carried_out() -> None:
    state = LedgerState(epoch=3, sizes=(("ps", 2), ("worker", 4)))
    assert decode_state(encode_state(state)) == state
    assert decode_state({"epoch": "1"}).sizes == (), "a ledger of an older version has none"
