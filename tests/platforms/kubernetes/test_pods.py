"""From launches and templates to pods: what is added, what stays, and what is refused."""

from __future__ import annotations

import copy

import msgspec
import pytest

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.exits import identity_of
from dlrover.platforms.kubernetes.objects import Pod, decode
from dlrover.platforms.kubernetes.pods import GRACE, LOST_NODE, MAX_AVOIDED, PodJob, PodType, pod_of
from dlrover.platforms.kubernetes.quantities import quantity, resource_of
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.fleet import LaunchNode, NodeType, Resource, Strategy
from dlrover.protocol.messages.identity import PlatformId

TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "trainer:1", "command": ["dlrover-run", "train.py"]}]}}


def job(template=TEMPLATE, **more) -> PodJob:
    types = {NodeType.WORKER: PodType(template=template, count=4)}
    return PodJob(**{"name": "j", "uid": "u-1", "namespace": "ns", "types": types, **more})


def launch(**more) -> LaunchNode:
    values = {"id": PlatformId(7), "node_type": NodeType.WORKER, "rank": 3, "name": "j-worker-7", **more}
    return LaunchNode(**values)


def main_of(pod):
    return next(each for each in pod["spec"]["containers"] if each["name"] == "main")


def variables(pod) -> dict[str, str]:
    return {each["name"]: each.get("value", "by reference") for each in main_of(pod)["env"]}


def with_container(**more):
    return {"spec": {"containers": [{"name": "main", **more}]}}


