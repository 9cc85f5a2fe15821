"""
From a launch intent and the user's template to a pod.

The template is copied and added to. What the user wrote stays: lifecycle hooks, grace period, affinity, tolerations,
sidecars, annotations. Only the fields that the job itself decides are ours: name, labels, owner, restart policy, the
environment of the main container, and its size where the intent gives one. No I/O: tests compare whole objects.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import JsonObject
from dlrover.platforms.kubernetes.job.gangs import GangScheduler, group_marks, scheduler_name
from dlrover.platforms.kubernetes.objects import Pod
from dlrover.platforms.kubernetes.quantities import MIB, cpu_of, memory_mb_of, quantity
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.fleet import LaunchNode, NodeType, Resource, Strategy

MAX_AVOIDED = 64
"""Hosts in one pod's affinity, newest first: a longer list makes each scheduling attempt slower for the whole cluster."""
GRACE = 60
"""Seconds that a pod gets for saving its state, where its template does not say."""
LOST_NODE = 30
"""Seconds that a pod stays on a machine that is not ready, where its template does not say. Kubernetes' own are 300."""

_FALLBACK = {NodeType.CHIEF: NodeType.WORKER, NodeType.EVALUATOR: NodeType.WORKER}
_TOKEN_VOLUME = "dlrover-token"
_TLS_VOLUME = "dlrover-tls"
_SHM_VOLUME = "dlrover-shm"
_SHM = "/dev/shm"


class PodType(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the pods of one type have in common."""

    template: JsonObject
    """`PodTemplateSpec` of the user."""
    count: int = 0
    priority_class: str = ""
    """Wins over the priority of an intent."""


class PodJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all pods of one job have in common."""

    name: str
    uid: str
    namespace: str
    types: dict[NodeType, PodType]
    strategy: Strategy = Strategy.ALLREDUCE
    nnodes: str = ""
    """`min:max` of an elastic job. Empty: the user's command says it."""
    envs: dict[str, JsonObject] = {}
    """Variable name to `EnvVar`, for every pod."""
    master_addr: str = ""
    """Under which pods reach the master. Empty: the name of its service."""
    token_secret: str = ""
    """Secret with the job's token. Empty: the pods get none from us."""
    num_groups: int = 0
    avoids_hosts: bool = True
    """False: the job ignores that machines failed a check."""
    queue: str = ""
    """Queue of Kueue that admits the job; empty: none does."""
    gang: str = ""
    """Scheduler that places the pods together; empty: none does."""
    tls_secret: str = ""
    """Secret with the certificate that the master's must come from; empty: no TLS."""

    @property
    def selector(self) -> str:
        return names.selector_of(self.uid)


def pod_of(intent: LaunchNode, job: PodJob) -> JsonObject:
    """Raises `Rejected` if the job has no usable template for the node."""
    pod_type = job.types.get(intent.node_type) or job.types.get(_FALLBACK.get(intent.node_type, intent.node_type))
    if pod_type is None:
        raise _bad(
            intent,
            f"The job {job.name} has no template for nodes of the type {intent.node_type.value}. "
            "Add it to spec.replicaSpecs.",
        )
    template = copy.deepcopy(pod_type.template)
    metadata = _object(template, "metadata", intent)
    spec = _object(template, "spec", intent)
    name = names.pod_name(job.name, intent.node_type.value, intent.id)
    try:
        container = main_container(spec)
        _size(container, intent.resource)
    except ConfigError as error:
        raise _bad(intent, f"Template of {intent.node_type.value}: {error}") from error
    container["env"] = list(_environment(container, intent, job))
    spec["restartPolicy"] = "Never"
    priority = pod_type.priority_class or intent.priority
    if priority:
        spec["priorityClassName"] = priority
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("terminationGracePeriodSeconds", GRACE)
    spec.setdefault("hostname", name)
    spec.setdefault("subdomain", names.nodes_service(job.name))
    _tolerate_lost_nodes(spec)
    _mount(spec, container, _SHM_VOLUME, _SHM, {"emptyDir": {"medium": "Memory"}})
    if job.token_secret:
        secret: JsonObject = {"secret": {"secretName": job.token_secret, "defaultMode": 0o440}}
        _mount(spec, container, _TOKEN_VOLUME, names.TOKEN_DIRECTORY, secret, is_read_only=True)
    if job.tls_secret:
        # The certificates alone: the key is the master's.
        items = [{"key": names.TLS_CA, "path": names.TLS_CA}]
        source: JsonObject = {"secret": {"secretName": job.tls_secret, "items": items, "defaultMode": 0o444}}
        _mount(spec, container, _TLS_VOLUME, names.TLS_DIRECTORY, source, is_read_only=True)
    labels, annotations = _strings(metadata, "labels"), _strings(metadata, "annotations")
    if job.gang:
        if job.gang not in tuple(GangScheduler):
            raise _bad(intent, f"{job.gang} is not a gang scheduler that DLRover supports.")
        scheduler = GangScheduler(job.gang)
        spec.setdefault("schedulerName", scheduler_name(scheduler))
        group_labels, group_annotations = group_marks(scheduler, job.name)
        labels |= group_labels
        annotations |= group_annotations
    if intent.avoid_hosts and job.avoids_hosts:
        _avoid(spec, intent.avoid_hosts[:MAX_AVOIDED])
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **metadata,
            "name": name,
            "namespace": job.namespace,
            "labels": {**labels, **_labels(intent, job)},
            "annotations": {**annotations, names.LAUNCH: launch_note(intent)},
            "ownerReferences": [names.owner_reference(job.name, job.uid)],
        },
        "spec": spec,
    }


