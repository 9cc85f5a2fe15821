"""
First sizes of a job from what former ones used: historical algorithms for its creation (spec 07 §13.7).

Only completed jobs say which size is right. One that ran out of memory says which is too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlrover.core.scaling.history.numbers import major_mean, mean, total_cpu
from dlrover.core.scaling.history.parameters import (
    LEAST_WORKER_MEMORY,
    MOST_SERVER_MEMORY,
    HistoryParameters,
)
from dlrover.core.scaling.history.seen import GroupWish, HistoryPlan, JobSeen
from dlrover.protocol.messages.fleet import NodeType


def create_servers(job: JobSeen, former: Sequence[JobSeen], given: HistoryParameters) -> HistoryPlan | None:
    """`optimize_job_ps_create_resource`."""
    totals: list[float] = []
    busiest = largest = largest_total = 0.0
    for each in former:
        records = [record for record in each.records if record.servers]
        if not each.is_completed or not records:
            continue
        totals.append(major_mean(total_cpu(record.servers) for record in records))
        cores: dict[int, list[float]] = {}
        for record in records:
            for node in record.servers:
                cores.setdefault(node.id, []).append(node.cpu)
        busiest = max(busiest, *(mean(used) for used in cores.values()))
        largest = max(largest, *(node.memory_mb for record in records for node in record.servers))
        largest_total = max(largest_total, *(sum(node.memory_mb for node in record.servers) for record in records))
    used = major_mean(totals)
    if not used or not largest or not busiest:
        return None

    cpu = busiest + given.server_cpu_margin
    total = used * (1 + given.server_cpu_margin_share)
    count = math.ceil(total / cpu)
    if count > given.most_servers:
        count, cpu = given.most_servers, math.ceil(total / given.most_servers)
    if largest * count < largest_total:
        largest = math.ceil(largest_total / count)
    memory = min(MOST_SERVER_MEMORY, largest * (1 + given.server_memory_margin))
    return HistoryPlan(
        algorithm="optimize_job_ps_create_resource",
        sentence=f"{len(totals)} completed jobs used {used:.1f} cores of servers in all and {largest:.0f} MiB of one.",
        groups=(GroupWish(node_type=NodeType.PS, count=count, cpu=cpu, memory_mb=memory),),
    )


def create_servers_cold(job: JobSeen, former: Sequence[JobSeen], given: HistoryParameters) -> HistoryPlan | None:
    """`optimize_job_ps_cold_create_resource`."""
    return HistoryPlan(
        algorithm="optimize_job_ps_cold_create_resource",
        sentence="No completed job is like this one: its servers begin with the sizes of the settings.",
        groups=(
            GroupWish(node_type=NodeType.PS, count=given.cold_servers, cpu=given.cold_cpu, memory_mb=given.cold_memory),
        ),
    )


def create_workers(job: JobSeen, former: Sequence[JobSeen], given: HistoryParameters) -> HistoryPlan | None:
    """`optimize_job_worker_create_resource`: one worker, the chief, with so many cores that its need can be measured."""
    used = [
        node for each in former if each.is_completed for record in each.records for node in record.workers if node.cpu
    ]
    if not used:
        return None
    cpu = max(node.cpu for node in used)
    memory = max(node.memory_mb for node in used)
    return HistoryPlan(
        algorithm="optimize_job_worker_create_resource",
        sentence=f"Workers of completed jobs used at most {cpu:.1f} cores and {memory:.0f} MiB.",
        groups=(
            GroupWish(
                node_type=NodeType.WORKER,
                count=1,
                cpu=max(float(math.ceil(cpu)), given.worker_create_cpu),
                memory_mb=max(LEAST_WORKER_MEMORY, memory * (1 + given.node_memory_margin)),
            ),
        ),
    )


def create_workers_after_oom(job: JobSeen, former: Sequence[JobSeen], given: HistoryParameters) -> HistoryPlan | None:
    """`optimize_job_worker_create_oom_resource`: memory alone."""
    needs = [
        max(node.used_memory_mb, node.memory_mb if node.is_oom else 0.0)
        * (1 + given.worker_oom_margin if node.is_oom else 1)
        for each in (*former, job)
        for node in each.nodes
        if node.node_type in (NodeType.WORKER, NodeType.CHIEF)
    ]
    last = job.planned_worker_memory_mb or max(
        (node.memory_mb for record in job.records[-1:] for node in record.workers), default=0.0
    )
    if last:
        needs.append(last + given.worker_oom_increase)
    memory = max(needs, default=0.0)
    if not memory:
        return None
    return HistoryPlan(
        algorithm="optimize_job_worker_create_oom_resource",
        sentence=f"Workers of jobs like this one need {memory:.0f} MiB, as far as those that ran out of memory show.",
        groups=(GroupWish(node_type=NodeType.WORKER, memory_mb=memory),),
    )