def test_a_pod_has_its_name_labels_owner_and_the_launch_that_made_it():
    pod = pod_of(launch(relaunch_count=2, environ={"SECRET": "x"}), job())
    metadata = pod["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("j-edljob-worker-7", "ns")
    assert metadata["labels"] == {
        "app": "dlrover",
        "elasticjob.dlrover/name": "j",
        "elasticjob.dlrover/uid": "u-1",
        "elasticjob.dlrover/replica-type": "worker",
        "elasticjob.dlrover/replica-index": "7",
        "elasticjob.dlrover/rank-index": "3",
        "elasticjob.dlrover/relaunch-count": "2",
    }
    [owner] = metadata["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
        "ElasticJob",
        "u-1",
        True,
        True,
    )
    noted = msgspec.json.decode(metadata["annotations"][names.LAUNCH], type=LaunchNode)
    assert noted == launch(relaunch_count=2), "all of the intent but its environment"
    assert variables(pod)["SECRET"] == "x"


def test_the_label_counts_evictions_and_the_budget_does_not() -> None:
    pod = pod_of(launch(relaunch_count=1, num_former=3), job())
    assert pod["metadata"]["labels"]["elasticjob.dlrover/relaunch-count"] == "3"  # type: ignore[index]
    assert identity_of(decode(Pod, msgspec.json.encode(pod))).relaunch_count == 1  # type: ignore[union-attr]


def test_the_environment_is_that_of_every_platform_and_ours_comes_last():
    given = [{"name": "NODE_RANK", "value": "99"}, {"name": "OWN", "value": "$(SHARED)"}]
    pod = pod_of(launch(), job(with_container(env=given), envs={"SHARED": {"value": "s"}}, token_secret="t"))
    found = variables(pod)
    assert list(found)[:2] == ["SHARED", "OWN"], "a variable may refer to those above it"
    expected = {
        "SHARED": "s",
        "OWN": "$(SHARED)",
        "POD_NAME": "by reference",
        "POD_IP": "by reference",
        "NODE_IP": "by reference",
        "ELASTIC_JOB_NAME": "j",
        "JOB_UID": "u-1",
        "DLROVER_MASTER_ADDR": "elasticjob-j-dlrover-master:50001",
        "DLROVER_NODE_ID": "7",
        "DLROVER_NODE_GROUP": "-1",
        "NODE_TYPE": "worker",
        "NODE_ID": "7",
        "NODE_NUM": "4",
        "NODE_RANK": "3",
        "WORKER_TYPE": "worker",
        "WORKER_ID": "7",
        "WORKER_NUM": "4",
        "WORKER_RANK": "3",
        "WORLD_SIZE": "4",
        "RANK": "3",
        "MONITOR_ENABLED": "true",
        "GRPC_ENABLE_FORK_SUPPORT": "false",
        "PET_JOB_TOKEN_FILE": "/var/run/dlrover/token/token",
    }
    assert found == expected
    assert len(main_of(pod)["env"]) == len(found), "no name twice"


def test_only_all_reduce_jobs_get_the_names_of_pytorch_jobs():
    assert "WORLD_SIZE" not in variables(pod_of(launch(), job(strategy=Strategy.PS)))


def test_a_replacement_and_an_elastic_job_are_told_so():
    found = variables(pod_of(launch(relaunch_count=1), job(nnodes="2:4")))
    assert (found["RELAUNCHED_POD"], found["PET_NNODES"]) == ("true", "2:4")


def test_what_the_user_wrote_stays():
    template = {
        "metadata": {"labels": {"team": "a", "app": "theirs"}, "annotations": {"gang": "g"}},
        "spec": {
            "restartPolicy": "Always",
            "schedulerName": "volcano",
            "terminationGracePeriodSeconds": 600,
            "automountServiceAccountToken": True,
            "tolerations": [{"operator": "Exists"}],
            "hostname": "h",
            "containers": [
                {"name": "proxy", "image": "p"},
                {
                    "name": "main",
                    "lifecycle": {"preStop": {"exec": {"command": ["save"]}}},
                    "volumeMounts": [{"name": "mine", "mountPath": "/dev/shm"}],
                },
            ],
            "volumes": [{"name": "mine", "emptyDir": {}}],
        },
    }
    before = copy.deepcopy(template)
    pod = pod_of(launch(), job(template))
    assert template == before, "the template itself is never changed"
    spec = pod["spec"]
    assert (spec["schedulerName"], spec["terminationGracePeriodSeconds"], spec["hostname"]) == ("volcano", 600, "h")
    assert spec["automountServiceAccountToken"] is True
    assert spec["tolerations"] == [{"operator": "Exists"}], "it tolerates everything, for ever"
    assert spec["volumes"] == [{"name": "mine", "emptyDir": {}}]
    assert spec["containers"][0] == {"name": "proxy", "image": "p"}
    assert main_of(pod)["lifecycle"] == {"preStop": {"exec": {"command": ["save"]}}}
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["app"] == "dlrover"
    assert pod["metadata"]["annotations"]["gang"] == "g"
    assert spec["restartPolicy"] == "Never", "the master replaces nodes, the kubelet does not"


def test_a_silent_template_gets_defaults():
    spec = pod_of(launch(), job(token_secret="elasticjob-j-token"))["spec"]
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert spec["terminationGracePeriodSeconds"] == GRACE
    assert (spec["hostname"], spec["subdomain"]) == ("j-edljob-worker-7", "elasticjob-j-nodes")
    assert [(each["key"], each["tolerationSeconds"]) for each in spec["tolerations"]] == [
        ("node.kubernetes.io/not-ready", LOST_NODE),
        ("node.kubernetes.io/unreachable", LOST_NODE),
    ]
    assert spec["volumes"] == [
        {"name": "dlrover-shm", "emptyDir": {"medium": "Memory"}},
        {"name": "dlrover-token", "secret": {"secretName": "elasticjob-j-token", "defaultMode": 0o440}},
    ]
    assert {"name": "dlrover-token", "mountPath": "/var/run/dlrover/token", "readOnly": True} in spec["containers"][0][
        "volumeMounts"
    ]


@pytest.mark.parametrize(
    ("resources", "wanted", "expected"),
    [
        pytest.param({}, Resource(), None, id="no size"),
        pytest.param(
            {},
            Resource(cpu=2.5, memory_mb=512, gpus=1, gpu_type="nvidia.com/gpu"),
            {
                "requests": {"cpu": "2.5", "memory": "512Mi", "nvidia.com/gpu": "1"},
                "limits": {"cpu": "2.5", "memory": "512Mi", "nvidia.com/gpu": "1"},
            },
            id="a bare template gets both",
        ),
        pytest.param(
            {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
            Resource(cpu=0.5, memory_mb=1024),
            {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
            id="its own size changes nothing",
        ),
        pytest.param(
            {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
            Resource(cpu=1, memory_mb=1536),
            {"requests": {"cpu": "1", "memory": "1536Mi"}, "limits": {"memory": "3072Mi"}},
            id="the limit grows with the request, and a cpu without limit stays so",
        ),
        pytest.param(
            {"limits": {"cpu": "4", "nvidia.com/gpu": 8}},
            Resource(cpu=2, gpus=8, gpu_type="nvidia.com/gpu"),
            {"requests": {"cpu": "2"}, "limits": {"cpu": "2", "nvidia.com/gpu": 8}},
            id="limits alone are requests, too",
        ),
    ],
)
def test_the_main_container_gets_the_size_of_the_intent(resources, wanted, expected):
    template = with_container(**({"resources": resources} if resources else {}))
    assert main_of(pod_of(launch(resource=wanted), job(template))).get("resources") == expected


def test_hosts_are_avoided_in_every_alternative_of_the_users_affinity():
    terms = [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["old"]}]},
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    template = {"spec": {**TEMPLATE["spec"], "affinity": {"nodeAffinity": required, "podAffinity": {}}}}
    pod = pod_of(launch(avoid_hosts=("bad-1", "bad-2")), job(template))
    avoid = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in ("bad-1", "bad-2")]
    affinity = pod["spec"]["affinity"]
    found = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert found == [{**terms[0], "matchFields": avoid}, {"matchFields": [terms[1]["matchFields"][0], *avoid]}]
    assert affinity["podAffinity"] == {}


def test_hosts_are_avoided_without_any_affinity_of_the_user_and_not_too_many():
    hosts = tuple(f"h{number}" for number in range(100))
    pod = pod_of(launch(avoid_hosts=hosts), job())
    [term] = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert [each["values"] for each in term["matchFields"]] == [[host] for host in hosts[:MAX_AVOIDED]]
    assert "affinity" not in pod_of(launch(avoid_hosts=hosts), job(avoids_hosts=False))["spec"]


def test_priorities_become_classes_and_a_class_of_the_type_wins():
    assert pod_of(launch(priority="high"), job())["spec"]["priorityClassName"] == "high"
    types = {NodeType.WORKER: PodType(template=TEMPLATE, priority_class="training")}
    assert pod_of(launch(priority="high"), job(types=types))["spec"]["priorityClassName"] == "training"


def test_groups_become_labels():
    labels = pod_of(launch(group=2), job(num_groups=4))["metadata"]["labels"]
    assert (labels["scheduling/rack-group"], labels["scheduling/rack-group-num"]) == ("2", "4")


@pytest.mark.parametrize("node_type", [NodeType.CHIEF, NodeType.EVALUATOR])
def test_chief_and_evaluator_fall_back_to_the_workers_template(node_type):
    pod = pod_of(launch(node_type=node_type), job())
    assert pod["metadata"]["name"] == f"j-edljob-{node_type.value}-7"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ({"spec": {}}, "at least one container"),
        ({"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}, r"several containers \(a, b\).*`main`"),
        ({"spec": "x"}, "`spec` must be an object"),
        (with_container(resources={"requests": {"cpu": "much"}}), "'much' is not a resource quantity"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_for_good(template, what):
    with pytest.raises(Rejected, match=what) as caught:
        pod_of(launch(resource=Resource(cpu=1)), job(template))
    assert caught.value.code == "bad-template"


def test_a_type_without_a_template_is_refused_for_good():
    with pytest.raises(Rejected, match="no template for nodes of the type ps"):
        pod_of(launch(node_type=NodeType.PS), job())


@pytest.mark.parametrize(
    ("text", "number"),
    [("500m", 0.5), (2, 2.0), ("4Gi", 4 * 2**30), ("1e3", 1000.0), ("2k", 2000.0), ("0", 0.0), ("100Mi", 100 * 2**20)],
)
def test_quantities_are_read_as_kubernetes_writes_them(text, number):
    assert quantity(text) == number


@pytest.mark.parametrize("text", ["", "x", "1.2.3", "nan", "inf", "-1", "1 GB", None])
def test_other_texts_are_no_quantities(text):
    with pytest.raises(ConfigError, match="not a resource quantity"):
        quantity(text)


def test_a_containers_requests_are_read_as_a_resource():
    found = resource_of({"cpu": "1500m", "memory": "1.5Gi", "ephemeral-storage": "2Gi", "huawei.com/ascend910": "8"})
    assert found == Resource(cpu=1.5, memory_mb=1536, gpus=8, gpu_type="huawei.com/ascend910")