def launch_note(intent: LaunchNode) -> str:
    """The intent as a pod remembers it, without its environment, which may hold what only the pod's process may read."""
    return msgspec.json.encode(replace(intent, environ={})).decode()


def main_container(spec: Mapping[str, object]) -> JsonObject:
    """The only container, else the one named `main`. Raises `ConfigError`."""
    containers = spec.get("containers")
    if not isinstance(containers, list) or not containers or not all(isinstance(each, dict) for each in containers):
        raise ConfigError("`spec.containers` must list at least one container.")
    if len(containers) == 1:
        return cast(JsonObject, containers[0])
    for container in containers:
        if container.get("name") == names.MAIN_CONTAINER:
            return cast(JsonObject, container)
    found = ", ".join(str(each.get("name")) for each in containers)
    raise ConfigError(f"There are several containers ({found}). Give the container that trains the name `main`.")


def main_name(pod: Pod) -> str:
    """Name of the container that trains."""
    containers = [container.name for container in pod.spec.containers]
    return containers[0] if len(containers) == 1 else names.MAIN_CONTAINER


def requests_of(template: Mapping[str, object]) -> JsonObject:
    """What the main container of a template asks for. Raises `ConfigError`."""
    spec = template.get("spec")
    resources = main_container(spec if isinstance(spec, dict) else {}).get("resources")
    requests = resources.get("requests") or resources.get("limits") if isinstance(resources, dict) else None
    return requests if isinstance(requests, dict) else {}


def _labels(intent: LaunchNode, job: PodJob) -> dict[str, str]:
    labels = {
        names.APP: names.APP_DLROVER,
        names.JOB_NAME: job.name,
        names.JOB_UID: job.uid,
        names.REPLICA_TYPE: intent.node_type.value,
        names.REPLICA_INDEX: str(intent.id),
        names.RANK_INDEX: str(intent.rank),
        names.RELAUNCH_COUNT: str(max(intent.num_former, intent.relaunch_count)),
    }
    if intent.group >= 0:
        labels[names.GROUP_INDEX] = str(intent.group)
        if job.num_groups:
            labels[names.GROUP_NUM] = str(job.num_groups)
    return labels


# Environment.


def _environment(container: JsonObject, intent: LaunchNode, job: PodJob) -> Iterator[JsonObject]:
    """Of the job, then the template's, then ours: the later one of the same name wins."""
    written = container.get("env")
    template = [each for each in written if isinstance(each, dict)] if isinstance(written, list) else []
    variables: dict[str, JsonObject] = {}
    shared = ({**value, "name": name} for name, value in job.envs.items())
    for variable in (*shared, *template, *_own_variables(intent, job)):
        name = str(variable.get("name"))
        variables.pop(name, None)  # `$(NAME)` refers to variables further up, so a new value goes to the end
        variables[name] = variable
    yield from variables.values()


