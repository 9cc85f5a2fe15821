"""
The objects of a job beside pods: services, token, rights, ledger, journal claim, disruption budget, network policy.

Each has the job as its owner, so the cluster deletes it after the job. Each is made once and not changed: what a person or
another controller edits stays edited. Two follow the numbers of the job, when these change: the budget and the gang's group.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlrover.operator.actions import AdjustObject, CreateObject, CreateToken, ObjectKind
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import GROUP, ElasticJob, JsonObject
from dlrover.platforms.kubernetes.job.gangs import GangScheduler, gang_of, group_spec, groups_of
from dlrover.platforms.kubernetes.objects import Metadata

MASTER_ROLE = "dlrover-master"
"""ClusterRole with what all masters may do, bound within the job's namespace only."""
PLANNING_MASTER_ROLE = "dlrover-master-plans"
"""The same for masters of mode `k8s`, which create and delete no pods."""
ALLOWED_ACCOUNT = "elasticjob.dlrover/master"
"""Label of service accounts that a job may name for its master; its value is `allowed`."""
GROUP_KINDS = {
    GangScheduler.VOLCANO: ObjectKind.VOLCANO_GROUP,
    GangScheduler.COSCHEDULING: ObjectKind.COSCHEDULING_GROUP,
}
_BOUNDS = {
    ObjectKind.DISRUPTION_BUDGET: ("minAvailable", "maxUnavailable"),
    ObjectKind.VOLCANO_GROUP: ("minMember",),
    ObjectKind.COSCHEDULING_GROUP: ("minMember",),
}
"""Fields that follow the job."""


def makes_plans(job: ElasticJob) -> bool:
    """Mode `k8s`: the operator creates the pods that the master asks for. It is chosen when the job is made."""
    return job.spec.master.options.get("platform") == "k8s"


def account_name(job: ElasticJob) -> str:
    return job.spec.master.service_account_name or f"elasticjob-{job.metadata.name}-master"


def claim_name(job: ElasticJob) -> str:
    return f"elasticjob-{job.metadata.name}-journal"


def operator_labels(job: ElasticJob) -> dict[str, str]:
    return {
        names.APP_NAME: names.APP_ELASTIC_JOB,
        names.JOB_NAME: job.metadata.name,
        names.JOB_UID: job.metadata.uid,
    }


def owned_objects(job: ElasticJob) -> Iterator[CreateObject | CreateToken]:
    """In the order in which they are needed: a pod is refused while its service account does not exist."""
    if not job.spec.master.service_account_name:
        yield _create(job, ObjectKind.SERVICE_ACCOUNT, account_name(job), {}, {ALLOWED_ACCOUNT: "allowed"})
    role = PLANNING_MASTER_ROLE if makes_plans(job) else MASTER_ROLE
    yield _create(job, ObjectKind.ROLE_BINDING, _common(job), _binding(job, "ClusterRole", role))
    yield _create(job, ObjectKind.ROLE, _own(job), {"rules": list(_own_rules(job))})
    yield _create(job, ObjectKind.ROLE_BINDING, _own(job), _binding(job, "Role", _own(job)))
    token = _create(job, ObjectKind.SECRET, names.token_secret(job.metadata.name), {"type": "Opaque"})
    yield CreateToken(name=token.name, body=token.body)
    yield _create(job, ObjectKind.CONFIG_MAP, names.ledger_name(job.metadata.name), {"data": {}})
    yield _create(job, ObjectKind.SERVICE, names.master_service(job.metadata.name), _master_service(job))
    yield _create(job, ObjectKind.SERVICE, names.nodes_service(job.metadata.name), _nodes_service(job))
    if job.spec.master.journal is not None:
        yield _create(job, ObjectKind.CLAIM, claim_name(job), _claim(job))
    if job.spec.disruption_budget and "worker" in job.spec.replica_specs:
        yield _following(job, ObjectKind.DISRUPTION_BUDGET, f"elasticjob-{job.metadata.name}-workers", _budget(job))
    if gang := gang_of(job):
        kind = GROUP_KINDS[GangScheduler(gang)]
        yield _following(job, kind, names.group_name(job.metadata.name), {"spec": group_spec(job)})
    if job.spec.network.policy:
        yield _create(job, ObjectKind.NETWORK_POLICY, f"elasticjob-{job.metadata.name}", _network_policy(job))


def adjustment_of(wanted: CreateObject | CreateToken, found: Metadata) -> AdjustObject | None:
    """For an object that follows the job's numbers and was made from others. None: it is as it shall be."""
    if not isinstance(wanted, CreateObject) or wanted.kind not in _BOUNDS:
        return None
    metadata, spec = wanted.body["metadata"], wanted.body["spec"]
    assert isinstance(metadata, dict), "we made it"
    assert isinstance(spec, dict), "we made it"
    made_from = metadata["annotations"][names.MADE_FROM]
    if found.annotations.get(names.MADE_FROM) == made_from:
        return None
    patch: JsonObject = {
        "metadata": {"uid": found.uid, "annotations": {names.MADE_FROM: made_from}},
        "spec": {name: spec.get(name) for name in _BOUNDS[wanted.kind]},
    }
    return AdjustObject(kind=wanted.kind, name=wanted.name, patch=patch)


