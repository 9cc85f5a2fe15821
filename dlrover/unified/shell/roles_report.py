"""What people see of the roles of a job: for the pages of its elastic roles, and for `dlrover ray status`."""

from __future__ import annotations

from collections import Counter

from dlrover.protocol.messages.roles import RoleLine, RolesReport
from dlrover.unified.core.messages import EnsembleStatus, RoleStatus
from dlrover.unified.plan import EnsemblePlan

MAX_FAILURE = 500


def roles_report(status: EnsembleStatus, plan: EnsemblePlan) -> RolesReport:
    return RolesReport(
        job=status.name,
        stage=status.stage.value,
        num_job_restarts=status.num_job_restarts,
        verdict=status.verdict,
        roles=tuple(_line(role, plan.roles[role.name].kind.value) for role in status.roles),
    )


def states(role: RoleStatus) -> str:
    """For example `2 running, 1 starting`."""
    counts = Counter(each.state for each in role.instances)
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def _line(role: RoleStatus, kind: str) -> RoleLine:
    last = max(role.instances, key=lambda each: each.failed_at)
    return RoleLine(
        name=role.name,
        kind=kind,
        num_wanted=len(role.instances),
        num_ready=sum(each.is_usable for each in role.instances),
        states=states(role),
        num_restarts=sum(each.num_restarts for each in role.instances),
        failure=f"{last.name}: {last.cause}"[:MAX_FAILURE] if last.failed_at else "",
        failed_at=last.failed_at,
    )
