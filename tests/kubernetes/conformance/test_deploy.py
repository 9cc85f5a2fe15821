"""What `kubectl apply -k deploy` and `helm install` would send is accepted by each API server, and is the same."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from dlrover.cli.brain.command import app as brain_app
from dlrover.core.fleet.commands import check_spec
from dlrover.operator.checks import problem_of, unused_fields
from dlrover.operator.observations import JobObjects, OperatorSettings
from dlrover.platforms.kubernetes.access import find_access
from dlrover.platforms.kubernetes.answers import PODS, ApiResource
from dlrover.platforms.kubernetes.api import ClusterApi, Conflict, FoundObject
from dlrover.platforms.kubernetes.elastic_job import ElasticJob
from dlrover.platforms.kubernetes.job.fleet import fleet_of
from dlrover.platforms.kubernetes.objects import decode
from dlrover.protocol.errors import Unavailable
from tests.kubernetes.servers import Server
from tools.render_chart import BRAIN_CHART, BRAIN_PLAIN, CHART, VERSIONS, helm, template

DEPLOY = Path(__file__).parents[3] / "deploy"
EXAMPLES = Path(__file__).parents[3] / "examples" / "kubernetes"
PLURALS = {
    "CustomResourceDefinition": ("customresourcedefinitions", False),
    "ClusterRole": ("clusterroles", False),
    "ClusterRoleBinding": ("clusterrolebindings", False),
    "Namespace": ("namespaces", False),
    "ServiceAccount": ("serviceaccounts", True),
    "Service": ("services", True),
    "Deployment": ("deployments", True),
    "Role": ("roles", True),
    "RoleBinding": ("rolebindings", True),
    "ConfigMap": ("configmaps", True),
}
FIRST = {"Namespace": 0, "ServiceAccount": 1}
"""What the server must have before it takes the others."""
FULL = (
    "controller.watchNamespace=default,controller.priorityClassName=system-cluster-critical,controller.replicas=2,"
    "cordon.namespaces={a,b},room.namespaces={a},topoMapper.topology_config=x,namespace.create=true,"
    "controller.extraArgs={--start-timeout=5}"
)
"""Every value of the chart at once."""
FULL_BRAIN = (
    "tls.secret=dlrover-brain-tls,extraArgs={--host=::},priorityClassName=system-cluster-critical,monitor.install=true,"
    "monitor.cluster=east,monitor.brain=brain.example:50001,monitor.caConfigMap=dlrover-brain-ca,retention.runs=30"
)
needs_helm = pytest.mark.skipif(
    not helm().exists(), reason="needs the package helm-binary, which `make setup` installs"
)


def objects() -> list[dict[str, Any]]:
    listed = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["resources"]
    return [body for path in listed for body in yaml.safe_load_all((DEPLOY / path).read_text())]


def test_the_kustomization_lists_every_manifest() -> None:
    listed = set(yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["resources"])
    found = {str(path.relative_to(DEPLOY)) for path in DEPLOY.glob("*/*.yaml") if path.parent != DEPLOY / "chart"}
    assert listed == found


@needs_helm
@pytest.mark.parametrize("version", VERSIONS)
def test_the_chart_renders_to_the_plain_manifests(version: str) -> None:
    """If this fails, run `python tools/render_chart.py`."""
    rendered = [body for body in yaml.safe_load_all(template(version=version)) if body]
    assert sorted(map(json.dumps, rendered)) == sorted(map(json.dumps, objects()))


def brain_objects() -> list[dict[str, Any]]:
    listed = yaml.safe_load((BRAIN_PLAIN / "kustomization.yaml").read_text())["resources"]
    return [body for path in listed for body in yaml.safe_load_all((BRAIN_PLAIN / path).read_text())]


def test_the_kustomization_of_brain_lists_every_manifest() -> None:
    listed = set(yaml.safe_load((BRAIN_PLAIN / "kustomization.yaml").read_text())["resources"])
    assert listed == {path.name for path in BRAIN_PLAIN.glob("*.yaml")} - {"kustomization.yaml"}


@needs_helm
@pytest.mark.parametrize("version", VERSIONS)
def test_the_chart_of_brain_renders_to_the_plain_manifests(version: str) -> None:
    """If this fails, run `python tools/render_chart.py`."""
    rendered = [body for body in yaml.safe_load_all(template(version=version, chart=BRAIN_CHART)) if body]
    assert sorted(map(json.dumps, rendered)) == sorted(map(json.dumps, brain_objects()))


@needs_helm
def test_without_the_monitor_brain_has_no_right_in_the_cluster() -> None:
    rendered = [body for body in yaml.safe_load_all(template(plain=False, chart=BRAIN_CHART)) if body]
    assert {body["kind"] for body in rendered} == {"ServiceAccount", "Service", "Deployment"}
    [account] = [body for body in rendered if body["kind"] == "ServiceAccount"]
    assert account["automountServiceAccountToken"] is False


def test_the_monitor_of_brain_may_list_and_watch_pods_and_machines_alone() -> None:
    [role] = [body for body in brain_objects() if body["kind"] == "ClusterRole"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["list", "watch"]}]


@pytest.mark.parametrize(
    "options", [pytest.param((), id="plain"), pytest.param(("--set", FULL_BRAIN), id="every-value", marks=needs_helm)]
)
def test_the_values_of_the_chart_of_brain_are_options_of_its_commands(options: tuple[str, ...]) -> None:
    wanted = yaml.safe_load_all(template(*options, plain=False, chart=BRAIN_CHART)) if options else brain_objects()
    commands = get_command(brain_app)
    assert isinstance(commands, TyperGroup)
    parsed: dict[str, dict[str, Any]] = {}
    for body in wanted:
        if body and body["kind"] == "Deployment":
            pod = body["spec"]["template"]["spec"]
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                *_, name = container["command"]
                command = commands.commands[name]
                parsed[name] = command.make_context(name, list(container["args"])).params
                mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
                files = [arg.split("=", 1)[1] for arg in container["args"] if "=/" in arg]
                assert {str(Path(file).parent) for file in files} <= mounted
    assert set(parsed) == {"migrate", "serve", "monitor"}
    if options:
        assert (parsed["serve"]["host"], parsed["serve"]["run_days"]) == ("::", 30.0)
        assert (parsed["monitor"]["cluster"], parsed["monitor"]["brain"]) == ("east", "brain.example:50001")
    else:
        assert parsed["monitor"]["brain"] == "dlrover-brain.dlrover:50001"


@needs_helm
def test_a_kubernetes_that_is_too_old_is_refused() -> None:
    with pytest.raises(RuntimeError, match="requires kubeVersion"):
        template(version="1.30.0")


@needs_helm
def test_the_values_of_the_chart_reach_the_operator() -> None:
    from dlrover.operator.__main__ import build_parser

    rendered = [body for body in yaml.safe_load_all(template("--set", FULL, plain=False)) if body]
    [deployment] = [body for body in rendered if body["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    options = build_parser().parse_args(container["args"])
    assert (options.namespace, options.allow_cordon, options.start_timeout) == ("default", ["a", "b"], 5.0)
    assert options.master_image == "dlrover/dlrover:latest"
    bindings = {body["metadata"]["name"]: body for body in rendered if body["kind"].endswith("Binding")}
    assert bindings["dlrover-manager-rolebinding"]["kind"] == "RoleBinding", "of one namespace"
    [group] = bindings["dlrover-master-nodes"]["subjects"]
    assert (group["kind"], group["name"]) == ("Group", "system:serviceaccounts:a")
    roles = {body["metadata"]["name"]: body["rules"] for body in rendered if body["kind"] == "ClusterRole"}
    on_nodes = {
        verb for rule in roles["dlrover-manager-role"] if "nodes" in rule["resources"] for verb in rule["verbs"]
    }
    assert on_nodes == {"patch"}


@pytest.mark.parametrize(
    ("chart", "options"),
    [
        pytest.param(CHART, (), id="plain"),
        pytest.param(CHART, ("--set", FULL), id="every-value", marks=needs_helm),
        pytest.param(BRAIN_CHART, (), id="brain"),
        pytest.param(BRAIN_CHART, ("--set", FULL_BRAIN), id="brain-every-value", marks=needs_helm),
    ],
)
async def test_every_object_is_accepted(api_server: Server, chart: Path, options: tuple[str, ...]) -> None:
    refused = []
    plain = (
        objects() if chart == CHART else [body for body in objects() if body["kind"] == "Namespace"] + brain_objects()
    )
    wanted = list(yaml.safe_load_all(template(*options, plain=False, chart=chart))) if options else plain
    async with ClusterApi(find_access({}, kubeconfig=api_server.kubeconfig)) as api:
        for body in sorted((body for body in wanted if body), key=lambda body: FIRST.get(body["kind"], len(FIRST))):
            kind = body["kind"]
            if kind == "Deployment":
                # What its controller would make. A server accepts a Deployment whose pods it refuses.
                planned = body["spec"]["template"]
                metadata = {**planned["metadata"], "name": body["metadata"]["name"]}
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": planned["spec"]}
                namespace = body["metadata"]["namespace"]
                answer = await api.create(PODS, pod, namespace=namespace, dry_run=True)
                if not isinstance(answer, FoundObject):
                    refused.append(f"the pod of {body['metadata']['name']}: {answer}")
                if api_server.name == "ours":
                    continue  # it knows no Deployments
            plural, is_namespaced = PLURALS[kind]
            group, _, version = body["apiVersion"].rpartition("/")
            resource = ApiResource(group, version, plural, kind, is_namespaced)
            namespace = body["metadata"].get("namespace")
            is_trial = kind not in FIRST  # the others need them
            answer = await api.create(resource, body, namespace=namespace, dry_run=is_trial)
            if not isinstance(answer, FoundObject | Conflict):
                refused.append(f"{kind} {body['metadata']['name']}: {answer}")
    assert refused == []


@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
async def test_every_example_is_accepted_and_can_run(api_server: Server, file: str) -> None:
    plurals = {
        "ElasticJob": "elasticjobs",
        "ScalePlan": "scaleplans",
        "PersistentVolumeClaim": "persistentvolumeclaims",
    }
    async with ClusterApi(find_access({}, kubeconfig=api_server.kubeconfig)) as api:
        for path in sorted((DEPLOY / "crds").glob("*.yaml")):
            body = yaml.safe_load(path.read_text())
            crds = ApiResource("apiextensions.k8s.io", "v1", "customresourcedefinitions", body["kind"], False)
            assert isinstance(await api.create(crds, body, namespace=None), FoundObject | Conflict)
        for body in yaml.safe_load_all((EXAMPLES / file).read_text()):
            group, _, version = body["apiVersion"].rpartition("/")
            resource = ApiResource(group, version, plurals[body["kind"]], body["kind"])
            answer = await _create_when_served(api, resource, body)
            assert isinstance(answer, FoundObject), answer
            if body["kind"] == "ElasticJob":
                job = decode(ElasticJob, answer.body)
                check_spec(fleet_of(job))
                assert problem_of(job, JobObjects(), OperatorSettings(master_image="m")) is None
                assert unused_fields(job) == ""


async def _create_when_served(api: ClusterApi, resource: ApiResource, body: dict[str, Any]) -> object:
    """A real server serves a new resource some moments after its definition."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await api.create(resource, body, namespace="default", dry_run=True)
            except Unavailable:
                await asyncio.sleep(0.2)


@pytest.mark.parametrize("name", ["dlrover-elasticjob-editor-role", "dlrover-elasticjob-viewer-role"])
def test_roles_of_people_give_no_more_than_jobs_and_reading_pods(name: str) -> None:
    [role] = [each for each in objects() if each["metadata"]["name"] == name]
    for rule in role["rules"]:
        assert "*" not in (*rule["verbs"], *rule["resources"], *rule["apiGroups"])
        if rule["apiGroups"] == [""]:
            assert set(rule["verbs"]) == {"get", "list", "watch"}
            assert set(rule["resources"]) == {"pods", "pods/log", "events"}
