"""
Names, labels and annotations of a job's objects. The master, the operator and people's own tools rely on them.

Most are the original's, so that its dashboards and selectors keep working (spec 08 §2). A job's name has at most 37
characters: the longest name made of it, that of the master's service, then fits into the 63 that DNS allows.
"""

from __future__ import annotations

MAX_JOB_NAME = 37
MASTER_PORT = 50001
"""Of the master's service. The container may listen on another port."""
MASTER_TYPE = "dlrover-master"
MAIN_CONTAINER = "main"

APP = "app"
APP_DLROVER = "dlrover"
"""Value of `app` on pods and services that the master makes."""
APP_NAME = "app.kubernetes.io/name"
APP_ELASTIC_JOB = "elasticjob"
"""Value of `app.kubernetes.io/name` on objects that the operator makes."""

JOB_NAME = "elasticjob.dlrover/name"
JOB_UID = "elasticjob.dlrover/uid"
"""Selects what belongs to this job, and not to an earlier one of the same name."""
REPLICA_TYPE = "elasticjob.dlrover/replica-type"
REPLICA_INDEX = "elasticjob.dlrover/replica-index"
RANK_INDEX = "elasticjob.dlrover/rank-index"
RELAUNCH_COUNT = "elasticjob.dlrover/relaunch-count"
GROUP_INDEX = "scheduling/rack-group"
GROUP_NUM = "scheduling/rack-group-num"
OLD_JOB_NAME = "elasticjob-name"
"""Published examples of manual plans use it."""
SCALE_TYPE = "scale-type"

STOP = "elasticjob.dlrover/stop"
"""Annotation of an ElasticJob: its master ends the job in good order. The value is the reason."""
MADE_FROM = "elasticjob.dlrover/made-from"
"""Annotation of objects that follow the job's numbers: which ones they were made from."""
CORDONED_FOR = "elasticjob.dlrover/cordoned-for"
"""Annotation of a machine that was marked unschedulable: uid of the job."""
WORK = "elasticjob.dlrover/work"
"""Annotation of a plan that a master wrote: the pods to create and delete."""
MASTER_EPOCH = "elasticjob.dlrover/master-epoch"
"""Annotation of such a plan: of the master that wrote it."""
LAUNCH = "elasticjob.dlrover/launch"
"""Annotation with the intent that made a pod, without its environment."""

TOKEN_DIRECTORY = "/var/run/dlrover/token"
TOKEN_KEY = "token"
"""Key of the Secret, and so the name of the file in `TOKEN_DIRECTORY`."""
TLS_DIRECTORY = "/var/run/dlrover/tls"
TLS_CERT, TLS_KEY, TLS_CA = "tls.crt", "tls.key", "ca.crt"
"""Keys of a Secret of the type `kubernetes.io/tls`, as cert-manager writes it."""


def pod_name(job: str, node_type: str, node_id: int) -> str:
    return f"{job}-edljob-{node_type}-{node_id}"


def master_service(job: str) -> str:
    return f"elasticjob-{job}-dlrover-master"


def master_pod(job: str, index: int) -> str:
    return f"{master_service(job)}-{index}"


def plan_name(job: str, epoch: int, number: int) -> str:
    """Of a master that creates no pods itself. The epoch keeps the plans of two masters apart."""
    return f"{job}-plan-{epoch}-{number}"


def nodes_service(job: str) -> str:
    """The headless service that gives each pod a name of its own."""
    return f"elasticjob-{job}-nodes"


def ledger_name(job: str) -> str:
    return f"elasticjob-{job}-ledger"


def group_name(job: str) -> str:
    """The pods that a gang scheduler starts together."""
    return f"elasticjob-{job}"


def token_secret(job: str) -> str:
    return f"elasticjob-{job}-token"


def selector_of(job_uid: str) -> str:
    return f"{JOB_UID}={job_uid}"


def owner_reference(job: str, job_uid: str) -> dict[str, object]:
    """The cluster deletes what carries it after the job."""
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "name": job,
        "uid": job_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