def kind_of(action: CreateObject | CreateToken) -> ObjectKind:
    return ObjectKind.SECRET if isinstance(action, CreateToken) else action.kind


def _common(job: ElasticJob) -> str:
    """Binding of what all masters may do."""
    return f"elasticjob-{job.metadata.name}-master"


def _own(job: ElasticJob) -> str:
    """Role and binding of what this master alone may do."""
    return f"elasticjob-{job.metadata.name}-own"


def _own_rules(job: ElasticJob) -> Iterator[JsonObject]:
    """By name: a master reads and writes no ledger and no status but its own."""
    name = job.metadata.name
    ledger = names.ledger_name(name)
    yield _rule("", "configmaps", ledger, ("get", "list", "watch", "update"))
    yield _rule(GROUP, "elasticjobs", name, ("get", "list", "watch"))
    yield _rule(GROUP, "elasticjobs/status", name, ("get", "patch"))


def _rule(group: str, resource: str, name: str, verbs: tuple[str, ...]) -> JsonObject:
    return {"apiGroups": [group], "resources": [resource], "resourceNames": [name], "verbs": list(verbs)}


def _binding(job: ElasticJob, kind: str, role: str) -> JsonObject:
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": account_name(job), "namespace": job.metadata.namespace}
    return {"roleRef": {"apiGroup": group, "kind": kind, "name": role}, "subjects": [subject]}


def _master_service(job: ElasticJob) -> JsonObject:
    """It selects by uid, so a pod of a former job of that name never gets this job's connections."""
    port = {"name": "grpc", "port": names.MASTER_PORT, "targetPort": names.MASTER_PORT, "protocol": "TCP"}
    selector = {names.JOB_UID: job.metadata.uid, names.REPLICA_TYPE: names.MASTER_TYPE}
    return {"spec": {"type": "ClusterIP", "selector": selector, "ports": [port]}}


def _nodes_service(job: ElasticJob) -> JsonObject:
    """Gives each pod a name. Nodes look for each other before they are ready, so all addresses are published."""
    return {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB_UID: job.metadata.uid},
        }
    }


def _claim(job: ElasticJob) -> JsonObject:
    journal = job.spec.master.journal
    assert journal is not None, "a job without a journal has no claim"
    spec: JsonObject = {
        "accessModes": ["ReadWriteOncePod"],
        "resources": {"requests": {"storage": journal.size}},
    }
    if journal.storage_class_name:
        spec["storageClassName"] = journal.storage_class_name
    return {"spec": spec}


def _budget(job: ElasticJob) -> JsonObject:
    """
    For drains. An elastic job can do without all pods above its minimum, however it is scaled; any other without one.

    There is none for the master: a drain must always be able to go on, and a master that moves costs no step.
    """
    worker = job.spec.replica_specs["worker"]
    least = worker.replicas if worker.min_replicas is None else worker.min_replicas
    bound: JsonObject = {"minAvailable": least} if 0 < least < worker.replicas else {"maxUnavailable": 1}
    labels = {names.JOB_UID: job.metadata.uid, names.REPLICA_TYPE: "worker"}
    return {"spec": {**bound, "selector": {"matchLabels": labels}}}


def _network_policy(job: ElasticJob) -> JsonObject:
    """Pods of the job admit each other and the operator."""
    own = {"matchLabels": {names.JOB_UID: job.metadata.uid}}
    operator = {"matchLabels": {names.APP_NAME: names.APP_DLROVER}}
    admitted = [{"podSelector": own}, {"podSelector": operator, "namespaceSelector": {}}]
    return {"spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": admitted}]}}


_API_VERSIONS = {
    **dict.fromkeys((ObjectKind.ROLE, ObjectKind.ROLE_BINDING), "rbac.authorization.k8s.io/v1"),
    ObjectKind.DISRUPTION_BUDGET: "policy/v1",
    ObjectKind.NETWORK_POLICY: "networking.k8s.io/v1",
    **{kind: groups_of(scheduler).api_version for scheduler, kind in GROUP_KINDS.items()},
}


def _following(job: ElasticJob, kind: ObjectKind, name: str, rest: JsonObject) -> CreateObject:
    made = _create(job, kind, name, rest)
    metadata, spec = made.body["metadata"], made.body["spec"]
    assert isinstance(metadata, dict), "we made it"
    assert isinstance(spec, dict), "we made it"
    made_from = ",".join(f"{field}={spec[field]}" for field in _BOUNDS[kind] if field in spec)
    metadata["annotations"] = {**metadata["annotations"], names.MADE_FROM: made_from}
    return made


def _create(
    job: ElasticJob, kind: ObjectKind, name: str, rest: JsonObject, labels: dict[str, str] | None = None
) -> CreateObject:
    common = operator_labels(job)
    metadata = {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": {**common, **(labels or {})},
        "annotations": common,  # extensions of sites patch annotations, and a missing map cannot be patched
        "ownerReferences": [names.owner_reference(job.metadata.name, job.metadata.uid)],
    }
    kind_name = kind.value.partition(".")[0]
    body = {"apiVersion": _API_VERSIONS.get(kind, "v1"), "kind": kind_name, "metadata": metadata, **rest}
    return CreateObject(kind=kind, name=name, body=body)
