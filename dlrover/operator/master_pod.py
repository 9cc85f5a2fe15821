"""
The master's pod: our default, the user's template `replicaSpecs.dlrover-master` on top, `spec.master` on top of that.

Always ours, whatever the template says: name, labels, owner, restart policy, token, journal, service account. The
container runs no shell, so a value of an option is one argument whatever it contains.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import cast

from dlrover.operator.owned import account_name, claim_name, makes_plans, operator_labels
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, JobReplica, JsonObject
from dlrover.platforms.kubernetes.pods import main_container

MAX_RESTARTS = 20
GRACE = 30
"""Seconds. A master that stops has only a journal to close, which is durable at each moment."""
LOST_MACHINE = 30
"""Seconds that the cluster leaves the pod on a machine that is not ready. The operator itself acts earlier."""
JOURNAL_DIRECTORY = "/var/lib/dlrover/journal"
RESOURCES = {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "2Gi"}

OPTION_ANNOTATIONS = (
    "pending_timeout",
    "pending_fail_strategy",
    "service_type",
    "pre_check_ops",
    "pre_check_bypass",
    "training_elastic_mode",
    "enable_dashboard",
    "dashboard_port",
    "xpu_type",
    "group_affinity",
    "dynamic_failover_extension",
    "hang_detection",
    "hang_downtime",
    "max_hang_downtime",
    "task_process_timeout",
)
"""Annotations of a job that are options of its master, as in the original."""
OWN_OPTIONS = ("platform", "namespace", "job_name", "host", "port", "journal", "token_file")
"""The operator sets these."""
MODES = ("pyk8s", "k8s")
"""Who creates the pods: the master, or the operator by its plans."""
_OPTION = re.compile(r"[a-z][a-z0-9_]*")


def master_template(job: ElasticJob) -> JobReplica:
    return job.spec.replica_specs.get(names.MASTER_TYPE, JobReplica())


def max_restarts(job: ElasticJob) -> int:
    if job.spec.master.max_restarts is not None:
        return job.spec.master.max_restarts
    count = master_template(job).restart_count
    return MAX_RESTARTS if count is None else count


def option_problem(job: ElasticJob) -> str:
    """Why `spec.master.options` cannot be used. Empty: it can."""
    for given in job.spec.master.options:
        name = given.replace("-", "_")
        if name == "platform" and job.spec.master.options[given] in MODES:
            continue
        if not _OPTION.fullmatch(name):
            return f"spec.master.options: {given!r} is not the name of an option. Write it without dashes in front."
        if name in OWN_OPTIONS:
            return f"spec.master.options: the operator sets {given} itself. Remove it."
    return ""


def master_pod(job: ElasticJob, index: int, image: str) -> JsonObject:
    template = copy.deepcopy(master_template(job).template)
    metadata = _mapping(template.get("metadata"))
    spec = _mapping(template.get("spec"))
    if not spec.get("containers"):
        spec["containers"] = [{"name": names.MAIN_CONTAINER}]
    container = main_container(spec)
    container.setdefault("image", image)
    container.setdefault("imagePullPolicy", "Always")
    if "command" not in container and "args" not in container:
        container["command"] = [*_command(job), *_options(job)]
    container["resources"] = job.spec.master.resources or container.get("resources") or _default_resources()
    container["env"] = _environment(job, container)
    container.setdefault("ports", [{"name": "grpc", "containerPort": names.MASTER_PORT, "protocol": "TCP"}])
    spec["restartPolicy"] = "OnFailure"
    spec["serviceAccountName"] = account_name(job)
    spec["automountServiceAccountToken"] = True
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("terminationGracePeriodSeconds", GRACE)
    spec.setdefault("tolerations", list(_tolerations()))
    secret = {"secretName": names.token_secret(job.metadata.name), "defaultMode": 0o440}
    _mount(spec, container, "dlrover-token", names.TOKEN_DIRECTORY, {"secret": secret}, is_read_only=True)
    if job.spec.network.tls_secret_name:
        tls = {"secretName": job.spec.network.tls_secret_name, "defaultMode": 0o440}
        _mount(spec, container, "dlrover-tls", names.TLS_DIRECTORY, {"secret": tls}, is_read_only=True)
    if job.spec.master.journal is None:
        journal: JsonObject = {"emptyDir": {}}
    else:
        journal = {"persistentVolumeClaim": {"claimName": claim_name(job)}}
    _mount(spec, container, "dlrover-journal", JOURNAL_DIRECTORY, journal)
    labels = {**job.metadata.labels, **_strings(metadata.get("labels")), **_labels(job, index)}
    annotations = {**_passed_on(job.metadata.annotations), **_strings(metadata.get("annotations"))}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.master_pod(job.metadata.name, index),
            "namespace": job.metadata.namespace,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [names.owner_reference(job.metadata.name, job.metadata.uid)],
        },
        "spec": spec,
    }


def _labels(job: ElasticJob, index: int) -> dict[str, str]:
    return {**operator_labels(job), names.REPLICA_TYPE: names.MASTER_TYPE, names.REPLICA_INDEX: str(index)}


def _command(job: ElasticJob) -> Iterator[str]:
    yield from ("python", "-m", "dlrover.python.master.main", "--platform", "k8s" if makes_plans(job) else "pyk8s")
    yield from ("--namespace", job.metadata.namespace, "--job_name", job.metadata.name)
    yield from ("--port", str(names.MASTER_PORT), "--host", "0.0.0.0")
    yield from ("--journal", f"{JOURNAL_DIRECTORY}/journal.sqlite")
    yield from ("--token_file", f"{names.TOKEN_DIRECTORY}/{names.TOKEN_KEY}")
    if job.spec.network.tls_secret_name:
        yield from ("--tls_cert", f"{names.TLS_DIRECTORY}/{names.TLS_CERT}")
        yield from ("--tls_key", f"{names.TLS_DIRECTORY}/{names.TLS_KEY}")


def _options(job: ElasticJob) -> Iterator[str]:
    given = {name: job.metadata.annotations[name] for name in OPTION_ANNOTATIONS if name in job.metadata.annotations}
    given |= {name.replace("-", "_"): value for name, value in job.spec.master.options.items()}
    given.pop("platform", None)  # part of the command
    for name, value in given.items():
        yield f"--{name}={value}"  # one argument: a value that begins with a dash stays a value


def _environment(job: ElasticJob, container: JsonObject) -> list[JsonObject]:
    """Of the job, then the template's, then ours: the later one of the same name wins."""
    ours: list[JsonObject] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"), ("NODE_IP", "status.hostIP"))
    ]
    ours += [
        {"name": "ELASTIC_JOB_NAME", "value": job.metadata.name},
        {"name": "JOB_UID", "value": job.metadata.uid},
    ]
    if job.spec.brain_service:
        ours.append({"name": "DLROVER_BRAIN_SERVICE_ADDR", "value": job.spec.brain_service})
    given = container.get("env")
    variables: dict[str, JsonObject] = {}
    shared = ({**value, "name": name} for name, value in job.spec.envs.items())
    for variable in (*shared, *(given if isinstance(given, list) else ()), *ours):
        name = str(_mapping(variable).get("name"))
        variables.pop(name, None)  # `$(NAME)` refers to variables further up, so a new value goes to the end
        variables[name] = variable
    return list(variables.values())


