"""
What to do about one job, from what exists: the whole of the operator's judgement, without a clock and without I/O.

Level-triggered: each decision begins from what the cluster holds, so an operator that stops between two actions needs
no memory of them. Nothing here sets a finalizer: a job can be deleted while no operator runs.

Order within a decision: events, status, other objects, the master's pod. Events come before the status because their
names follow from their content: after a stop between the two they are sent again, and the API server has them already.

A job that is suspended while it runs: its master lets the nodes save and leave, then the operator deletes the master's pod.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from dlrover.operator.actions import (
    Action,
    AdjustObject,
    ApplyStatus,
    CarryOutPlan,
    CheckTemplates,
    CordonMachine,
    CreateObject,
    CreateToken,
    DeleteObject,
    EmitEvent,
    ObjectKind,
    OperatorDecision,
)
from dlrover.operator.checks import Problem, first_pods, problem_of, unused_fields
from dlrover.operator.master_pod import master_pod
from dlrover.operator.master_state import is_master, is_ready, trouble_of, verdict_of
from dlrover.operator.observations import JobObjects, OperatorSettings
from dlrover.operator.owned import adjustment_of, kind_of, makes_plans, owned_objects
from dlrover.operator.status import JobCourse, JobPhase, Truth, condition_of, is_true, next_status, write_at
from dlrover.operator.succession import Succession, following, succession_of
from dlrover.operator.timestamps import instant_of, text_of
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import (
    CleanPodPolicy,
    ElasticJob,
    FaultyHosts,
    JsonObject,
    MasterRecord,
    SuspendPolicy,
    forgets_when_suspended,
)
from dlrover.platforms.kubernetes.job.fleet import fleet_of
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import NodeType, Strategy

CONTROLLER = "elastic.iml.github.io/operator"
"""Value of `spec.managedBy` that means us, as an absent one does."""
CHECK_EVERY = 30.0
"""Seconds between two checks of templates that were refused: a missing PriorityClass may have been created."""
LOOK_AGAIN = 5.0
"""Seconds. The event that we wait for tells us earlier; this is for an event that does not come."""
_AT_REST = {kind: Truth(is_true=False, reason="Suspended") for kind in ("MasterReady", "Running")}
LOST_WITH_JOURNAL = (
    "The master moved to another pod without its journal. Lost are the records of data shards since the last checkpoint "
    "that carries them, keys of the key-value store, and events. Set spec.master.journal to keep them."
)


def decide(job: ElasticJob, seen: JobObjects, now: float, settings: OperatorSettings) -> OperatorDecision:
    decision = _decide(job, seen, now, settings)
    if not seen.open_plans or not _may_plan(job, seen, now):
        return decision
    plans = tuple(CarryOutPlan(plan=plan) for plan in seen.open_plans)
    return replace(decision, actions=(*decision.actions, *plans))


def _may_plan(job: ElasticJob, seen: JobObjects, now: float) -> bool:
    """A master of mode `k8s` asks for pods as long as its job runs, also while it is being suspended."""
    is_ended = is_true(job, "Succeeded") or is_true(job, "Failed")
    is_held = seen.failure is not None and now < seen.failure.retry_at
    return makes_plans(job) and job.metadata.deletion_timestamp is None and not is_ended and not is_held


def _decide(job: ElasticJob, seen: JobObjects, now: float, settings: OperatorSettings) -> OperatorDecision:
    if job.metadata.deletion_timestamp is not None or job.spec.managed_by not in ("", CONTROLLER):
        return OperatorDecision()
    if is_true(job, "Succeeded") or is_true(job, "Failed"):
        return _after_end(job, seen, now)
    validity = _validity(job, seen, now, settings)
    has_started = job.status.master is not None
    if not has_started and validity.check is not None:
        return _gated(job, seen, now, (validity.check,))
    if not has_started and validity.problem is not None:
        course = _invalid(job, validity.problem)
        return _written(job, seen, now, course, tuple(_adoptions(job, seen)), wake_at=validity.check_at)
    if has_started and _is_without_master(job):
        return _suspending(job, seen, now)
    if not has_started and _is_without_master(job):
        if reason := job.metadata.annotations.get(names.STOP):
            return _written(job, seen, now, _stopped(job, now, reason))
        return _written(job, seen, now, _suspended(job), tuple(_adoptions(job, seen)))
    return _live(job, seen, now, settings, validity)


# Before the start.


class _Validity(Struct, frozen=True, kw_only=True):
    problem: Problem | None = None
    check: CheckTemplates | None = None
    """The API server must judge first."""
    check_at: float | None = None


def _validity(job: ElasticJob, seen: JobObjects, now: float, settings: OperatorSettings) -> _Validity:
    if problem := problem_of(job, seen, settings):
        return _Validity(problem=problem)
    try:
        pods = first_pods(job)
    except Rejected as error:
        return _Validity(problem=Problem("InvalidTemplate", str(error)))
    generation, known = job.metadata.generation, condition_of(job, "Valid")
    check = CheckTemplates(generation=generation, pods=pods)
    result = seen.check if seen.check is not None and seen.check.generation == generation else None
    if result is None:
        is_known = known is not None and known.status == "True" and known.observed_generation == generation
        return _Validity() if is_known else _Validity(check=check)
    if not result.problem:
        return _Validity()
    if now >= result.at + CHECK_EVERY:
        return _Validity(check=check)
    return _Validity(problem=Problem("InvalidTemplate", result.problem), check_at=result.at + CHECK_EVERY)


def _invalid(job: ElasticJob, problem: Problem) -> JobCourse:
    valid = Truth(is_true=False, reason=problem.reason, message=problem.sentence)
    return JobCourse(
        phase=JobPhase.CREATED,
        reason=problem.reason,
        message=problem.sentence,
        conditions={"Valid": valid},
        master=job.status.master,
    )


def _suspended(job: ElasticJob, record: MasterRecord | None = None) -> JobCourse:
    """`record`: of a job that has run."""
    if record is None:
        sentence = "spec.suspend is true. Set it to false to start the job."
    else:
        sentence = "spec.suspend is true. Set it to false, and the job goes on from its checkpoint."
    suspended = Truth(is_true=True, reason="SuspendedBySpec", message=sentence)
    valid = Truth(is_true=True, reason="TemplatesAccepted", message=unused_fields(job))
    return JobCourse(
        phase=JobPhase.SUSPENDED,
        reason="SuspendedBySpec",
        message=sentence,
        conditions={"Valid": valid, "Suspended": suspended} | ({} if record is None else _AT_REST),
        master=record,
    )


def _is_without_master(job: ElasticJob) -> bool:
    return bool(job.spec.suspend) and job.spec.suspend_policy is SuspendPolicy.DELETE_MASTER


def _stopped(job: ElasticJob, now: float, reason: str) -> JobCourse:
    """Of a job without a master: nothing else could end it."""
    return _end(job, Succession(record=job.status.master or MasterRecord()), now, False, "StoppedByUser", reason)


# A suspended job that has run.


def _suspending(job: ElasticJob, seen: JobObjects, now: float) -> OperatorDecision:
    """
    The master lets its nodes save and leave. When they are gone, or no master can do it, the operator deletes what is left:
    the master first, so that it replaces none of its nodes.
    """
    record = job.status.master or MasterRecord()
    masters = [pod for pod in seen.pods if is_master(pod)]
    nodes = [pod for pod in seen.pods if not is_master(pod)]
    running = [pod for pod in nodes if pod.status.phase not in ("Succeeded", "Failed")]
    verdict = next((found for pod in masters if (found := verdict_of(pod)) is not None), None)
    if verdict is not None:
        reason = verdict.reason or ("Completed" if verdict.is_success else "UnknownError")
        succession = Succession(record=record)
        return _written(job, seen, now, _end(job, succession, now, verdict.is_success, reason, verdict.sentence))
    if not seen.pods:
        if stop := job.metadata.annotations.get(names.STOP):
            return _written(job, seen, now, _stopped(job, now, stop))
        return _written(job, seen, now, _suspended(job, following(record, now)), tuple(_adoptions(job, seen)))
    has_able_master = any(is_ready(pod) and not pod.metadata.deletion_timestamp for pod in masters)
    if running and has_able_master and _can_release(job):
        sentence = " ".join((f"{len(running)} pods save and leave.", forgets_when_suspended(job))).strip()
        return _written(job, seen, now, _leaving(job, record, sentence), wake_at=now + LOOK_AGAIN)
    doomed = [pod for pod in masters or nodes if pod.metadata.deletion_timestamp is None]
    removals = tuple(DeleteObject(kind=ObjectKind.POD, name=pod.metadata.name, uid=pod.metadata.uid) for pod in doomed)
    course = _leaving(job, record, f"The last {len(seen.pods)} pods leave.")
    return _written(job, seen, now, course, removals, wake_at=now + LOOK_AGAIN)


def _can_release(job: ElasticJob) -> bool:
    """As the master decides it: workers that form one world."""
    fleet = fleet_of(job)
    return fleet.strategy is Strategy.ALLREDUCE and NodeType.PS not in fleet.replicas


def _leaving(job: ElasticJob, record: MasterRecord, sentence: str) -> JobCourse:
    phase = JobPhase(job.status.phase) if job.status.phase in tuple(JobPhase) else JobPhase.RUNNING
    return JobCourse(
        phase=phase,
        reason="Suspending",
        message=sentence,
        conditions={"Suspended": Truth(is_true=False, reason="Suspending", message=sentence)},
        master=record,
    )


# While the job runs.


def _live(
    job: ElasticJob, seen: JobObjects, now: float, settings: OperatorSettings, validity: _Validity
) -> OperatorDecision:
    succession = succession_of(job, seen, now)
    if succession.verdict is not None:
        verdict = succession.verdict
        reason = verdict.reason or ("Completed" if verdict.is_success else "UnknownError")
        return _written(job, seen, now, _end(job, succession, now, verdict.is_success, reason, verdict.sentence))
    if succession.failure:
        course = _end(job, succession, now, False, "MasterRestartsExhausted", succession.failure)
        return _written(job, seen, now, course)
    # A suspension does not count, as in batch Jobs: a job that was resumed begins anew.
    started_at = None if is_true(job, "Suspended") else instant_of(job.status.start_time)
    deadline = job.spec.active_deadline_seconds
    ends_at = None if started_at is None or deadline is None else started_at + deadline
    if ends_at is not None and now >= ends_at:
        sentence = f"The job ran for more than {deadline} s (spec.activeDeadlineSeconds)."
        return _written(job, seen, now, _end(job, succession, now, False, "DeadlineExceeded", sentence))
    missing, blockers = _missing(job, seen)
    actions: list[Action] = [*succession.removals, *missing, *_cordons(job, seen), *_adoptions(job, seen)]
    if validity.check is not None:  # the job was edited
        actions.append(validity.check)
    wakes = [succession.wake_at, validity.check_at, ends_at]
    if blockers:
        wakes.append(now + LOOK_AGAIN)
    elif succession.creates:
        body = master_pod(job, succession.record.index, settings.master_image)
        name = names.master_pod(job.metadata.name, succession.record.index)
        actions.append(CreateObject(kind=ObjectKind.POD, name=name, body=body))
    if succession.removals:
        wakes.append(now + LOOK_AGAIN)
    course = _course(job, seen, now, succession, validity, blockers)
    return _written(job, seen, now, course, tuple(actions), wake_at=_earliest(wakes))


def _missing(job: ElasticJob, seen: JobObjects) -> tuple[list[CreateObject | CreateToken | AdjustObject], list[str]]:
    """What is not there yet or not as it shall be, and which names a former job of this name still occupies."""
    missing: list[CreateObject | CreateToken | AdjustObject] = []
    blockers = []
    for wanted in owned_objects(job):
        found = seen.others.get((kind_of(wanted), wanted.name))
        if found is None:
            missing.append(wanted)
        elif found.controller is not None and found.controller.uid != job.metadata.uid:
            blockers.append(f"{kind_of(wanted).value} {wanted.name}")
        elif (adjustment := adjustment_of(wanted, found)) is not None:
            missing.append(adjustment)
    return missing, blockers


def _adoptions(job: ElasticJob, seen: JobObjects) -> Iterable[AdjustObject]:
    """People's plans go with the job. The master adopts those that it carries out; others would be left for ever."""
    for plan in seen.plans:
        owner = names.owner_reference(job.metadata.name, job.metadata.uid)
        patch: JsonObject = {"metadata": {"uid": plan.uid, "ownerReferences": [owner]}}
        yield AdjustObject(kind=ObjectKind.SCALE_PLAN, name=plan.name, patch=patch)


