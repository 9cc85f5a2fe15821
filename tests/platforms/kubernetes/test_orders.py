"""What people write into a job's objects, as commands of the job."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import ElasticJob
from dlrover.platforms.kubernetes.job.ledger_state import LedgerState, decode_state, encode_state
from dlrover.platforms.kubernetes.objects import decode
from dlrover.platforms.kubernetes.orders import commands as orders
from dlrover.platforms.kubernetes.scale_plan import PlanObject
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.fleet import (
    MigrateNode,
    NodeType,
    Resource,
    ResumeJob,
    ScaleJob,
    ScaleReplicas,
    SizeReplicas,
    Strategy,
    SuspendJob,
)
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.job import StopJob
from dlrover.protocol.messages.scaling import ScaleTo


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
    assert told(orders.resizes(job(), known, Strategy.ALLREDUCE)) == [("to", 4)]
    assert list(orders.resizes(job(), known, Strategy.PS)) == [ScaleReplicas(node_type=NodeType.WORKER, count=4)]
    assert list(orders.resizes(job(), {"worker": 4, "ps": 2}, Strategy.PS)) == []
    assert list(orders.resizes(job(), {}, Strategy.PS)) == [], "the first numbers are those that the job starts with"


def test_bounds_move_only_if_a_person_changes_them() -> None:
    def workers(**worker: int) -> ElasticJob:
        return job(replicaSpecs={"worker": worker})

    elastic = workers(replicas=5, minReplicas=2)
    assert told(orders.resizes(elastic, {"worker": 3, "worker/min": 2}, Strategy.ALLREDUCE)) == [("to", 5)]
    known = orders.sizes_of(workers(replicas=4, minReplicas=2, maxReplicas=6))
    assert known == {"worker": 4, "worker/min": 2, "worker/max": 6}
    narrower = workers(replicas=4, minReplicas=3, maxReplicas=5)
    assert told(orders.resizes(narrower, known, Strategy.ALLREDUCE)) == [("between", 3, 5), ("to", 4)]
    widest = workers(replicas=5, minReplicas=3, maxReplicas=5)
    assert told(orders.resizes(widest, known, Strategy.ALLREDUCE)) == [("between", 3, 5)], "that asks for five already"
    assert list(orders.resizes(narrower, {}, Strategy.ALLREDUCE)) == [], "what the job starts with"


def told(commands: Iterable[orders.OrderCommand]) -> list[tuple[object, ...]]:
    """Without the reasons."""
    found: list[tuple[object, ...]] = []
    for command in commands:
        if isinstance(command, ScaleTo):
            found.append(("to", command.nodes))
        else:
            assert isinstance(command, ScaleJob)
            found.append(("between", command.min_nodes, command.max_nodes))
    return found


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
        SizeReplicas(node_type=NodeType.PS, resource=Resource(cpu=4.0)),
        ScaleReplicas(node_type=NodeType.PS, count=0),
    )
    assert wanted.note == "The resource of ps applies only to later nodes. Use migratePods to change a running node."


def test_a_plan_may_give_nothing_but_the_size_of_later_nodes() -> None:
    spec = {"worker": {"resource": {"memory": "8Gi", "nvidia.com/gpu": 2}}}
    [command] = orders.plan_of(plan(replicaResourceSpecs=spec), job(), Strategy.ALLREDUCE).commands
    resource = Resource(memory_mb=8192, gpus=2, gpu_type="nvidia.com/gpu")
    assert command == SizeReplicas(node_type=NodeType.WORKER, resource=resource)


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
        ({"replicaResourceSpecs": {"ps": {"resource": {"cpu": "many"}}}}, "ps: 'many' is not a resource quantity"),
        ({"createPods": [{"name": "a"}]}, "names no pods to create"),
        ({"migratePods": [{"name": "demo"}]}, "is not a node of the job"),
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


SAID_BY_THE_CORE = (Path(__file__).parents[2] / "core" / "transcripts" / "fleet" / "scaling.txt").read_text()


def test_only_the_refusal_of_an_exchange_that_is_under_way_says_that_it_is_being_done() -> None:
    exchange = MigrateNode(node=PlatformId(1), resource=Resource())
    refusals = [line for line in SAID_BY_THE_CORE.splitlines() if line.startswith("! bad-migration")]
    done = [refusal for refusal in refusals if orders.is_being_done(exchange, Rejected(refusal))]
    assert done == ["! bad-migration: worker 1 (a-job-worker-1) is being exchanged already."]
    assert len(refusals) > 1
    assert not orders.is_being_done(ScaleTo(nodes=4), Rejected(done[0]))