def _default_resources() -> JsonObject:
    return {"requests": dict(RESOURCES), "limits": dict(RESOURCES)}


def _tolerations() -> Iterator[JsonObject]:
    for trouble in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{trouble}"
        yield {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_MACHINE}


def _mount(
    spec: JsonObject, container: JsonObject, name: str, path: str, source: JsonObject, *, is_read_only: bool = False
) -> None:
    mounts, volumes = container.get("volumeMounts"), spec.get("volumes")
    mount: JsonObject = {"name": name, "mountPath": path, **({"readOnly": True} if is_read_only else {})}
    container["volumeMounts"] = [*(mounts if isinstance(mounts, list) else ()), mount]
    spec["volumes"] = [*(volumes if isinstance(volumes, list) else ()), {"name": name, **source}]


def _passed_on(annotations: Mapping[str, str]) -> dict[str, str]:
    """Those of the job that mean something for a pod. kubectl's own copy of the job would only make the pod large."""
    return {name: value for name, value in annotations.items() if not name.startswith("kubectl.kubernetes.io/")}


def _mapping(value: object) -> JsonObject:
    return cast(JsonObject, value) if isinstance(value, dict) else {}


def _strings(value: object) -> dict[str, str]:
    return {name: str(text) for name, text in _mapping(value).items()}
