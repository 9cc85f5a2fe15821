"""Pods: defaults, checks, status, binding, eviction."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes.conformance.client import Client, Json, fresh, pod

LABEL_WORDS = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an "
    "alphanumeric character"
)


async def test_a_new_pod_is_pending_and_has_defaults(api: Client) -> None:
    made = await api.create("pods", {**pod("a"), "status": {"phase": "Running", "podIP": "10.0.0.1"}})
    assert made.status == 201, made
    assert made.body["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
    spec = made.body["spec"]
    wanted = {
        "dnsPolicy": "ClusterFirst",
        "enableServiceLinks": True,
        "preemptionPolicy": "PreemptLowerPriority",
        "priority": 0,
        "restartPolicy": "Never",
        "schedulerName": "default-scheduler",
        "securityContext": {},
        "terminationGracePeriodSeconds": 30,
    }
    assert {key: spec.get(key) for key in wanted} == wanted
    container = spec["containers"][0]
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert container["terminationMessagePath"] == "/dev/termination-log"
    assert container["terminationMessagePolicy"] == "File"
    assert container["resources"] == {}
    assert made.meta["generation"] == 1


async def test_a_pod_leaves_machines_that_are_lost_after_300_s(api: Client) -> None:
    made = await api.create("pods", pod("a"))
    tolerations = {one["key"]: one for one in made.body["spec"]["tolerations"]}
    assert set(tolerations) == {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    assert {one["tolerationSeconds"] for one in tolerations.values()} == {300}
    mine = {
        "key": "node.kubernetes.io/unreachable",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 30,
    }
    made = await api.create("pods", pod("b", spec={"tolerations": [mine]}))
    tolerations = {one["key"]: one["tolerationSeconds"] for one in made.body["spec"]["tolerations"]}
    assert tolerations == {"node.kubernetes.io/not-ready": 300, "node.kubernetes.io/unreachable": 30}


@pytest.mark.parametrize(
    ("resources", "quality"),
    [
        ({"requests": {"cpu": "1"}}, "Burstable"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, "Guaranteed"),
        ({"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "1Gi"}}, "Burstable"),
    ],
)
async def test_the_quality_of_service_follows_resources(api: Client, resources: Json, quality: str) -> None:
    body = pod("a")
    body["spec"]["containers"][0]["resources"] = resources
    made = await api.create("pods", body)
    assert made.body["status"]["qosClass"] == quality
    kept = made.body["spec"]["containers"][0]["resources"]
    for name, value in resources.get("limits", {}).items():
        assert kept["requests"].get(name) == resources.get("requests", {}).get(name, value), (
            "limits are the default of requests"
        )


def changed(**fields: Any) -> Json:
    body = pod("a")
    for path, value in fields.items():
        at: Any = body["spec"]
        *steps, last = path.split("__")
        for step in steps:
            at = at[int(step)] if isinstance(at, list) else at.setdefault(step, {})
        if value is None:
            at.pop(last)
        else:
            at[last] = value
    return body


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (changed(containers=None), 'Pod "a" is invalid: spec.containers: Required value'),
        (changed(containers=[]), 'Pod "a" is invalid: spec.containers: Required value'),
        (changed(containers__0__image=None), 'Pod "a" is invalid: spec.containers[0].image: Required value'),
        (changed(containers__0__name=None), 'Pod "a" is invalid: spec.containers[0].name: Required value'),
        (
            changed(containers__0__name="My_Main"),
            f'Pod "a" is invalid: spec.containers[0].name: Invalid value: "My_Main": {LABEL_WORDS}',
        ),
        (
            changed(restartPolicy="Sometimes"),
            'Pod "a" is invalid: spec.restartPolicy: Unsupported value: "Sometimes": supported values: "Always", "OnFailure", "Never"',
        ),
        (
            changed(containers__0__imagePullPolicy="Maybe"),
            'spec.containers[0].imagePullPolicy: Unsupported value: "Maybe": supported values: "Always", "IfNotPresent", "Never"',
        ),
        (
            changed(containers__0__resources={"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}),
            'Pod "a" is invalid: spec.containers[0].resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1',
        ),
        (
            changed(containers__0__resources={"requests": {"memory": "-1"}}),
            'spec.containers[0].resources.requests[memory]: Invalid value: "-1": must be greater than or equal to 0',
        ),
        (
            changed(containers__0__resources={"requests": {"nvidia.com/gpu": "1"}}),
            "spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources",
        ),
        (
            changed(containers__0__resources={"limits": {"gpu": "1"}}),
            'spec.containers[0].resources.limits[gpu]: Invalid value: "gpu": must be a standard resource type or fully qualified',
        ),
        (
            changed(containers__0__volumeMounts=[{"name": "none", "mountPath": "/x"}]),
            'Pod "a" is invalid: spec.containers[0].volumeMounts[0].name: Not found: "none"',
        ),
        (changed(hostname="A.b"), f'spec.hostname: Invalid value: "A.b": {LABEL_WORDS}'),
        (changed(nodeSelector={"a b": "c"}), 'spec.nodeSelector: Invalid value: "a b": name part must consist of'),
    ],
)
async def test_an_invalid_pod_is_refused_with_the_field(api: Client, body: Json, sentence: str) -> None:
    made = await api.create("pods", body)
    assert (made.status, made.reason) == (422, "Invalid")
    assert sentence in made.message


async def test_a_negative_grace_counts_as_one_second(api: Client) -> None:
    made = await api.create("pods", changed(terminationGracePeriodSeconds=-1))
    assert (made.status, made.body["spec"]["terminationGracePeriodSeconds"]) == (201, 1)


async def test_two_containers_of_one_name_are_invalid(api: Client) -> None:
    body = pod("a")
    body["spec"]["containers"] *= 2
    made = await api.create("pods", body)
    assert 'spec.containers[1].name: Duplicate value: "main"' in made.message


async def test_a_node_field_takes_exactly_one_value(api: Client) -> None:
    def by_name(values: list[str]) -> Json:
        term = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": values}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        return changed(affinity={"nodeAffinity": required})

    made = await api.create("pods", by_name(["one", "two"]))
    assert made.status == 422
    assert "must be only one value when `operator` is 'In' or 'NotIn' for node field selector" in made.message
    assert (await api.create("pods", by_name(["one"]))).status == 201


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            changed(containers__0__env=[{"name": "A", "value": 1}]),
            "json: cannot unmarshal number into Go struct field EnvVar.spec.containers.env.value of type string",
        ),
        (
            changed(containers="main"),
            "json: cannot unmarshal string into Go struct field PodSpec.spec.containers of type []v1.Container",
        ),
        (
            changed(terminationGracePeriodSeconds="5"),
            "json: cannot unmarshal string into Go struct field PodSpec.spec.terminationGracePeriodSeconds of type int64",
        ),
        (
            changed(containers__0__resources={"limits": {"cpu": "many"}}),
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
        ),
    ],
)
async def test_a_value_of_the_wrong_type_is_refused(api: Client, body: Json, sentence: str) -> None:
    made = await api.create("pods", body)
    assert (made.status, made.reason) == (400, "BadRequest")
    assert made.message == f'Pod in version "v1" cannot be handled as a Pod: {sentence}'


async def test_unknown_fields_are_dropped_with_a_warning_and_refused_if_asked(api: Client) -> None:
    body = changed(containers__0__imagee="x")
    made = await api.create("pods", body)
    assert made.status == 201
    assert "imagee" not in made.body["spec"]["containers"][0]
    assert 'unknown field \\"spec.containers[0].imagee\\"' in made.headers["Warning"]
    made = await api.create("pods", {**body, "metadata": {"name": "b"}}, fieldValidation="Strict")
    assert made.status == 400
    assert made.message == (
        'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "spec.containers[0].imagee"'
    )


async def test_the_spec_of_a_pod_is_fixed(api: Client) -> None:
    await api.create("pods", pod("a"))
    moved = await api.patch("pods", "a", {"spec": {"nodeName": "elsewhere"}})
    assert (moved.status, moved.reason) == (422, "Invalid")
    assert 'Pod "a" is invalid: spec: Forbidden: pod updates may not change fields other than' in moved.message
    labelled = await api.patch("pods", "a", {"metadata": {"labels": {"x": "y"}}})
    assert (labelled.status, labelled.meta["generation"]) == (200, 1)


async def test_status_and_spec_have_paths_of_their_own(api: Client) -> None:
    made = await api.create("pods", pod("a"))
    await api.patch("pods", "a", {"status": {"phase": "Running"}})
    assert (await api.get("pods", "a")).body["status"]["phase"] == "Pending"
    status = await api.patch("pods", "a", {"status": {"phase": "Running"}, "spec": {"nodeName": "x"}}, sub="status")
    assert status.status == 200
    assert status.body["status"]["phase"] == "Running"
    assert "nodeName" not in status.body["spec"]
    late = {**made.body, "status": {"phase": "Failed"}}
    assert (await api.replace("pods", late, sub="status")).status == 409
    assert (await api.get("pods", "a", sub="status")).body["status"]["phase"] == "Running"


async def test_a_binding_gives_a_pod_its_node_once(api: Client) -> None:
    await api.create("pods", pod("a"))
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "a"}, "target": {"kind": "Node", "name": "n1"}}
    bound = await api.create("pods", body, name="a", sub="binding")
    assert (bound.status, bound.body["status"]) == (201, "Success")
    found = await api.get("pods", "a")
    assert found.body["spec"]["nodeName"] == "n1"
    conditions = {one["type"]: one["status"] for one in found.body["status"]["conditions"]}
    assert conditions == {"PodScheduled": "True"}
    again = await api.create("pods", body, name="a", sub="binding")
    assert (again.status, again.reason) == (409, "Conflict")
    assert 'pod a is already assigned to node "n1"' in again.message


async def test_an_eviction_marks_and_deletes(api: Client) -> None:
    await api.create("pods", pod("a", spec={"nodeName": "n1"}))
    await api.patch("pods", "a", {"status": {"phase": "Running"}}, sub="status")
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "a"},
        "deleteOptions": {"gracePeriodSeconds": 7},
    }
    evicted = await api.create("pods", body, name="a", sub="eviction")
    assert (evicted.status, evicted.body["status"]) == (201, "Success")
    found = await api.get("pods", "a")
    assert found.meta["deletionGracePeriodSeconds"] == 7
    condition = next(one for one in found.body["status"]["conditions"] if one["type"] == "DisruptionTarget")
    assert (condition["status"], condition["reason"]) == ("True", "EvictionByEvictionAPI")


@pytest.mark.usefixtures("controllers")
async def test_a_budget_refuses_an_eviction(api: Client) -> None:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "b"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"x": "y"}}},
    }
    await api.create("pods", pod("a", spec={"nodeName": "n1"}, labels={"x": "y"}))
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    await api.patch("pods", "a", {"status": ready}, sub="status")
    await api.create("policy/v1/poddisruptionbudgets", budget)
    await api.soon(
        lambda: api.get("policy/v1/poddisruptionbudgets", "b"),
        lambda answer: answer.body.get("status", {}).get("currentHealthy") == 1,
    )
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "a"}}
    refused = await api.create("pods", body, name="a", sub="eviction")
    assert (refused.status, refused.reason) == (429, "TooManyRequests")
    assert refused.message == "Cannot evict pod as it would violate the pod's disruption budget."
    cause = refused.body["details"]["causes"][0]
    assert cause["message"] == "The disruption budget b needs 1 healthy pods and has 1 currently"


async def test_a_missing_priority_class_is_forbidden(api: Client) -> None:
    made = await api.create("pods", changed(priorityClassName="none-such"))
    assert (made.status, made.reason) == (403, "Forbidden")
    assert made.message == 'pods "a" is forbidden: no PriorityClass with name none-such was found'


async def test_a_priority_class_gives_its_value(api: Client) -> None:
    name = fresh("class")
    plural = "scheduling.k8s.io/v1/priorityclasses"
    await api.create(plural, {"metadata": {"name": name}, "value": 77}, namespace="")
    made = await api.soon(
        lambda: api.create("pods", changed(priorityClassName=name), dryRun="All"), lambda answer: answer.status == 201
    )
    assert made.body["spec"]["priority"] == 77
    await api.delete(plural, name, namespace="")


@pytest.mark.usefixtures("controllers")
async def test_a_full_quota_is_told_with_numbers(api: Client) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "2", "requests.cpu": "3"}}}
    await api.create("resourcequotas", quota)
    await api.soon(lambda: api.get("resourcequotas", "q"), lambda answer: "used" in answer.body.get("status", {}))
    resources = {"requests": {"cpu": "1"}}
    for name in ("a", "b"):
        body = {**changed(containers__0__resources=resources), "metadata": {"name": name}}
        assert (await api.create("pods", body)).status == 201
    body = {**changed(containers__0__resources=resources), "metadata": {"name": "c"}}
    made = await api.create("pods", body)
    assert (made.status, made.reason) == (403, "Forbidden")
    assert made.message == 'pods "c" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
    made = await api.create("pods", {**pod("d")})
    assert made.message == 'pods "d" is forbidden: failed quota: q: must specify requests.cpu for: main'
    used = (await api.get("resourcequotas", "q")).body["status"]["used"]
    assert used == {"pods": "2", "requests.cpu": "2"}
    await api.delete("pods", "a")
    body["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "2500m"}}
    made = await api.soon(lambda: api.create("pods", body), lambda answer: "pods=" not in answer.message)
    assert made.message == (
        'pods "c" is forbidden: exceeded quota: q, requested: requests.cpu=2500m, used: requests.cpu=1, limited: requests.cpu=3'
    )


async def test_a_missing_account_is_forbidden(api: Client) -> None:
    if not api.server.has_accounts:
        pytest.skip("needs controller-manager")
    made = await api.create("pods", changed(serviceAccountName="none"))
    assert (made.status, made.reason) == (403, "Forbidden")
    assert made.message == (
        f'pods "a" is forbidden: error looking up service account {api.namespace}/none: serviceaccount "none" not found'
    )


async def test_a_token_is_mounted_unless_the_pod_says_no(api: Client) -> None:
    if not api.server.has_accounts:
        pytest.skip("needs controller-manager")
    made = await api.create("pods", pod("a"))
    mount = made.body["spec"]["containers"][0]["volumeMounts"][0]
    assert mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    volume = next(one for one in made.body["spec"]["volumes"] if one["name"] == mount["name"])
    kinds = [next(iter(source)) for source in volume["projected"]["sources"]]
    assert kinds == ["serviceAccountToken", "configMap", "downwardAPI"]
    bare = await api.create("pods", pod("b", spec={"automountServiceAccountToken": False}))
    assert "volumes" not in bare.body["spec"]
