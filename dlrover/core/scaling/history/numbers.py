"""
Means and maxima as the historical algorithms take them (spec 07 §13.6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dlrover.core.scaling.history.parameters import WINDOW
from dlrover.core.scaling.history.seen import JobSeen, NodeUsed, UseRecord
from dlrover.protocol.messages.fleet import NodeType


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def major_mean(numbers: Iterable[float]) -> float:
    """The mean of the half that lies closest to the median: a few odd numbers do not move it."""
    ordered = sorted(numbers)
    if not ordered:
        return 0.0
    size = len(ordered)
    left = right = middle = size // 2
    while right - left + 1 < size // 2 + 1:
        nearer_left = left > 0 and (
            right == size - 1 or ordered[middle] - ordered[left - 1] <= ordered[right + 1] - ordered[middle]
        )
        left, right = (left - 1, right) if nearer_left else (left, right + 1)
    return mean(ordered[left : right + 1])


def total_cpu(nodes: Iterable[NodeUsed]) -> float:
    return sum(node.cpu for node in nodes)


def newest_servers(records: Sequence[UseRecord]) -> list[UseRecord]:
    """The records with the servers of the newest one, oldest first."""
    if not records:
        return []
    newest = {node.id for node in records[-1].servers}
    return [record for record in records if newest and {node.id for node in record.servers} == newest]


def over_window(
    records: Sequence[UseRecord],
    nodes_of: Callable[[UseRecord], tuple[NodeUsed, ...]],
    combine: Callable[[Sequence[float]], float] = mean,
) -> dict[int, float]:
    """Node to the mean (or another figure) of its cores over the newest records."""
    found: dict[int, list[float]] = {}
    for record in records[-WINDOW:]:
        for node in nodes_of(record):
            found.setdefault(node.id, []).append(node.cpu)
    return {id_: combine(cores) for id_, cores in found.items()}


def servers_of(record: UseRecord) -> tuple[NodeUsed, ...]:
    return record.servers


def workers_of(record: UseRecord) -> tuple[NodeUsed, ...]:
    return record.workers


def cores_given(job: JobSeen, node_type: NodeType) -> dict[int, float]:
    """Node to the cores that it has; nodes of which that is not known are left out."""
    return {node.id: node.cpu for node in job.nodes if node.node_type is node_type and node.cpu > 0}


def uses(job: JobSeen, record: UseRecord) -> dict[int, float]:
    """Server to the share of its cores that it used."""
    given = cores_given(job, NodeType.PS)
    return {node.id: node.cpu / given[node.id] for node in record.servers if node.id in given}


def most_use(job: JobSeen, record: UseRecord) -> float:
    return max(uses(job, record).values(), default=0.0)


def worker_speed(records: Sequence[UseRecord], count: int) -> float:
    """Batches per second of one worker, over so many newest records; 0: not known."""
    newest = [record for record in records[-count:] if record.workers and record.speed > 0] if count > 0 else []
    return mean([record.speed / len(record.workers) for record in newest])


def num_steps(job: JobSeen) -> float:
    """Batches in the whole job; 0: not known."""
    facts = job.facts
    by_data = facts.dataset_size / facts.batch_size * max(1, facts.num_epochs) if facts.batch_size > 0 else 0.0
    if facts.max_steps > 0:
        return min(by_data, float(facts.max_steps)) if by_data > 0 else float(facts.max_steps)
    return by_data


def single_worker_seconds(job: JobSeen, count: int) -> float | None:
    """How long the job would last with one worker; None: not known."""
    speed, steps = worker_speed(job.records, count), num_steps(job)
    return steps / speed if speed > 0 and steps > 0 else None
