"""
The process kubelet against what Kubernetes documents of a real one (pages "Pod Lifecycle", "Disruptions", "Node-pressure
Eviction", "Taints and Tolerations"): the sequence of phases, container states and conditions for each way to end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.kubernetes.controllers.lifecycle import preempt
from tests.kubernetes.kubelet.client import ApiError, Body, pod_path
from tests.kubernetes.kubelet.network import available
from tests.kubernetes.machine import LocalCluster
from tests.kubernetes.story import ALL_TRUE, Stories

_REASON = available()
pytestmark = [pytest.mark.skipif(bool(_REASON), reason=_REASON), pytest.mark.asyncio(loop_scope="module")]

FOR_EVER = "echo ready; while true; do sleep 0.1; done"
WAITS = f"trap 'exit 0' TERM; {FOR_EVER}"
"""Runs until SIGTERM. A first process of a container that has no handler, or not yet, does not hear it."""
DEAF = f"trap '' TERM; {FOR_EVER}"
STARTED = "PodScheduled Initialized"
ENDING = "PodScheduled PodReadyToStartContainers Initialized"


class Stage:
    """A cluster of two nodes, and what its pods went through."""

    def __init__(self, cluster: LocalCluster, stories: Stories) -> None:
        self.cluster = cluster
        self.stories = stories

    async def create(self, name: str, script: str = WAITS, node: str = "one", **spec: object) -> Body:
        container: Body = {"name": "main", "image": "trainer", "command": ["sh", "-c", script]}
        for key in ("env", "resources", "lifecycle", "volumeMounts", "image", "imagePullPolicy", "readinessProbe", "command",
                    "terminationMessagePolicy"):  # fmt: skip
            if key in spec:
                container[key] = spec.pop(key)
        selector = {"kubernetes.io/hostname": node} if node else {}
        body: Body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 20,
                "automountServiceAccountToken": False,
                "nodeSelector": selector,
                "containers": [container],
                **spec,
            },
        }
        return await self.cluster.api.create("/api/v1/namespaces/default/pods", body)

    async def until(self, name: str, beginning: str) -> None:
        await self.stories.until(name, beginning)

    async def until_ready(self, name: str) -> Body:
        """The pod runs, and its program hears signals."""
        await self.until(name, "Running; main running")
        pod = await self.cluster.pod(name)
        assert pod is not None, f"{name} is gone"
        await self.cluster.until(lambda: "ready" in self.cluster.life(pod).log.read_text(), f"{name} is ready")
        return pod

    async def delete(self, name: str, grace: int | None = None) -> None:
        with contextlib.suppress(ApiError):
            await self.cluster.api.delete(pod_path("default", name), grace=grace)

    async def log(self, name: str) -> str:
        pod = await self.cluster.pod(name)
        assert pod is not None, f"{name} is gone"
        return self.cluster.life(pod).log.read_text()

    def story(self, name: str) -> str:
        return self.stories.of(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    options = ("--lease-grace", "8", "--toleration-factor", "0.02")
    async with LocalCluster(tmp_path_factory.mktemp("k"), controller_options=options) as cluster:
        await cluster.add_node("one", "--renew-every", "0.5", "--capacity", "cpu=64,memory=64Gi,pods=110")
        await cluster.add_node("two", "--renew-every", "0.5", "--capacity", "cpu=2,memory=4Gi,pods=4")
        stories = Stories(cluster.api)
        following = asyncio.ensure_future(stories.run())
        try:
            yield Stage(cluster, stories)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


# How a pod's own program ends it.


async def test_a_pod_that_completes_runs_then_terminates_then_succeeds(stage: Stage) -> None:
    await stage.create("completes", "exit 0")
    await stage.until("completes", "Succeeded")
    assert stage.story("completes") == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main running ready; {ALL_TRUE}
        Running; main terminated Completed 0; {ENDING}
        Succeeded; main terminated Completed 0; {STARTED}
    """)


