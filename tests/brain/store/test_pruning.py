"""What is old goes, in batches, and questions do not wait for it."""

from __future__ import annotations

import asyncio
import time

import pytest
from sqlalchemy import Connection, Engine, func, insert, select

from dlrover.brain.config import DAY, RetentionTerms
from dlrover.brain.desk import BrainDesk
from dlrover.brain.store import writing
from dlrover.brain.store.pruning import prune
from dlrover.brain.store.schema import JOB, NODE_EVENT, PLAN, RUN
from dlrover.brain.store.store import BrainStore
from dlrover.brain.tenants import TokenRole, add_token
from dlrover.protocol.messages.brain import JobsAsked, NodeEnded, NodeEndKind, RunsTold
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import PlatformId
from tests.brain.jobs import TEAM, Clock, ask, began, ended, ref, run

SHORT = RetentionTerms(run_days=2, job_days=8, plan_days=4)


def counts(connection: Connection) -> dict[str, int]:
    return {
        table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
        for table in (JOB, RUN, NODE_EVENT, PLAN)
    }


async def test_the_store_keeps_a_steady_size_over_many_days(desk: BrainDesk, store: BrainStore, clock: Clock) -> None:
    sizes = []
    for day in range(14):
        for index in range(2):
            uid = f"job-{day}-{index}"
            await ask(desk, began(uid))
            await ask(desk, RunsTold(job=ref(uid), runs=(run(1), run(2))))
            await ask(
                desk, NodeEnded(job=ref(uid), node=PlatformId(1), node_type=NodeType.WORKER, kind=NodeEndKind.FAILED)
            )
            await ask(desk, ended(uid))
        clock.now += DAY
        await prune(store, SHORT)
        sizes.append(await store.read(counts))
    assert sizes[10] == sizes[-1]
    assert {name: sizes[-1][name] for name in ("run", "node_event", "job")} == {"run": 8, "node_event": 4, "job": 16}
    assert 0 < sizes[-1]["plan"] <= 10


async def test_a_tenant_above_its_limit_of_rows_loses_its_oldest_runs(
    desk: BrainDesk, store: BrainStore, clock: Clock
) -> None:
    await store.write(lambda connection: add_token(connection, "team", TokenRole.JOB, 0.0, row_limit=5))
    await ask(desk, began())
    for number in range(1, 9):
        clock.now += 60
        await ask(desk, RunsTold(job=ref(), runs=(run(number),)))
    assert (await prune(store, RetentionTerms()))["run"] == 3
    left = await store.read(
        lambda connection: connection.execute(select(RUN.c.number).order_by(RUN.c.number)).scalars().all()
    )
    assert left == [4, 5, 6, 7, 8]


@pytest.mark.slow
async def test_pruning_many_rows_blocks_no_question(
    desk: BrainDesk, store: BrainStore, engine: Engine, clock: Clock
) -> None:
    await ask(desk, began())
    fresh = await store.write(
        lambda connection: writing.store_runs(connection, TEAM.tenant, ref(), (run(1),), newest=1, now=clock.now)
    )
    assert fresh.newest_run == 1
    row = {
        "job_id": 1,
        "at": 0.0,
        "seconds": 1.0,
        "steps": 1,
        "step_time": 1.0,
        "records_per_second": 0.0,
        "workers": 1,
        "servers": 0,
        "data": b"x" * 400,
    }
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        connection.execute(insert(RUN), [{**row, "number": number} for number in range(10, 20_010)])
    pruning = asyncio.ensure_future(prune(store, SHORT))
    waits = []
    while not pruning.done():
        began_at = time.perf_counter()
        await ask(desk, JobsAsked(most=1))
        waits.append(time.perf_counter() - began_at)
        await asyncio.sleep(0)
    assert (await pruning)["run"] == 20_000
    assert len(waits) > 5, "questions were answered between the batches"
    assert max(waits) < 2.0, "0.2 s on a quiet machine, see benchmarks"
    assert (await store.read(counts))["run"] == 1
