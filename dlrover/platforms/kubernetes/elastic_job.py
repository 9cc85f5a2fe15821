"""
The `ElasticJob` of a cluster: its fields as structs, and the fleet that a master makes of them.

The operator and the master read the same object, so its fields stand in one place. A field that this module does not
know is ignored: the schema of the CRD prunes or rejects it before it gets here. Pod templates stay plain JSON, because
a template belongs to the user and Kubernetes adds fields to it each year.
"""

from __future__ import annotations

import enum

from msgspec import UNSET, Struct, UnsetType, field

from dlrover.platforms.kubernetes.objects import Metadata

GROUP = "elastic.iml.github.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ElasticJob"

JsonObject = dict[str, object]
"""A part of an object that we pass on and do not interpret: a pod template, a resource list."""


class SuspendPolicy(enum.StrEnum):
    DELETE_MASTER = "DeleteMaster"
    """A suspended job has no pod at all."""
    KEEP_MASTER = "KeepMaster"
    """As the original: the master's pod keeps running."""


class CleanPodPolicy(enum.StrEnum):
    """Which pods of a job are deleted when the job ends, as in batch Jobs of Kubeflow."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class FaultyHosts(enum.StrEnum):
    AVOID = "Avoid"
    """New pods of this job do not go to a machine that failed a check."""
    CORDON = "Cordon"
    """The machine is marked unschedulable for all. The operator must allow it."""
    IGNORE = "Ignore"


class JobReplica(Struct, frozen=True, kw_only=True, rename="camel"):
    """`spec.replicaSpecs.<type>`: the pods of one type."""

    replicas: int = 0
    template: JsonObject = {}
    """A `PodTemplateSpec`."""
    restart_policy: str = ""
    """Accepted for similarity with Kubeflow; `template.spec.restartPolicy` is the field that counts."""
    restart_count: int | None = None
    """Relaunches of each rank after failures; None: 3."""
    auto_scale: bool | str = True
    """A text is true for `true`, `yes`, `t` and `y`."""
    restart_timeout: int = 0
    priority: str = ""
    """`high`, `low`, or a fraction."""
    critical_nodes: str = ""
    batch_scheduler: str = field(default="", name="batchScheduler")
    old_batch_scheduler: str = field(default="", name="BatchScheduler")
    """The original's spelling of `batchScheduler`."""
    min_replicas: int | None = None
    max_replicas: int | None = None
    standby: int = 0
    """Warm nodes beyond the world."""
    priority_class_name: str = ""
    """Of every pod of this type. It wins over `priority`."""


class JournalClaim(Struct, frozen=True, kw_only=True, rename="camel"):
    """A volume of its own for the master's journal."""

    size: str = "1Gi"
    storage_class_name: str = ""
    """Empty: the cluster's default class."""


class MasterSettings(Struct, frozen=True, kw_only=True, rename="camel"):
    """`spec.master`: wins over the template `replicaSpecs.dlrover-master`."""

    resources: JsonObject = {}
    journal: JournalClaim | None = None
    """None: an `emptyDir`, which outlives the container and not the pod."""
    max_restarts: int | None = None
    """None: `replicaSpecs.dlrover-master.restartCount`, else 20."""
    options: dict[str, str] = {}
    """Master options without dashes in front: name to value. They win over annotations of the job."""
    service_account_name: str = ""


class GangSettings(Struct, frozen=True, kw_only=True, rename="camel"):
    scheduler: str = ""
    """`volcano` or `coscheduling`."""
    min_member: int | None = None
    """None: as many as the job needs to train."""


class NetworkSettings(Struct, frozen=True, kw_only=True, rename="camel"):
    policy: bool = False
    """Make a NetworkPolicy that admits the job's own pods and the operator."""
    tls_secret_name: str = ""
    """A Secret with `tls.crt`, `tls.key` and `ca.crt`: the master's port speaks TLS."""


class ElasticJobSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    distribution_strategy: str = ""
    resource_limits: dict[str, str | int | float] = {}
    optimize_mode: str = ""
    brain_service: str = ""
    enable_elastic_scheduling: bool = True
    enable_dynamic_sharding: bool = True
    replica_specs: dict[str, JobReplica] = {}
    envs: dict[str, JsonObject] = {}
    """Variable name to `EnvVar`; every pod of the job gets them."""
    suspend: bool | None = None
    suspend_policy: SuspendPolicy = SuspendPolicy.DELETE_MASTER
    managed_by: str = ""
    """Name of another controller that cares for this job. Empty: our operator does."""
    ttl_seconds_after_finished: int | None = None
    active_deadline_seconds: int | None = None
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    master: MasterSettings = MasterSettings()
    gang: GangSettings | None = None
    network: NetworkSettings = NetworkSettings()
    disruption_budget: bool = True
    """Keep a PodDisruptionBudget for the workers."""
    faulty_hosts: FaultyHosts = FaultyHosts.AVOID


class JobCondition(Struct, frozen=True, kw_only=True, rename="camel"):
    """One condition in Kubernetes' own form."""

    type: str
    status: str
    """`True`, `False` or `Unknown`."""
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""
    last_update_time: str | UnsetType = UNSET
    """Only in the nested list of old."""
    observed_generation: int | UnsetType = UNSET


class ReplicaCounts(Struct, frozen=True, kw_only=True, rename="camel"):
    initial: int = 0
    pending: int = 0
    active: int = 0
    succeeded: int = 0
    failed: int = 0
    label_selector: str | UnsetType = UNSET


class OldJobStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """`status.status`: where the original's readers look."""

    conditions: tuple[JobCondition, ...] = ()
    replica_statuses: dict[str, ReplicaCounts] = {}
    start_time: str = ""
    completion_time: str = ""
    last_reconcile_time: str = ""


class MasterRecord(Struct, frozen=True, kw_only=True, rename="camel"):
    """What the operator must remember of the newest master pod, because the pod itself may be gone."""

    index: int = 0
    """The n of its name. It is written here before the pod is created."""
    uid: str = ""
    """Empty: the pod is not created yet, or the operator has not seen it."""
    restarts: int = 0
    """Pods made after the first, since the last hour of quiet."""
    restarted_at: str = ""
    gone_at: str = ""
    """When the operator saw that the former pod's object was gone. Its API token is accepted for some seconds longer."""
    forgiven_crashes: int = 0
    """Restarts of this pod's container that lie before an hour of quiet."""


class ElasticJobStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    phase: str = ""
    reason: str = ""
    scale_plan: str = ""
    """Name of the plan that is carried out now."""
    status: OldJobStatus = OldJobStatus()
    conditions: tuple[JobCondition, ...] = ()
    observed_generation: int = 0
    replica_statuses: dict[str, ReplicaCounts] = {}
    worker_replicas: int = 0
    """For the `scale` sub-resource: pods of type worker that exist."""
    selector: str = ""
    """For the `scale` sub-resource: label selector of the workers."""
    ready: str = ""
    """`5/8`: workers that run, of those that the job wants."""
    restarts: int = 0
    """Master pods made after the first."""
    start_time: str = ""
    completion_time: str = ""
    master: MasterRecord | None = None
    """None: the operator has not made a master pod."""
    # The master writes these, by server-side apply with a field manager of its own.
    round: int = 0
    goodput: str = ""
    last_step: int = 0
    cordon_hosts: tuple[str, ...] = ()
    """Machines that failed a check, with `faultyHosts: Cordon`. The operator marks them unschedulable."""


class ElasticJob(Struct, frozen=True, kw_only=True, rename="camel"):
    metadata: Metadata
    spec: ElasticJobSpec = ElasticJobSpec()
    status: ElasticJobStatus = ElasticJobStatus()
    api_version: str = API_VERSION
    kind: str = KIND

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


def forgets_when_suspended(job: ElasticJob) -> str:
    """What a suspension costs a job that has run, as a sentence. Empty: nothing, its journal stays."""
    stays = job.spec.master.journal is not None or job.spec.suspend_policy is SuspendPolicy.KEEP_MASTER
    if stays or job.status.master is None:
        return ""
    return (
        "The journal goes with the master's pod: a resumed job reads the data records again that were used since its last "
        "checkpoint. spec.master.journal, or spec.suspendPolicy: KeepMaster, keeps it."
    )
