"""Jobs under a whole operator: from `kubectl apply` to the end, and everything that can be wrong with them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from dlrover.operator.actions import ObjectKind
from dlrover.operator.cluster_view import RESOURCES
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.api import (
    CLAIMS,
    CONFIG_MAPS,
    ELASTIC_JOBS,
    EVENTS,
    PODS,
    RESOURCE_QUOTAS,
    ROLE_BINDINGS,
    SCALE_PLANS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    ApiResource,
    Invalid,
    Page,
    PatchKind,
)
from dlrover.protocol.errors import Unavailable
from tests.kubernetes.operator.lab import BAD_JOBS, CRDS, NAMESPACE, Lab, job_body, master, read, taken, template

VOLCANO_GROUPS = RESOURCES[ObjectKind.VOLCANO_GROUP]
POD_GROUPS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{VOLCANO_GROUPS.plural}.{VOLCANO_GROUPS.group}"},
    "spec": {
        "group": VOLCANO_GROUPS.group,
        "scope": "Namespaced",
        "names": {"kind": VOLCANO_GROUPS.kind, "plural": VOLCANO_GROUPS.plural},
        "versions": [
            {
                "name": VOLCANO_GROUPS.version,
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
"""As much of volcano's as the operator needs."""
DONE = json.dumps({"stage": "succeeded", "reason": "Completed", "sentence": "All workers ended well."})
OURS = "app.kubernetes.io/name=elasticjob"


async def test_a_job_gets_its_objects_runs_and_ends(lab: Lab) -> None:
    await lab.define()
    await lab.start_operator("--master-image", "dlrover:test")
    await lab.apply(cleanPodPolicy="All")
    await lab.bring_up(master())
    await lab.phase_is("Running")
    assert await lab.names_of(SERVICES, labels=OURS) == ["elasticjob-demo-dlrover-master", "elasticjob-demo-nodes"]
    assert await lab.names_of(SECRETS, labels=OURS) == ["elasticjob-demo-token"]
    assert await lab.names_of(CONFIG_MAPS, labels=OURS) == ["elasticjob-demo-ledger"]
    assert await lab.names_of(SERVICE_ACCOUNTS, labels=OURS) == ["elasticjob-demo-master"]
    assert await lab.names_of(ROLE_BINDINGS, labels=OURS) == ["elasticjob-demo-master", "elasticjob-demo-own"]
    assert await lab.names_of(CLAIMS, labels=OURS) == []
    pod = await lab.pod(master())
    assert pod is not None
    main = pod["spec"]["containers"][0]
    assert main["image"] == "dlrover:test"
    assert main["command"][:10] == [
        *("python", "-m", "dlrover.python.master.main", "--platform", "pyk8s"),
        *("--namespace", NAMESPACE, "--job_name", "demo", "--port"),
    ]
    secret = read(taken(await lab.api.get(SECRETS, "elasticjob-demo-token", namespace=NAMESPACE)))
    assert len(base64.b64decode(secret["data"]["token"])) == 64

    async def is_counted() -> bool:
        status = (await lab.job())["status"]
        counts = status.get("replicaStatuses") or {}
        return counts.get("dlrover-master", {}).get("active") == 1 and status["status"]["replicaStatuses"] == counts

    await lab.until(is_counted, "the running master in status.replicaStatuses, and where old readers look")
    await lab.end_pod(master(), message=DONE)
    await lab.phase_is("Succeeded")
    await lab.until(lambda: _no_pod_stays(lab), "deletion of all pods")
    status = (await lab.job())["status"]
    assert status["reason"] == "Completed"
    assert status["completionTime"]
    old = {each["type"]: each["status"] for each in status["status"]["conditions"]}
    assert old == {"Created": "True", "Pending": "True", "Running": "False", "Succeeded": "True"}
    reasons = {read_event(event) for event in await _events(lab)}
    assert {"JobCreated", "JobPending", "JobRunning", "JobSucceeded"} <= reasons


async def _no_pod_stays(lab: Lab) -> bool:
    await lab.finish_deletions()
    return not await lab.names_of(PODS)


async def _events(lab: Lab) -> list[Any]:
    page = await lab.api.list_all(EVENTS, namespace=NAMESPACE)
    return [json.loads(bytes(item)) for item in page.items]  # type: ignore[union-attr]


def read_event(event: Any) -> str:
    assert event["involvedObject"]["kind"] == "ElasticJob"
    return str(event["reason"])


async def test_a_master_that_is_deleted_is_replaced_and_the_journal_is_kept_on_its_claim(lab: Lab) -> None:
    await lab.define()
    await lab.add_machine("machine-0")
    await lab.start_operator()
    await lab.apply(master={"journal": {"size": "1Gi"}})
    await lab.bring_up(master(), machine="machine-0")
    await lab.phase_is("Running")
    taken(await lab.api.delete(PODS, master(), namespace=NAMESPACE))  # it terminates, and no kubelet ends it
    await lab.bring_up(master(1))
    await lab.phase_is("Running")
    assert await lab.names_of(PODS) == [master(1)]
    assert (await lab.condition("JournalKept"))["status"] == "True"
    assert (await lab.job())["status"]["restarts"] == 1


