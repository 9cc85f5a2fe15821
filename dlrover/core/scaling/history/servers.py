"""
Servers of a job that runs: historical algorithms that adjust their number and their sizes (spec 07 §13.7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlrover.core.scaling.history.numbers import (
    cores_given,
    mean,
    most_use,
    newest_servers,
    num_steps,
    over_window,
    servers_of,
    single_worker_seconds,
    total_cpu,
)
from dlrover.core.scaling.history.parameters import (
    FIRST_WORKERS,
    HARD_SERVER_CPU,
    LEAST_LEFT,
    MOST_SERVER_MEMORY,
    SHORT_STEPS,
    WINDOW,
    HistoryParameters,
)
from dlrover.core.scaling.history.seen import GroupWish, HistoryPlan, JobSeen, NodeWish, UseRecord
from dlrover.protocol.messages.fleet import NodeType

PLENTY = 16.0
"""Cores of a server that receives more than `FEW_OPS` operations."""
FEW_OPS = 150
CORES_OF_OP = 0.08
_SMALL = 1e-9


def adjust_servers(job: JobSeen, former: Sequence[JobSeen], given: HistoryParameters) -> HistoryPlan | None:
    """`optimize_job_ps_init_adjust_resource`: servers for the workers that are to come."""
    records = newest_servers(job.records)
    if not records or not job.facts.recv_op_count or not records[-1].workers:
        return None
    count, workers = len(records[-1].servers), len(records[-1].workers)
    means = over_window(records, servers_of)
    hottest = max(means.values())
    if hottest <= 0:
        return None

    ops = job.facts.recv_op_count / count
    cpu = math.ceil(CORES_OF_OP * ops) + given.server_cpu_margin if ops <= FEW_OPS else PLENTY
    cpu = max(cpu, math.ceil(hottest) + given.server_cpu_margin)
    rate = cpu / (hottest / (given.most_servers / count))
    if count > 1:
        apart = hottest - mean(sorted(means.values())[:-1])
        rate = min(rate, cpu / apart) if apart > 0 else rate  # more servers do not spread what one alone has
    target = min(_target_workers(job, given), math.ceil(rate * workers))
    most_used = max(total_cpu(record.servers) for record in records)
    wanted = min(given.most_servers, math.ceil(target / workers * most_used / cpu))
    memory = max(node.memory_mb for node in records[-1].servers) * (1 + given.server_memory_margin)
    return HistoryPlan(
        algorithm="optimize_job_ps_init_adjust_resource",
        sentence=f"{workers} workers use {most_used:.1f} cores of servers, and {target} are expected.",
        groups=(GroupWish(node_type=NodeType.PS, count=wanted or None, cpu=cpu, memory_mb=memory or None),),
    )


def _target_workers(job: JobSeen, given: HistoryParameters) -> int:
    """0: the speed is not known, so no number of servers follows from it."""
    if not any(record.speed > 0 for record in job.records):
        return 0
    seconds = single_worker_seconds(job, WINDOW)
    return FIRST_WORKERS if seconds is not None and seconds <= SHORT_STEPS else given.init_target_workers


def servers_after_oom(job: JobSeen, former: Sequence[JobSeen], given: HistoryParameters) -> HistoryPlan | None:
    """`optimize_job_ps_oom_resource`: more memory where one server has more than its share, else more servers."""
    nodes = [node for node in job.nodes if node.node_type is NodeType.PS and (node.is_running or node.is_oom)]
    if not nodes:
        return None
    memory, cpu = max(node.memory_mb for node in nodes), max(node.cpu for node in nodes)
    records = [record for record in job.records if record.servers]
    doubled = 2 * memory
    if records:
        used = [node.memory_mb for node in records[-1].servers]
        most = max(used)
        is_uneven = most > 0 and (most - mean(used)) / most > given.memory_imbalance
        doubled = max(memory, 2 * most)
    else:
        is_uneven = memory < MOST_SERVER_MEMORY
    can_grow = is_uneven and min(doubled, MOST_SERVER_MEMORY) > memory
    why = "one of them needs more than the others" if records else "what each of them used is not known"
    if can_grow:
        group = GroupWish(node_type=NodeType.PS, memory_mb=min(doubled, MOST_SERVER_MEMORY))
    else:
        why = "all of them need as much" if not is_uneven else "none can have more memory"
        count = max(len(nodes), min(2 * len(nodes), given.most_servers))
        group = GroupWish(node_type=NodeType.PS, count=count, cpu=cpu or None, memory_mb=memory or None)
    return HistoryPlan(
        algorithm="optimize_job_ps_oom_resource",
        sentence=f"A server ran out of memory, and {why}.",
        groups=(group,),
    )


def hot_servers(job: JobSeen, former: Sequence[JobSeen], given: HistoryParameters) -> HistoryPlan | None:
    """`optimize_job_hot_ps_resource`: single servers that need more cores or memory."""
    records = newest_servers(job.records)
    if len(records) < WINDOW:
        return None
    cores, memory = _hot_cores(job, records, given), _hot_memory(job, records, given)
    wishes = tuple(
        NodeWish(id=id_, node_type=NodeType.PS, cpu=cores.get(id_), memory_mb=memory.get(id_))
        for id_ in sorted({**cores, **memory})
    )
    if not wishes:
        return None
    return HistoryPlan(
        algorithm="optimize_job_hot_ps_resource",
        sentence=f"{len(cores)} servers need more cores and {len(memory)} more memory.",
        nodes=wishes,
    )


def _hot_cores(job: JobSeen, records: Sequence[UseRecord], given: HistoryParameters) -> dict[int, float]:
    configured, means, workers = cores_given(job, NodeType.PS), over_window(records, servers_of), records[-1].workers
    hot = [used for id_, used in means.items() if id_ in configured and used / configured[id_] > given.hot]
    if not hot or not workers:
        return {}
    factor = given.hot_target_workers / len(workers)
    factor = min([factor, *(HARD_SERVER_CPU / used for used in hot if math.ceil(used * factor) > HARD_SERVER_CPU)])
    wanted = {id_: min(HARD_SERVER_CPU, float(math.ceil(used * factor - _SMALL))) for id_, used in means.items()}
    return {id_: cpu for id_, cpu in wanted.items() if id_ in configured and cpu > configured[id_]}


def _hot_memory(job: JobSeen, records: Sequence[UseRecord], given: HistoryParameters) -> dict[int, float]:
    had = {node.id: node.memory_mb for node in job.nodes if node.node_type is NodeType.PS and node.memory_mb > 0}
    found: dict[int, float] = {}
    for id_, memory in had.items():
        used = [node.memory_mb for record in records[-WINDOW:] for node in record.servers if node.id == id_]
        more = min(MOST_SERVER_MEMORY, memory + given.hot_memory_more)
        if len(used) == WINDOW and min(used) / memory > given.hot_memory and more > memory:
            found[id_] = more
    return found


def idle_servers(job: JobSeen, former: Sequence[JobSeen], given: HistoryParameters) -> HistoryPlan | None:
    """`optimize_job_ps_resource_util`: servers with idle cores get fewer, once the job cannot grow any more and is still long."""
    records = newest_servers(job.records)
    if len(records) < WINDOW or _seconds_left(job, records) < LEAST_LEFT:
        return None
    configured, means = cores_given(job, NodeType.PS), over_window(records, servers_of)
    is_grown = len(records[-1].workers) >= given.hot_target_workers and most_use(job, records[-1]) > given.overload
    if not is_grown and max(means.values(), default=0.0) < HARD_SERVER_CPU * given.overload:
        return None
    had = {node.id: node.memory_mb for node in job.nodes if node.node_type is NodeType.PS}
    wishes = []
    for id_, used in over_window(records, servers_of, max).items():
        cpu = math.ceil(used) + given.node_cpu_margin
        if id_ in configured and used / configured[id_] < given.low_cpu and cpu < configured[id_]:
            most = max(node.memory_mb for record in records[-WINDOW:] for node in record.servers if node.id == id_)
            memory = most * (1 + given.server_memory_margin)
            is_less = memory > 0 and (not had[id_] or memory < had[id_])
            wishes.append(NodeWish(id=id_, node_type=NodeType.PS, cpu=cpu, memory_mb=memory if is_less else None))
    if not wishes:
        return None
    return HistoryPlan(
        algorithm="optimize_job_ps_resource_util",
        sentence=f"{len(wishes)} servers use less than {given.low_cpu:.0%} of their cores, and the job has reached its size.",
        nodes=tuple(sorted(wishes, key=lambda wish: wish.id)),
    )


def _seconds_left(job: JobSeen, records: Sequence[UseRecord]) -> float:
    speed = mean([record.speed for record in records[-WINDOW:]])
    return max(0.0, num_steps(job) - records[-1].step) / speed if speed > 0 else 0.0
