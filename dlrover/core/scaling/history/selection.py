"""
Which algorithm answers a question: by stage, or by the historical name of a processor, an optimiser or an algorithm (spec 07 §7.1, §13.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from dlrover.core.scaling.history import creating, servers, starting
from dlrover.core.scaling.history.alike import AlikeJobs, find_alike
from dlrover.core.scaling.history.parameters import PHASE_KEY, HistoryParameters, parameters_of
from dlrover.core.scaling.history.seen import HistoryPlan, JobSeen
from dlrover.core.scaling.history.workers import WorkerPhase, size_workers

Algorithm = Callable[[JobSeen, Sequence[JobSeen], HistoryParameters], HistoryPlan | None]

ALGORITHMS: dict[str, Algorithm] = {
    "optimize_job_ps_create_resource": creating.create_servers,
    "optimize_job_ps_cold_create_resource": creating.create_servers_cold,
    "optimize_job_ps_init_adjust_resource": servers.adjust_servers,
    "optimize_job_ps_oom_resource": servers.servers_after_oom,
    "optimize_job_hot_ps_resource": servers.hot_servers,
    "optimize_job_ps_resource_util": servers.idle_servers,
    "optimize_job_worker_create_resource": creating.create_workers,
    "optimize_job_worker_create_oom_resource": creating.create_workers_after_oom,
    "optimize_job_worker_resource": size_workers,
}
CREATE, WORKER_INITIAL, PS_INITIAL = "job_stage_create", "job_stage_worker_initial", "job_stage_ps_initial"
PS_RUNNING, WORKER_RUNNING = "job_stage_ps_running", "job_stage_worker_running"
STAGES = {
    CREATE: ("job_worker_create_resource_optimizer", "job_ps_create_resource_optimizer"),
    PS_INITIAL: ("job_ps_init_adjust_resource_optimizer",),
    WORKER_INITIAL: ("job_worker_resource_optimizer",),
    "job_stage_running": ("job_ps_running_resource_optimizer",),
    PS_RUNNING: ("job_ps_running_resource_optimizer",),
    WORKER_RUNNING: ("job_worker_resource_optimizer",),
}
"""All spellings of masters of the original; `job_stage_running` means the servers."""
OPTIMIZERS = (
    *dict.fromkeys(name for names in STAGES.values() for name in names),
    "base_optimizer",
    "start_like",
    "percentile",
)
BY_STAGE = "running_training_job_optimize_request_processor"
BY_NAME = "base_optimize_processor"
PROCESSORS = (BY_STAGE, BY_NAME)
DATA_STORES = ("base_datastore",)
RETRIEVERS = ("base_config_retriever",)
OPTIMIZER_KEY, ALGORITHM_KEY = "optimizer", "optimize-algorithm"
HTTP_OPTIMIZER = "BaseOptimizer"
_NOTHING = ("base_optimizer", HTTP_OPTIMIZER)


class HistoryAsked(Struct, frozen=True, kw_only=True):
    """A question about one job. Empty names: the stage selects."""

    stage: str = ""
    processor: str = ""
    optimizer: str = ""
    algorithm: str = ""
    config: dict[str, str] = {}
    """Keys of the question: `PHASE_KEY`, and parameters that hold for this answer alone. `OPTIMIZER_KEY` and `ALGORITHM_KEY` are taken as above."""
    now: float = 0.0
    """Seconds since 1970."""


class HistoryAnswer(Struct, frozen=True, kw_only=True):
    plan: HistoryPlan | None = None
    """None: nothing should change, and that is an answer."""
    sentence: str
    error: str = ""
    """The question cannot be answered: an unknown name. Empty: it was."""
    level: int = 0
    similar: int = 0
    warnings: tuple[str, ...] = ()
    """Settings without effect."""


def answer(asked: HistoryAsked, job: JobSeen, former: Sequence[JobSeen], settings: Mapping[str, str]) -> HistoryAnswer:
    """The plan of history for a job. `former` may hold any jobs: those that are alike are found here."""
    given, warnings = parameters_of({**settings, **asked.config})
    names, error = _names(asked)
    if error:
        return HistoryAnswer(sentence=error, error=error, warnings=warnings)
    others = [each for each in former if each.uid != job.uid]
    before = job.began_at or asked.now
    alike = find_alike(job.recipe, others, before=before, hours=given.backward_hours)
    phase, error = _phase(asked)
    if error:
        return HistoryAnswer(sentence=error, error=error, warnings=warnings)

    found = [plan for name in names if (plan := _plan(name, job, alike, given, phase)) is not None]
    if not found:
        sentence = f"Nothing should change: {alike.text}, and what the job measured calls for no other size."
        return HistoryAnswer(sentence=sentence, level=alike.level, similar=len(alike.completed), warnings=warnings)
    plan = HistoryPlan(
        algorithm="+".join(each.algorithm for each in found),
        sentence=" ".join(each.sentence for each in found),
        groups=tuple(group for each in found for group in each.groups),
        nodes=tuple(node for each in found for node in each.nodes),
    )
    return HistoryAnswer(
        plan=plan, sentence=plan.sentence, level=alike.level, similar=len(alike.completed), warnings=warnings
    )


def _names(asked: HistoryAsked) -> tuple[tuple[str, ...], str]:
    """Optimisers or algorithms to ask, or why there are none."""
    algorithm = asked.algorithm or asked.config.get(ALGORITHM_KEY, "")
    optimizer = asked.optimizer or asked.config.get(OPTIMIZER_KEY, "")
    if asked.processor and asked.processor not in PROCESSORS:
        return (), f"The processor {asked.processor!r} is unknown. Give one of {', '.join(PROCESSORS)}."
    is_named = asked.processor != BY_STAGE and (algorithm or optimizer)
    if is_named and algorithm:
        return ((algorithm,), "") if algorithm in ALGORITHMS else ((), _unknown("algorithm", algorithm, ALGORITHMS))
    if is_named:
        known = (*OPTIMIZERS, HTTP_OPTIMIZER)
        return ((optimizer,), "") if optimizer in known else ((), _unknown("optimizer", optimizer, known))
    if asked.processor == BY_NAME:
        return (), "" if asked.stage in STAGES or not asked.stage else _bad_stage(asked.stage)
    return (STAGES[asked.stage], "") if asked.stage in STAGES else ((), _bad_stage(asked.stage))


def _bad_stage(stage: str) -> str:
    return f"invalid event type {stage!r}: the stages are {', '.join(STAGES)}."


def _unknown(what: str, name: str, known: Sequence[str] | Mapping[str, Algorithm]) -> str:
    return f"The {what} {name!r} is unknown. Give one of {', '.join(known)}."


def _phase(asked: HistoryAsked) -> tuple[WorkerPhase, str]:
    """Where the question does not say, it follows from the stage."""
    text = asked.config.get(PHASE_KEY, "")
    if not text:
        return WorkerPhase.INITIAL if asked.stage == WORKER_INITIAL else WorkerPhase.STABLE, ""
    known = [phase.value for phase in WorkerPhase]
    if text not in known:
        return WorkerPhase.STABLE, f"{PHASE_KEY} is {text!r}. Give one of {', '.join(known)}."
    return WorkerPhase(text), ""


def _plan(
    name: str, job: JobSeen, alike: AlikeJobs, given: HistoryParameters, phase: WorkerPhase
) -> HistoryPlan | None:
    former = alike.jobs
    match name:
        case "job_worker_create_resource_optimizer":
            create = creating.create_workers_after_oom if job.is_oom else creating.create_workers
            return create(job, former, given)
        case "job_ps_create_resource_optimizer":
            return creating.create_servers(job, former, given) or creating.create_servers_cold(job, former, given)
        case "job_ps_init_adjust_resource_optimizer":
            adjust = servers.servers_after_oom if job.is_oom else servers.adjust_servers
            return adjust(job, former, given)
        case "job_ps_running_resource_optimizer":
            return servers.hot_servers(job, former, given) or servers.idle_servers(job, former, given)
        case "job_worker_resource_optimizer" | "optimize_job_worker_resource":
            return size_workers(job, former, given, phase)
        case "start_like":
            start = starting.start_like(alike)
            return None if start is None else start.plan
        case "percentile":
            return starting.percentile(alike)
        case _:
            return None if name in _NOTHING else ALGORITHMS[name](job, former, given)
