"""
The statements that change something. Each function is the body of one change: it refuses first, then it writes.

What a job tells may come again, and in parts: rows are found by the job and their own number, and the newer words take the place of the older ones.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, RowMapping, Table, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from dlrover.brain.store.reading import find_job, find_plans, recipe_of_row
from dlrover.brain.store.schema import CLUSTER, JOB, NODE_EVENT, PLAN, RUN, SETTING
from dlrover.core.scaling.history.alike import level_keys
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.brain import (
    BrainStored,
    ClusterSeen,
    JobBegan,
    JobEnded,
    JobRecipe,
    JobRef,
    NodeEnded,
    NodeEndKind,
    PodSeen,
    kept_of,
)
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import JobFacts, RunMeasured, ScaleDecision, ScaleOutcome, SizePlan

_ENCODER = msgspec.msgpack.Encoder()


class Proposal(Struct, frozen=True, kw_only=True):
    """A plan that Brain proposed."""

    algorithm: str
    plan: SizePlan
    sentence: str
    expected_speed: float = 0.0


def store_beginning(connection: Connection, tenant: str, began: JobBegan, now: float) -> int:
    """Gives the number of the newest run that is stored."""
    known = find_job(connection, tenant, began.job.uid)
    if known is not None:
        check_secret(known, began.job)
    told = {
        "name": clean(began.name),
        "user_name": clean(began.user),
        "cluster": clean(began.cluster),
        "namespace": clean(began.namespace),
        "app": clean(began.app),
        "strategy": began.strategy.value,
        "bounds": _ENCODER.encode((began.bounds, began.asked)),
        "heard_at": now,
        "ended_at": None,
        "end_reason": "",
    }
    recipe = _recipe_columns(tenant, told, began.recipe, known)
    if known is not None:
        connection.execute(update(JOB).where(JOB.c.id == known["id"]).values(**told, **recipe))
        return int(known["newest_run"])
    first = {
        "tenant": tenant,
        "uid": began.job.uid,
        "secret_hash": hash_of(began.job.secret),
        "facts": _ENCODER.encode({}),
        "began_at": now - began.age,
        "seconds": 0.0,
        "steps": 0,
        "core_hours": 0.0,
        "newest_run": 0,
        "newest_decision": 0,
    }
    connection.execute(JOB.insert().values(**first, **told, **recipe))
    return 0


def store_runs(
    connection: Connection, tenant: str, job: JobRef, runs: Sequence[RunMeasured], *, newest: int, now: float
) -> BrainStored:
    known = job_to_write(connection, tenant, job)
    rows = [_run_row(known["id"], run, now) for run in runs]
    if rows:
        upsert(connection, RUN, rows, ("job_id", "number"), newer="seconds")
    return _heard(connection, known, now, run=newest)


def store_facts(
    connection: Connection, tenant: str, job: JobRef, facts: JobFacts, recipe: JobRecipe | None, now: float
) -> BrainStored:
    known = job_to_write(connection, tenant, job)
    kept: dict[str, int] = msgspec.msgpack.decode(known["facts"], type=dict[str, int])
    names = [name for name in JobFacts.__struct_fields__ if isinstance(getattr(JobFacts(), name), int)]
    kept |= {name: value for name in names if 0 < (value := getattr(facts, name)) <= 2**62}
    more = JobRecipe(
        dataset_hash=hash_of(facts.dataset_name) if facts.dataset_name else "",
        model_size=min(kept.get("total_variable_size", 0), 2**53),
    )
    told = recipe or JobRecipe()
    filled = JobRecipe(
        name=told.name,
        script_hash=told.script_hash,
        script_name=told.script_name,
        dataset_hash=told.dataset_hash or known["dataset_hash"] or more.dataset_hash,
        model_size=told.model_size or known["model_size"] or more.model_size,
    )
    columns = _recipe_columns(tenant, known, filled, known)
    connection.execute(update(JOB).where(JOB.c.id == known["id"]).values(facts=_ENCODER.encode(kept), **columns))
    return _heard(connection, known, now)


def store_decisions(
    connection: Connection, tenant: str, job: JobRef, decisions: Sequence[ScaleDecision], *, newest: int, now: float
) -> BrainStored:
    known = job_to_write(connection, tenant, job)
    rows = [
        {
            "job_id": known["id"],
            "number": made.number,
            "at": now,
            "algorithm": "job",
            "outcome": made.outcome.value,
            "data": _ENCODER.encode(made.plan),
            "sentence": clean(made.sentence),
            "expected": made.expected_speed,
            "came": made.speed_after,
            "is_taken_back": made.outcome is ScaleOutcome.TAKEN_BACK,
        }
        for made in decisions
    ]
    if rows:
        upsert(connection, PLAN, rows, ("job_id", "number"), keep=("at",))
    return _heard(connection, known, now, decision=newest)


def store_proposal(connection: Connection, tenant: str, uid: str, proposal: Proposal, now: float) -> None:
    """Unless it is the one that was proposed last: a job asks every few minutes."""
    known = find_job(connection, tenant, uid)
    if known is None:
        return
    last = find_plans(connection, (known["id"],), 1, only_proposals=True)
    data = _ENCODER.encode(proposal.plan)
    if last and last[0]["data"] == data and last[0]["algorithm"] == proposal.algorithm:
        return
    connection.execute(
        PLAN.insert().values(
            job_id=known["id"],
            number=None,
            at=now,
            algorithm=clean(proposal.algorithm),
            outcome="proposed",
            data=data,
            sentence=clean(proposal.sentence),
            expected=proposal.expected_speed,
            came=0.0,
            is_taken_back=False,
        )
    )


def store_node_end(connection: Connection, tenant: str, ended: NodeEnded, now: float) -> BrainStored:
    known = job_to_write(connection, tenant, ended.job)
    row = {
        "job_id": known["id"],
        "node": int(ended.node),
        "kind": ended.kind.value,
        "node_type": ended.node_type.value,
        "at": now - ended.age,
        "cpu": ended.resource.cpu,
        "memory_mb": ended.resource.memory_mb,
        "gpus": ended.resource.gpus,
        "used_memory_mb": ended.memory_mb,
    }
    upsert(connection, NODE_EVENT, [row], ("job_id", "node", "kind"), keep=("at",))
    return _heard(connection, known, now)


def store_end(connection: Connection, tenant: str, ended: JobEnded, now: float) -> BrainStored:
    known = job_to_write(connection, tenant, ended.job)
    totals = ended.totals
    connection.execute(
        update(JOB)
        .where(JOB.c.id == known["id"])
        .values(
            ended_at=max(known["began_at"], now - ended.age),
            end_reason=ended.reason.value,
            seconds=totals.seconds,
            steps=totals.steps,
            core_hours=totals.core_hours,
        )
    )
    return _heard(connection, known, now)


def store_cluster(connection: Connection, tenant: str, seen: ClusterSeen, now: float) -> BrainStored:
    name = clean(seen.cluster)
    if seen.machines is not None:
        row = {"tenant": tenant, "name": name, "at": now, "data": _ENCODER.encode(seen.machines)}
        upsert(connection, CLUSTER, [row], ("tenant", "name"))
    for pod in seen.pods:
        if pod.is_oom and pod.job_uid:
            _store_pod_without_memory(connection, tenant, pod, now)
    return BrainStored()


def _store_pod_without_memory(connection: Connection, tenant: str, pod: PodSeen, now: float) -> None:
    """Of each life of its job. The number of the node is not known, so it has one of its own, below those that platforms give."""
    number = -1 - int.from_bytes(hashlib.sha256(pod.uid.encode()).digest()[:7])
    is_of_job = or_(JOB.c.uid == pod.job_uid, JOB.c.uid.startswith(f"{pod.job_uid}-", autoescape=True))
    rows = [
        {
            "job_id": id_,
            "node": number,
            "kind": NodeEndKind.OOM.value,
            "node_type": (pod.node_type or NodeType.WORKER).value,
            "at": now,
            "cpu": pod.resource.cpu,
            "memory_mb": pod.resource.memory_mb,
            "gpus": pod.resource.gpus,
            "used_memory_mb": 0.0,
        }
        for id_ in connection.execute(
            select(JOB.c.id).where(JOB.c.tenant == tenant, JOB.c.ended_at.is_(None), is_of_job)
        ).scalars()
    ]
    if rows:
        upsert(connection, NODE_EVENT, rows, ("job_id", "node", "kind"), keep=("at",))


def set_setting(
    connection: Connection,
    position: int,
    include: Mapping[str, Any],
    exclude: Mapping[str, Any],
    values: Mapping[str, str],
) -> None:
    row = {
        "position": position,
        "include": json.dumps(include, sort_keys=True),
        "exclude": json.dumps(exclude, sort_keys=True),
        "vals": json.dumps(values, sort_keys=True),
    }
    upsert(connection, SETTING, [row], ("position",))


def job_to_write(connection: Connection, tenant: str, job: JobRef) -> RowMapping:
    """Raises Unavailable for a job that Brain does not know (it tells its beginning again), and Rejected for a wrong secret."""
    known = find_job(connection, tenant, job.uid)
    if known is None:
        raise Unavailable(f"Brain does not know the job {job.uid!r}. Send `JobBegan` first.", 0.0)
    check_secret(known, job)
    return known


def check_secret(known: RowMapping, job: JobRef) -> None:
    if not hmac.compare_digest(known["secret_hash"], hash_of(job.secret)):
        raise Rejected(f"The secret of the job {job.uid!r} differs from its first one. Another job uses the same uid.")


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def clean(text: str) -> str:
    """PostgreSQL keeps no text with a zero byte."""
    return text.replace("\0", "")


def upsert(
    connection: Connection,
    table: Table,
    rows: list[dict[str, Any]],
    keys: tuple[str, ...],
    *,
    newer: str = "",
    keep: tuple[str, ...] = (),
) -> None:
    """A row with the same keys is replaced, all but the columns `keep`; with `newer` only where that column is at least what it was."""
    make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = make(table)
    told = {name: statement.excluded[name] for name in rows[0] if name not in keys and name not in keep}
    where = statement.excluded[newer] >= table.c[newer] if newer else None
    connection.execute(
        statement.on_conflict_do_update(index_elements=[table.c[key] for key in keys], set_=told, where=where), rows
    )


def _heard(connection: Connection, known: RowMapping, now: float, *, run: int = 0, decision: int = 0) -> BrainStored:
    stored = BrainStored(
        newest_run=max(run, known["newest_run"]), newest_decision=max(decision, known["newest_decision"])
    )
    connection.execute(
        update(JOB)
        .where(JOB.c.id == known["id"])
        .values(heard_at=now, newest_run=stored.newest_run, newest_decision=stored.newest_decision)
    )
    return stored


def _run_row(job_id: int, run: RunMeasured, now: float) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "number": run.number,
        "at": now,
        "seconds": run.seconds,
        "steps": run.steps,
        "step_time": run.step_time,
        "records_per_second": run.records_per_second,
        "workers": run.configuration.num_workers,
        "servers": run.configuration.count(NodeType.PS),
        "data": _ENCODER.encode(kept_of(run)),
    }


def _recipe_columns(
    tenant: str, job: Mapping[str, Any] | RowMapping, told: JobRecipe, known: RowMapping | None
) -> dict[str, Any]:
    """What is not told stays as it was."""
    columns = {
        "recipe_name": clean(told.name) or (known["recipe_name"] if known is not None else ""),
        "script_hash": clean(told.script_hash) or (known["script_hash"] if known is not None else ""),
        "script_name": clean(told.script_name) or (known["script_name"] if known is not None else ""),
        "dataset_hash": clean(told.dataset_hash) or (known["dataset_hash"] if known is not None else ""),
        "model_size": told.model_size or (known["model_size"] if known is not None else 0),
    }
    row = {**columns, "tenant": tenant, "user_name": job["user_name"], "strategy": job["strategy"]}
    _, by_parts, by_script, by_size = level_keys(recipe_of_row(row))
    return {**columns, "key_parts": by_parts, "key_script": by_script, "key_size": by_size}
