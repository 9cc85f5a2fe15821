"""
Every field of the definitions does something, or is documented as accepted and unused.

Each row gives one field another value in a job that is otherwise the same, and names what must differ: the pods, the fleet, the
objects beside them, the master's pod, or the course of a whole life. A field that is added to a definition without a row fails here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover.cli.options.scaling_settings import OPTIMIZE_MODES
from dlrover.operator.checks import first_pods, unused_fields
from dlrover.operator.master_pod import master_pod, max_restarts
from dlrover.operator.owned import owned_objects
from dlrover.platforms.kubernetes.elastic_job import ElasticJob
from dlrover.platforms.kubernetes.job.fleet import fleet_of, pod_job_of, scaled_types
from dlrover.platforms.kubernetes.objects import decode
from dlrover.platforms.kubernetes.orders import commands as orders
from dlrover.platforms.kubernetes.scale_plan import PlanObject
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import Strategy
from tests.operator.model import ModelCluster, job_body, template
from tests.operator.test_decide import DONE
from tests.operator.test_definitions import schema_of

Json = dict[str, Any]
Observer = Callable[[ElasticJob], object]
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "operator.md"


def as_job(body: Json) -> ElasticJob:
    return decode(ElasticJob, json.dumps(body).encode())


# What can be seen of a job.


def pods(job: ElasticJob) -> object:
    return first_pods(job)


def fleet(job: ElasticJob) -> object:
    return fleet_of(job)


def in_common(job: ElasticJob) -> object:
    return pod_job_of(job, fleet_of(job))


def objects(job: ElasticJob) -> object:
    return list(owned_objects(job))


def master(job: ElasticJob) -> object:
    return master_pod(job, 0, "master:1")


def restarts(job: ElasticJob) -> object:
    return max_restarts(job)


def scaling(job: ElasticJob) -> object:
    return OPTIMIZE_MODES[job.spec.optimize_mode]


def scaled(job: ElasticJob) -> object:
    return scaled_types(job)


def a_life(job: ElasticJob) -> object:
    """What is there after the start, an hour later, after the end, and another hour later."""
    cluster = ModelCluster(job_body(**_spec_of(job)))
    seen = []
    cluster.run()
    for name in cluster.masters():
        cluster.start(name)
    cluster.add_worker(0)
    cluster.run()
    seen.append(_look(cluster))
    cluster.wait(3600)
    cluster.run()
    seen.append(_look(cluster))
    for name in cluster.masters():
        cluster.end(name, message=DONE)
    cluster.run()
    seen.append(_look(cluster))
    cluster.wait(3600)
    if cluster.is_job_there:
        cluster.run()
    return (*seen, _look(cluster))


def a_pause(job: ElasticJob) -> object:
    """What is there after a running job was suspended."""
    cluster = ModelCluster(job_body(**_spec_of(job)))
    cluster.run()
    for name in cluster.masters():
        cluster.start(name)
    cluster.run()
    cluster.body["spec"]["suspend"] = True
    cluster.body["metadata"]["generation"] += 1
    cluster.settle(hours=0.1)
    return _look(cluster)


def _look(cluster: ModelCluster) -> object:
    there = {name: "deletionTimestamp" in pod["metadata"] for name, pod in cluster.pods.items()}
    return cluster.is_job_there, cluster.status.phase, there


def _spec_of(job: ElasticJob) -> Json:
    return copy.deepcopy(_SPECS[job.metadata.uid])


_SPECS: dict[str, Json] = {}
"""As written, by the uid of the job that was made of it."""

# The table. A path ends at what a person writes; `*` stands for a type of replicas.

SEEN: dict[str, tuple[Json, Observer]] = {
    "distributionStrategy": ({"distributionStrategy": "ParameterServerStrategy"}, pods),
    "resourceLimits": ({"resourceLimits": {"cpu": "64"}}, fleet),
    "optimizeMode": ({"optimizeMode": "single-job"}, scaling),
    "brainService": ({"brainService": "brain:50001"}, master),
    "envs.value": ({"envs": {"A": {"value": "1"}}}, pods),
    "envs.valueFrom": ({"envs": {"A": {"valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}}}, pods),
    "suspend": ({"suspend": True}, a_life),
    "suspendPolicy": ({"suspendPolicy": "KeepMaster"}, a_pause),
    "managedBy": ({"managedBy": "another.example/controller"}, a_life),
    "ttlSecondsAfterFinished": ({"ttlSecondsAfterFinished": 60}, a_life),
    "activeDeadlineSeconds": ({"activeDeadlineSeconds": 60}, a_life),
    "cleanPodPolicy": ({"cleanPodPolicy": "All"}, a_life),
    "master.resources.requests": ({"master": {"resources": {"requests": {"cpu": "2"}}}}, master),
    "master.resources.limits": ({"master": {"resources": {"limits": {"memory": "4Gi"}}}}, master),
    "master.journal.size": ({"master": {"journal": {"size": "2Gi"}}}, objects),
    "master.journal.storageClassName": ({"master": {"journal": {"storageClassName": "fast"}}}, objects),
    "master.maxRestarts": ({"master": {"maxRestarts": 1}}, restarts),
    "master.options": ({"master": {"options": {"hang_downtime": "2"}}}, master),
    "master.serviceAccountName": ({"master": {"serviceAccountName": "own"}}, objects),
    "gang.scheduler": ({"gang": {"scheduler": "volcano"}}, pods),
    "gang.minMember": ({"gang": {"scheduler": "volcano", "minMember": 1}}, objects),
    "network.policy": ({"network": {"policy": True}}, objects),
    "network.tlsSecretName": ({"network": {"tlsSecretName": "tls"}}, pods),
    "disruptionBudget": ({"disruptionBudget": False}, objects),
    "faultyHosts": ({"faultyHosts": "Cordon"}, fleet),
    "replicaSpecs.*.replicas": ({"replicas": 7}, fleet),
    "replicaSpecs.*.minReplicas": ({"minReplicas": 1}, pods),
    "replicaSpecs.*.maxReplicas": ({"maxReplicas": 9}, pods),
    "replicaSpecs.*.standby": ({"standby": 1}, fleet),
    "replicaSpecs.*.restartCount": ({"restartCount": 1}, fleet),
    "replicaSpecs.*.autoScale": ({"autoScale": False}, scaled),
    "replicaSpecs.*.priority": ({"priority": "0.5"}, fleet),
    "replicaSpecs.*.priorityClassName": ({"priorityClassName": "training"}, pods),
    "replicaSpecs.*.criticalNodes": ({"criticalNodes": "all"}, fleet),
    "replicaSpecs.*.batchScheduler": ({"batchScheduler": "volcano"}, pods),
    "replicaSpecs.*.BatchScheduler": ({"BatchScheduler": "volcano"}, pods),
    "replicaSpecs.*.template.metadata": ({"template": {"metadata": {"labels": {"a": "b"}}, **template()}}, pods),
    "replicaSpecs.*.template.spec.containers": ({"template": template({"name": "main", "image": "other"})}, pods),
}
UNUSED: dict[str, Json] = {
    "enableElasticScheduling": {"enableElasticScheduling": False},
    "enableDynamicSharding": {"enableDynamicSharding": False},
    "replicaSpecs.*.restartTimeout": {"restartTimeout": 30},
    "replicaSpecs.*.restartPolicy": {"restartPolicy": "Always"},
}
NAMES_ALONE = {"envs.name"}
"""Written, and overruled by the key: `envs` is a map."""


def made_with(path: str, change: Json | None) -> ElasticJob:
    worker: Json = {"replicas": 4, "template": template()}
    spec: Json = {"distributionStrategy": "AllreduceStrategy", "replicaSpecs": {"worker": worker}}
    if path.startswith("master.journal."):
        spec["master"] = {"journal": {}}
    if path == "gang.minMember":
        spec["gang"] = {"scheduler": "volcano"}
    if change is not None:
        (worker if path.startswith("replicaSpecs.") else spec).update(copy.deepcopy(change))
    uid = f"{path}-{change is not None}"
    _SPECS[uid] = spec
    return as_job(job_body(uid=uid, **copy.deepcopy(spec)))


@pytest.mark.parametrize("path", SEEN)
def test_a_field_does_something(path: str) -> None:
    change, observer = SEEN[path]
    plain, changed = made_with(path, None), made_with(path, change)
    before, after = observer(plain), observer(changed)
    assert _without_uids(before) != _without_uids(after)


@pytest.mark.parametrize("path", UNUSED)
def test_a_field_without_effect_is_named_in_the_status_and_in_the_docs(path: str) -> None:
    told = unused_fields(made_with(path, UNUSED[path]))
    assert path.replace("*", "worker") in told
    assert unused_fields(made_with(path, None)) == ""
    assert f"`{path.replace('*', '<type>')}`" in REFERENCE.read_text()


def test_no_field_of_a_job_is_left_out() -> None:
    assert set(leaves(schema_of("elasticjobs")["properties"]["spec"])) == {*SEEN, *UNUSED, *NAMES_ALONE}


def leaves(schema: Json, path: str = "") -> Iterator[str]:
    """Paths of what a person writes: maps and lists of plain values, and templates, count as one."""
    inner = schema.get("additionalProperties")
    if inner is not None and "properties" in inner:
        yield from leaves(inner, f"{path}.*" if path == "replicaSpecs" else path)
        return
    properties = schema.get("properties") or schema.get("items", {}).get("properties")
    if properties is None or path.endswith(".containers"):
        yield path
        return
    for name, each in properties.items():
        yield from leaves(each, f"{path}.{name}" if path else name)


def _without_uids(value: object) -> str:
    text = str(value)
    for uid in _SPECS:
        text = text.replace(uid, "UID")
    return text


# Plans.

LABELS = {"elasticjob.dlrover/name": "demo", "scale-type": "manual"}


def plan(**spec: Any) -> PlanObject:
    body = {"metadata": {"name": "p", "labels": LABELS}, "spec": spec}
    return decode(PlanObject, json.dumps(body).encode())


def told(**spec: Any) -> str:
    """What comes of a plan: its commands and a note, or why not."""
    job = as_job(job_body(replicaSpecs={"worker": {"replicas": 4, "template": template()}}))
    try:
        return str(orders.plan_of(plan(**spec), job, Strategy.ALLREDUCE))
    except ConfigError as error:
        return str(error)


SIX = {"worker": {"replicas": 6}}
PLANNED: dict[str, tuple[Json, Json]] = {
    "replicaResourceSpecs.replicas": (
        {"replicaResourceSpecs": {"worker": {"replicas": 5}}},
        {"replicaResourceSpecs": SIX},
    ),
    "replicaResourceSpecs.resource": (
        {"replicaResourceSpecs": SIX},
        {"replicaResourceSpecs": {"worker": {"replicas": 6, "resource": {"cpu": 4}}}},
    ),
    "createPods": ({"replicaResourceSpecs": SIX}, {"replicaResourceSpecs": SIX, "createPods": [{"name": "a"}]}),
    "removePods": ({"replicaResourceSpecs": SIX}, {"replicaResourceSpecs": SIX, "removePods": [{"name": "a"}]}),
    "migratePods.name": (
        {"migratePods": [{"name": "demo-edljob-ps-1"}]},
        {"migratePods": [{"name": "demo-edljob-ps-2"}]},
    ),
    "migratePods.id": ({"migratePods": [{"id": 1}]}, {"migratePods": [{"id": 2}]}),
    "migratePods.resource": (
        {"migratePods": [{"id": 1, "resource": {"cpu": 1}}]},
        {"migratePods": [{"id": 1, "resource": {"cpu": 2}}]},
    ),
}
UNUSED_IN_PLANS = ("psHosts", "migratePods.type", "migratePods.rankIndex", "migratePods.service")


@pytest.mark.parametrize("path", PLANNED)
def test_a_field_of_a_plan_does_something(path: str) -> None:
    plain, changed = PLANNED[path]
    assert told(**plain) != told(**changed)


def test_the_owner_of_a_plan_counts_where_no_label_names_the_job() -> None:
    unnamed = {"metadata": {"name": "p", "labels": {"scale-type": "manual"}}, "spec": {"ownerJob": "demo"}}
    assert orders.is_for(decode(PlanObject, json.dumps(unnamed).encode()), "demo")


def test_no_field_of_a_plan_is_left_out() -> None:
    found = set(leaves(schema_of("scaleplans")["properties"]["spec"]))
    pods_of_masters = {path for path in found if path.startswith(("createPods", "removePods"))}
    assert found - pods_of_masters == {*PLANNED, *UNUSED_IN_PLANS, "ownerJob"} - {"createPods", "removePods"}
    documented = REFERENCE.read_text()
    for path in UNUSED_IN_PLANS:
        assert f"`{path}`" in documented, path
