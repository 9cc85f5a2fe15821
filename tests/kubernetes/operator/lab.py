"""
A whole operator: a process of its own beside an API server, and a test that plays user, kubelet and disaster.

The server runs in the test's process, so a test can make it fail at a chosen request and then kill the operator there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from dlrover.operator.timestamps import text_of
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.access import plain_access
from dlrover.platforms.kubernetes.api import (
    ELASTIC_JOBS,
    NODES,
    PODS,
    ApiResource,
    ClusterApi,
    FoundObject,
    NotFound,
    ObjectAnswer,
    Page,
    PatchKind,
)
from tests.kubernetes.server.serving import ApiServer

REPOSITORY = Path(__file__).parents[3]
CRDS = ApiResource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False)
CLUSTER_ROLES = ApiResource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", False)
NAMESPACE = "default"
DEADLINE = 60.0
"""Seconds for everything that a test waits for. A quiet machine needs a tenth."""

Json = dict[str, Any]


class OperatorProcess:
    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        async with asyncio.timeout(DEADLINE):
            return await self._process.wait()

    async def stop(self) -> int:
        if self.is_running:
            self.send(signal.SIGTERM)
        return await self.ended()

    async def kill(self) -> None:
        if self.is_running:
            self.send(signal.SIGKILL)
            await self._process.wait()


class Lab:
    def __init__(self, server: ApiServer, api: ClusterApi, folder: Path) -> None:
        self.server = server
        self.api = api
        self.folder = folder
        self.operators: list[OperatorProcess] = []

    async def define(self, *, with_rules: bool = True) -> None:
        """Install the definitions. Without their rules, as in a cluster whose definitions are older than the jobs' mistakes."""
        for path in sorted((REPOSITORY / "deploy" / "crds").glob("*.yaml")):
            body = yaml.safe_load(path.read_text())
            if not with_rules:
                for version in body["spec"]["versions"]:
                    without_rules(version["schema"]["openAPIV3Schema"])
            taken(await self.api.create(CRDS, body, namespace=None))
        body = yaml.safe_load((REPOSITORY / "deploy" / "roles" / "master.yaml").read_text())
        taken(await self.api.create(CLUSTER_ROLES, body, namespace=None))

    async def start_operator(self, *options: str, kubeconfig: Path | None = None) -> OperatorProcess:
        log = self.folder / f"operator-{len(self.operators)}.log"
        command = [sys.executable, "-m", "dlrover.operator", "--kubeconfig", str(kubeconfig or self.server.kubeconfig)]
        if "--metrics-bind-address" not in options:
            command += ["--metrics-bind-address", "0"]
        if "--health-probe-bind-address" not in options:
            command += ["--health-probe-bind-address", "0"]
        environ = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *command, *options, cwd=REPOSITORY, stdout=file, stderr=file, env=environ
            )
        operator = OperatorProcess(process, log)
        self.operators.append(operator)
        return operator

    # The user.

    async def apply(self, name: str = "demo", *, metadata: Json | None = None, **spec: Any) -> Json:
        return read(taken(await self.try_to_apply(name, metadata=metadata, **spec)))

    async def try_to_apply(self, name: str = "demo", *, metadata: Json | None = None, **spec: Any) -> ObjectAnswer:
        body = job_body(name, metadata=metadata, **spec)
        return await self.api.create(ELASTIC_JOBS, body, namespace=NAMESPACE)

    async def edit(self, name: str, patch: Json) -> None:
        taken(await self.api.patch(ELASTIC_JOBS, name, patch, namespace=NAMESPACE, kind=PatchKind.MERGE))

    async def delete(self, name: str = "demo") -> None:
        taken(await self.api.delete(ELASTIC_JOBS, name, namespace=NAMESPACE))

    async def job(self, name: str = "demo") -> Json:
        return read(taken(await self.api.get(ELASTIC_JOBS, name, namespace=NAMESPACE)))

    async def names_of(self, resource: ApiResource, *, labels: str = "") -> list[str]:
        page = await self.api.list_all(resource, namespace=NAMESPACE, labels=labels)
        assert isinstance(page, Page), page
        return sorted(json.loads(bytes(item))["metadata"]["name"] for item in page.items)

    async def pod(self, name: str) -> Json | None:
        answer = await self.api.get(PODS, name, namespace=NAMESPACE)
        return None if isinstance(answer, NotFound) else read(taken(answer))

    async def condition(self, kind: str, name: str = "demo") -> Json:
        conditions = (await self.job(name)).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    # The kubelet.

    async def bring_up(self, name: str, *, machine: str = "") -> None:
        """The pod of this name runs."""
        await self.until(lambda: self.pod(name), f"pod {name}")
        if machine:
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"name": machine}}
            path = ApiResource("", "v1", f"pods/{name}/binding", "Binding")
            taken(await self.api.create(path, binding, namespace=NAMESPACE))
        state = {"running": {"startedAt": text_of(time.time())}}
        await self.report(
            name,
            {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [container("main", state, ready=True)],
            },
        )

    async def end_pod(self, name: str, *, exit_code: int = 0, message: str = "") -> None:
        reason = "Completed" if exit_code == 0 else "Error"
        state = {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}
        await self.report(
            name,
            {
                "phase": "Succeeded" if exit_code == 0 else "Failed",
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [container("main", state, ready=False)],
            },
        )

    async def report(self, name: str, status: Json) -> None:
        answer = await self.api.patch(
            PODS, name, {"status": status}, namespace=NAMESPACE, kind=PatchKind.MERGE, subresource="status"
        )
        taken(answer)

    async def finish_deletions(self) -> None:
        """What a kubelet does at the end of the grace period."""
        for name in await self.names_of(PODS):
            pod = await self.pod(name)
            if pod is not None and "deletionTimestamp" in pod["metadata"]:
                await self.api.delete(PODS, name, namespace=NAMESPACE, uid=pod["metadata"]["uid"], grace=0)

    async def add_machine(self, name: str) -> None:
        taken(
            await self.api.create(
                NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}, namespace=None
            )
        )
        await self.set_ready(name, True)

    async def set_ready(self, name: str, is_ready: bool) -> None:
        condition = {
            "type": "Ready",
            "status": "True" if is_ready else "Unknown",
            "reason": "KubeletReady" if is_ready else "NodeStatusUnknown",
            "lastTransitionTime": text_of(time.time()),
        }
        patch = {"status": {"conditions": [condition]}}
        taken(await self.api.patch(NODES, name, patch, namespace=None, kind=PatchKind.MERGE, subresource="status"))

    # Waiting.

    async def until(self, look: Callable[[], Awaitable[Any]], what: str, *, timeout: float = DEADLINE) -> Any:
        """Until it gives something true."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    if found := await look():
                        return found
                    await asyncio.sleep(0.02)
        except TimeoutError:
            logs = "\n".join(operator.log for operator in self.operators)
            raise AssertionError(f"{what}: not within {timeout:g} s. The operators wrote:\n{logs}") from None

    async def phase_is(self, phase: str, name: str = "demo") -> None:
        async def look() -> bool:
            return bool((await self.job(name)).get("status", {}).get("phase") == phase)

        await self.until(look, f"phase {phase} of {name}")

    async def has_pods(self, *wanted: str) -> None:
        async def look() -> bool:
            return await self.names_of(PODS) == sorted(wanted)

        await self.until(look, f"the pods {wanted}")


@contextlib.asynccontextmanager
async def open_lab(folder: Path) -> AsyncIterator[Lab]:
    async with ApiServer() as server, ClusterApi(plain_access(server.url, token=server.token)) as api:
        lab = Lab(server, api, folder)
        try:
            yield lab
        finally:
            server.faults.withdraw()
            for operator in lab.operators:
                with contextlib.suppress(ProcessLookupError):
                    operator.send(signal.SIGCONT)
                await operator.kill()


def job_body(name: str = "demo", *, metadata: Json | None = None, **spec: Any) -> Json:
    spec.setdefault("distributionStrategy", "AllreduceStrategy")
    spec.setdefault("replicaSpecs", {"worker": {"replicas": 2, "template": template()}})
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name, "namespace": NAMESPACE, **(metadata or {})},
        "spec": spec,
    }


def template(*containers: Json, **spec: Any) -> Json:
    return {"spec": {"containers": list(containers) or [{"name": "main", "image": "worker:1"}], **spec}}


def container(name: str, state: Json, *, ready: bool) -> Json:
    return {"name": name, "image": "x", "imageID": "", "ready": ready, "restartCount": 0, "state": state}


def master(index: int = 0, job: str = "demo") -> str:
    return names.master_pod(job, index)


def taken(answer: Any) -> FoundObject:
    assert isinstance(answer, FoundObject), answer
    return answer


def read(answer: FoundObject) -> Json:
    return json.loads(answer.body)  # type: ignore[no-any-return]


def without_rules(schema: Json) -> None:
    schema.pop("x-kubernetes-validations", None)
    for inner in schema.get("properties", {}).values():
        without_rules(inner)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            without_rules(schema[name])


BAD_JOBS: dict[str, tuple[Json, str]] = {
    "template": (
        {"replicaSpecs": {"worker": {"template": template({"name": "main", "image": ""})}}},
        "image",
    ),
    "priority-class": (
        {"replicaSpecs": {"worker": {"priorityClassName": "urgent", "template": template()}}},
        "no PriorityClass with name urgent was found",
    ),
    "type": ({"replicaSpecs": {"wroker": {"template": template()}}}, "Did you mean worker?"),
    "main-container": (
        {"replicaSpecs": {"worker": {"template": template({"name": "a"}, {"name": "b"})}}},
        "Give the container that trains the name `main`",
    ),
    "name": ({"name": "x" * 38}, "at most 37"),
}
"""What is wrong with a job, to its fields and to a part of the sentence that its status gets."""
