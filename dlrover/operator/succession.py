"""
Which master pod is in charge, and when the next one is made.

At most one master may act. So the next pod is created only when the former one has ended or its object is gone: the API
token of a master is bound to that object. The API server accepts a token for some seconds after its pod is gone. The
journal itself fences two masters that share it. A master without one reads `goneAt` here and waits for these seconds.

The number of a new pod is written to the job's status before the pod is created, and the uid of the pod after it. An
operator that stops between the two finds a number without a uid, and creates the pod under the same name.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from dlrover.operator.actions import DeleteObject, ObjectKind
from dlrover.operator.master_pod import max_restarts
from dlrover.operator.master_state import (
    PATIENCE,
    JobVerdict,
    index_of,
    is_leaving,
    is_master,
    is_over,
    main_status,
    num_crashes,
    trouble_of,
    verdict_of,
)
from dlrover.operator.observations import JobObjects
from dlrover.operator.timestamps import instant_of, text_of
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, MasterRecord
from dlrover.platforms.kubernetes.objects import Pod

KEPT = 10
"""Ended masters whose pods stay for their logs, the newest."""
QUIET = 3600.0
"""Seconds without a restart after which earlier ones no longer count."""


class Succession(Struct, frozen=True, kw_only=True):
    record: MasterRecord
    pod: Pod | None = None
    """The master in charge. None: there is none now."""
    removals: tuple[DeleteObject, ...] = ()
    """Objects of former masters that may still act."""
    creates: bool = False
    """The pod of `record.index` is to be created. False: it exists, or a former one must go first."""
    verdict: JobVerdict | None = None
    """How the job ended, in the master's words."""
    failure: str = ""
    """Why no further master is made."""
    loss: str = ""
    """Why the former master is not in charge any more."""
    wake_at: float | None = None


def succession_of(job: ElasticJob, seen: JobObjects, now: float) -> Succession:
    masters = sorted((pod for pod in seen.pods if is_master(pod)), key=index_of)
    record = _record(job.status.master, masters)
    pod = next((each for each in masters if _is_recorded(each, record)), None)
    former = [each for each in masters if each is not pod]
    strays = tuple(_removal(each) for each in former if not is_over(each))
    old = tuple(_removal(each) for each in former if is_over(each))[:-KEPT]
    if pod is not None:
        record = replace(record, uid=pod.metadata.uid)
        found = _with_pod(job, seen, pod, record, now)
    elif record.uid:
        found = _after_loss(job, record, "its pod is gone", now, is_ended=False)
    else:
        found = Succession(record=record, creates=True)
    return replace(found, removals=(*found.removals, *strays, *old), creates=found.creates and not strays)


def following(record: MasterRecord, now: float) -> MasterRecord:
    """After a suspension, when no pod is left. Its end costs no restart. The next pod has a name of its own."""
    if not record.uid:
        return record
    return replace(record, index=record.index + 1, uid="", gone_at=text_of(now), forgiven_crashes=0)


def _record(record: MasterRecord | None, masters: list[Pod]) -> MasterRecord:
    """A status that was lost, for example in a restored backup, is read back from the pods."""
    record = record or MasterRecord()
    newest = masters[-1] if masters else None
    if newest is not None and index_of(newest) > record.index:
        return replace(record, index=index_of(newest), uid=newest.metadata.uid, forgiven_crashes=0)
    return record


def _is_recorded(pod: Pod, record: MasterRecord) -> bool:
    return index_of(pod) == record.index and record.uid in ("", pod.metadata.uid)


def _with_pod(job: ElasticJob, seen: JobObjects, pod: Pod, record: MasterRecord, now: float) -> Succession:
    if (verdict := verdict_of(pod)) is not None:
        return Succession(record=record, pod=pod, verdict=verdict)
    if is_over(pod):
        return _after_loss(job, record, trouble_of(pod)[1], now, is_ended=True)
    if why := is_leaving(pod, seen.not_ready, now):
        return Succession(record=record, removals=(_removal(pod),), loss=why)
    return _in_charge(job, seen, pod, record, now)


def _in_charge(job: ElasticJob, seen: JobObjects, pod: Pod, record: MasterRecord, now: float) -> Succession:
    crashes, wakes = num_crashes(pod), []
    status = main_status(pod)
    running = status.state.running if status else None
    if crashes > record.forgiven_crashes and running is not None and running.started_at is not None:
        quiet_at = running.started_at.timestamp() + QUIET
        if now >= quiet_at:
            record = replace(record, forgiven_crashes=crashes)
        else:
            wakes.append(quiet_at)
    if (since := seen.not_ready.get(pod.spec.node_name)) is not None:
        wakes.append(since + PATIENCE)
    num_restarts = record.restarts + crashes - record.forgiven_crashes
    if crashes > record.forgiven_crashes and num_restarts > max_restarts(job):
        return Succession(record=record, pod=pod, failure=_too_many(job, trouble_of(pod)[1]))
    return Succession(record=record, pod=pod, wake_at=min(wakes, default=None))


def _after_loss(job: ElasticJob, record: MasterRecord, why: str, now: float, *, is_ended: bool) -> Succession:
    last = instant_of(record.restarted_at)
    num_restarts = record.restarts + 1 if last is not None and now < last + QUIET else 1
    if num_restarts > max_restarts(job):
        return Succession(record=record, loss=why, failure=_too_many(job, why))
    needs_fence = not is_ended and job.spec.master.journal is None
    following = MasterRecord(
        index=record.index + 1,
        restarts=num_restarts,
        restarted_at=text_of(now),
        gone_at=text_of(now) if needs_fence else record.gone_at,  # of the last one whose process may still run
    )
    return Succession(record=following, creates=True, loss=why)


def _too_many(job: ElasticJob, why: str) -> str:
    limit = max_restarts(job)
    return f"The master was restarted more than {limit} times (spec.master.maxRestarts). The last time: {why}"


def _removal(pod: Pod) -> DeleteObject:
    return DeleteObject(kind=ObjectKind.POD, name=pod.metadata.name, uid=pod.metadata.uid, grace=0)