def _cordons(job: ElasticJob, seen: JobObjects) -> Iterable[CordonMachine]:
    """
    The master has no right to machines: it names those that failed a check, and the operator marks them.

    Only machines on which the operator sees a pod of the job: a job marks nothing that it has not used.
    """
    if job.spec.faulty_hosts is FaultyHosts.CORDON:
        for name in job.status.cordon_hosts:
            if name in seen.uncordoned:
                yield CordonMachine(name=name)


def _course(
    job: ElasticJob,
    seen: JobObjects,
    now: float,
    succession: Succession,
    validity: _Validity,
    blockers: list[str],
) -> JobCourse:
    pod, record = succession.pod, succession.record
    is_up = pod is not None and is_ready(pod)
    if is_up:
        ready = Truth(is_true=True, reason="MasterReady")
    else:
        ready = Truth(is_true=False, **_why_not_ready(seen, succession, blockers))
    has_run = job.status.phase in (JobPhase.RUNNING.value, JobPhase.RESTARTING.value)
    if is_up:
        phase, reason, message = JobPhase.RUNNING, "JobRunning", "The master is ready."
    else:
        waiting = JobPhase.PENDING if pod is not None else JobPhase.CREATED
        phase = JobPhase.RESTARTING if has_run or record.index > 0 else waiting
        reason, message = ready.reason, ready.message
    conditions = {
        "MasterReady": ready,
        "Running": Truth(is_true=is_up, reason=reason, message="" if is_up else message),
        "JournalKept": _journal_kept(job, record.index),
    }
    if validity.check is not None:
        pass  # the answer of the API server comes first
    elif validity.problem is None:
        conditions["Valid"] = Truth(is_true=True, reason="TemplatesAccepted", message=unused_fields(job))
    else:
        conditions["Valid"] = Truth(
            is_true=False,
            reason=validity.problem.reason,
            message=f"{validity.problem.sentence} The running job keeps its former templates.",
        )
    if job.spec.suspend:  # and the master stays
        num_left = sum(1 for each in seen.pods if not is_master(each) and each.status.phase in ("Pending", "Running"))
        left = f"{num_left} pods save and leave." if num_left else "The master stays (spec.suspendPolicy)."
        conditions["Suspended"] = Truth(is_true=not num_left, reason="SuspendedBySpec", message=left)
        if is_up and not num_left:
            phase, reason, message = JobPhase.SUSPENDED, "SuspendedBySpec", left
    elif condition_of(job, "Suspended") is not None:
        conditions["Suspended"] = Truth(is_true=False, reason="Resumed")
    return JobCourse(
        phase=phase,
        reason=reason,
        message=message,
        conditions=conditions,
        master=record,
        start_time=text_of(now) if is_true(job, "Suspended") else job.status.start_time or text_of(now),
    )