async def test_a_pod_that_fails_tells_code_message_and_times(stage: Stage) -> None:
    await stage.create("fails", "echo the last words > /dev/termination-log; exit 3")
    await stage.until("fails", "Failed")
    assert stage.story("fails") == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main running ready; {ALL_TRUE}
        Running; main terminated Error 3; {ENDING}
        Failed; main terminated Error 3; {STARTED}
    """)
    pod = await stage.cluster.pod("fails")
    assert pod is not None
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["message"] == "the last words\n"
    assert pod["status"]["startTime"] <= ended["startedAt"] <= ended["finishedAt"]
    reasons = {each["type"]: each.get("reason") for each in pod["status"]["conditions"]}
    assert reasons["Ready"] == reasons["ContainersReady"] == "PodFailed"


async def test_the_tail_of_the_log_is_the_message_of_an_error_where_the_policy_says_so(stage: Stage) -> None:
    script = "for i in $(seq 200); do echo line $i; done; exit 1"
    await stage.create("tail", script, terminationMessagePolicy="FallbackToLogsOnError")
    await stage.until("tail", "Failed")
    pod = await stage.cluster.pod("tail")
    assert pod is not None
    message = pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    assert message.splitlines() == [f"line {number}" for number in range(121, 201)]


async def test_a_pod_beyond_its_memory_limit_is_killed_whole_as_oom_killed(stage: Stage) -> None:
    # The shell outlives its hungry child, and waits: only a kill of the whole container ends it.
    script = "python -c 'x = bytearray(400 * 2**20)'; sleep 600; exit 5"
    await stage.create("hungry", script, resources={"limits": {"memory": "100Mi"}})
    await stage.until("hungry", "Failed")
    assert stage.story("hungry") == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main running ready; {ALL_TRUE}
        Running; main terminated OOMKilled 137; {ENDING}
        Failed; main terminated OOMKilled 137; {STARTED}
    """)


async def test_a_command_that_does_not_exist_is_a_start_error(stage: Stage) -> None:
    await stage.create("nameless", command=["no-such-program"])
    await stage.until("nameless", "Failed")
    assert stage.story("nameless") == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main terminated StartError 128; {ENDING}
        Failed; main terminated StartError 128; {STARTED}
    """)


async def test_an_init_container_that_fails_fails_the_pod(stage: Stage) -> None:
    init = [{"name": "prepare", "image": "trainer", "command": ["sh", "-c", "exit 7"]}]
    await stage.create("unprepared", initContainers=init)
    await stage.until("unprepared", "Failed")
    assert stage.story("unprepared") == lines("""
        Pending; prepare waiting PodInitializing, main waiting PodInitializing; PodScheduled
        Pending; prepare running ready, main waiting PodInitializing; PodScheduled PodReadyToStartContainers
        Pending; prepare terminated Error 7, main waiting PodInitializing; PodScheduled PodReadyToStartContainers
        Failed; prepare terminated Error 7, main waiting PodInitializing; PodScheduled
    """)


async def test_a_pod_that_is_active_too_long_exceeds_its_deadline(stage: Stage) -> None:
    await stage.create("slow", activeDeadlineSeconds=10)
    await stage.until("slow", "Failed")
    assert stage.story("slow") == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main running ready; {ALL_TRUE}
        Running; main terminated Completed 0; {ENDING}
        Failed DeadlineExceeded; main terminated Completed 0; {STARTED}
    """)


# Restarts.


