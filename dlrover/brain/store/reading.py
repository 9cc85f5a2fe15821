"""The statements that look something up, and rows as the values that the core and people read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import ColumnElement, Connection, RowMapping, and_, func, select

from dlrover.brain.store.schema import CLUSTER, JOB, NODE_EVENT, PLAN, RUN, SETTING
from dlrover.core.scaling.history.alike import level_keys
from dlrover.core.scaling.history.seen import (
    COMPLETED,
    MOST_RECORDS,
    OUT_OF_MEMORY,
    FormerRun,
    JobSeen,
    NodeSeen,
    Recipe,
    former_run,
    records_of,
)
from dlrover.protocol.messages.brain import AskedGroup, JobBounds, JobRecipe, JobRow, MachinesSeen, NodeEndRow, PlanRow
from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.scaling import Configuration, JobFacts, RunMeasured, ScaleOutcome, SizePlan

MOST_ALIKE = 100
"""Jobs of one level that are looked at."""
MOST_WITH_RUNS = 8
"""Of these, the completed ones whose runs are read: the newest."""
_RUN = msgspec.msgpack.Decoder(RunMeasured)
_PLAN = msgspec.msgpack.Decoder(SizePlan)
_BOUNDS = msgspec.msgpack.Decoder(tuple[JobBounds, tuple[AskedGroup, ...]])
_FACTS = msgspec.msgpack.Decoder(dict[str, int])
_MACHINES = msgspec.msgpack.Decoder(MachinesSeen)


class SettingEntry(Struct, frozen=True, kw_only=True):
    """Values for the jobs that its scopes fit."""

    position: int
    include: dict[str, tuple[str, ...]] = {}
    """Key of a job to the values that it may have; empty: all jobs."""
    exclude: dict[str, tuple[str, ...]] = {}
    values: dict[str, str] = {}


def find_job(connection: Connection, tenant: str, uid: str) -> RowMapping | None:
    found = connection.execute(select(JOB).where(JOB.c.tenant == tenant, JOB.c.uid == uid))
    return found.mappings().first()


def find_jobs(connection: Connection, tenant: str | None, *, name: str = "", most: int) -> Sequence[RowMapping]:
    """The newest first. `tenant` None: of all."""
    where: list[ColumnElement[bool]] = [] if tenant is None else [JOB.c.tenant == tenant]
    if name:
        where.append(JOB.c.name == name)
    statement = select(JOB).where(and_(True, *where)).order_by(JOB.c.began_at.desc(), JOB.c.id.desc()).limit(most)
    return connection.execute(statement).mappings().all()


def find_runs(connection: Connection, job_id: int, most: int) -> list[RunMeasured]:
    """The newest, in the order of their numbers."""
    statement = select(RUN.c.data).where(RUN.c.job_id == job_id).order_by(RUN.c.number.desc()).limit(most)
    return [_RUN.decode(data) for (data,) in connection.execute(statement)][::-1]


def find_plans(
    connection: Connection,
    jobs: Sequence[int] | None,
    most: int,
    *,
    tenant: str | None = None,
    only_proposals: bool = False,
) -> Sequence[RowMapping]:
    """The newest first, with tenant and uid of their jobs. `jobs` None: of all jobs of the tenant, or of all tenants."""
    statement = select(PLAN, JOB.c.uid, JOB.c.tenant).join(JOB, JOB.c.id == PLAN.c.job_id)
    if jobs is not None:
        statement = statement.where(PLAN.c.job_id.in_(jobs))
    if tenant is not None:
        statement = statement.where(JOB.c.tenant == tenant)
    if only_proposals:
        statement = statement.where(PLAN.c.number.is_(None))
    return connection.execute(statement.order_by(PLAN.c.id.desc()).limit(most)).mappings().all()


def find_node_ends(connection: Connection, jobs: Sequence[int], *, only_oom: bool = False) -> Sequence[RowMapping]:
    statement = select(NODE_EVENT).where(NODE_EVENT.c.job_id.in_(jobs)).order_by(NODE_EVENT.c.at).limit(10_000)
    if only_oom:
        statement = statement.where(NODE_EVENT.c.kind == "oom")
    return connection.execute(statement).mappings().all()


def find_settings(connection: Connection) -> list[SettingEntry]:
    rows = connection.execute(select(SETTING).order_by(SETTING.c.position)).mappings()
    return [
        SettingEntry(
            position=row["position"],
            include=_scope(row["include"]),
            exclude=_scope(row["exclude"]),
            values=json.loads(row["vals"]),
        )
        for row in rows
    ]


def find_machines(connection: Connection, tenant: str, cluster: str, *, since: float) -> MachinesSeen | None:
    statement = select(CLUSTER.c.data).where(
        CLUSTER.c.tenant == tenant, CLUSTER.c.name == cluster, CLUSTER.c.at >= since
    )
    data = connection.execute(statement).scalar()
    return None if data is None else _MACHINES.decode(data)


def find_alike(connection: Connection, recipe: Recipe, *, but: str, before: float, hours: float) -> list[JobSeen]:
    """The jobs of the first level on which one completed; `core` decides what it makes of them. `but`: the uid of the job that asks."""
    _, by_parts, by_script, by_size = level_keys(recipe)
    keys: list[tuple[str, str]] = [("recipe_name", recipe.name)] if recipe.name else [("key_parts", by_parts)]
    keys += [("key_script", by_script), ("key_size", by_size)]
    since = before - min(hours, 1e6) * 3600
    for column, key in keys:
        if not key:
            continue
        where = and_(
            JOB.c.tenant == recipe.tenant,
            JOB.c[column] == key,
            JOB.c.uid != but,
            JOB.c.began_at >= since,
            JOB.c.began_at <= before,
            *([JOB.c.recipe_name == ""] if column == "key_parts" else []),
            JOB.c.end_reason.in_((COMPLETED, *OUT_OF_MEMORY)),
        )
        rows = (
            connection.execute(select(JOB).where(where).order_by(JOB.c.began_at.desc()).limit(MOST_ALIKE))
            .mappings()
            .all()
        )
        if any(row["end_reason"] == COMPLETED for row in rows):
            return _with_runs(connection, rows)
    return []


def _with_runs(connection: Connection, rows: Sequence[RowMapping]) -> list[JobSeen]:
    completed = [row["id"] for row in rows if row["end_reason"] == COMPLETED][:MOST_WITH_RUNS]
    ends: dict[int, list[NodeSeen]] = {}
    for each in find_node_ends(connection, [row["id"] for row in rows], only_oom=True):
        ends.setdefault(each["job_id"], []).append(_node_seen(each))
    return [
        job_seen(
            connection, row, most_runs=MOST_RECORDS if row["id"] in completed else 0, nodes=ends.get(row["id"], ())
        )
        for row in rows
    ]


def job_seen(
    connection: Connection, row: RowMapping, *, most_runs: int = MOST_RECORDS, nodes: Sequence[NodeSeen] = ()
) -> JobSeen:
    """A job as the core reads it, with its newest runs."""
    measured = find_runs(connection, row["id"], most_runs) if most_runs else []
    failed = _failed_tries(connection, row["id"]) if measured else []
    runs = tuple(former_run(run, has_paid=not _is_one_of(run.configuration, failed)) for run in measured)
    bounds, _ = bounds_of(row)
    return JobSeen(
        uid=row["uid"],
        recipe=recipe_of_row(row),
        began_at=row["began_at"],
        exit_reason=row["end_reason"],
        facts=JobFacts(**_FACTS.decode(row["facts"])),  # type: ignore[arg-type]
        runs=runs,
        records=records_of(runs),
        nodes=(*_present_nodes(runs), *nodes),
        limits=bounds.limits,
    )


def oom_nodes(connection: Connection, job_id: int, *, since: float) -> list[NodeSeen]:
    """Nodes of a job that ended for want of memory since then."""
    return [_node_seen(row) for row in find_node_ends(connection, (job_id,), only_oom=True) if row["at"] >= since]


def bounds_of(row: RowMapping) -> tuple[JobBounds, tuple[AskedGroup, ...]]:
    return _BOUNDS.decode(row["bounds"])


def recipe_of_row(row: Mapping[str, Any] | RowMapping) -> Recipe:
    return Recipe(
        name=row["recipe_name"],
        script_hash=row["script_hash"],
        script=row["script_name"],
        user=row["user_name"],
        tenant=row["tenant"],
        dataset=row["dataset_hash"],
        model_size=row["model_size"],
        strategy=row["strategy"],
    )


def shown_job(connection: Connection, row: RowMapping) -> JobRow:
    count = connection.execute(select(func.count()).select_from(RUN).where(RUN.c.job_id == row["id"])).scalar_one()
    return JobRow(
        uid=row["uid"],
        tenant=row["tenant"],
        name=row["name"],
        user=row["user_name"],
        cluster=row["cluster"],
        namespace=row["namespace"],
        app=row["app"],
        strategy=row["strategy"],
        recipe=JobRecipe(
            name=row["recipe_name"],
            script_hash=row["script_hash"],
            script_name=row["script_name"],
            dataset_hash=row["dataset_hash"],
            model_size=row["model_size"],
        ),
        began_at=row["began_at"],
        ended_at=row["ended_at"],
        end_reason=row["end_reason"],
        steps=row["steps"],
        core_hours=row["core_hours"],
        num_runs=count,
        facts=_FACTS.decode(row["facts"]),
    )


def shown_plan(row: RowMapping) -> PlanRow:
    return PlanRow(
        job=row["uid"],
        at=row["at"],
        number=row["number"] or 0,
        algorithm=row["algorithm"],
        outcome=row["outcome"],
        plan=_PLAN.decode(row["data"]),
        sentence=row["sentence"],
        expected_speed=row["expected"],
        speed_after=row["came"],
        is_taken_back=row["is_taken_back"],
    )


def shown_node_end(row: RowMapping) -> NodeEndRow:
    return NodeEndRow(
        node=row["node"],
        node_type=row["node_type"],
        kind=row["kind"],
        at=row["at"],
        resource=Resource(cpu=row["cpu"], memory_mb=row["memory_mb"], gpus=row["gpus"]),
        memory_mb=row["used_memory_mb"],
    )


def _failed_tries(connection: Connection, job_id: int) -> list[SizePlan]:
    """Plans whose newest try was taken back."""
    judged = (ScaleOutcome.KEPT.value, ScaleOutcome.TAKEN_BACK.value)
    statement = (
        select(PLAN.c.data, PLAN.c.is_taken_back)
        .where(PLAN.c.job_id == job_id, PLAN.c.outcome.in_(judged))
        .order_by(PLAN.c.number)
    )
    newest: dict[bytes, bool] = {row.data: row.is_taken_back for row in connection.execute(statement)}
    return [_PLAN.decode(data) for data, is_taken_back in newest.items() if is_taken_back]


def _is_one_of(configuration: Configuration, plans: Sequence[SizePlan]) -> bool:
    return any(_is_that(configuration, plan) for plan in plans)


def _is_that(configuration: Configuration, plan: SizePlan) -> bool:
    if plan.nodes or not (plan.groups or plan.micro_batch is not None):
        return False
    if plan.micro_batch is not None and plan.micro_batch != configuration.micro_batch:
        return False
    for wish in plan.groups:
        group = configuration.group(wish.node_type)
        if group is None:
            return False
        pairs = ((wish.count, group.count), (wish.cpu, group.cpu), (wish.memory_mb, group.memory_mb))
        if any(wanted is not None and wanted != has for wanted, has in pairs):
            return False
    return True


def _present_nodes(runs: Sequence[FormerRun]) -> list[NodeSeen]:
    """Those of the newest record, under the same ids."""
    records = records_of(runs[-1:])
    if not records:
        return []
    configuration = runs[-1].configuration
    found: list[NodeSeen] = []
    for kind, used in ((NodeType.PS, records[0].servers), (NodeType.WORKER, records[0].workers)):
        group = configuration.group(kind) or (configuration.group(NodeType.CHIEF) if kind is NodeType.WORKER else None)
        found += [
            NodeSeen(
                id=node.id,
                node_type=kind,
                cpu=0.0 if group is None else group.cpu,
                memory_mb=0.0 if group is None else group.memory_mb,
                used_memory_mb=node.memory_mb,
            )
            for node in used
        ]
    return found


def _node_seen(row: RowMapping) -> NodeSeen:
    return NodeSeen(
        id=row["node"],
        node_type=NodeType(row["node_type"]),
        cpu=row["cpu"],
        memory_mb=row["memory_mb"],
        used_memory_mb=row["used_memory_mb"],
        is_oom=True,
        is_running=False,
    )


def _scope(text: str) -> dict[str, tuple[str, ...]]:
    return {key: tuple(values) for key, values in json.loads(text).items()}
