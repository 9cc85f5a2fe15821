"""
What a cluster's pods and machines mean to Brain. No I/O and no clock: the monitor reads, this says.

Only pods that carry the labels of a job are told, and of machines only sums: no name of a machine, no annotation, no environment and no image leaves the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from msgspec.structs import replace

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.exits import identity_of, node_of
from dlrover.platforms.kubernetes.objects import ClusterNode, Container, Pod, Taint
from dlrover.platforms.kubernetes.quantities import MIB, accelerator_in, quantity, resource_of
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.brain import MachinesSeen, PodPhase, PodSeen
from dlrover.protocol.messages.fleet import NodeExit, Resource

OWN_TAINTS = ("node-role.kubernetes.io/", "node.kubernetes.io/")
"""Machines with such a taint take no training: control planes, and machines that are not ready or under pressure. Other taints keep machines for training as often as from it."""
_OVER = ("Succeeded", "Failed")


def pod_seen(pod: Pod, now: datetime) -> PodSeen | None:
    """None: it is of no training job."""
    labels = pod.metadata.labels
    job_uid = labels.get(names.JOB_UID, "")
    if not job_uid or not pod.metadata.uid:
        return None
    launch, node = identity_of(pod), node_of(pod)
    made_at = pod.metadata.creation_timestamp
    return PodSeen(
        uid=pod.metadata.uid,
        name=pod.metadata.name,
        job_uid=job_uid,
        job_name=labels.get(names.JOB_NAME, ""),
        node_type=None if launch is None else launch.node_type,
        phase=_phase(pod.status.phase),
        is_oom=node is not None and node.exit_reason is NodeExit.OOM,
        resource=_main_size(pod),
        age=0.0 if made_at is None else max(0.0, (now - made_at).total_seconds()),
    )


def gone(seen: PodSeen) -> PodSeen:
    return replace(seen, is_gone=True)


def is_news(seen: PodSeen, told: PodSeen | None) -> bool:
    """Time alone is none."""
    return told is None or replace(seen, age=0.0) != replace(told, age=0.0)


def machines_seen(machines: Iterable[ClusterNode], pods: Iterable[Pod]) -> MachinesSeen:
    """Of the machines that are ready and take training pods, and of the pods on them that are not over."""
    sizes = {each.metadata.name: _amounts([each.status.allocatable]) for each in machines if _takes_pods(each)}
    claims = dict.fromkeys(sizes, (0.0, 0.0, 0.0))
    for pod in pods:
        if pod.spec.node_name in claims and pod.status.phase not in _OVER:
            claims[pod.spec.node_name] = _sum(claims[pod.spec.node_name], _claim(pod))
    left = [tuple(max(0.0, had - used) for had, used in zip(sizes[name], claims[name], strict=True)) for name in sizes]
    cpu, memory, gpus = map(sum, zip(*sizes.values(), strict=True)) if sizes else (0.0, 0.0, 0.0)
    claimed_cpu, claimed_memory, claimed_gpus = map(sum, zip(*claims.values(), strict=True)) if sizes else (0.0,) * 3
    most = max(left, default=(0.0, 0.0, 0.0))
    return MachinesSeen(
        count=len(sizes),
        cpu=round(cpu, 3),
        memory_mb=round(memory),
        gpus=round(gpus),
        claimed_cpu=round(claimed_cpu, 3),
        claimed_memory_mb=round(claimed_memory),
        claimed_gpus=round(claimed_gpus),
        largest=Resource(cpu=round(most[0], 3), memory_mb=int(most[1]), gpus=int(most[2])),
    )


def _takes_pods(machine: ClusterNode) -> bool:
    return machine.is_ready and not machine.spec.unschedulable and not any(map(_is_own, machine.spec.taints))


def _is_own(taint: Taint) -> bool:
    return taint.effect in ("NoSchedule", "NoExecute") and taint.key.startswith(OWN_TAINTS)


def _phase(text: str) -> PodPhase:
    return PodPhase(text) if text in tuple(PodPhase) else PodPhase.UNKNOWN


def _main_size(pod: Pod) -> Resource:
    """Of the container that trains; its limit, where it has one, is what it died of."""
    containers = pod.spec.containers
    main = next(
        (each for each in containers if each.name == names.MAIN_CONTAINER), containers[0] if containers else None
    )
    if main is None:
        return Resource()
    try:
        return resource_of({**main.resources.requests, **main.resources.limits})
    except ConfigError:
        return Resource()


def _claim(pod: Pod) -> tuple[float, float, float]:
    """As the scheduler counts: containers together with sidecars, or the largest init container."""
    sidecars = [each for each in pod.spec.init_containers if each.restart_policy == "Always"]
    running = _amounts([_wanted(each) for each in (*pod.spec.containers, *sidecars)])
    first = [_amounts([_wanted(each)]) for each in pod.spec.init_containers if each not in sidecars]
    cpu, memory, gpus = (max(each) for each in zip(running, *first, strict=True))
    return cpu, memory, gpus


def _wanted(container: Container) -> dict[str, str]:
    return {**container.resources.limits, **container.resources.requests}


def _amounts(given: Iterable[dict[str, str]]) -> tuple[float, float, float]:
    """Cores, MiB and accelerators; what is no quantity counts as nothing."""
    total = (0.0, 0.0, 0.0)
    for each in given:
        accelerator = accelerator_in(each)
        gpus = _amount(each.get(accelerator, "0")) if accelerator else 0.0
        total = _sum(total, (_amount(each.get("cpu", "0")), _amount(each.get("memory", "0")) / MIB, gpus))
    return total


def _amount(text: str) -> float:
    try:
        return quantity(text)
    except ConfigError:
        return 0.0


def _sum(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float, float]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]