def _why_not_ready(seen: JobObjects, succession: Succession, blockers: list[str]) -> dict[str, str]:
    if succession.pod is not None:
        reason, message = trouble_of(succession.pod)
        return {"reason": reason, "message": message}
    if seen.failure is not None:
        return {
            "reason": seen.failure.reason,
            "message": f"The operator could not {seen.failure.what}: {seen.failure.message}",
        }
    if blockers:
        waits = f"The cluster still deletes objects of a former job of this name: {', '.join(blockers)}."
        return {"reason": "FormerJobIsDeleted", "message": waits}
    if succession.loss:
        return {"reason": "MasterLost", "message": f"The master is replaced: {succession.loss}"}
    if succession.record.index:
        return {"reason": "MasterLost", "message": "The operator makes the next master's pod."}
    return {"reason": "Creating", "message": "The operator makes the master's pod."}


def _journal_kept(job: ElasticJob, index: int) -> Truth:
    if job.spec.master.journal is not None:
        return Truth(is_true=True, reason="JournalClaim")
    if index == 0:
        return Truth(
            is_true=True,
            reason="FirstPod",
            message="The journal is stored in the master's pod. If that pod is deleted, the journal is lost. Set spec.master.journal to "
            "keep it.",
        )
    return Truth(is_true=False, reason="MasterMoved", message=LOST_WITH_JOURNAL)