async def test_a_master_on_a_silent_machine_is_replaced(lab: Lab) -> None:
    await lab.define()
    await lab.add_machine("machine-0")
    await lab.start_operator()
    await lab.apply(master={"journal": {}})
    await lab.bring_up(master(), machine="machine-0")
    await lab.phase_is("Running")
    await lab.set_ready("machine-0", False)
    await lab.has_pods(master(1))


@pytest.mark.parametrize(("spec", "part"), BAD_JOBS.values(), ids=BAD_JOBS)
async def test_a_bad_job_gets_a_sentence_and_no_pod(lab: Lab, spec: dict[str, Any], part: str) -> None:
    """Also where the definition is too old to refuse it."""
    await lab.define(with_rules=False)
    await lab.start_operator()
    name = spec.get("name", "demo")
    await lab.apply(**spec)

    async def told() -> bool:
        return part in (await lab.condition("Valid", name)).get("message", "")

    await lab.until(told, f"a sentence with {part!r}")
    assert (await lab.condition("Valid", name))["status"] == "False"
    assert (await lab.job(name))["status"]["phase"] == "Created"
    assert await lab.names_of(PODS) == []
    assert await lab.names_of(SERVICES, labels=OURS) == []
    assert [event["type"] for event in await _events(lab) if event["message"].find(part) >= 0] != []


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ({"replicaSpecs": {"wroker": {"template": template()}}}, "the types of replicas are"),
        (
            {"replicaSpecs": {"worker": {"template": template({"name": "a"}, {"name": "b"})}}},
            "several containers, none named main",
        ),
        ({"name": "x" * 38}, "at most 37 characters"),
        ({"replicaSpecs": {"worker": {"replicas": 2, "minReplicas": 3, "template": template()}}}, "minReplicas"),
        ({"replicaSpecs": {"worker": {"replicas": 2, "maxReplicas": 1, "template": template()}}}, "maxReplicas"),
        ({"replicaSpecs": {"worker": {"template": template()}, "dlrover-master": {"replicas": 2}}}, "at most 1"),
        ({"cleanPodPolicy": "Sometimes"}, "Sometimes"),
    ],
)
async def test_the_definition_refuses_a_bad_job_at_once(lab: Lab, spec: dict[str, Any], part: str) -> None:
    await lab.define()
    answer = await lab.try_to_apply(**spec)
    assert isinstance(answer, Invalid)
    assert part in answer.message


async def test_what_must_not_change_does_not(lab: Lab) -> None:
    await lab.define()
    await lab.start_operator()
    await lab.apply()
    await lab.bring_up(master())
    await lab.phase_is("Running")
    for patch, part in (
        ({"spec": {"managedBy": "another"}}, "managedBy cannot change"),
        ({"spec": {"distributionStrategy": "Local"}}, "distributionStrategy cannot change"),
    ):
        answer = await lab.api.patch(ELASTIC_JOBS, "demo", patch, namespace=NAMESPACE, kind=PatchKind.MERGE)
        assert isinstance(answer, Invalid), answer
        assert part in answer.message


async def test_a_priority_class_that_comes_later_starts_the_job(lab: Lab) -> None:
    """After at most 30 seconds, or at once when the job is edited."""
    await lab.define()
    await lab.start_operator()
    await lab.apply(replicaSpecs={"worker": {"priorityClassName": "urgent", "template": template()}})

    async def told() -> bool:
        return (await lab.condition("Valid")).get("status") == "False"

    await lab.until(told, "the refusal")
    body = {"metadata": {"name": "urgent"}, "value": 10}
    lab.server.cluster.create("priorityclasses", "", body, group="scheduling.k8s.io")
    await lab.edit("demo", {"spec": {"optimizeMode": "manual"}})
    await lab.has_pods(master())


async def test_a_job_made_anew_under_its_name_takes_nothing_of_the_former_one(lab: Lab) -> None:
    await lab.define()
    await lab.add_machine("machine-0")
    await lab.start_operator()
    first = await lab.apply()
    await lab.bring_up(master(), machine="machine-0")  # a pod on no machine would be gone at once
    await lab.phase_is("Running")
    secret = read(taken(await lab.api.get(SECRETS, "elasticjob-demo-token", namespace=NAMESPACE)))
    await lab.delete()
    second = await lab.apply()
    assert first["metadata"]["uid"] != second["metadata"]["uid"]

    async def old_master_terminates() -> bool:
        pod = await lab.pod(master())
        return pod is not None and "deletionTimestamp" in pod["metadata"]

    await lab.until(old_master_terminates, "deletion of the former master")

    async def waits() -> bool:
        return (await lab.condition("MasterReady")).get("reason") == "NameTaken"

    await lab.until(waits, "a sentence about the former master")
    assert (await lab.job())["status"]["phase"] == "Created"  # the former one's pod runs, and is not taken for ours
    await lab.finish_deletions()
    await lab.bring_up(master())
    await lab.phase_is("Running")
    for resource in (PODS, SERVICES, SECRETS, CONFIG_MAPS, SERVICE_ACCOUNTS, ROLE_BINDINGS):
        page = await lab.api.list_all(resource, namespace=NAMESPACE, labels=OURS)
        owners = {json.loads(bytes(item))["metadata"]["ownerReferences"][0]["uid"] for item in page.items}  # type: ignore[union-attr]
        assert owners == {second["metadata"]["uid"]}, resource.plural
    anew = read(taken(await lab.api.get(SECRETS, "elasticjob-demo-token", namespace=NAMESPACE)))
    assert anew["data"] != secret["data"]


