"""From ElasticJobs to fleets and pods: the rules of the original, and where ours differ."""

from __future__ import annotations

import msgspec
import pytest

from dlrover.platforms.kubernetes.elastic_job import ElasticJob
from dlrover.platforms.kubernetes.job.fleet import MasterWishes, fleet_of, pod_job_of
from dlrover.platforms.kubernetes.objects import decode
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Resource, Strategy


def template(*, restart: str = "Never", **requests: str) -> dict[str, object]:
    container = {"name": "main", "image": "i", "resources": {"requests": requests}}
    return {"spec": {"restartPolicy": restart, "containers": [container]}}


def job(*, metadata: dict[str, object] | None = None, **spec: object) -> ElasticJob:
    replicas = {"worker": {"replicas": 2, "template": template(cpu="500m", memory="1Gi")}}
    body = {
        "metadata": {"name": "j", "namespace": "ns", "uid": "u", **(metadata or {})},
        "spec": {"replicaSpecs": replicas, **spec},
    }
    return decode(ElasticJob, msgspec.json.encode(body))


def test_a_plain_job_becomes_a_fleet():
    assert fleet_of(job()) == FleetSpec(
        replicas={NodeType.WORKER: ReplicaSpec(count=2, resource=Resource(cpu=0.5, memory_mb=1024), max_relaunches=3)},
        strategy=Strategy.ALLREDUCE,
        remove_exited=False,
    )


def test_each_field_of_a_replica_counts():
    worker = {
        "replicas": 4,
        "template": template(**{"cpu": "2", "nvidia.com/gpu": "8"}),
        "restartCount": 2,
        "criticalNodes": "0:3",
        "priority": "0.5",
        "standby": 1,
    }
    found = fleet_of(job(replicaSpecs={"worker": worker}))
    assert found.replicas[NodeType.WORKER] == ReplicaSpec(
        count=4,
        resource=Resource(cpu=2.0, gpus=8, gpu_type="nvidia.com/gpu"),
        max_relaunches=2,
        critical="0:3",
        priority="0.5",
    )
    assert found.standby == 1


def test_limits_of_the_job_are_those_of_its_fleet_and_absent_ones_are_none():
    given = {"cpu": "64", "memory": "100Gi", "gpu": 16}
    assert fleet_of(job(resourceLimits=given)).limits == Resource(cpu=64, memory_mb=102400, gpus=16)
    assert fleet_of(job(resourceLimits={"nvidia.com/gpu": "4"})).limits == Resource(gpus=4, gpu_type="nvidia.com/gpu")
    assert fleet_of(job()).limits == Resource(), "the original has hidden limits of 100 cores and 4 accelerators"
    with pytest.raises(ConfigError, match=r"resourceLimits.*'many'"):
        fleet_of(job(resourceLimits={"cpu": "many"}))


def test_no_rank_gets_more_relaunches_than_the_original_gives():
    worker = {"replicas": 1, "template": template(), "restartCount": 99}
    assert fleet_of(job(replicaSpecs={"worker": worker})).replicas[NodeType.WORKER].max_relaunches == 5


@pytest.mark.parametrize(
    ("given", "types", "expected"),
    [
        ("", {"worker": 1}, Strategy.ALLREDUCE),
        ("", {"worker": 1, "ps": 1}, Strategy.PS),
        ("ParameterServerStrategy", {"worker": 1, "ps": 1}, Strategy.PS),
        ("AllreduceStrategy", {"worker": 1}, Strategy.ALLREDUCE),
    ],
)
def test_the_strategy_is_given_or_follows_from_the_types(given, types, expected):
    replicas = {name: {"replicas": count, "template": template()} for name, count in types.items()}
    assert fleet_of(job(distributionStrategy=given, replicaSpecs=replicas)).strategy is expected


@pytest.mark.parametrize(("policy", "expected"), [("Always", True), ("Never", False)])
def test_the_workers_restart_policy_decides_about_errors_of_the_script(policy, expected):
    replicas = {
        "worker": {"replicas": 1, "template": template(restart=policy)},
        "ps": {"replicas": 1, "template": template()},
    }
    found = job(distributionStrategy="ParameterServerStrategy", replicaSpecs=replicas)
    assert fleet_of(found).relaunch_always is expected
    assert fleet_of(found, MasterWishes(relaunches_errors=True)).relaunch_always is True


def test_the_masters_template_is_no_type_and_master_means_chief():
    replicas = {
        "dlrover-master": {"replicas": 1, "template": template()},
        "master": {"replicas": 1, "template": template()},
        "worker": {"replicas": 1, "template": template()},
    }
    assert set(fleet_of(job(replicaSpecs=replicas)).replicas) == {NodeType.CHIEF, NodeType.WORKER}


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (
            {"replicaSpecs": {"wroker": {"replicas": 1}}},
            r"replicaSpecs.wroker is not a type of node. The types are worker,",
        ),
        ({"replicaSpecs": {"chief": {}, "master": {}}}, "master and chief name the same type"),
        ({"distributionStrategy": "Magic"}, "distributionStrategy 'Magic' must be one of"),
        ({"optimizeMode": "auto"}, "optimizeMode 'auto' of the job j must be"),
        (
            {"replicaSpecs": {"worker": {"replicas": 1, "template": template(cpu="lots")}}},
            r"replicaSpecs.worker.template: 'lots' is not a resource quantity",
        ),
    ],
)
def test_a_job_that_makes_no_sense_is_refused_with_its_field(spec, what):
    with pytest.raises(ConfigError, match=what):
        fleet_of(job(**spec))


@pytest.mark.parametrize("mode", ["manunal", "mannual", "manual", "single-job", "cluster"])
def test_published_spellings_of_the_optimize_mode_are_taken(mode):
    assert fleet_of(job(optimizeMode=mode))


def test_the_masters_options_count_more_than_defaults():
    wishes = MasterWishes(pending_timeout=60.0, pending_strategy=2, group_affinity={0: 1, 1: 1})
    found = fleet_of(job(), wishes)
    assert (found.pending_timeout, found.pending_strategy, found.group_affinity) == (60.0, 2, {0: 1, 1: 1})
    assert pod_job_of(job(), found).num_groups == 2


def test_pods_have_in_common_what_the_job_says():
    worker = {
        "replicas": 3,
        "minReplicas": 2,
        "maxReplicas": 5,
        "template": template(),
        "priorityClassName": "training",
    }
    found = job(
        metadata={"labels": {"kueue.x-k8s.io/queue-name": "team-a"}},
        replicaSpecs={"worker": worker},
        envs={"A": {"value": "1"}},
        faultyHosts="Ignore",
    )
    pods = pod_job_of(found, fleet_of(found), token_secret="t")
    assert (pods.name, pods.uid, pods.namespace, pods.selector) == ("j", "u", "ns", "elasticjob.dlrover/uid=u")
    assert (pods.nnodes, pods.envs, pods.queue, pods.avoids_hosts) == ("2:5", {"A": {"value": "1"}}, "team-a", False)
    assert pods.types[NodeType.WORKER].priority_class == "training"
    assert pods.types[NodeType.WORKER].count == 3