def _own_variables(intent: LaunchNode, job: PodJob) -> Iterator[JsonObject]:
    for name, path in (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"), ("NODE_IP", "status.hostIP")):
        yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
    pod_type = job.types.get(intent.node_type)
    workers = job.types.get(NodeType.WORKER)
    num_nodes = (workers.count if workers else 0) or (pod_type.count if pod_type else 0)
    values = {
        "ELASTIC_JOB_NAME": job.name,
        "JOB_UID": job.uid,
        "DLROVER_MASTER_ADDR": job.master_addr or f"{names.master_service(job.name)}:{names.MASTER_PORT}",
        "DLROVER_NODE_ID": str(intent.id),
        "DLROVER_NODE_GROUP": str(intent.group),
        "MONITOR_ENABLED": "true",
        "GRPC_ENABLE_FORK_SUPPORT": "false",
    }
    for prefix in ("NODE", "WORKER"):  # the second are the names that the original calls deprecated and still reads
        values |= {
            f"{prefix}_TYPE": intent.node_type.value,
            f"{prefix}_ID": str(intent.id),
            f"{prefix}_NUM": str(num_nodes),
            f"{prefix}_RANK": str(intent.rank),
        }
    if job.strategy is Strategy.ALLREDUCE:
        values |= {"WORLD_SIZE": str(num_nodes), "RANK": str(intent.rank)}
    if job.nnodes:
        values["PET_NNODES"] = job.nnodes
    if job.token_secret:
        values["PET_JOB_TOKEN_FILE"] = f"{names.TOKEN_DIRECTORY}/{names.TOKEN_KEY}"
    if job.tls_secret:
        values["PET_TLS_CA"] = f"{names.TLS_DIRECTORY}/{names.TLS_CA}"
    if intent.relaunch_count:
        values["RELAUNCHED_POD"] = "true"
    for name, value in {**intent.environ, **values}.items():
        yield {"name": name, "value": value}


# Resources.


def _size(container: JsonObject, wanted: Resource) -> None:
    """
    Give the container what the intent gives.

    A value that is the template's own changes nothing. Another one replaces the request, and the limit grows in the same
    proportion: a container whose limit is twice its request keeps that.
    """
    resources = container.get("resources")
    resources = dict(resources) if isinstance(resources, dict) else {}
    requests, limits = (dict(_mapping(resources.get(part))) for part in ("requests", "limits"))
    changes: dict[str, object] = {}
    if wanted.cpu and wanted.cpu != cpu_of(requests.get("cpu", limits.get("cpu", 0))):
        changes["cpu"] = f"{wanted.cpu:g}"
    if wanted.memory_mb and wanted.memory_mb != memory_mb_of(requests.get("memory", limits.get("memory", 0))):
        changes["memory"] = f"{wanted.memory_mb}Mi"
    device = wanted.gpu_type
    if device and wanted.gpus and wanted.gpus != quantity(requests.get(device, limits.get(device, 0))):
        changes[device] = str(wanted.gpus)
    if not changes:
        return
    for key, value in changes.items():
        had = requests.get(key)
        if key == device or (had is None and key not in limits):
            limits[key] = value  # an extended resource has equal request and limit; a bare template gets both
        elif key in limits:
            new, old = quantity(value), 0.0 if had is None else quantity(had)
            limit = max(new, quantity(limits[key]) * new / old if old else 0.0)
            limits[key] = f"{math.ceil(limit / MIB)}Mi" if key == "memory" else f"{round(limit, 3):g}"
        requests[key] = value
    resources |= {"requests": requests}
    if limits:
        resources["limits"] = limits
    container["resources"] = resources


# Where it may run.


def _avoid(spec: JsonObject, hosts: Iterable[str]) -> None:
    """Required affinity by name in each term of the template: terms are alternatives, so each must exclude the hosts."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in hosts]
    affinity = _child(spec, "affinity")
    required = _child(_child(affinity, "nodeAffinity"), "requiredDuringSchedulingIgnoredDuringExecution")
    terms = required.get("nodeSelectorTerms")
    for term in terms if isinstance(terms, list) and terms else required.setdefault("nodeSelectorTerms", [{}]):  # type: ignore[attr-defined]
        term["matchFields"] = [*term.get("matchFields", []), *fields]


def _tolerate_lost_nodes(spec: JsonObject) -> None:
    given = spec.get("tolerations")
    tolerations = list(given) if isinstance(given, list) else []
    for trouble in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{trouble}"
        if not any(_tolerates(each, key) for each in tolerations):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE}
            )
    spec["tolerations"] = tolerations


def _tolerates(toleration: object, key: str) -> bool:
    toleration = _mapping(toleration)
    effect = toleration.get("effect") or "NoExecute"
    matches = toleration.get("key") == key or (not toleration.get("key") and toleration.get("operator") == "Exists")
    return matches and effect == "NoExecute"


# Volumes.


def _mount(
    spec: JsonObject, container: JsonObject, name: str, path: str, source: JsonObject, *, is_read_only: bool = False
) -> None:
    mounts = container.get("volumeMounts")
    mounts = list(mounts) if isinstance(mounts, list) else []
    if any(_mapping(each).get("mountPath") == path for each in mounts):
        return  # the user's own
    volumes = spec.get("volumes")
    spec["volumes"] = [*(volumes if isinstance(volumes, list) else []), {"name": name, **source}]
    mount: JsonObject = {"name": name, "mountPath": path}
    container["volumeMounts"] = [*mounts, {**mount, "readOnly": True} if is_read_only else mount]


# Reading JSON that others wrote.


def _object(parent: JsonObject, key: str, intent: LaunchNode) -> JsonObject:
    found = parent.get(key, {})
    if not isinstance(found, dict):
        raise _bad(intent, f"Template of {intent.node_type.value}: `{key}` must be an object.")
    return found


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _child(parent: JsonObject, key: str) -> JsonObject:
    if not isinstance(parent.get(key), dict):
        parent[key] = {}
    return cast(JsonObject, parent[key])


def _strings(metadata: JsonObject, key: str) -> dict[str, str]:
    return {name: str(value) for name, value in _mapping(metadata.get(key)).items()}


def _bad(intent: LaunchNode, what: str) -> Rejected:
    return Rejected(f"{intent.name} cannot be launched: {what}", code=ErrorCode.BAD_TEMPLATE)