async def test_a_crashing_container_is_restarted_at_once_then_backs_off(stage: Stage) -> None:
    await stage.create("crashes", "exit 1", restartPolicy="OnFailure")
    await stage.until("crashes", "Running; main running ready restarts=2")
    story = stage.story("crashes").splitlines()[:7]
    assert "\n".join(story) == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main running ready; {ALL_TRUE}
        Running; main terminated Error 1; {ENDING}
        Running; main running ready restarts=1 last=Error/1; {ALL_TRUE}
        Running; main terminated Error 1 restarts=1 last=Error/1; {ENDING}
        Running; main waiting CrashLoopBackOff restarts=1 last=Error/1; {ENDING}
        Running; main running ready restarts=2 last=Error/1; {ALL_TRUE}
    """)
    await stage.delete("crashes", grace=0)


async def test_a_restarted_container_keeps_the_volumes_of_its_pod_and_not_its_own_files(stage: Stage) -> None:
    script = "ls /own /kept/file && exit 9; touch /kept/file; mkdir /own; test -e /kept/again && exit 0; touch /kept/again; exit 1"
    volumes = [{"name": "kept", "emptyDir": {}}]
    mounts = [{"name": "kept", "mountPath": "/kept"}]
    await stage.create("returns", script, restartPolicy="OnFailure", volumes=volumes, volumeMounts=mounts)
    await stage.until("returns", "Succeeded; main terminated Completed 0 restarts=1 last=Error/1")


# How others end a pod.


async def test_a_deleted_pod_ends_by_sigterm_and_goes_after_its_terminal_phase(stage: Stage) -> None:
    await stage.create("leaves")
    await stage.until_ready("leaves")
    await stage.delete("leaves")
    await stage.until("leaves", "gone")
    assert stage.story("leaves") == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main running ready; {ALL_TRUE}
        deleting Running; main running ready; {ALL_TRUE}
        deleting Running; main terminated Completed 0; {ENDING}
        deleting Succeeded; main terminated Completed 0; {STARTED}
        gone
    """)


async def test_a_deleted_pod_that_does_not_end_is_killed_at_the_end_of_its_grace(stage: Stage) -> None:
    loop = asyncio.get_running_loop()
    await stage.create("stays", DEAF)
    pod = await stage.until_ready("stays")
    pid = stage.cluster.life(pod).pid
    began_at = loop.time()
    await stage.delete("stays", grace=2)
    await stage.until("stays", "gone")
    assert loop.time() - began_at >= 2.0
    assert not os.path.exists(f"/proc/{pid}")
    assert stage.story("stays") == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main running ready; {ALL_TRUE}
        deleting Running; main running ready; {ALL_TRUE}
        deleting Running; main terminated Error 137; {ENDING}
        deleting Failed; main terminated Error 137; {STARTED}
        gone
    """)


async def test_the_pre_stop_hook_runs_before_sigterm(stage: Stage, tmp_path: Path) -> None:
    script = f"trap 'echo term >> /out/order; exit 0' TERM; {FOR_EVER}"
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "sleep 0.3; echo hook >> /out/order"]}}}
    volumes = [{"name": "out", "hostPath": {"path": str(tmp_path)}}]
    mounts = [{"name": "out", "mountPath": "/out"}]
    await stage.create("hooked", script, lifecycle=hook, volumes=volumes, volumeMounts=mounts)
    await stage.until_ready("hooked")
    await stage.delete("hooked")
    await stage.until("hooked", "gone")
    assert (tmp_path / "order").read_text() == "hook\nterm\n"


async def test_a_pod_deleted_by_force_is_killed_although_its_object_is_gone(stage: Stage) -> None:
    await stage.create("forced", DEAF)
    pod = await stage.until_ready("forced")
    pid = stage.cluster.life(pod).pid
    await stage.delete("forced", grace=0)
    await stage.until("forced", "gone")
    await stage.cluster.until(lambda: not os.path.exists(f"/proc/{pid}"), "the process is gone")


async def test_an_evicted_pod_fails_with_a_reason_and_stays(stage: Stage) -> None:
    await stage.create("evicted", DEAF)
    await stage.until_ready("evicted")
    stage.cluster.tell("one", "evict", pod="default/evicted")
    await stage.until("evicted", "Failed")
    assert stage.story("evicted") == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main running ready; {ALL_TRUE}
        Running; main terminated Error 137; {ENDING}
        Failed Evicted; main terminated Error 137; {STARTED} DisruptionTarget(TerminationByKubelet)
    """)
    pod = await stage.cluster.pod("evicted")
    assert pod is not None
    assert pod["status"]["message"].startswith("The node was low on resource: memory.")
    assert "deletionTimestamp" not in pod["metadata"]


