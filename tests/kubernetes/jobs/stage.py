"""
A cluster with the operator in it, and one job: what it shows of itself, from outside.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.machine import REPOSITORY, LocalCluster

EXAMPLE = REPOSITORY / "examples" / "kubernetes"
JOBS = "/apis/elastic.iml.github.io/v1alpha1/namespaces/default/elasticjobs"
RANK = "elasticjob.dlrover/rank-index"
TYPE = "elasticjob.dlrover/replica-type"
UID = "elasticjob.dlrover/uid"
_DEADLINE = 180.0
_TOKEN_LIFE = 86400


async def start_operator(cluster: LocalCluster) -> None:
    """
    Definitions, roles and account as in `deploy/`, and the operator as a process of this machine: with the command and the
    options of its Deployment, with the rights of its account, and started again when it ends.
    """
    for folder in ("crds", "roles"):
        for file in sorted((REPOSITORY / "deploy" / folder).glob("*.yaml")):
            await cluster.apply(file.read_text())
    bodies = list(yaml.safe_load_all((REPOSITORY / "deploy" / "operator" / "operator.yaml").read_text()))
    await cluster.apply(yaml.safe_dump_all([body for body in bodies if body["kind"] not in ("Deployment", "Service")]))
    [deployment] = [body for body in bodies if body["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    interpreter, switch, module = container["command"]
    assert (interpreter, switch) == ("python", "-m")
    config = await _kubeconfig_of(cluster, deployment["metadata"]["namespace"], pod["serviceAccountName"])
    ports = ("--metrics-bind-address=0", "--health-probe-bind-address=0")  # several clusters share this machine
    cluster.keep("operator", module, *container["args"], "--kubeconfig", config, *ports)


async def _kubeconfig_of(cluster: LocalCluster, namespace: str, account: str) -> Path:
    """The way to the API server with a token of this account."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": _TOKEN_LIFE},
    }
    made = await cluster.api.create(f"{accounts}/{account}/token", request)
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": made["status"]["token"]}
    path = cluster.folder / f"{account}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