# The end.


def _end(
    job: ElasticJob, succession: Succession, now: float, is_success: bool, reason: str, sentence: str
) -> JobCourse:
    phase = JobPhase.SUCCEEDED if is_success else JobPhase.FAILED
    ended = Truth(is_true=False, reason="JobEnded")
    return JobCourse(
        phase=phase,
        reason=reason,
        message=sentence,
        conditions={
            "MasterReady": ended,
            "Running": ended,
            phase.value: Truth(is_true=True, reason=reason, message=sentence),
        },
        master=succession.record,
        completion_time=text_of(now),
    )


def _after_end(job: ElasticJob, seen: JobObjects, now: float) -> OperatorDecision:
    policy = job.spec.clean_pod_policy
    removals: list[Action] = list(_adoptions(job, seen))
    removals += [
        DeleteObject(kind=ObjectKind.POD, name=pod.metadata.name, uid=pod.metadata.uid)
        for pod in seen.pods
        if pod.metadata.deletion_timestamp is None
        and (
            policy is CleanPodPolicy.ALL
            or (policy is CleanPodPolicy.RUNNING and pod.status.phase not in ("Succeeded", "Failed"))
        )
    ]
    wake_at = None
    ended_at, ttl = instant_of(job.status.completion_time), job.spec.ttl_seconds_after_finished
    if ttl is not None and ended_at is not None:
        if now >= ended_at + ttl:
            return _gated(job, seen, now, (_removal_of(job),))
        wake_at = ended_at + ttl
    course = JobCourse(
        phase=JobPhase.SUCCEEDED if is_true(job, "Succeeded") else JobPhase.FAILED,
        reason=job.status.reason,
        master=job.status.master,
    )
    return _written(job, seen, now, course, tuple(removals), wake_at=wake_at)


