"""Tokens and roles."""

from __future__ import annotations

import asyncio

from tests.kubernetes.conformance.client import WITHIN, Client, Json, config_map, pod

RBAC = "rbac.authorization.k8s.io/v1"


async def account(api: Client, name: str, rules: list[Json]) -> None:
    """A service account with these rights in its namespace."""
    await api.create("serviceaccounts", {"metadata": {"name": name}})
    role = {"apiVersion": RBAC, "kind": "Role", "metadata": {"name": name}, "rules": rules}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": api.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    binding = {
        "apiVersion": RBAC,
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "subjects": [subject],
        "roleRef": reference,
    }
    assert (await api.create(f"{RBAC}/roles", role)).status == 201
    assert (await api.create(f"{RBAC}/rolebindings", binding)).status == 201


async def token(api: Client, name: str, bound: Json | None = None) -> str:
    spec: Json = {"expirationSeconds": 3600}
    if bound is not None:
        spec["boundObjectRef"] = bound
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    answer = await api.create("serviceaccounts", body, name=name, sub="token")
    assert answer.status == 201, answer
    assert answer.body["status"]["expirationTimestamp"] > "2020"
    return str(answer.body["status"]["token"])


async def allowed(api: Client, user: Client) -> None:
    """Waits until the server has seen the roles."""
    await api.soon(lambda: user.get("configmaps"), lambda answer: answer.status == 200)


async def test_a_wrong_token_is_unauthorized(api: Client) -> None:
    answer = await api.as_user("wrong").get("configmaps")
    assert (answer.status, answer.reason, answer.message) == (401, "Unauthorized", "Unauthorized")


async def test_no_token_is_an_anonymous_user(api: Client) -> None:
    answer = await api.as_user("").get("configmaps")
    assert (answer.status, answer.reason) == (403, "Forbidden")
    assert answer.message == (
        'configmaps is forbidden: User "system:anonymous" cannot list resource "configmaps" in API group "" '
        f'in the namespace "{api.namespace}"'
    )


async def test_an_account_may_do_what_its_role_says(api: Client) -> None:
    rules = [
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "create"]},
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": ["mine"],
            "verbs": ["get", "watch", "update"],
        },
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
    ]
    await account(api, "worker", rules)
    user = api.as_user(await token(api, "worker"))
    await allowed(api, user)
    name = f"system:serviceaccount:{api.namespace}:worker"
    assert (await user.create("configmaps", config_map("mine"))).status == 201
    assert (await user.create("configmaps", config_map("other"))).status == 201
    assert (await user.get("configmaps", "mine")).status == 200
    refused = await user.get("configmaps", "other")
    assert refused.status == 403
    assert refused.message == (
        f'configmaps "other" is forbidden: User "{name}" cannot get resource "configmaps" in API group "" '
        f'in the namespace "{api.namespace}"'
    )
    assert (
        await user.get("configmaps", watch=True, timeoutSeconds=1, fieldSelector="metadata.name=mine")
    ).status == 200
    assert (await user.get("configmaps", watch=True, timeoutSeconds=1)).status == 403
    await api.create("pods", pod("a"))
    assert (await user.patch("pods", "a", {"status": {"phase": "Running"}}, sub="status")).status == 200
    assert (await user.patch("pods", "a", {"metadata": {"labels": {"x": "y"}}})).status == 403
    wide = await user.get("nodes", namespace="")
    assert wide.message == (
        f'nodes is forbidden: User "{name}" cannot list resource "nodes" in API group "" at the cluster scope'
    )


async def test_nobody_grants_more_than_they_have(api: Client) -> None:
    binding = {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["rolebindings"], "verbs": ["create"]}
    await account(api, "operator", [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}, binding])
    role = {"apiVersion": RBAC, "kind": "Role", "metadata": {"name": "power"}}
    await api.create(
        f"{RBAC}/roles", {**role, "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]}
    )
    user = api.as_user(await token(api, "operator"))
    await allowed(api, user)
    body = {
        "apiVersion": RBAC,
        "kind": "RoleBinding",
        "metadata": {"name": "x"},
        "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": api.namespace}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "power"},
    }
    refused = await user.create(f"{RBAC}/rolebindings", body)
    assert (refused.status, refused.reason) == (403, "Forbidden")
    assert "is attempting to grant RBAC permissions not currently held" in refused.message
    may_bind = {
        "apiGroups": ["rbac.authorization.k8s.io"],
        "resources": ["roles"],
        "resourceNames": ["power"],
        "verbs": ["bind"],
    }
    await account(
        api, "binder", [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}, binding, may_bind]
    )
    user = api.as_user(await token(api, "binder"))
    await allowed(api, user)
    assert (await user.create(f"{RBAC}/rolebindings", body)).status == 201


async def test_a_token_of_a_pod_dies_with_the_pods_object(api: Client) -> None:
    rights = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}]
    await account(api, "master", rights)
    made = await api.create("pods", pod("m", spec={"nodeName": "n1", "serviceAccountName": "master"}))
    assert made.status == 201, made
    bound = {"apiVersion": "v1", "kind": "Pod", "name": "m", "uid": made.meta["uid"]}
    user = api.as_user(await token(api, "master", bound))
    await allowed(api, user)
    await api.delete("pods", "m", {"gracePeriodSeconds": 30})
    assert (await user.get("configmaps")).status == 200, "a pod that terminates keeps its rights"
    await api.delete("pods", "m", {"gracePeriodSeconds": 0})
    began_at = asyncio.get_running_loop().time()
    late = await api.soon(lambda: user.get("configmaps"), lambda answer: answer.status != 200)
    assert late.status == 401
    assert asyncio.get_running_loop().time() - began_at < WITHIN


async def test_a_token_for_another_pod_of_that_name_is_refused(api: Client) -> None:
    await api.create("serviceaccounts", {"metadata": {"name": "x"}})
    await api.create("pods", pod("m", spec={"serviceAccountName": "x"}))
    bound = {"apiVersion": "v1", "kind": "Pod", "name": "m", "uid": "11111111-2222-3333-4444-555555555555"}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"boundObjectRef": bound}}
    answer = await api.create("serviceaccounts", body, name="x", sub="token")
    assert answer.status == 409