class TrainingJob:
    """The example's job under a name of its own."""

    def __init__(self, cluster: LocalCluster, name: str, *, workers: int, options: tuple[str, ...] = ()) -> None:
        self.cluster = cluster
        self.name = name
        self.uid = ""
        self._workers = workers
        self._options = options
        self.folder = Path()
        """What the pods see as /data. Known when the job is submitted."""
        self._has_claim = True
        """For the journal."""

    async def submit(
        self,
        *,
        has_journal: bool = True,
        memory: str = "2Gi",
        restarts: int | None = None,
        least: int | None = None,
        mode: str = "",
        launcher: tuple[str, ...] = (),
        prelude: str = "",
    ) -> None:
        """
        `least`: the job trains with so many workers, too. `mode`: who creates the pods. `launcher`: more options of dlrover-run.
        `prelude`: lines before the program.
        """
        job, claim = yaml.safe_load_all((EXAMPLE / "job.yaml").read_text())
        job["metadata"]["name"] = self.name
        claim["metadata"]["name"] = f"{self.name}-data"
        worker = job["spec"]["replicaSpecs"]["worker"]
        worker["replicas"] = self._workers
        if restarts is not None:
            worker["restartCount"] = restarts
        spec = worker["template"]["spec"]
        spec["volumes"][1]["persistentVolumeClaim"]["claimName"] = f"{self.name}-data"
        container = spec["containers"][0]
        size = f"{self._workers}" if least is None else f"{least}:{self._workers}"
        if least is not None:
            worker["minReplicas"] = least
        command = [word.replace("--nnodes=3", f"--nnodes={size}") for word in container["command"]]
        container["command"] = [command[0], *launcher, *command[1:], *self._options]
        container["resources"] = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": memory}}
        if mode:
            job["spec"]["master"]["options"] = {"platform": mode}
        self._has_claim = has_journal
        if not has_journal:
            del job["spec"]["master"]
        program: Body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "points-program"},
            "data": {"train.py": prelude + (EXAMPLE / "train.py").read_text()},
        }
        if prelude:  # other jobs share theirs
            program["metadata"]["name"] = spec["volumes"][0]["configMap"]["name"] = f"{self.name}-program"
        made = await self.cluster.apply(yaml.safe_dump_all([program, claim, job]))
        self.uid = made[2]["metadata"]["uid"]
        self.folder = self.cluster.folder / "claims" / made[1]["metadata"]["uid"]

    async def delete(self) -> None:
        await self.cluster.api.delete(f"{JOBS}/{self.name}")

    # Objects.

    async def status(self) -> Body:
        job = await self.cluster.find(f"{JOBS}/{self.name}")
        return (job or {}).get("status") or {}

    async def pods(self, kind: str = "worker") -> list[Body]:
        return await self.cluster.pods(f"{UID}={self.uid},{TYPE}={kind}")

    async def running(self, kind: str = "worker") -> dict[int, Body]:
        """Pods that run and are not being deleted, by rank (the master's by 0)."""
        found: dict[int, Body] = {}
        for pod in await self.pods(kind):
            if pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
                rank = int(pod["metadata"]["labels"].get(RANK, 0))
                assert rank not in found, f"two pods of rank {rank}: {pod['metadata']['name']}"
                found[rank] = pod
        return found

    async def until_running(self) -> dict[int, Body]:
        async def all_run() -> dict[int, Body]:
            found = await self.running()
            return found if len(found) == self._workers else {}

        return await self.cluster.until(all_run, f"{self._workers} pods of {self.name} run", _DEADLINE)

    async def until_replaced(self, rank: int, lost: Body) -> Body:
        """The pod that follows the lost one in its rank."""

        async def is_replaced() -> Body | None:
            pod = (await self.running()).get(rank)
            return pod if pod is not None and pod["metadata"]["uid"] != lost["metadata"]["uid"] else None

        found = await self.cluster.until(is_replaced, f"rank {rank} of {self.name} is replaced", _DEADLINE)
        assert found is not None
        return found

    async def until_replaced_master(self, lost: Body) -> None:
        async def is_replaced() -> bool:
            masters = await self.running("dlrover-master")
            ready = [
                pod
                for pod in masters.values()
                if any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"]["conditions"])
            ]
            return any(pod["metadata"]["uid"] != lost["metadata"]["uid"] for pod in ready)

        await self.cluster.until(is_replaced, f"{self.name} has another master", _DEADLINE)

    async def until_ended(self) -> str:
        async def is_ended() -> str:
            phase = str((await self.status()).get("phase", ""))
            return phase if phase in ("Succeeded", "Failed") else ""

        return await self.cluster.until(is_ended, f"{self.name} ends", _DEADLINE)

    async def until_lost(self, pod: Body) -> None:
        """The API server shows the end of the pod: a deletion time, a terminal phase, or no object."""

        async def is_lost() -> bool:
            now = await self.cluster.pod(pod["metadata"]["name"])
            return (
                now is None
                or "deletionTimestamp" in now["metadata"]
                or now["status"]["phase"] in ("Failed", "Succeeded")
            )

        await self.cluster.until(is_lost, f"the end of {pod['metadata']['name']} is seen")

    # Training.

    def events(self, kind: str) -> list[Body]:
        """What the workers wrote, of all ranks, in the order of time."""
        found = []
        for file in self.folder.glob("events-*.jsonl"):
            for line in file.read_text().splitlines():
                event = json.loads(line)
                if event["event"] == kind:
                    found.append(event)
        return sorted(found, key=lambda event: float(event["at"]))

    def step(self) -> int:
        steps = self.events("step")
        return int(steps[-1]["step"]) if steps else 0

    async def until_step(self, step: int) -> None:
        await self.cluster.until(
            lambda: self.step() >= step, f"step {step} of {self.name} (at {self.step()})", _DEADLINE
        )

    async def until_trained_by(self, pod: Body) -> None:
        """The pod has done a step."""
        name = pod["metadata"]["name"]
        condition = lambda: any(event["pod"] == name for event in self.events("step"))  # noqa: E731
        await self.cluster.until(condition, f"{name} trains", _DEADLINE)

    def hurry(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "hurry").touch()

    def losses(self) -> dict[int, float]:
        """Of the life that counts: a step that was done again has the later loss."""
        return {int(event["step"]): float(event["loss"]) for event in self.events("step")}

    async def audit(self) -> Body:
        """What the master's journal says of the data. One without a claim is there as long as its master runs."""
        if not self._has_claim:
            [pod] = await self.pods("dlrover-master")
            volumes = (
                self.cluster.folder / "nodes" / pod["spec"]["nodeName"] / "pods" / pod["metadata"]["uid"] / "volumes"
            )
            return audit(volumes / "dlrover-journal" / "journal.sqlite")
        claims = "/api/v1/namespaces/default/persistentvolumeclaims"
        claim = await self.cluster.api.get(f"{claims}/elasticjob-{self.name}-journal")
        return audit(self.cluster.folder / "claims" / claim["metadata"]["uid"] / "journal.sqlite")

    def mains(self, pods: dict[int, Body]) -> dict[int, int]:
        """First process of each pod's container, as this machine numbers it."""
        return {rank: self.cluster.life(pod).pid for rank, pod in pods.items()}


def audit(journal: Path) -> Body:
    command = [sys.executable, "-m", "dlrover.cli.main", "data", "audit", "--json", str(journal)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert told.returncode == 0, told.stdout + told.stderr
    [finding] = json.loads(told.stdout)
    return dict(finding)
