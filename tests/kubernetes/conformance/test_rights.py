"""
Who may do what, asked of the server itself: the master of a job, a person who submits jobs, and one who only looks at them.

The operator runs with its published role, bound in one namespace alone. What a right allows is tried: any answer but 403 means yes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.conformance.client import Answer, Client, Json, job
from tests.kubernetes.conformance.conftest import define
from tests.kubernetes.conformance.test_access import RBAC, token
from tests.kubernetes.servers import Server

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "deploy"
JOBS = "elastic.iml.github.io/v1alpha1/elasticjobs"
PLANS = "elastic.iml.github.io/v1alpha1/scaleplans"
LEDGER = "elasticjob-demo-ledger"
CLUSTER_WIDE = ("nodes", "namespaces", f"{RBAC}/clusterroles", f"{RBAC}/clusterrolebindings")
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")
ASKED = (
    *(("pods", name, sub) for name in ("none",) for sub in ("", "log", "exec", "eviction", "status")),
    *(("configmaps", name, "") for name in (LEDGER, "none")),
    *((JOBS, name, sub) for name in ("demo", "none") for sub in ("", "status", "scale")),
    *((PLANS, "none", sub) for sub in ("", "status")),
    *((plural, "none", "") for plural in ("secrets", "services", "events", "resourcequotas", "serviceaccounts")),
    *((plural, "none", "") for plural in ("persistentvolumeclaims", *CLUSTER_WIDE)),
    *((f"{RBAC}/{plural}", "none", "") for plural in ("roles", "rolebindings")),
    ("coordination.k8s.io/v1/leases", "none", ""),
    ("policy/v1/poddisruptionbudgets", "none", ""),
    ("networking.k8s.io/v1/networkpolicies", "none", ""),
)
"""Resource, name, sub-resource."""
MASTER = {
    ("pods", "none", ""): {"get", "list", "watch", "create", "delete"},
    ("configmaps", LEDGER, ""): {"get", "list", "watch", "update"},
    (JOBS, "demo", ""): {"get", "list", "watch"},
    (JOBS, "demo", "status"): {"get", "patch"},
    (PLANS, "none", ""): {"get", "list", "watch", "patch"},
    (PLANS, "none", "status"): {"get", "patch", "update"},
    ("resourcequotas", "none", ""): {"list"},
    ("events", "none", ""): {"create"},
}
"""The whole of it. Design, section 10."""
PLANNER = MASTER | {
    ("pods", "none", ""): {"get", "list", "watch"},
    (PLANS, "none", ""): {"get", "list", "watch", "create", "patch", "delete"},
}
"""Of a master that leaves its pods to the operator."""
EDITOR = {
    **{(JOBS, name, ""): set(VERBS) for name in ("demo", "none")},
    **{(JOBS, name, "scale"): {"get", "update", "patch"} for name in ("demo", "none")},
    **{(JOBS, name, "status"): {"get"} for name in ("demo", "none")},
    (PLANS, "none", ""): set(VERBS),
    (PLANS, "none", "status"): {"get"},
    ("pods", "none", ""): {"get", "list", "watch"},
    ("pods", "none", "log"): {"get"},
    ("events", "none", ""): {"get", "list", "watch"},
}
VIEWER = {key: verbs & {"get", "list", "watch"} for key, verbs in EDITOR.items() if key[2] != "scale"}

Rights = dict[tuple[str, str, str], set[str]]


async def rights_of(user: Client, *, namespace: str | None = None) -> Rights:
    """What this user may do, by trying. Nothing is changed: creates are trials, and what is to be changed does not exist."""
    turns = asyncio.Semaphore(8)

    async def tried(plural: str, name: str, sub: str, verb: str) -> tuple[tuple[str, str, str], str, int]:
        space = "" if plural in CLUSTER_WIDE else namespace
        async with turns:
            return (plural, name, sub), verb, await _try(user, plural, name, sub, verb, space)

    asked = [
        tried(plural, name, sub, verb)
        for plural, name, sub in ASKED
        for verb in VERBS
        if not (sub and verb in ("list", "watch", "delete"))
        and not (sub in ("log", "exec") and verb not in ("get", "create"))
    ]
    found: Rights = {}
    for key, verb, status in await asyncio.gather(*asked):
        if status != 403:
            found.setdefault(key, set()).add(verb)
    return found


async def _try(user: Client, plural: str, name: str, sub: str, verb: str, namespace: str | None) -> int:
    path = user.path(plural, name, sub=sub, namespace=namespace)
    body: Json = {"metadata": {"name": name}}
    only = {"fieldSelector": f"metadata.name={name}"}
    match verb:
        case "get":
            answer = await user.call("GET", path)
        case "list":
            answer = await user.call("GET", user.path(plural, namespace=namespace), **only)
        case "watch":
            query = {**only, "watch": True, "timeoutSeconds": 1}
            answer = await user.call("GET", user.path(plural, namespace=namespace), **query)
        case "create":
            where = path if sub else user.path(plural, namespace=namespace)
            answer = await user.call("POST", where, body, dryRun="All")
        case "update":
            answer = await user.call("PUT", path, body, dryRun="All")
        case "patch":
            query = {"dryRun": "All"}
            answer = await user.call("PATCH", path, {}, kind="application/merge-patch+json", **query)
        case _:
            answer = await user.call("DELETE", path, dryRun="All")
    assert answer.status != 401, f"{verb} {path}: {answer}"
    return answer.status


async def person(api: Client, name: str, role: str) -> Client:
    """A user of the namespace, as an account: with the published role and nothing else."""
    await api.create("serviceaccounts", {"metadata": {"name": name}})
    await bind(api, name, role)
    return api.as_user(await token(api, name))


async def bind(api: Client, account: str, role: str) -> None:
    body = {
        "metadata": {"name": account},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": api.namespace}],
    }
    made = await api.create(f"{RBAC}/rolebindings", body)
    assert made.status == 201, made


@pytest.fixture
async def published(api: Client) -> Client:
    """The definitions and roles as `kubectl apply -k deploy` makes them."""
    for path in sorted((DEPLOY / "crds").glob("*.yaml")):
        await define(api, yaml.safe_load(path.read_text()))
    for path in sorted((DEPLOY / "roles").glob("*.yaml")):
        for body in yaml.safe_load_all(path.read_text()):
            made = await api.create(f"{RBAC}/clusterroles", body, namespace="")
            assert made.status in (201, 409), made
    return api


@pytest.fixture
async def operator(published: Client, server: Server, tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """With its role, in this namespace alone."""
    api = published
    await api.create("serviceaccounts", {"metadata": {"name": "operator"}})
    await bind(api, "operator", "dlrover-manager-role")
    config = yaml.safe_load(server.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": await token(api, "operator")}
    path = tmp_path / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "dlrover.operator", "--kubeconfig", str(path), "--namespace", api.namespace]
    command += ["--metrics-bind-address", "0", "--health-probe-bind-address", "0"]
    environ = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    with (tmp_path / "operator.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY, stdout=log, stderr=log, env=environ)
    yield process
    process.terminate()
    await process.wait()


async def said(api: Client, name: str, reason: str) -> None:
    def is_said(answer: Answer) -> bool:
        conditions = answer.body.get("status", {}).get("conditions", [])
        return any(each["type"] == "Valid" and each["reason"] == reason for each in conditions)

    await api.soon(lambda: api.get(JOBS, name), is_said)


@pytest.mark.parametrize(("mode", "rights"), [("pyk8s", MASTER), ("k8s", PLANNER)])
async def test_a_master_may_do_what_the_design_lists_and_nothing_else(
    operator: asyncio.subprocess.Process, published: Client, mode: str, rights: Rights
) -> None:
    """No secrets, no exec, no nodes, and of config maps and jobs its own alone."""
    api = published
    settings = {"options": {"platform": mode}}
    made = await api.create(JOBS, job("demo", distributionStrategy="AllreduceStrategy", master=settings))
    assert made.status == 201, made
    masters = lambda: api.get("pods", "elasticjob-demo-dlrover-master-0")  # noqa: E731
    pod = (await api.soon(masters, lambda answer: answer.status == 200)).body
    account = pod["spec"]["serviceAccountName"]
    assert account == "elasticjob-demo-master"
    master = api.as_user(await token(api, account))
    await api.soon(lambda: master.get("pods"), lambda answer: answer.status == 200)
    await api.soon(lambda: master.get("configmaps", LEDGER), lambda answer: answer.status == 200)
    assert await rights_of(master) == rights
    elsewhere = await rights_of(master, namespace="default")
    assert elsewhere == {}, "in this namespace alone"


async def test_a_person_who_may_submit_jobs_gains_nothing_beyond_running_pods(
    operator: asyncio.subprocess.Process, published: Client
) -> None:
    api = published
    alice = await person(api, "alice", "dlrover-elasticjob-editor-role")
    bob = await person(api, "bob", "dlrover-elasticjob-viewer-role")
    for user in (alice, bob):
        await api.soon(lambda user=user: user.get(JOBS), lambda answer: answer.status == 200)  # type: ignore[misc]
    assert await rights_of(alice) == EDITOR
    assert await rights_of(bob) == VIEWER
    assert await rights_of(alice, namespace="default") == {}

    # A job cannot borrow the rights of an account that its owner of the namespace did not open for masters.
    await api.create("serviceaccounts", {"metadata": {"name": "deployer"}})
    borrowed = job("borrowed", master={"serviceAccountName": "deployer"})
    assert (await alice.create(JOBS, borrowed)).status == 201
    await said(api, "borrowed", "ServiceAccountNotAllowed")
    template = {"spec": {"serviceAccountName": "deployer", "containers": [{"name": "main", "image": "x"}]}}
    worker = job("demo")["spec"]["replicaSpecs"]["worker"]
    renamed = job("renamed", replicaSpecs={"worker": worker, "dlrover-master": {"template": template}})
    assert (await alice.create(JOBS, renamed)).status == 201
    masters = lambda: api.get("pods", "elasticjob-renamed-dlrover-master-0")  # noqa: E731
    pod = (await api.soon(masters, lambda answer: answer.status == 200)).body
    assert pod["spec"]["serviceAccountName"] == "elasticjob-renamed-master"

    # Nor mark machines where the operator was not told to.
    assert (await alice.create(JOBS, job("marking", faultyHosts="Cordon"))).status == 201
    await said(api, "marking", "CordonNotAllowed")
    for name in ("borrowed", "marking"):
        assert (await api.get("pods", f"elasticjob-{name}-dlrover-master-0")).status == 404

    # What the operator made for the job is not the person's to read or change.
    assert (await alice.get("secrets", "elasticjob-renamed-token")).status == 403
    stolen = {"status": {"cordonHosts": ["some-machine"]}}
    assert (await alice.patch(JOBS, "renamed", stolen, sub="status")).status == 403
    assert (await alice.patch(JOBS, "renamed", stolen)).status == 200  # pruned: the status has its own door
    assert "cordonHosts" not in (await api.get(JOBS, "renamed")).body.get("status", {})


async def test_the_operator_may_bind_the_roles_of_masters_and_no_other(
    operator: asyncio.subprocess.Process, published: Client
) -> None:
    api = published
    user = api.as_user(await token(api, "operator"))
    await api.soon(lambda: user.get("pods"), lambda answer: answer.status == 200)
    subject = {"kind": "ServiceAccount", "name": "operator", "namespace": api.namespace}
    group = "rbac.authorization.k8s.io"
    for role, expected in (
        ("dlrover-master", 201),
        ("dlrover-master-plans", 201),
        ("cluster-admin", 403),
        ("dlrover-elasticjob-editor-role", 403),
    ):
        reference = {"apiGroup": group, "kind": "ClusterRole", "name": role}
        body = {"metadata": {"name": f"to-{role}"}, "roleRef": reference, "subjects": [subject]}
        answer = await user.create(f"{RBAC}/rolebindings", body)
        assert answer.status == expected, (role, answer)
