"""
One pod on this node, from the moment it is bound until its object is gone.

A pod ends for one of three reasons: its containers end for good, its object is deleted, or the kubelet ends it. In each case
the kubelet first ends the containers, then writes the terminal phase, and only then lets the object go.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import re
import shutil
import signal
from pathlib import Path

from tests.kubernetes.kubelet.client import ApiError, Body, pod_path
from tests.kubernetes.kubelet.environment import ConfigMissing, Values, environment, expand, hostname, parse_quantity
from tests.kubernetes.kubelet.host import Host
from tests.kubernetes.kubelet.lives import Life
from tests.kubernetes.kubelet.network import NetworkFailed
from tests.kubernetes.kubelet.probes import is_passing, run_hook
from tests.kubernetes.kubelet.status import ContainerState, Ended, PodFacts, Stage, Verdict, pod_status
from tests.kubernetes.kubelet.volumes import PodVolumes, VolumeFailed, files_of_pod
from tests.kubernetes.kubelet.writer import StatusWriter

_MIN_GRACE = 1.0
_RETRY = 0.5
_MAX_BACK_OFF_FACTOR = 30
_IMAGE_NAME = re.compile(r"[a-z0-9][a-z0-9._/:@-]*")


class InitFailed(Exception):
    """An init container failed and is not started again."""


class PodRun:
    """`run` is the pod's task; the other methods tell it what has happened."""

    def __init__(self, pod: Body, host: Host) -> None:
        self.pod = pod
        self.uid = str(pod["metadata"]["uid"])
        self.name = str(pod["metadata"]["name"])
        self.namespace = str(pod["metadata"]["namespace"])
        self._spec = pod["spec"]
        self._host = host
        self._folder = host.folder / "pods" / self.uid
        self._policy = str(self._spec.get("restartPolicy") or "Always")
        self.facts = PodFacts(
            restart_policy=self._policy,
            host_ip=host.address,
            containers=[_fresh(container) for container in self._spec["containers"]],
            init_containers=[
                _fresh(container, "PodInitializing") for container in self._spec.get("initContainers") or ()
            ],
        )
        if self.facts.init_containers:
            for state in self.facts.containers:
                state.reason = "PodInitializing"
        self._volumes = PodVolumes(self._folder, pod, host.cluster, host.claims)
        self._mounts: list[Body] = []
        self._lives: dict[str, Life] = {}
        self._writer = StatusWriter(host, pod_path(self.namespace, self.name), self.uid)
        self._stop_asked = asyncio.Event()
        self._grace = float(self._spec.get("terminationGracePeriodSeconds", 30))
        self._deleted = asyncio.Event()
        """The object has a deletion time, or is gone."""
        self._is_gone = False
        self._verdict: Verdict | None = None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(self._writer.run())
            try:
                if (self.pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                    await self._live_and_end()
                else:
                    await self._end_containers()
                self._clear()
                await self._writer.flush()
                await self._deleted.wait()
                await self._let_go()
            finally:
                writing.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    def reject(self, verdict: Verdict) -> None:
        """The node does not take it."""
        self._writer.write_rejection(verdict)
        self.pod.setdefault("status", {})["phase"] = "Failed"

    def delete(self, grace: float) -> None:
        """The object got a deletion time. Also a later, shorter one."""
        self._grace = min(self._grace, grace) if self._deleted.is_set() else grace
        self._deleted.set()
        self._stop_asked.set()

    def vanish(self) -> None:
        """The object is gone: there is no one to report to."""
        self._is_gone = True
        self._writer.close()
        self.delete(_MIN_GRACE if self._deleted.is_set() else self._grace)

    def end(self, verdict: Verdict, grace: float) -> None:
        """The kubelet itself ends the pod: eviction, preemption, shutdown of the node, deadline."""
        if not self._stop_asked.is_set():
            self._verdict = verdict
            self._grace = grace
            self._stop_asked.set()

    @property
    def is_ended(self) -> bool:
        return self.facts.is_terminated or (self.pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")

    def kill_main(self, number: int) -> None:
        """A signal to the first process of each container, for tests."""
        for life in self._lives.values():
            life.signal(number)

    # Life.

    async def _live_and_end(self) -> None:
        deadline = self._spec.get("activeDeadlineSeconds")
        if deadline is not None:
            message = "Pod was active on the node longer than the specified deadline"
            verdict = Verdict(reason="DeadlineExceeded", message=message)
            asyncio.get_running_loop().call_later(float(deadline), self.end, verdict, self._grace)
        if not self._folder.exists():  # else a kubelet before us has said so, and more
            self._publish()
        living = asyncio.ensure_future(self._live())
        stopping = asyncio.ensure_future(self._stop_asked.wait())
        try:
            await asyncio.wait((living, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (living, stopping):
                if not task.done():
                    task.cancel()
            results = await asyncio.gather(living, stopping, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], InitFailed):
            raise results[0]
        await self._end_containers()
        self._publish()
        self.facts.has_sandbox = False
        self.facts.is_terminated = True
        self.facts.verdict = self._verdict
        self._publish()

    async def _live(self) -> None:
        await self._make_sandbox()
        for container, state in zip(self._spec.get("initContainers") or (), self.facts.init_containers, strict=True):
            await self._initialize(container, state)
        pairs = zip(self._spec["containers"], self.facts.containers, strict=True)
        async with asyncio.TaskGroup() as group:
            for container, state in pairs:
                group.create_task(self._supervise(container, state))

    async def _make_sandbox(self) -> None:
        """Network and volumes. What is missing is waited for, as a kubelet does."""
        self._folder.mkdir(parents=True, exist_ok=True)
        record = self._folder / "sandbox.json"
        while True:
            try:
                if record.exists():
                    address = str(json.loads(record.read_text())["address"])
                    self._host.network.adopt(address)
                else:
                    address = await asyncio.to_thread(self._host.network.add)
                    record.write_text(json.dumps({"address": address}))
                self.facts.pod_ip = address
                # Fields that the downward API reads.
                status = self.pod.setdefault("status", {})
                status["podIP"], status["hostIP"] = address, self._host.address
                await self._volumes.prepare()
                break
            except (VolumeFailed, NetworkFailed, ApiError) as error:
                await self._event("FailedMount", str(error))
                await asyncio.sleep(_RETRY)
        self._mounts = await files_of_pod(self._folder, self.pod, self.facts.pod_ip, dns=self._host.dns)
        self.facts.has_sandbox = True

    async def _initialize(self, container: Body, state: ContainerState) -> None:
        back_off = 0.0
        while True:
            end = await self._run_once(container, state)
            if end.is_success:
                return
            if self._policy == "Never":
                raise InitFailed
            back_off = await self._back_off(state, end, back_off)

    async def _supervise(self, container: Body, state: ContainerState) -> None:
        back_off = 0.0
        while True:
            end = await self._run_once(container, state)
            is_over = self._policy == "Never" or (self._policy == "OnFailure" and end.is_success)
            if is_over:
                return
            back_off = await self._back_off(state, end, back_off)

    async def _back_off(self, state: ContainerState, end: Ended, seconds: float) -> float:
        """The first restart is at once; each later one waits twice as long. The next wait is returned."""
        state.before, state.ended = end, None
        if seconds:
            state.stage, state.reason = Stage.WAITING, "CrashLoopBackOff"
            pod = f"{self.name}_{self.namespace}({self.uid})"
            state.message = f"back-off {seconds:g}s restarting failed container={state.name} pod={pod}"
            self._publish()
            await asyncio.sleep(seconds)
        state.restarts += 1
        limit = self._host.back_off * _MAX_BACK_OFF_FACTOR
        return min(max(seconds * 2, self._host.back_off), limit)

    async def _run_once(self, container: Body, state: ContainerState) -> Ended:
        """Until its end; a container that a kubelet before us started is taken over."""
        life = self._take_over(state)
        is_new = life is None
        if life is None:
            life = await self._start(container, state)
        self._lives[state.name] = life
        state.container_id = f"process://{self.uid}/{state.name}/{life.attempt}"
        end = life.ended_nowait()
        if end is None or (is_new and life.started_at):  # also a life that is over before we look is shown
            state.stage, state.started_at, state.message = Stage.RUNNING, life.started_at, ""
            probe = container.get("readinessProbe")
            state.is_ready = probe is None
            self._publish()
            probing = asyncio.ensure_future(self._probe(life, state, probe)) if probe else None
            try:
                end = await life.wait()
            finally:
                if probing is not None:
                    probing.cancel()
                    await asyncio.gather(probing, return_exceptions=True)
        self._note_end(state, end)
        self._publish()
        return end

    def _take_over(self, state: ContainerState) -> Life | None:
        if state.name in self._lives:
            return None
        life = Life.newest(self._folder / "containers" / state.name)
        if life is not None:
            state.restarts = life.attempt
        return life

    async def _start(self, container: Body, state: ContainerState) -> Life:
        await self._pull(container, state)
        while True:
            try:
                values = Values(self._host.cluster, self.namespace)
                environ = await environment(container, self.pod, values, self._host.cluster_environ)
                break
            except (ConfigMissing, ApiError) as error:
                state.stage, state.reason, state.message = Stage.WAITING, "CreateContainerConfigError", str(error)
                self._publish()
                await asyncio.sleep(_RETRY)
        folder = self._folder / "containers" / state.name / str(state.restarts)
        message_path = container.get("terminationMessagePath") or "/dev/termination-log"
        message_file = {"source": str(folder / "termination-log"), "target": message_path, "read_only": False}
        argv = [expand(str(word), environ) for word in (*container.get("command", ()), *container.get("args", ()))]
        spec = {
            "argv": argv,
            "environ": environ,
            "directory": container.get("workingDir") or "/",
            "hostname": hostname(self.pod),
            "network": self._host.network.file(self.facts.pod_ip),
            "cgroup": self._limit_memory(container, state),
            "mounts": [*self._volumes.mounts(container), *self._mounts, message_file],
            "image_paths": list(self._host.image_paths),
            "scratch": str(folder / "scratch"),
            "log": str(folder / "log"),
            "message_policy": container.get("terminationMessagePolicy") or "File",
        }
        return await asyncio.shield(Life.start(folder, spec))

    async def _pull(self, container: Body, state: ContainerState) -> None:
        """`ErrImagePull` and `ImagePullBackOff` in turn, until the image can be pulled."""
        image = str(container.get("image", ""))
        back_off = self._host.pull_back_off
        while True:
            reason = message = ""
            if not _IMAGE_NAME.fullmatch(image):
                reason = "InvalidImageName"
                message = f'Failed to apply default image tag "{image}": couldn\'t parse image name "{image}": invalid reference format'
            elif image in self._host.broken_images and container.get("imagePullPolicy") == "Never":
                reason = "ErrImageNeverPull"
                message = f'Container image "{image}" is not present with pull policy of Never'
            elif image in self._host.broken_images:
                reason = "ErrImagePull"
                message = f'failed to pull and unpack image "{image}": failed to resolve reference "{image}": not found'
            if not reason:
                return
            state.stage, state.reason, state.message = Stage.WAITING, reason, message
            self._publish()
            if reason == "ErrImagePull":
                state.reason = "ImagePullBackOff"
                state.message = f'Back-off pulling image "{image}": ErrImagePull: {message}'
                await asyncio.sleep(min(_RETRY, back_off))
                self._publish()
            await asyncio.sleep(back_off)
            back_off = min(back_off * 2, self._host.pull_back_off * _MAX_BACK_OFF_FACTOR)

    def _limit_memory(self, container: Body, state: ContainerState) -> str:
        limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
        if limit is None or self._host.limits is None:
            return ""
        mebibytes = max(1, math.floor(parse_quantity(limit) / 2**20))
        procs = Path(self._host.limits.create(f"{self.uid}-{state.name}-{state.restarts}", mebibytes))
        group = procs.parent / "memory.oom.group"
        if group.exists():
            group.write_text("1")
        return str(procs.parent)

    async def _probe(self, life: Life, state: ContainerState, probe: Body) -> None:
        """Readiness: `successThreshold` and `failureThreshold` in a row."""
        await asyncio.sleep(float(probe.get("initialDelaySeconds") or 0))
        num_same = 0
        while True:
            is_passed = await is_passing(probe, life, self.facts.pod_ip)
            num_same = num_same + 1 if is_passed != state.is_ready else 0
            threshold = probe.get("successThreshold", 1) if is_passed else probe.get("failureThreshold", 3)
            if num_same >= int(threshold):
                state.is_ready, num_same = is_passed, 0
                self._publish()
            await asyncio.sleep(float(probe.get("periodSeconds") or 10))

    # End.

    async def _end_containers(self) -> None:
        names = [state.name for state in (*self.facts.init_containers, *self.facts.containers)]
        for name in names:
            life = Life.newest(self._folder / "containers" / name)
            if life is not None:
                self._lives[name] = life
        running = [life for life in self._lives.values() if life.ended_nowait() is None]
        await asyncio.gather(*(self._end_container(life) for life in running))
        for state in (*self.facts.init_containers, *self.facts.containers):
            if state.name in self._lives and (end := self._lives[state.name].ended_nowait()) is not None:
                if state.stage is not Stage.WAITING or state.before is None:
                    self._note_end(state, end)
                else:
                    state.stage, state.ended = Stage.TERMINATED, state.before

    async def _end_container(self, life: Life) -> None:
        """preStop, SIGTERM, SIGKILL; a later, shorter grace counts."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        containers = {c["name"]: c for c in (*self._spec["containers"], *(self._spec.get("initContainers") or ()))}
        hook = (containers[life.folder.parent.name].get("lifecycle") or {}).get("preStop")
        if hook and self._grace > 0:
            await run_hook(hook, life, self.facts.pod_ip, self._grace)
        life.signal(signal.SIGTERM)
        ending = asyncio.ensure_future(life.wait())
        while not ending.done():
            left = began_at + max(self._grace, _MIN_GRACE) - loop.time()
            if left <= 0:
                life.signal(signal.SIGKILL)
                await ending
                break
            await asyncio.wait((ending,), timeout=min(left, _RETRY))

    def _note_end(self, state: ContainerState, end: Ended) -> None:
        state.stage, state.ended, state.is_ready, state.message = Stage.TERMINATED, end, False, ""
        if self._host.limits is not None:
            self._host.limits.remove(f"{self.uid}-{state.name}-{state.restarts}")

    def _clear(self) -> None:
        """The sandbox goes with the containers; logs stay until the object is gone."""
        if self.facts.pod_ip:
            self._host.network.remove(self.facts.pod_ip)
            with contextlib.suppress(FileNotFoundError):
                (self._folder / "sandbox.json").unlink()
            self.facts.pod_ip = ""
        self._volumes.remove()

    async def _let_go(self) -> None:
        while not self._is_gone:
            try:
                await self._host.cluster.delete(pod_path(self.namespace, self.name), grace=0, uid=self.uid)
                return
            except ApiError as error:
                if error.code in (404, 409):
                    return
                await asyncio.sleep(_RETRY)

    def _publish(self) -> None:
        facts = copy.deepcopy(self.facts)
        self._writer.write(lambda before: pod_status(facts, before, self._host.now()))

    async def _event(self, reason: str, message: str) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{self.name}.", "namespace": self.namespace},
            "involvedObject": {"kind": "Pod", "namespace": self.namespace, "name": self.name, "uid": self.uid},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "source": {"component": "kubelet", "host": self._host.name},
        }
        with contextlib.suppress(ApiError):  # events are told once and never again, as by a real kubelet
            await self._host.cluster.create(f"/api/v1/namespaces/{self.namespace}/events", body)


def _fresh(container: Body, reason: str = "ContainerCreating") -> ContainerState:
    return ContainerState(name=str(container["name"]), image=str(container.get("image", "")), reason=reason)
