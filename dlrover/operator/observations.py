"""
What `decide` sees of one job, gathered from informers and from answers to earlier actions.

Everything here except `check` and `failure` is in the cluster, so an operator that starts again sees the same. Those
two are lost with the process, and `decide` asks for them again.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.operator.actions import ObjectKind
from dlrover.platforms.kubernetes.objects import Metadata, Pod
from dlrover.platforms.kubernetes.scale_plan import PlanObject


class TemplateCheck(Struct, frozen=True, kw_only=True):
    """What the API server said about the first pod of each type."""

    generation: int
    problem: str = ""
    """The sentence of the API server. Empty: the templates are good."""
    at: float


class FailedAction(Struct, frozen=True, kw_only=True):
    """The last action that failed."""

    what: str
    """The action: `create Pod elasticjob-a-dlrover-master-0`."""
    reason: str
    """One word for the condition, such as `QuotaExceeded`."""
    message: str
    retry_at: float


class JobObjects(Struct, frozen=True, kw_only=True):
    pods: tuple[Pod, ...] = ()
    """Those with the job's uid as label: the master's and the nodes'."""
    others: dict[tuple[ObjectKind, str], Metadata] = {}
    """All other objects with a name that the operator uses for this job, also those of a former job of that name."""
    not_ready: dict[str, float] = {}
    """Machines that do not answer, and since when."""
    allowed_accounts: frozenset[str] = frozenset()
    """Service accounts of the namespace that a job may name for its master."""
    plans: tuple[Metadata, ...] = ()
    """Plans for this job that have no owner yet."""
    open_plans: tuple[PlanObject, ...] = ()
    """Of the job's master, oldest first."""
    uncordoned: frozenset[str] = frozenset()
    """Machines with pods of this job that were never marked for it."""
    check: TemplateCheck | None = None
    failure: FailedAction | None = None


class OperatorSettings(Struct, frozen=True, kw_only=True):
    """What the person who runs the operator decides for all jobs."""

    master_image: str
    allow_cordon: frozenset[str] = frozenset()
    """Namespaces in which jobs may mark machines unschedulable."""
    gang_schedulers: frozenset[str] = frozenset()
    """Those whose groups this cluster knows."""