def _removal_of(job: ElasticJob) -> DeleteObject:
    return DeleteObject(kind=ObjectKind.ELASTIC_JOB, name=job.metadata.name, uid=job.metadata.uid)


# Putting a decision together.


def _written(
    job: ElasticJob,
    seen: JobObjects,
    now: float,
    course: JobCourse,
    actions: tuple[Action, ...] = (),
    *,
    wake_at: float | None = None,
) -> OperatorDecision:
    """The status and its events first, so that what the next action relies on is durable."""
    status = next_status(job, course, seen.pods, now)
    at = write_at(job, status, now)
    if at is not None and at <= now:
        first: tuple[Action, ...] = (*_events(job, seen, course), ApplyStatus(status=status))
        return _gated(job, seen, now, actions, first=first, wake_at=wake_at)
    return _gated(job, seen, now, actions, wake_at=_earliest((wake_at, at)))


def _gated(
    job: ElasticJob,
    seen: JobObjects,
    now: float,
    actions: tuple[Action, ...],
    *,
    first: tuple[Action, ...] = (),
    wake_at: float | None = None,
) -> OperatorDecision:
    """After a failure only the status is written until it is time to try again."""
    if seen.failure is not None and now < seen.failure.retry_at and actions:
        return OperatorDecision(actions=first, wake_at=_earliest((wake_at, seen.failure.retry_at)))
    return OperatorDecision(actions=(*first, *actions), wake_at=wake_at)


def _events(job: ElasticJob, seen: JobObjects, course: JobCourse) -> Iterable[EmitEvent]:
    if course.phase.value != job.status.phase:
        is_bad = course.phase in (JobPhase.FAILED, JobPhase.RESTARTING)
        yield _event(job, course, f"Job{course.phase.value}", course.message or course.reason, is_warning=is_bad)
    valid, known = course.conditions.get("Valid"), condition_of(job, "Valid")
    if valid is not None and not valid.is_true and (known is None or known.message != valid.message):
        yield _event(job, course, valid.reason, valid.message, is_warning=True)
    ready, known = course.conditions.get("MasterReady"), condition_of(job, "MasterReady")
    if seen.failure is not None and ready is not None and (known is None or known.message != ready.message):
        yield _event(job, course, seen.failure.reason, ready.message, is_warning=True)


def _event(job: ElasticJob, course: JobCourse, reason: str, message: str, *, is_warning: bool) -> EmitEvent:
    index = course.master.index if course.master else 0
    digest = hashlib.sha256(f"{job.metadata.uid} {index} {reason} {message}".encode()).hexdigest()[:16]
    return EmitEvent(name=f"{job.metadata.name}.{digest}", is_warning=is_warning, reason=reason, message=message)


def _earliest(instants: Iterable[float | None]) -> float | None:
    return min((each for each in instants if each is not None), default=None)
