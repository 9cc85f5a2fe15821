"""
Is this job possible? Rules that need no API server, and the pods to be judged by one.

The CRD states most of these rules too, and refuses such a job at `kubectl apply`. They are here again because a cluster
may hold jobs that are older than its CRD, and because a sentence in the status reaches people who did not apply it.
"""

from __future__ import annotations

import difflib

from msgspec import Struct

from dlrover.operator.master_pod import master_template, option_problem
from dlrover.operator.observations import JobObjects, OperatorSettings
from dlrover.operator.owned import ALLOWED_ACCOUNT
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, FaultyHosts, JobReplica, JsonObject
from dlrover.platforms.kubernetes.job.fleet import MOST_RELAUNCHES, fleet_of, pod_job_of, training_types
from dlrover.platforms.kubernetes.job.gangs import GangScheduler, gang_of, groups_of, min_member
from dlrover.platforms.kubernetes.pods import main_container, pod_of
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import LaunchNode, NodeType
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.job_limits import excess_as_defined

_TYPES = {**{each.value: each for each in NodeType}, "master": NodeType.CHIEF}
"""The original's type `master` is a chief."""
_WITHOUT_TEMPLATE = (NodeType.CHIEF, NodeType.EVALUATOR)
"""They take the workers' template if they have none."""


class Problem(Struct, frozen=True):
    reason: str
    sentence: str