async def test_a_pod_preempted_by_the_scheduler_is_a_disruption_target_and_is_deleted(stage: Stage) -> None:
    await stage.create("preempted")
    pod = await stage.until_ready("preempted")
    await preempt(stage.cluster.api, pod)
    await stage.until("preempted", "gone")
    target = "DisruptionTarget(PreemptionByScheduler)"
    assert stage.story("preempted") == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main running ready; {ALL_TRUE}
        Running; main running ready; {ALL_TRUE} {target}
        deleting Running; main running ready; {ALL_TRUE} {target}
        deleting Running; main terminated Completed 0; {ENDING} {target}
        deleting Succeeded; main terminated Completed 0; {STARTED} {target}
        gone
    """)


async def test_a_pod_that_makes_room_for_a_critical_one_fails_as_preempting(stage: Stage) -> None:
    await stage.create("yields")
    await stage.until_ready("yields")
    stage.cluster.tell("one", "preempt", pod="default/yields", grace=20)
    await stage.until("yields", "Failed Preempting")
    assert stage.story("yields").splitlines()[-1] == (
        f"Failed Preempting; main terminated Completed 0; {STARTED} DisruptionTarget(TerminationByKubelet)"
    )


# What keeps a pod from running.


async def test_an_image_that_cannot_be_pulled_is_tried_again(stage: Stage) -> None:
    stage.cluster.tell("one", "break-image", image="registry/absent:1")
    await stage.create("imageless", image="registry/absent:1")
    await stage.until("imageless", "Pending; main waiting ImagePullBackOff")
    stage.cluster.tell("one", "mend-image", image="registry/absent:1")
    await stage.until("imageless", "Running")
    story = stage.story("imageless").splitlines()
    assert story[:3] == [
        f"Pending; main waiting ContainerCreating; {STARTED}",
        f"Pending; main waiting ErrImagePull; {ENDING}",
        f"Pending; main waiting ImagePullBackOff; {ENDING}",
    ]
    assert story[-1] == f"Running; main running ready; {ALL_TRUE}"


@pytest.mark.parametrize(
    ("name", "image", "policy", "reason"),
    [
        ("misnamed", "Not An Image", "Always", "InvalidImageName"),
        ("never-pulled", "registry/absent:2", "Never", "ErrImageNeverPull"),
    ],
)
async def test_an_image_that_is_never_pulled_says_why(
    stage: Stage, name: str, image: str, policy: str, reason: str
) -> None:
    stage.cluster.tell("one", "break-image", image="registry/absent:2")
    await stage.create(name, image=image, imagePullPolicy=policy)
    await stage.until(name, f"Pending; main waiting {reason}")
    await stage.delete(name)
    await stage.until(name, "gone")
    assert stage.story(name).splitlines()[-2] == f"deleting Failed; main waiting {reason}; {STARTED}"


async def test_a_container_waits_for_its_secret_and_for_its_volume(stage: Stage) -> None:
    env = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "late", "key": "word"}}}]
    await stage.create("keyless", "echo $KEY", env=env)
    await stage.until("keyless", "Pending; main waiting CreateContainerConfigError")
    data = {"word": base64.b64encode(b"sesame").decode()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "late"}, "data": data}
    await stage.cluster.api.create("/api/v1/namespaces/default/secrets", secret)
    await stage.until("keyless", "Succeeded")
    assert await stage.log("keyless") == "sesame\n"


async def test_a_pod_that_fits_nowhere_is_unschedulable_until_there_is_room(stage: Stage) -> None:
    large = {"requests": {"cpu": "1500m"}}
    await stage.create("first", node="two", resources=large)
    await stage.until("first", "Running")
    await stage.create("second", node="two", resources=large)
    await stage.until("second", "Pending; Unschedulable")
    assert stage.story("second").splitlines()[0] == (
        "Pending; Unschedulable: 0/2 nodes are available: 1 Insufficient cpu, "
        "1 node(s) didn't match Pod's node affinity/selector."
    )
    await stage.delete("first")
    await stage.until("second", "Running")
    await stage.delete("second")


async def test_a_kubelet_takes_no_pod_beyond_its_capacity(stage: Stage) -> None:
    await stage.create("squeezed", node="", nodeName="two", resources={"requests": {"cpu": "3"}})
    await stage.until("squeezed", "Failed OutOfcpu")
    pod = await stage.cluster.pod("squeezed")
    assert pod is not None
    expected = "Pod was rejected: Node didn't have enough resource: cpu, requested: 3000, used: "
    assert pod["status"]["message"].startswith(expected)
    assert "containerStatuses" not in pod["status"]


# Inside a container.


async def test_a_container_has_its_own_name_address_files_and_processes(stage: Stage) -> None:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a.ini": "a = 1\n"}}
    await stage.cluster.api.create("/api/v1/namespaces/default/configmaps", config)
    volumes = [
        {"name": "config", "configMap": {"name": "settings"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "config", "mountPath": "/etc/settings"}, {"name": "shm", "mountPath": "/dev/shm"}]
    env = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "BOTH", "value": "$(NODE)/$(LABEL) $$(NODE)"},
        {"name": "LIMIT", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
    ]
    script = (
        "echo $$$$ $(hostname) $NODE $LIMIT; echo $BOTH; hostname -i; echo $POD_IP; cat /etc/settings/a.ini; "
        "echo shared > /dev/shm/x; ls /dev/shm /tmp; touch /etc/mine; python -c 'import dlrover; print(dlrover.__name__)'; "
        "which dlrover-run"
    )
    limits = {"limits": {"memory": "300Mi"}}
    in_tmp = [Path(__file__).parts[2]] if Path(__file__).is_relative_to("/tmp") else []  # the program is there, too
    await stage.create("inside", script, env=env, volumes=volumes, volumeMounts=mounts, resources=limits)
    await stage.until("inside", "Succeeded")
    pod = await stage.cluster.pod("inside")
    assert pod is not None
    address = pod["status"]["podIP"]
    first, both, own_address, told_address, config_line, *rest = (await stage.log("inside")).splitlines()
    assert first == "1 inside one 300"
    assert both == "one/inside $(NODE)"
    assert own_address == told_address == address
    assert config_line == "a = 1"
    assert rest[:-1] == ["/dev/shm:", "x", "", "/tmp:", *sorted([*in_tmp, "dlrover"])]
    assert rest[-1].endswith("/bin/dlrover-run")
    assert not os.path.exists("/etc/mine")
    assert not os.path.exists("/dev/shm/x")


async def test_pods_reach_each_other_by_the_names_of_services(stage: Stage) -> None:
    for name, cluster_ip in (("front", {}), ("peers", {"clusterIP": "None"})):
        spec = {"selector": {"app": "server"}, "ports": [{"port": 8000, "targetPort": 9000}], **cluster_ip}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
        await stage.cluster.api.create("/api/v1/namespaces/default/services", service)
    probe = {"tcpSocket": {"port": 9000}, "periodSeconds": 1}
    script = "mkdir /www; cd /www; echo hello > index.html; exec python -u -m http.server 9000"
    await stage.create(
        "server", script, hostname="zero", subdomain="peers", readinessProbe=probe, terminationGracePeriodSeconds=0
    )
    await stage.until("server", "Running; main running ready")
    assert "Running; main running; " in stage.story("server")  # before its probe passed
    fetch = (
        "import time, urllib.request as r\n"
        "def get(url):\n"
        "    for _ in range(100):\n"
        "        try: return r.urlopen(url, timeout=5).read().decode().strip()\n"
        "        except OSError as error: print(error); time.sleep(0.1)\n"
        "print(get('http://front:8000'))\n"
        "print(get('http://zero.peers:9000'))\n"
    )
    await stage.create("client", node="two", command=["python", "-c", fetch])
    await stage.until("client", "Succeeded")
    assert (await stage.log("client")).splitlines()[-2:] == ["hello", "hello"]
    await stage.delete("server")


# What happens to a node.


async def test_a_kubelet_that_starts_again_takes_its_pods_over(stage: Stage) -> None:
    await stage.create("kept", f"trap 'exit 4' TERM; {FOR_EVER}")
    pod = await stage.until_ready("kept")
    life = stage.cluster.life(pod)
    stage.cluster.stop_kubelet("one")
    life.signal(15)  # it ends while no kubelet looks
    await life.wait()
    stage.cluster.start_kubelet("one")
    await stage.until("kept", "Failed")
    assert stage.story("kept") == lines(f"""
        Pending; main waiting ContainerCreating; {STARTED}
        Running; main running ready; {ALL_TRUE}
        Running; main terminated Error 4; {ENDING}
        Failed; main terminated Error 4; {STARTED}
    """)


async def test_a_running_container_does_not_notice_that_its_kubelet_starts_again(stage: Stage) -> None:
    await stage.create("unmoved")
    pod = await stage.until_ready("unmoved")
    pid = stage.cluster.life(pod).pid
    stage.cluster.stop_kubelet("one")
    stage.cluster.start_kubelet("one")
    await stage.delete("unmoved")
    await stage.until("unmoved", "gone")
    assert not os.path.exists(f"/proc/{pid}")
    assert "restarts" not in stage.story("unmoved")
    assert stage.story("unmoved").splitlines()[-2] == f"deleting Succeeded; main terminated Completed 0; {STARTED}"


async def test_statuses_may_be_late(stage: Stage) -> None:
    loop = asyncio.get_running_loop()
    stage.cluster.tell("two", "late", seconds=1.0)
    began_at = loop.time()
    await stage.create("late", "exit 0", node="two")
    await stage.until("late", "Succeeded")
    stage.cluster.tell("two", "late", seconds=0.0)
    assert loop.time() - began_at >= 4.0  # four statuses, each a second late
    await stage.delete("late")


async def test_pods_of_a_silent_node_run_on_and_are_deleted_when_it_speaks_again(stage: Stage) -> None:
    await stage.create("unheard", node="two", tolerations=[_bears(100)])
    pod = await stage.until_ready("unheard")
    pid = stage.cluster.life(pod).pid
    stage.cluster.tell("two", "silence")
    await stage.until("unheard", "deleting")
    node = await stage.cluster.find("/api/v1/nodes/two")
    assert node is not None
    ready = next(each for each in node["status"]["conditions"] if each["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("Unknown", "NodeStatusUnknown")
    assert {each["key"] for each in node["spec"]["taints"]} == {"node.kubernetes.io/unreachable"}
    assert os.path.exists(f"/proc/{pid}")
    stage.cluster.tell("two", "speak")
    await stage.until("unheard", "gone")
    target = "DisruptionTarget(DeletionByTaintManager)"
    story = stage.story("unheard").splitlines()
    not_ready = "PodScheduled PodReadyToStartContainers Initialized ContainersReady"
    assert story[2:5] == [
        f"Running; main running ready; {not_ready}",
        f"Running; main running ready; {not_ready} {target}",
        f"deleting Running; main running ready; {not_ready} {target}",
    ]
    assert story[-2:] == [f"deleting Succeeded; main terminated Completed 0; {STARTED} {target}", "gone"]

    async def is_back() -> bool:
        found = await stage.cluster.find("/api/v1/nodes/two")
        return found is not None and not found["spec"].get("taints")

    await stage.cluster.until(is_back, "the taints are gone")


async def test_pods_of_a_node_that_shuts_down_are_terminated(stage: Stage) -> None:
    await stage.cluster.add_node("three", "--renew-every", "0.5")
    await stage.create("shut", node="three", tolerations=[_bears(10_000)])
    await stage.until_ready("shut")
    stage.cluster.tell("three", "shut-down", grace=10)
    await stage.until("shut", "Failed Terminated")
    assert stage.story("shut").splitlines()[-1] == (
        f"Failed Terminated; main terminated Completed 0; {STARTED} DisruptionTarget(TerminationByKubelet)"
    )


async def test_pods_of_a_node_that_is_gone_are_collected(stage: Stage) -> None:
    await stage.cluster.add_node("four", "--renew-every", "0.5")
    await stage.create("stranded", node="four")
    pod = await stage.until_ready("stranded")
    pid = stage.cluster.life(pod).pid
    stage.cluster.power_off("four")
    await stage.cluster.until(lambda: not os.path.exists(f"/proc/{pid}"), "the process is gone")
    await stage.cluster.api.delete("/api/v1/nodes/four")
    await stage.until("stranded", "gone")
    target = "DisruptionTarget(DeletionByPodGC)"
    story = stage.story("stranded").splitlines()
    assert story[2] == f"Failed; main running ready; {ALL_TRUE} {target}"
    assert story[-1] == "gone"


def _bears(seconds: int) -> Body:
    """As pods have it by default, for every condition of a node."""
    return {"key": "", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
