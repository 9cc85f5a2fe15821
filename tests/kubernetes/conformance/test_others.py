"""Leases, nodes, services, events, claims: what the operator, the master and kubelets use beside pods."""

from __future__ import annotations

import pytest

from tests.kubernetes.conformance.client import STRATEGIC, Client, config_map, fresh, pod

LEASES = "coordination.k8s.io/v1/leases"


async def test_a_lease_is_taken_by_the_first_and_kept_by_versions(api: Client) -> None:
    spec = {"holderIdentity": "one", "leaseDurationSeconds": 15, "renewTime": "2026-01-02T03:04:05.000000Z"}
    body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "leader"}, "spec": spec}
    first = await api.create(LEASES, body)
    assert (first.status, first.body["spec"]) == (201, spec)
    assert (await api.create(LEASES, {**body, "spec": {**spec, "holderIdentity": "two"}})).status == 409
    renewed = await api.replace(LEASES, {**first.body, "spec": {**spec, "renewTime": "2026-01-02T03:04:06.000000Z"}})
    assert renewed.status == 200
    stolen = await api.replace(LEASES, {**first.body, "spec": {**spec, "holderIdentity": "two"}})
    assert (stolen.status, stolen.reason) == (409, "Conflict")


async def test_a_node_has_no_namespace_and_a_status_of_its_own(api: Client) -> None:
    name = fresh("node")
    made = await api.create("nodes", {"metadata": {"name": name}, "status": {"capacity": {"cpu": "4"}}}, namespace="")
    assert made.status == 201, made
    assert "namespace" not in made.meta
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "4"}}}
    status = await api.patch("nodes", name, ready, STRATEGIC, sub="status", namespace="")
    assert status.status == 200
    assert status.body["status"]["allocatable"] == {"cpu": "4"}
    cordoned = await api.patch("nodes", name, {"spec": {"unschedulable": True}}, namespace="")
    assert (cordoned.status, cordoned.body["spec"]["unschedulable"]) == (200, True)
    found = await api.get("nodes", namespace="", fieldSelector=f"spec.unschedulable=true,metadata.name={name}")
    assert len(found.body["items"]) == 1
    gone = await api.delete("nodes", name, namespace="")
    assert (gone.status, gone.body["status"]) == (200, "Success")


async def test_a_service_gets_an_address_unless_it_is_headless(api: Client) -> None:
    made = await api.create(
        "services", {"metadata": {"name": "a"}, "spec": {"ports": [{"port": 50001}], "selector": {"x": "y"}}}
    )
    assert made.status == 201, made
    assert made.body["spec"]["clusterIP"].startswith("10.96.")
    assert made.body["spec"]["ports"] == [{"port": 50001, "protocol": "TCP", "targetPort": 50001}]
    assert made.body["spec"]["type"] == "ClusterIP"
    headless = await api.create(
        "services", {"metadata": {"name": "b"}, "spec": {"clusterIP": "None", "selector": {"x": "y"}}}
    )
    assert (headless.status, headless.body["spec"]["clusterIP"]) == (201, "None")
    bare = await api.create("services", {"metadata": {"name": "c"}, "spec": {}})
    assert (bare.status, bare.message) == (422, 'Service "c" is invalid: spec.ports: Required value')
    long = await api.create("services", {"metadata": {"name": "x" * 64}, "spec": {"ports": [{"port": 1}]}})
    assert long.status == 422
    assert "must be no more than 63 characters" in long.message


async def test_an_address_of_a_service_stays(api: Client) -> None:
    made = await api.create("services", {"metadata": {"name": "a"}, "spec": {"ports": [{"port": 1}]}})
    changed = await api.patch("services", "a", {"spec": {"selector": {"x": "z"}}})
    assert (changed.status, changed.body["spec"]["clusterIP"]) == (200, made.body["spec"]["clusterIP"])


async def test_events_are_selected_by_their_object(api: Client) -> None:
    for name in ("a", "b"):
        body = {
            "metadata": {"generateName": f"{name}."},
            "involvedObject": {"kind": "Pod", "name": name, "namespace": api.namespace},
            "reason": "Killed",
            "message": "it was killed",
            "type": "Warning",
            "source": {"component": "dlrover"},
        }
        made = await api.create("events", body)
        assert made.status == 201, made
    found = await api.get("events", fieldSelector="involvedObject.name=b,reason=Killed")
    assert [item["involvedObject"]["name"] for item in found.body["items"]] == ["b"]