@pytest.mark.parametrize("has_operator", [True, False])
async def test_nothing_is_left_of_a_deleted_job(lab: Lab, has_operator: bool) -> None:
    """Also while no operator runs: nothing has a finalizer of ours."""
    await lab.define()
    taken(await lab.api.create(CRDS, POD_GROUPS, namespace=None))
    await lab.until(lambda: _is_served(lab, VOLCANO_GROUPS), "groups of volcano")
    operator = await lab.start_operator()
    await lab.apply(master={"journal": {}}, network={"policy": True}, gang={"scheduler": "volcano"})
    await lab.bring_up(master())
    await lab.phase_is("Running")
    labels = {names.JOB_NAME: "demo", names.SCALE_TYPE: "manual"}
    plan = {
        "metadata": {"name": "five", "labels": labels},
        "spec": {"replicaResourceSpecs": {"worker": {"replicas": 5}}},
    }
    plan |= {"apiVersion": SCALE_PLANS.api_version, "kind": SCALE_PLANS.kind}
    taken(await lab.api.create(SCALE_PLANS, plan, namespace=NAMESPACE))
    await lab.until(lambda: _is_adopted(lab, "five"), "the plan goes with the job")
    kinds = [resource for kind, resource in RESOURCES.items() if kind is not ObjectKind.COSCHEDULING_GROUP]
    found = {resource.kind: await lab.names_of(resource, labels=f"{names.JOB_NAME}=demo") for resource in kinds}
    made = {kind for kind, listed in found.items() if listed}
    assert made == {resource.kind for resource in kinds} - {"ElasticJob"}, "the test sees each kind that a job can have"
    if not has_operator:
        await operator.stop()
    await lab.delete()

    async def is_empty() -> bool:
        await lab.finish_deletions()
        return not any([await lab.names_of(resource, labels=f"{names.JOB_NAME}=demo") for resource in kinds])

    await lab.until(is_empty, "deletion of everything")
    assert await lab.names_of(ELASTIC_JOBS) == []


async def _is_served(lab: Lab, resource: ApiResource) -> bool:
    try:
        return isinstance(await lab.api.list_page(resource, namespace=NAMESPACE, limit=1), Page)
    except Unavailable:
        return False


async def _is_adopted(lab: Lab, name: str) -> bool:
    plan = read(taken(await lab.api.get(SCALE_PLANS, name, namespace=NAMESPACE)))
    return bool(plan["metadata"].get("ownerReferences"))


async def test_an_ended_job_with_a_time_to_live_is_deleted(lab: Lab) -> None:
    await lab.define()
    await lab.start_operator()
    await lab.apply(ttlSecondsAfterFinished=1)
    await lab.bring_up(master())
    await lab.phase_is("Running")
    await lab.end_pod(master(), message=DONE)

    async def is_gone() -> bool:
        return await lab.names_of(ELASTIC_JOBS) == []

    await lab.until(is_gone, "deletion of the job")


async def test_a_quota_that_is_used_up_is_told_and_waited_for(lab: Lab) -> None:
    await lab.define()
    quota = {"metadata": {"name": "compute"}, "spec": {"hard": {"pods": "0"}}}
    lab.server.cluster.create("resourcequotas", NAMESPACE, quota)
    await lab.start_operator()
    await lab.apply()

    async def told() -> bool:
        return (await lab.condition("MasterReady")).get("reason") == "QuotaExceeded"

    await lab.until(told, "a sentence about the quota")
    assert (await lab.condition("Valid"))["status"] == "True"
    taken(await lab.api.delete(RESOURCE_QUOTAS, "compute", namespace=NAMESPACE))
    await lab.has_pods(master())


async def test_jobs_of_one_name_in_two_namespaces_do_not_meet(lab: Lab) -> None:

    await lab.define()
    lab.server.cluster.create("namespaces", "", {"metadata": {"name": "other"}})

    await lab.start_operator()
    await lab.apply()
    body = job_body()
    body["metadata"]["namespace"] = "other"
    taken(await lab.api.create(ELASTIC_JOBS, body, namespace="other"))

    async def both() -> bool:
        page = await lab.api.list_all(PODS, namespace=None)
        found = {json.loads(bytes(item))["metadata"]["namespace"] for item in page.items}  # type: ignore[union-attr]
        return found == {NAMESPACE, "other"}

    await lab.until(both, "a master in each namespace")
