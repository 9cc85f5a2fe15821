"""
A job of a cluster in words: lines while it runs, a page for `describe`, and the exit code at its end.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dlrover.protocol.errors import ConfigError

if TYPE_CHECKING:
    from dlrover.cli.job.cluster_jobs import ClusterJobs
    from dlrover.platforms.kubernetes.elastic_job import ElasticJob
    from dlrover.platforms.kubernetes.objects import Pod

EXIT_FAILED = 1
_ENDS = ("Succeeded", "Failed")


def line_of(job: ElasticJob) -> str:
    """What changes while a job runs: phase, ready, round, step."""
    status = job.status
    parts = [status.phase or "Submitted"]
    if status.ready:
        parts.append(f"ready {status.ready}")
    if status.round:
        parts.append(f"round {status.round}")
    if status.last_step:
        parts.append(f"step {status.last_step}")
    trouble = _trouble(job)
    return ", ".join(parts) + (f": {trouble}" if trouble else "")


def is_over(job: ElasticJob) -> bool:
    return job.status.phase in _ENDS


def sentence_of(job: ElasticJob) -> str:
    """How the job ended, or why it does not run."""
    for kind in (*_ENDS, "Valid", "Suspended", "MasterReady"):
        for condition in job.status.conditions:
            is_told = condition.status == ("True" if kind in (*_ENDS, "Suspended") else "False")
            if condition.type == kind and is_told and condition.message:
                return condition.message
    return job.status.reason


async def wait_for_end(jobs: ClusterJobs, name: str, say: Callable[[str], None]) -> int:
    """The exit code: 0 if the job succeeded. Says each change."""
    told = ""
    async for job in _follow(jobs, name):
        line = line_of(job)
        if line != told:
            say(line)
            told = line
        if is_over(job):
            say(sentence_of(job))
            return 0 if job.status.phase == "Succeeded" else EXIT_FAILED
    raise ConfigError(f"The job {name} was deleted before it ended.")


async def _follow(jobs: ClusterJobs, name: str) -> AsyncIterator[ElasticJob]:
    """Until the job is deleted."""
    import contextlib

    async with contextlib.aclosing(jobs.follow(name)) as sights:  # type: ignore[type-var]
        async for job in sights:
            if job is None:
                return
            yield job


def rows_of(jobs: tuple[ElasticJob, ...]) -> Iterator[tuple[str, ...]]:
    for job in jobs:
        status = job.status
        yield (
            job.metadata.name,
            job.metadata.namespace,
            status.phase or "-",
            status.ready or "-",
            str(status.round or "-"),
            str(status.last_step or "-"),
            age_of(job.metadata.creation_timestamp),
        )


def page_of(job: ElasticJob, pods: tuple[Pod, ...], events: tuple[dict[str, Any], ...]) -> Iterator[str]:
    """For `dlrover job describe`."""
    status = job.status
    yield f"Job {job.metadata.name} in {job.metadata.namespace}: {line_of(job)}"
    yield f"  made {age_of(job.metadata.creation_timestamp)} ago, {status.restarts} restarts of its master"
    if status.goodput:
        yield f"  goodput {status.goodput}"
    for condition in status.conditions:
        said = f": {condition.message}" if condition.message else ""
        yield f"  {condition.type} {condition.status} ({condition.reason}){said}"
    yield "Pods:" if pods else "No pods."
    for pod in sorted(pods, key=_order):
        yield f"  {label_of(pod)}  {pod.metadata.name}  {pod_state(pod)}  {pod.spec.node_name or '-'}"
    if events:
        yield "Events:"
    for event in events[-20:]:
        yield f"  {event.get('lastTimestamp') or '-'}  {event.get('type')}  {event.get('reason')}: {event.get('message')}"


def label_of(pod: Pod) -> str:
    """`worker-3`; the master is `master`."""
    from dlrover.platforms.kubernetes import names

    labels = pod.metadata.labels
    kind = labels.get(names.REPLICA_TYPE, "")
    return "master" if kind == names.MASTER_TYPE else f"{kind}-{labels.get(names.RANK_INDEX, '?')}"


def pod_state(pod: Pod) -> str:
    if pod.metadata.deletion_timestamp is not None:
        return "Terminating"
    for status in pod.status.container_statuses:
        if status.state.waiting is not None and status.state.waiting.reason:
            return f"{pod.status.phase} ({status.state.waiting.reason})"
    return f"{pod.status.phase} ({pod.status.reason})" if pod.status.reason else pod.status.phase


def age_of(since: datetime | None) -> str:
    if since is None:
        return "-"
    seconds = max(0, int(time.time() - since.timestamp()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _trouble(job: ElasticJob) -> str:
    return "" if job.status.phase in ("Running", *_ENDS) else sentence_of(job)


def _order(pod: Pod) -> tuple[str, int, str]:
    label, _, rank = label_of(pod).partition("-")
    return label, int(rank) if rank.isdigit() else -1, pod.metadata.name
