"""
Plans for a job: what the store knows goes to the algorithms of the core, and what they wish is brought inside the bounds of the job.

Everything here runs in a reader's thread on one connection, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace
from sqlalchemy import Connection, RowMapping

from dlrover.brain.store.reading import (
    SettingEntry,
    bounds_of,
    find_alike,
    find_job,
    find_settings,
    job_seen,
    oom_nodes,
)
from dlrover.core.scaling.history.alike import AlikeJobs
from dlrover.core.scaling.history.alike import find_alike as choose_alike
from dlrover.core.scaling.history.conversion import size_plan, within
from dlrover.core.scaling.history.parameters import parameters_of
from dlrover.core.scaling.history.seen import HistoryPlan, JobSeen, Recipe
from dlrover.core.scaling.history.selection import (
    ALGORITHM_KEY,
    ALGORITHMS,
    OPTIMIZER_KEY,
    OPTIMIZERS,
    HistoryAnswer,
    HistoryAsked,
    answer,
)
from dlrover.core.scaling.history.starting import start_like
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.brain import (
    AskedGroup,
    BrainPlan,
    JobBegan,
    JobBounds,
    JobSettings,
    PlanAsked,
    PlanStage,
    StartPlan,
)
from dlrover.protocol.messages.fleet import NodeType, Strategy
from dlrover.protocol.messages.scaling import PlannedGroup, ScaleTerms, SizePlan

START_LIKE = "start_like"
START_HOURS = 400 * 24.0
"""As long as jobs are kept."""
RECENT = 600.0
"""Seconds for which the end of a node for want of memory is news."""
RECENT_IF_TOLD = 3600.0


def plan_start(connection: Connection, tenant: str, began: JobBegan, now: float) -> StartPlan:
    """What a new job should begin with: as the newest jobs ended that are like it, unless the settings name another algorithm."""
    known = find_job(connection, tenant, began.job.uid)
    began_at = now - began.age if known is None else known["began_at"]
    recipe = Recipe(
        name=began.recipe.name,
        script_hash=began.recipe.script_hash,
        script=began.recipe.script_name,
        user=began.user,
        tenant=tenant,
        dataset=began.recipe.dataset_hash,
        model_size=began.recipe.model_size,
        strategy=began.strategy.value,
    )
    scopes = _scopes(tenant, began.user, began.namespace, began.cluster, began.app)
    settings = settings_of(find_settings(connection), scopes).values
    name = settings.get(ALGORITHM_KEY) or settings.get(OPTIMIZER_KEY) or START_LIKE
    if name != START_LIKE:
        job = JobSeen(uid=began.job.uid, recipe=recipe, began_at=began_at, limits=began.bounds.limits)
        found = _by_name(connection, job, HistoryAsked(stage=PlanStage.CREATE.value, now=now), name, settings)
        plan = None if found.plan is None else _fitted(found.plan, began.bounds, began.asked, began.strategy)
        return StartPlan(
            plan=plan,
            sentence=_shortened(found.sentence),
            level=found.level,
            similar=found.similar,
            algorithm="" if found.plan is None else found.plan.algorithm[:128],
        )
    former = find_alike(connection, recipe, but=began.job.uid, before=began_at, hours=START_HOURS)
    alike = choose_alike(recipe, former, before=began_at)
    start = start_like(alike)
    if start is None:
        return StartPlan(sentence=_shortened(_why_none(alike)), level=alike.level, similar=len(alike.completed))
    plan = _fitted(start.plan, began.bounds, began.asked, began.strategy)
    return StartPlan(
        plan=plan if plan.groups else None,
        sentence=_shortened(start.plan.sentence),
        level=start.level,
        similar=start.similar,
        confidence=min(1.0, start.confidence),
        algorithm=START_LIKE,
        expected_speed=start.speed,
    )


def plan_running(connection: Connection, tenant: str, asked: PlanAsked, now: float) -> BrainPlan:
    """Raises Unavailable for an unknown job, and Rejected for an unknown name."""
    row = find_job(connection, tenant, asked.job.uid)
    if row is None:
        raise Unavailable(f"Brain does not know the job {asked.job.uid!r}. Send `JobBegan` first.", 0.0)
    found, bounds, groups = history_of(connection, row, asked, now)
    if found.error:
        raise Rejected(found.error)
    if found.plan is None:
        return BrainPlan(sentence=_shortened(found.sentence))
    plan = _fitted(found.plan, bounds, groups, Strategy(row["strategy"]))
    return BrainPlan(
        plan=plan if plan.groups or plan.nodes else None,
        sentence=_shortened(found.sentence),
        algorithm=found.plan.algorithm[:128],
    )


def history_of(
    connection: Connection, row: RowMapping, asked: PlanAsked, now: float
) -> tuple[HistoryAnswer, JobBounds, tuple[AskedGroup, ...]]:
    """What history says of a job that the store knows, as the algorithms say it."""
    bounds, groups = bounds_of(row)
    recent = oom_nodes(connection, row["id"], since=now - (RECENT_IF_TOLD if asked.is_oom else RECENT))
    job = job_seen(connection, row, nodes=recent)
    settings = settings_for(connection, row)
    question = HistoryAsked(stage=asked.stage.value, config=dict(asked.options), now=now)
    name = asked.algorithm or asked.options.get(ALGORITHM_KEY) or asked.options.get(OPTIMIZER_KEY) or ""
    return _by_name(connection, job, question, name, settings.values), bounds, groups


def settings_for(connection: Connection, row: RowMapping) -> JobSettings:
    scopes = _scopes(row["tenant"], row["user_name"], row["namespace"], row["cluster"], row["app"])
    return settings_of(find_settings(connection), scopes)


def settings_of(entries: list[SettingEntry], job: Mapping[str, str]) -> JobSettings:
    """The first entry whose scopes fit: `include` is empty or fits, and `exclude` is empty or does not fit."""
    for entry in entries:
        is_included = not entry.include or _fits(entry.include, job)
        if is_included and not (entry.exclude and _fits(entry.exclude, job)):
            return JobSettings(values=entry.values, entry=entry.position)
    return JobSettings()


def _by_name(
    connection: Connection, job: JobSeen, asked: HistoryAsked, name: str, settings: Mapping[str, str]
) -> HistoryAnswer:
    if name and name not in ALGORITHMS and name not in OPTIMIZERS:
        known = ", ".join(dict.fromkeys((*ALGORITHMS, *OPTIMIZERS)))
        text = f"The algorithm {name!r} is unknown. Give one of {known}."
        return HistoryAnswer(sentence=text, error=text)
    question = replace(
        asked, algorithm=name if name in ALGORITHMS else "", optimizer=name if name in OPTIMIZERS else ""
    )
    given, _ = parameters_of({**settings, **asked.config})
    before = job.began_at or asked.now
    former = find_alike(connection, job.recipe, but=job.uid, before=before, hours=given.backward_hours)
    return answer(question, job, former, settings)


def _fitted(
    plan: HistoryPlan,
    bounds: JobBounds,
    asked: tuple[AskedGroup, ...],
    strategy: Strategy,
) -> SizePlan:
    """Inside the bounds of the job. Types that it may not change are left out."""
    is_like = plan.algorithm == START_LIKE
    terms = ScaleTerms(
        smallest=bounds.smallest,
        largest=bounds.largest,
        most_workers=bounds.most_workers,
        most_servers=bounds.most_servers,
    )
    has_servers = strategy is Strategy.PS
    clamped = within(plan, terms, bounds.limits, max_workers=0 if has_servers else bounds.max_nodes)
    chiefs = 0 if is_like else sum(group.count for group in asked if group.node_type is NodeType.CHIEF)
    made = size_plan(clamped, num_chiefs=chiefs)
    groups = tuple(
        group if has_servers else _in_units(group, bounds) for group in made.groups if group.node_type in bounds.types
    )
    return replace(made, groups=groups)


def _in_units(group: PlannedGroup, bounds: JobBounds) -> PlannedGroup:
    """The workers of one world: at least the minimum, at most the maximum, a multiple of the unit."""
    if group.node_type is not NodeType.WORKER or group.count is None:
        return group
    unit = bounds.node_unit
    least = -(-bounds.min_nodes // unit) * unit
    most = bounds.max_nodes // unit * unit
    count = max(least, min(most, -(-group.count // unit) * unit))
    return replace(group, count=count if bounds.min_nodes <= count <= bounds.max_nodes else None)


def _why_none(alike: AlikeJobs) -> str:
    if not alike.level:
        return "Brain knows no completed job that is similar, so the job starts with the size that its user gave."
    return (
        f"{alike.text}, but none of them has a usable measurement, so the job starts with the size that its user gave."
    )


def _scopes(tenant: str, user: str, namespace: str, cluster: str, app: str) -> dict[str, str]:
    return {"tenant": tenant, "user": user, "namespace": namespace, "cluster": cluster, "app": app}


def _fits(scope: Mapping[str, tuple[str, ...]], job: Mapping[str, str]) -> bool:
    return all(job.get(key) in values for key, values in scope.items())


def _shortened(sentence: str) -> str:
    return sentence if len(sentence) <= 1024 else f"{sentence[:1021]}..."