async def test_a_claim_is_pending_until_it_is_bound(api: Client) -> None:
    spec = {"accessModes": ["ReadWriteOncePod"], "resources": {"requests": {"storage": "1Gi"}}}
    made = await api.create("persistentvolumeclaims", {"metadata": {"name": "a"}, "spec": spec})
    assert made.status == 201, made
    assert made.body["status"] == {"phase": "Pending"}
    assert made.body["spec"]["volumeMode"] == "Filesystem"
    assert made.meta["finalizers"] == ["kubernetes.io/pvc-protection"]


@pytest.mark.usefixtures("controllers")
async def test_a_claim_stays_while_a_pod_uses_it(api: Client) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    await api.create("persistentvolumeclaims", {"metadata": {"name": "a"}, "spec": spec})
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "a"}}
    await api.create("pods", pod("p", spec={"volumes": [volume], "nodeName": "n1"}))
    await api.delete("persistentvolumeclaims", "a")
    assert "deletionTimestamp" in (await api.get("persistentvolumeclaims", "a")).meta
    await api.delete("pods", "p", {"gracePeriodSeconds": 0})
    await api.soon(lambda: api.get("persistentvolumeclaims", "a"), lambda answer: answer.status == 404)


async def test_a_bad_quantity_is_refused(api: Client) -> None:
    made = await api.create("resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "many"}}})
    assert (made.status, made.reason) == (400, "BadRequest")
    assert made.message.startswith(
        'ResourceQuota in version "v1" cannot be handled as a ResourceQuota: quantities must match'
    )


async def test_a_budget_has_one_bound(api: Client) -> None:
    budget = {"metadata": {"name": "a"}, "spec": {"maxUnavailable": 1, "minAvailable": 1, "selector": {}}}
    made = await api.create("policy/v1/poddisruptionbudgets", budget)
    assert (made.status, made.reason) == (422, "Invalid")
    assert made.message.endswith("minAvailable and maxUnavailable cannot be both set")


async def test_a_budget_and_a_policy_count_generations(api: Client) -> None:
    budget = {"metadata": {"name": "a"}, "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"x": "y"}}}}
    made = await api.create("policy/v1/poddisruptionbudgets", budget)
    assert (made.status, made.meta["generation"]) == (201, 1)
    changed = await api.patch("policy/v1/poddisruptionbudgets", "a", {"spec": {"maxUnavailable": 2}})
    assert (changed.status, changed.meta["generation"]) == (200, 2)
    policy = {"metadata": {"name": "a"}, "spec": {"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]}}
    made = await api.create("networking.k8s.io/v1/networkpolicies", policy)
    assert (made.status, made.meta["generation"]) == (201, 1)
    assert made.body["spec"]["policyTypes"] == ["Ingress"]


async def test_an_unknown_format_of_a_body_is_refused(api: Client) -> None:
    made = await api.call("POST", api.path("configmaps"), b"a=b", kind="application/x-www-form-urlencoded")
    assert (made.status, made.reason) == (415, "UnsupportedMediaType")


async def test_yaml_is_a_format(api: Client) -> None:
    made = await api.call(
        "POST", api.path("configmaps"), b"metadata: {name: a}\ndata: {x: '1'}\n", kind="application/yaml"
    )
    assert (made.status, made.body["data"]) == (201, {"x": "1"})


@pytest.mark.parametrize(("method", "name"), [("PUT", ""), ("PATCH", ""), ("POST", "a")])
async def test_a_method_that_a_path_does_not_have_is_refused(api: Client, method: str, name: str) -> None:
    answer = await api.call(method, api.path("configmaps", name), config_map("a"))
    assert answer.status == 405


async def test_a_role_reference_is_fixed(api: Client) -> None:
    rbac = "rbac.authorization.k8s.io/v1"
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
    binding = {"metadata": {"name": "a"}, "roleRef": reference, "subjects": []}
    made = await api.create(f"{rbac}/rolebindings", binding)
    assert made.status == 201, made
    changed = await api.patch(f"{rbac}/rolebindings", "a", {"roleRef": {"name": "edit"}})
    assert (changed.status, changed.reason) == (422, "Invalid")
    assert "cannot change roleRef" in changed.message
