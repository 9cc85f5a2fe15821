"""
What the store forgets, a thousand rows at a time, so that no question waits for a large deletion.

Runs and ends of nodes go first, then plans, and at last jobs that have not been heard of for long. A tenant with a limit of rows loses its oldest runs above it.
"""

from __future__ import annotations

from sqlalchemy import Connection, Table, delete, func, select, tuple_

from dlrover.brain.config import DAY, RetentionTerms
from dlrover.brain.store.schema import CLUSTER, JOB, NODE_EVENT, PLAN, RUN, TENANT
from dlrover.brain.store.store import BrainStore

AT_ONCE = 1000
_KEYS = {RUN: ("job_id", "number"), NODE_EVENT: ("job_id", "node", "kind"), PLAN: ("id",)}


async def prune(store: BrainStore, retention: RetentionTerms) -> dict[str, int]:
    """One pass. Gives the number of deleted rows by table. Raises Unavailable."""
    now = store.clock()
    limits = [
        (RUN, now - retention.run_days * DAY),
        (NODE_EVENT, now - retention.run_days * DAY),
        (PLAN, now - retention.plan_days * DAY),
    ]
    deleted: dict[str, int] = {}
    for table, before in limits:
        deleted[table.name] = await _all_of(store, table, before)
    deleted[RUN.name] += await _above_limits(store)
    before = now - retention.job_days * DAY
    deleted[JOB.name] = 0
    while count := await store.write(lambda connection: _delete_jobs(connection, before)):
        deleted[JOB.name] += count
    await store.write(lambda connection: connection.execute(delete(CLUSTER).where(CLUSTER.c.at < before)).rowcount)
    return deleted


async def _all_of(store: BrainStore, table: Table, before: float) -> int:
    total = 0
    while count := await store.write(lambda connection: _delete_older(connection, table, before)):
        total += count
    return total


def _delete_older(connection: Connection, table: Table, before: float) -> int:
    keys = [table.c[name] for name in _KEYS[table]]
    oldest = select(*keys).where(table.c.at < before).order_by(table.c.at).limit(AT_ONCE)
    return connection.execute(delete(table).where(tuple_(*keys).in_(oldest))).rowcount


async def _above_limits(store: BrainStore) -> int:
    total = 0
    for tenant, limit in await store.read(_limited_tenants):
        excess = await store.read(lambda connection, name=tenant: _num_runs(connection, name)) - limit  # type: ignore[misc]
        while excess > 0:
            most = min(excess, AT_ONCE)
            count = await store.write(lambda connection, name=tenant, most=most: _delete_oldest(connection, name, most))  # type: ignore[misc]
            total, excess = total + count, excess - max(count, 1)
    return total


def _limited_tenants(connection: Connection) -> list[tuple[str, int]]:
    return [(name, limit) for name, limit in connection.execute(select(TENANT.c.name, TENANT.c.row_limit)) if limit > 0]


def _num_runs(connection: Connection, tenant: str) -> int:
    statement = select(func.count()).select_from(RUN).join(JOB, JOB.c.id == RUN.c.job_id).where(JOB.c.tenant == tenant)
    return connection.execute(statement).scalar_one()


def _delete_oldest(connection: Connection, tenant: str, most: int) -> int:
    oldest = (
        select(RUN.c.job_id, RUN.c.number)
        .join(JOB, JOB.c.id == RUN.c.job_id)
        .where(JOB.c.tenant == tenant)
        .order_by(RUN.c.at)
        .limit(most)
    )
    return connection.execute(delete(RUN).where(tuple_(RUN.c.job_id, RUN.c.number).in_(oldest))).rowcount


def _delete_jobs(connection: Connection, before: float) -> int:
    """With what is left of them, which is little: their runs are long gone."""
    jobs = connection.execute(select(JOB.c.id).where(JOB.c.heard_at < before).order_by(JOB.c.heard_at).limit(100))
    ids = list(jobs.scalars())
    if ids:
        for table in (RUN, NODE_EVENT, PLAN):
            connection.execute(delete(table).where(table.c.job_id.in_(ids)))
        connection.execute(delete(JOB).where(JOB.c.id.in_(ids)))
    return len(ids)
