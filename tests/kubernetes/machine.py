"""
A cluster on this machine: API server, controllers and kubelets as processes of their own, and pods as processes.

`async with LocalCluster(folder) as cluster` starts it; `cluster.api` reads and writes objects, `add_node` brings a machine in,
`power_off` takes one away. With a kubeconfig it uses the API server behind that and starts none. Everything that the
kernel keeps by name carries one tag, and is removed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from dlrover.platforms.local.kernel_claims import KernelTag
from dlrover.platforms.local.memory_limits import remove_groups
from dlrover.platforms.local.namespaces import Namespaces
from tests.kubernetes.controllers.pipes import make_certificate
from tests.kubernetes.kubelet.client import ApiError, Body, Cluster, pod_path
from tests.kubernetes.kubelet.faults import tell
from tests.kubernetes.kubelet.lives import Life, kill_all

REPOSITORY = Path(__file__).parents[2]
API_PORT = 6443
_START_TIMEOUT = 120.0
_STOP_TIMEOUT = 20.0
_LOOK_EVERY = 0.05
_NODE_BITS = 26

_KINDS = {
    "ClusterRole": (True, "clusterroles", False),
    "ClusterRoleBinding": (True, "clusterrolebindings", False),
    "Role": (True, "roles", True),
    "RoleBinding": (True, "rolebindings", True),
    "ConfigMap": (False, "configmaps", True),
    "CustomResourceDefinition": (True, "customresourcedefinitions", False),
    "ElasticJob": (True, "elasticjobs", True),
    "Namespace": (False, "namespaces", False),
    "PersistentVolumeClaim": (False, "persistentvolumeclaims", True),
    "ServiceAccount": (False, "serviceaccounts", True),
}
"""Kind to: in a group, plural, namespaced."""

T = TypeVar("T")


class LocalCluster:
    """`folder` must be short: sockets live in it."""

    def __init__(self, folder: Path, *, kubeconfig: Path | None = None, controller_options: Sequence[str] = ()) -> None:
        self.folder = folder.resolve()
        self.kubeconfig = kubeconfig or Path()
        self.address = ""
        """Of the cluster's services on the pods' bridge."""
        self._is_ours = kubeconfig is None
        self._controller_options = controller_options
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}
        self._kept: dict[str, Callable[[], None]] = {}
        """What to do when one of these processes has ended."""
        self._stack = contextlib.AsyncExitStack()
        self._slices: list[ipaddress.IPv4Network] = []
        self.api: Cluster

    async def __aenter__(self) -> LocalCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        for name in list(self._processes):
            self.stop(name)
        for pod in self.folder.glob("nodes/*/pods/*"):
            await asyncio.to_thread(kill_all, pod)
            shutil.rmtree(f"/dev/shm/pod-{pod.name}", ignore_errors=True)
        await self._stack.aclose()

    async def _start(self) -> None:
        claim = KernelTag()
        self._stack.callback(claim.release)
        self.tag = claim.tag
        self._stack.callback(remove_groups, claim.tag)
        network = await asyncio.to_thread(Namespaces.create, claim.tag)
        self._stack.callback(network.close)
        whole = ipaddress.IPv4Network(f"{network.master_address}/22", strict=False)
        self.address = str(whole[2])
        _, *self._slices = whole.subnets(new_prefix=_NODE_BITS)
        services = self._slices.pop()
        if self._is_ours:
            ready = self.folder / "server.json"
            self.start("server", "tests.kubernetes.server", "--ready-file", ready, "--directory", self.folder)
            await self.until(lambda: ready.exists(), "the API server listens")
            self.kubeconfig = Path(json.loads(ready.read_text())["kubeconfig"])
        certificate = self.folder / "api.pem"
        await asyncio.to_thread(make_certificate, certificate, self.address)
        self.api = await self._stack.enter_async_context(Cluster(self.kubeconfig))
        self.start(
            "controllers",
            "tests.kubernetes.controllers",
            *("--kubeconfig", self.kubeconfig, "--network", self.tag, "--address", self.address),
            *(
                "--api-port",
                API_PORT,
                "--certificate",
                certificate,
                "--service-addresses",
                services,
                *self._controller_options,
            ),
        )

    # Processes.

    def keep(self, name: str, module: str, *options: object) -> None:
        """As `start`, and again whenever it has ended, as a Deployment does."""
        self._kept[name] = lambda: self.start(name, module, *options)
        self._kept[name]()

    def start(self, name: str, module: str, *options: object, environ: dict[str, str] | None = None) -> None:
        """A module of Python as a process; its output goes to `<name>.log`."""
        command = [sys.executable, "-m", module, *map(str, options)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        self._kept.pop(name, None)
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    # Nodes.

    async def add_node(self, name: str, *options: object, back_off: float = 0.5) -> None:
        """A kubelet, and its node ready."""
        certificate = self.folder / "api.pem"
        self._commands[name] = [
            *("--kubeconfig", str(self.kubeconfig), "--node", name, "--folder", str(self._node(name))),
            *("--claims", str(self.folder / "claims"), "--network", self.tag, "--gateway", self.address),
            *("--addresses", str(self._slices.pop(0)), "--dns", self.address),
            *("--api-address", f"{self.address}:{API_PORT}", "--api-authority", str(certificate)),
            *("--back-off", str(back_off), *map(str, options)),
        ]
        self.start_kubelet(name)

        async def is_ready() -> bool:
            node = await self.find(f"/api/v1/nodes/{name}")
            conditions = ((node or {}).get("status") or {}).get("conditions") or ()
            return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

        await self.until(is_ready, f"node {name} is ready")

    def start_kubelet(self, name: str) -> None:
        """Also again, after `stop`: it takes its pods over."""
        (self._node(name) / "socket").unlink(missing_ok=True)
        self.start(f"kubelet-{name}", "tests.kubernetes.kubelet", *self._commands[name])

    def stop_kubelet(self, name: str) -> None:
        """SIGKILL; its pods run on."""
        self.stop(f"kubelet-{name}", signal.SIGKILL)

    def power_off(self, name: str) -> None:
        """The machine is gone, with everything on it. Its objects stay until somebody deletes them."""
        self.stop_kubelet(name)
        kill_all(self._node(name))

    def tell(self, node: str, do: str, **arguments: object) -> None:
        """A fault, by command."""
        tell(self._node(node) / "socket", do, **arguments)

    def _node(self, name: str) -> Path:
        return self.folder / "nodes" / name

    # Objects.

    async def find(self, path: str) -> Body | None:
        try:
            return await self.api.get(path)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def apply(self, text: str, namespace: str = "default") -> list[Body]:
        """Create what a manifest holds; what is there stays. Knows the kinds that this project's manifests have."""
        applied = []
        for body in yaml.safe_load_all(text):
            group, plural, is_namespaced = _KINDS[body["kind"]]
            base = f"/apis/{body['apiVersion']}" if group else f"/api/{body['apiVersion']}"
            where = body["metadata"].get("namespace", namespace)
            path = f"{base}/namespaces/{where}/{plural}" if is_namespaced else f"{base}/{plural}"
            try:
                applied.append(await self.api.create(path, body))
            except ApiError as error:
                if error.code != 409:
                    raise
                applied.append(await self.api.get(f"{path}/{body['metadata']['name']}"))
        return applied

    async def pod(self, name: str, namespace: str = "default") -> Body | None:
        return await self.find(pod_path(namespace, name))

    async def pods(self, labels: str = "", namespace: str = "default") -> list[Body]:
        path = f"/api/v1/namespaces/{namespace}/pods" + (f"?labelSelector={labels}" if labels else "")
        return list((await self.api.get(path)).get("items") or ())

    async def phase(self, name: str) -> str:
        """Empty: no such pod."""
        pod = await self.pod(name)
        return str((pod or {}).get("status", {}).get("phase", ""))

    def life(self, pod: Body, container: str = "main") -> Life:
        """The newest life of a container, on whichever node it runs."""
        folder = self._node(pod["spec"]["nodeName"]) / "pods" / pod["metadata"]["uid"] / "containers" / container
        life = Life.newest(folder)
        assert life is not None, f"{container} of {pod['metadata']['name']} was never started"
        return life

    def output(self, pod: Body) -> str:
        """What the newest life of the pod's container has printed."""
        return (self.life(pod).folder / "log").read_text(errors="replace")

    def eat_memory(self, pod: Body, container: str = "main") -> None:
        """A process of the container takes more memory than the container may have."""
        spec = json.loads((self.life(pod, container).folder / "spec.json").read_text())
        script = "import sys; open(sys.argv[1], 'w').write('0')\nheld = []\nwhile True: held.append(b'x' * 2**22)"
        # Its end is the kernel's affair; this process only begins it.
        eater = subprocess.Popen(
            [sys.executable, "-c", script, f"{spec['cgroup']}/cgroup.procs"], stderr=subprocess.DEVNULL
        )
        self._stack.callback(eater.wait)

    async def until(self, condition: Callable[[], T | Awaitable[T]], what: str, timeout: float = _START_TIMEOUT) -> T:
        """Wait until the condition answers something true, and return that. Says what it waited for."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    answer = condition()
                    if isinstance(answer, Awaitable):
                        answer = await answer
                    if answer:
                        return answer
                    self._check_processes()
                    await asyncio.sleep(_LOOK_EVERY)
        except TimeoutError:
            raise AssertionError(f"not within {timeout:g} s: {what}") from None

    def _check_processes(self) -> None:
        for name, process in list(self._processes.items()):
            if process.poll() is not None and name in self._kept:
                self._kept[name]()
            elif process.poll() is not None:
                raise AssertionError(f"{name} ended with {process.returncode}:\n{self.log(name)[-4000:]}")
