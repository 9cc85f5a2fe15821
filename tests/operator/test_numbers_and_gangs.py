"""What follows the numbers of a job: its disruption budget and its gang. And what it may do to machines, its deadline, its TLS."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.operator.actions import CordonMachine, ObjectKind
from dlrover.operator.checks import first_pods
from dlrover.operator.decide import decide
from dlrover.operator.master_pod import master_pod
from dlrover.operator.observations import OperatorSettings
from dlrover.operator.timestamps import text_of
from dlrover.platforms.kubernetes.elastic_job import ElasticJob
from dlrover.platforms.kubernetes.objects import decode
from tests.operator.model import MACHINE, SETTINGS, ModelCluster, job_body, make_job, template

BUDGET = (ObjectKind.DISRUPTION_BUDGET, "elasticjob-demo-workers")
VOLCANO = (ObjectKind.VOLCANO_GROUP, "elasticjob-demo")
COSCHEDULING = (ObjectKind.COSCHEDULING_GROUP, "elasticjob-demo")


def workers(replicas: int, **more: Any) -> dict[str, Any]:
    return {"worker": {"replicas": replicas, "template": template(), **more}}


def running(**spec: Any) -> ModelCluster:
    settings = replace(SETTINGS, allow_cordon=frozenset({"team"}))
    cluster = ModelCluster(job_body(**spec), settings=settings)
    cluster.run()
    cluster.start(cluster.master())
    cluster.run()
    return cluster


def edited(cluster: ModelCluster, **worker: Any) -> None:
    cluster.body["spec"]["replicaSpecs"]["worker"] |= worker
    cluster.body["metadata"]["generation"] += 1
    cluster.run()


def test_the_budget_follows_the_minimum_and_the_number_of_workers() -> None:
    cluster = running(replicaSpecs=workers(4, minReplicas=2))
    bounds = lambda: {name: cluster.others[BUDGET]["spec"].get(name) for name in ("minAvailable", "maxUnavailable")}  # noqa: E731
    assert bounds() == {"minAvailable": 2, "maxUnavailable": None}
    edited(cluster, minReplicas=3)
    assert bounds() == {"minAvailable": 3, "maxUnavailable": None}
    # `minAvailable: 3` of 3 pods would let no drain ever go on.
    edited(cluster, replicas=3)
    assert bounds() == {"minAvailable": None, "maxUnavailable": 1}
    assert cluster.decide().actions == ()


def test_a_person_who_edits_the_budget_is_not_contradicted() -> None:
    cluster = running(replicaSpecs=workers(4, minReplicas=2))
    cluster.others[BUDGET]["spec"]["minAvailable"] = 4
    assert cluster.decide().actions == ()


def test_without_a_budget_none_is_made() -> None:
    assert BUDGET not in running(disruptionBudget=False).others


@pytest.mark.parametrize(
    ("given", "key", "labels", "annotations", "scheduler"),
    [
        (
            {"gang": {"scheduler": "volcano"}},
            VOLCANO,
            {},
            {"scheduling.k8s.io/group-name": "elasticjob-demo"},
            "volcano",
        ),
        (
            {"gang": {"scheduler": "coscheduling"}},
            COSCHEDULING,
            {"scheduling.x-k8s.io/pod-group": "elasticjob-demo"},
            {},
            "scheduler-plugins-scheduler",
        ),
        (
            {"replicaSpecs": workers(4, minReplicas=2, batchScheduler="volcano")},
            VOLCANO,
            {},
            {"scheduling.k8s.io/group-name": "elasticjob-demo"},
            "volcano",
        ),
        (
            {"replicaSpecs": workers(4, minReplicas=2, BatchScheduler="volcano")},
            VOLCANO,
            {},
            {"scheduling.k8s.io/group-name": "elasticjob-demo"},
            "volcano",
        ),
    ],
)
def test_a_gang_is_a_group_of_the_job_and_every_pod_names_it(
    given: dict[str, Any], key: Any, labels: dict[str, str], annotations: dict[str, str], scheduler: str
) -> None:
    spec = {"replicaSpecs": workers(4, minReplicas=2), **given}
    cluster = running(**spec)
    group = cluster.others[key]
    assert (group["kind"], group["spec"]) == ("PodGroup", {"minMember": 2})
    assert group["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    (pod,) = first_pods(make_job(**spec))
    assert pod["spec"]["schedulerName"] == scheduler  # type: ignore[index,call-overload]
    assert labels.items() <= pod["metadata"]["labels"].items()  # type: ignore[index,call-overload,union-attr]
    assert annotations.items() <= pod["metadata"]["annotations"].items()  # type: ignore[index,call-overload,union-attr]
    (master,) = cluster.masters()
    assert "schedulerName" not in cluster.pods[master]["spec"], "the master must run before it can ask for pods"
    edited(cluster, minReplicas=3)
    assert group["spec"] == {"minMember": 3}


def test_a_given_member_number_queue_and_class_of_a_gang_count() -> None:
    metadata = {"annotations": {"scheduling.volcano.sh/queue-name": "research"}}
    cluster = running(
        metadata=metadata,
        gang={"scheduler": "volcano", "minMember": 3},
        replicaSpecs=workers(4, priorityClassName="high"),
    )
    assert cluster.others[VOLCANO]["spec"] == {"minMember": 3, "queue": "research", "priorityClassName": "high"}


def test_the_pods_of_all_types_are_one_gang() -> None:
    specs = {**workers(4, minReplicas=2), "ps": {"replicas": 3, "template": template()}}
    spec = {"distributionStrategy": "ParameterServerStrategy", "gang": {"scheduler": "volcano"}, "replicaSpecs": specs}
    assert running(**spec).others[VOLCANO]["spec"] == {"minMember": 5}
    assert {pod["spec"]["schedulerName"] for pod in first_pods(make_job(**spec))} == {"volcano"}  # type: ignore[index,call-overload]


def test_the_scheduler_of_a_template_stays() -> None:
    spec = {"gang": {"scheduler": "coscheduling"}}
    own = {"worker": {"replicas": 2, "template": template(schedulerName="default-scheduler")}}
    (pod,) = first_pods(make_job(replicaSpecs=own, **spec))
    assert pod["spec"]["schedulerName"] == "default-scheduler"  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    ("gang", "known", "reason", "part"),
    [
        ({}, {"volcano"}, "InvalidGang", "spec.gang.scheduler is missing"),
        ({"scheduler": "other"}, {"volcano"}, "InvalidGang", "other is not a gang scheduler"),
        ({"scheduler": "volcano"}, set(), "GangSchedulerMissing", "no podgroups.scheduling.volcano.sh"),
        ({"scheduler": "volcano", "minMember": 9}, {"volcano"}, "InvalidGang", "it can never start"),
    ],
)
def test_a_gang_that_would_wait_for_ever_is_refused_with_a_sentence(
    gang: dict[str, Any], known: set[str], reason: str, part: str
) -> None:
    cluster = ModelCluster(job_body(gang=gang, replicaSpecs=workers(4)))
    settings = OperatorSettings(master_image="m", gang_schedulers=frozenset(known))
    decision = decide(cluster.job, cluster.seen(), cluster.now, settings)
    said = json.dumps([str(action) for action in decision.actions])
    assert reason in said
    assert part in said
    assert "CreateObject" not in said


def test_a_faulty_machine_is_marked_once_and_only_if_the_job_has_a_pod_there() -> None:
    cluster = running(faultyHosts="Cordon")
    cluster.body["status"]["cordonHosts"] = [MACHINE, "of-other-jobs"]
    cluster.run()
    assert cluster.cordoned == [MACHINE]
    cluster.run()
    assert cluster.cordoned == [MACHINE], "a person may have taken the mark away"
    avoiding = running(faultyHosts="Avoid")
    avoiding.body["status"]["cordonHosts"] = [MACHINE]
    assert not any(isinstance(action, CordonMachine) for action in avoiding.decide().actions)


def test_machines_are_marked_only_in_namespaces_that_the_operator_names() -> None:
    cluster = ModelCluster(job_body(faultyHosts="Cordon"))
    decision = decide(cluster.job, cluster.seen(), cluster.now, OperatorSettings(master_image="m"))
    assert "CordonNotAllowed" in str(decision.actions)


def test_a_suspension_does_not_count_for_the_deadline() -> None:
    cluster = running(activeDeadlineSeconds=3600)
    cluster.wait(3000)
    cluster.body["spec"]["suspend"] = True
    cluster.body["metadata"]["generation"] += 1
    cluster.settle(hours=0.1)
    for name in list(cluster.pods):
        cluster.vanish(name)
    cluster.run()
    assert cluster.status.phase == "Suspended"
    cluster.wait(100_000)
    cluster.body["spec"]["suspend"] = False
    cluster.body["metadata"]["generation"] += 1
    cluster.run()
    cluster.start(cluster.master(1))
    cluster.run()
    assert cluster.status.phase == "Running"
    assert cluster.status.start_time == text_of(cluster.now)
    cluster.wait(3601)
    cluster.run()
    assert (cluster.status.phase, cluster.status.reason) == ("Failed", "DeadlineExceeded")


def test_with_tls_the_master_has_the_key_and_nodes_have_what_they_check_it_with() -> None:
    job = make_job(network={"tlsSecretName": "demo-tls"})
    pod: Any = master_pod(job, 0, "m")
    command = " ".join(pod["spec"]["containers"][0]["command"])
    assert "--tls_cert /var/run/dlrover/tls/tls.crt --tls_key /var/run/dlrover/tls/tls.key" in command
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert volumes["dlrover-tls"]["secret"] == {"secretName": "demo-tls", "defaultMode": 0o440}
    worker: Any
    (worker,) = first_pods(job)
    container = worker["spec"]["containers"][0]
    environ = {each["name"]: each.get("value") for each in container["env"]}
    assert environ["PET_TLS_CA"] == "/var/run/dlrover/tls/ca.crt"
    volumes = {each["name"]: each for each in worker["spec"]["volumes"]}
    assert volumes["dlrover-tls"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}], "never the key"


def test_the_status_of_the_master_names_machines_in_the_definition_too() -> None:
    body = job_body()
    body["status"] = {"cordonHosts": ["a"]}
    assert decode(ElasticJob, json.dumps(body).encode()).status.cordon_hosts == ("a",)