def problem_of(job: ElasticJob, seen: JobObjects, settings: OperatorSettings) -> Problem | None:
    """None: as far as the operator can tell, the job can start."""
    name = job.metadata.name
    if len(name) > names.MAX_JOB_NAME:
        return Problem(
            "NameTooLong",
            f"The name {name} has {len(name)} characters, and a job's name may have at most "
            f"{names.MAX_JOB_NAME}. (Names of its services add up to 26 characters, and DNS allows 63.) Create "
            "the job again with a shorter name.",
        )
    known = (*_TYPES, names.MASTER_TYPE)
    for type_name in job.spec.replica_specs:
        if type_name not in known:
            close = difflib.get_close_matches(type_name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            return Problem(
                "UnknownReplicaType",
                f"spec.replicaSpecs names the unknown type {type_name}. The types are {', '.join(known)}.{hint}",
            )
    if not any(type_name in _TYPES for type_name in job.spec.replica_specs):
        return Problem("NoReplicas", "spec.replicaSpecs has no type of node. Give at least `worker`.")
    for type_name, replica in job.spec.replica_specs.items():
        if problem := _replica_problem(job, type_name, replica):
            return problem
    if sentence := option_problem(job):
        return Problem("InvalidOption", sentence)
    try:
        fleet = fleet_of(job)  # what the master itself will make of it
    except ConfigError as error:
        return Problem("InvalidSpec", str(error))
    if excess := excess_as_defined(fleet):
        return Problem(
            "LimitsExceeded",
            f"The job needs more than spec.resourceLimits allow: {excess}. Raise the limits, or ask for less.",
        )
    return _gang_problem(job, settings) or _rights_problem(job, seen, settings)


def unused_fields(job: ElasticJob) -> str:
    """Sentences about fields that are given and have no effect in this version, or less than they say; empty: there is none."""
    spec = job.spec
    given = {
        "enableElasticScheduling": not spec.enable_elastic_scheduling,
        "enableDynamicSharding": not spec.enable_dynamic_sharding,
    }
    for type_name, replica in spec.replica_specs.items():
        where = f"replicaSpecs.{type_name}"
        given[f"{where}.restartTimeout"] = bool(replica.restart_timeout)
        given[f"{where}.restartPolicy"] = bool(replica.restart_policy)
    names_ = [name for name, is_given in given.items() if is_given]
    sentences = [f"These fields have no effect in this version: {', '.join(names_)}."] if names_ else []
    sentences += [
        f"replicaSpecs.{type_name}.restartCount is {replica.restart_count}; {MOST_RELAUNCHES}, the largest "
        "possible value, is used."
        for type_name, replica in spec.replica_specs.items()
        if type_name != names.MASTER_TYPE and (replica.restart_count or 0) > MOST_RELAUNCHES
    ]
    return " ".join(sentences)


def first_pods(job: ElasticJob) -> tuple[JsonObject, ...]:
    """The pod that the master would make first of each type. Call it for a job without a `problem_of`."""
    pod_job = pod_job_of(job, fleet_of(job), token_secret=names.token_secret(job.metadata.name))
    return tuple(
        pod_of(
            LaunchNode(
                id=PlatformId(0),
                node_type=node_type,
                rank=0,
                name=f"{node_type.value}-0",
                priority=_first_priority(replica.priority),
            ),
            pod_job,
        )
        for node_type, _, replica in training_types(job)
    )


def _replica_problem(job: ElasticJob, type_name: str, replica: JobReplica) -> Problem | None:
    where = f"spec.replicaSpecs.{type_name}"
    if type_name == names.MASTER_TYPE:
        if replica.replicas > 1:
            return Problem("TooManyMasters", f"{where}.replicas is {replica.replicas}. A job has one master.")
        return _template_problem(where, replica) if master_template(job).template else None
    least, most = replica.min_replicas, replica.max_replicas
    if least is not None and least > replica.replicas:
        return Problem("InvalidReplicas", f"{where}: minReplicas {least} is more than replicas {replica.replicas}.")
    if most is not None and most < replica.replicas:
        return Problem("InvalidReplicas", f"{where}: replicas {replica.replicas} is more than maxReplicas {most}.")
    if not replica.template:
        worker = job.spec.replica_specs.get(NodeType.WORKER.value)
        if _TYPES[type_name] in _WITHOUT_TEMPLATE and worker is not None and worker.template:
            return None
        return Problem("InvalidTemplate", f"{where}.template is missing.")
    return _template_problem(where, replica)


def _template_problem(where: str, replica: JobReplica) -> Problem | None:
    spec = replica.template.get("spec")
    if where.endswith(names.MASTER_TYPE) and isinstance(spec, dict) and not spec.get("containers"):
        return None  # the operator adds the container
    try:
        main_container(spec if isinstance(spec, dict) else {})
    except ConfigError as error:
        return Problem("InvalidTemplate", f"{where}.template: {error}")
    return None


def _gang_problem(job: ElasticJob, settings: OperatorSettings) -> Problem | None:
    if not (gang := gang_of(job)):
        if job.spec.gang is not None:
            return Problem("InvalidGang", f"spec.gang.scheduler is missing. Give {' or '.join(GangScheduler)}.")
        return None
    if gang not in tuple(GangScheduler):
        return Problem(
            "InvalidGang", f"{gang} is not a gang scheduler that DLRover supports. Give {' or '.join(GangScheduler)}."
        )
    if gang not in settings.gang_schedulers:
        resource = groups_of(GangScheduler(gang))
        return Problem(
            "GangSchedulerMissing",
            f"The cluster has no {resource.plural}.{resource.group}, or the operator may not list them, so {gang} cannot place "
            "the pods of this job. Install that scheduler, give the operator its rights, and restart the operator.",
        )
    least, all_of_them = min_member(job), sum(replica.replicas for _, _, replica in training_types(job))
    if least > all_of_them:
        return Problem(
            "InvalidGang",
            f"spec.gang.minMember is {least}, but the job has only {all_of_them} pods, so it can never start. "
            "Lower minMember.",
        )
    return None


def _rights_problem(job: ElasticJob, seen: JobObjects, settings: OperatorSettings) -> Problem | None:
    account = job.spec.master.service_account_name
    if account and account not in seen.allowed_accounts:
        return Problem(
            "ServiceAccountNotAllowed",
            f"spec.master.serviceAccountName: the account {account} does not exist in {job.metadata.namespace}, "
            f"or it lacks the label {ALLOWED_ACCOUNT}: allowed.",
        )
    if job.spec.faulty_hosts is FaultyHosts.CORDON and job.metadata.namespace not in settings.allow_cordon:
        return Problem(
            "CordonNotAllowed",
            "spec.faultyHosts is Cordon, but the operator was started without --allow-cordon "
            f"{job.metadata.namespace}.",
        )
    return None


def _first_priority(priority: str) -> str:
    """The class of rank 0: `high` and `low` are names of classes, and a fraction begins with `high`."""
    return priority if priority in ("", "high", "low") else "high"
