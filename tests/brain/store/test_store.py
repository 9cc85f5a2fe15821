"""What is told is stored once, on both kinds of database, with the same statements."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, func, inspect, select
from sqlalchemy.engine import make_url

from dlrover.brain.desk import BrainDesk
from dlrover.brain.store import writing
from dlrover.brain.store.database import open_engine
from dlrover.brain.store.reading import find_job, find_runs
from dlrover.brain.store.schema import JOB, METADATA, RUN
from dlrover.brain.store.store import BrainStore
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.brain import (
    BrainStored,
    DecisionsTold,
    FactsTold,
    JobAsked,
    JobRecord,
    NodeEnded,
    NodeEndKind,
    RunsTold,
    StartPlan,
    digest_of,
)
from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.identity import Micros, PlatformId
from dlrover.protocol.messages.job import ExitReason
from dlrover.protocol.messages.scaling import (
    JobFacts,
    MemoryPoint,
    PlannedGroup,
    ScaleDecision,
    ScaleOutcome,
    SizePlan,
    TypeUse,
)
from tests.brain.jobs import ask, began, ended, ref, run


async def record_of(desk: BrainDesk, uid: str = "job-1") -> JobRecord:
    found = await ask(desk, JobAsked(uid=uid, most=500))
    assert isinstance(found, JobRecord)
    return found


def test_the_tables_are_those_that_the_statements_know(engine: Engine) -> None:
    made = inspect(engine)
    for table in METADATA.sorted_tables:
        columns = {column["name"]: column["nullable"] for column in made.get_columns(table.name)}
        assert columns == {column.name: bool(column.nullable) for column in table.columns}, table.name
        assert made.get_pk_constraint(table.name)["constrained_columns"] == [key.name for key in table.primary_key]


async def test_runs_that_come_again_and_in_parts_are_stored_once(desk: BrainDesk) -> None:
    runs = [run(number, seconds=60.0 + number, nodes=1 + number % 7) for number in range(1, 41)]
    chance = random.Random(7)
    await ask(desk, began())
    for start in range(0, 40, 8):
        told = runs[start : start + 8]
        for _ in range(chance.randint(1, 3)):  # the answer was lost
            stored = await ask(desk, RunsTold(job=ref(), runs=tuple(told)))
            assert stored == BrainStored(newest_run=start + 8)
        await ask(desk, RunsTold(job=ref(), runs=tuple(runs[max(0, start - 3) : start + 8])))
    found = await record_of(desk)
    assert (len(found.runs), digest_of(found.runs)) == (40, digest_of(runs))
    assert found.job.num_runs == 40


async def test_a_longer_word_about_a_run_takes_the_place_of_a_shorter_one(desk: BrainDesk) -> None:
    await ask(desk, began())
    for seconds in (60.0, 120.0, 90.0):  # the last one was late
        await ask(desk, RunsTold(job=ref(), runs=(run(1, seconds=seconds),)))
    assert [each.seconds for each in (await record_of(desk)).runs] == [120.0]


async def test_defect_33_reports_that_come_at_once_lose_nothing(desk: BrainDesk) -> None:
    """Spec 07 §19: each report read and wrote one text with all runs, without a transaction."""
    runs = [run(number, seconds=60.0 + number) for number in range(1, 61)]
    await ask(desk, began())
    told = [RunsTold(job=ref(), runs=(each,)) for each in runs]
    random.Random(3).shuffle(told)
    await asyncio.gather(*(ask(desk, each) for each in told))
    found = await record_of(desk)
    assert sorted(each.number for each in found.runs) == list(range(1, 61))
    assert digest_of(found.runs) == digest_of(runs)


async def test_points_of_memory_are_not_kept(desk: BrainDesk) -> None:
    use = TypeUse(node_type=NodeType.WORKER, memory_mb=5.0, memory=(MemoryPoint(Micros(1), 1, 5.0),))
    told = run(1, types=(use,))
    await ask(desk, began())
    await ask(desk, RunsTold(job=ref(), runs=(told,)))
    kept = (await record_of(desk)).runs
    assert kept[0].types[0].memory == ()
    assert digest_of(kept) == digest_of([told])


async def test_a_job_that_begins_again_keeps_its_runs_and_hears_the_newest(desk: BrainDesk) -> None:
    await ask(desk, began())
    await ask(desk, RunsTold(job=ref(), runs=(run(1), run(2))))
    await ask(desk, ended())
    again = await ask(desk, began(wants_plan=False))
    assert isinstance(again, StartPlan)
    assert (again.newest_run, again.plan) == (2, None)
    await ask(desk, RunsTold(job=ref(), runs=(run(3),)))
    found = await record_of(desk)
    assert (found.job.num_runs, found.job.ended_at, found.job.end_reason) == (3, None, "")


async def test_a_job_that_brain_does_not_know_is_asked_for_its_beginning(desk: BrainDesk) -> None:
    with pytest.raises(Unavailable, match="JobBegan") as caught:
        await ask(desk, RunsTold(job=ref(), runs=(run(1),)))
    assert caught.value.retry_after == 0.0


async def test_another_job_cannot_write_under_a_uid_without_its_secret(desk: BrainDesk) -> None:
    await ask(desk, began())
    await ask(desk, RunsTold(job=ref(), runs=(run(1),)))
    stranger = ref(secret="another")
    for question in (began(job=stranger), RunsTold(job=stranger, runs=(run(2),))):
        with pytest.raises(Rejected, match="secret"):
            await ask(desk, question)
    assert (await record_of(desk)).job.num_runs == 1


async def test_decisions_ends_and_facts_are_kept_by_their_numbers(desk: BrainDesk, store: BrainStore) -> None:
    plan = SizePlan(groups=(PlannedGroup(node_type=NodeType.WORKER, count=3),))
    made = [
        ScaleDecision(
            number=1, at=Micros(1), outcome=ScaleOutcome.PLANNED, sentence="three", plan=plan, expected_speed=9.0
        ),
        ScaleDecision(
            number=1,
            at=Micros(1),
            outcome=ScaleOutcome.PLANNED,
            sentence="three",
            plan=plan,
            expected_speed=9.0,
            speed_after=8.5,
        ),
        ScaleDecision(number=2, at=Micros(2), outcome=ScaleOutcome.TAKEN_BACK, sentence="no", plan=plan),
    ]
    await ask(desk, began())
    for each in made:
        await ask(desk, DecisionsTold(job=ref(), decisions=(each,)))
    lost = NodeEnded(
        job=ref(), node=PlatformId(5), node_type=NodeType.WORKER, kind=NodeEndKind.OOM, resource=Resource(memory_mb=900)
    )
    for _ in range(2):
        await ask(desk, lost)
    await ask(
        desk,
        FactsTold(
            job=ref(), facts=JobFacts(batch_size=32, dataset_name="a/secret/path", custom={"k": "v"}, exit_reason="x")
        ),
    )
    await ask(desk, FactsTold(job=ref(), facts=JobFacts(max_steps=10)))
    found = await record_of(desk)
    assert [(each.number, each.speed_after, each.is_taken_back) for each in found.plans] == [
        (1, 8.5, False),
        (2, 0.0, True),
    ]
    assert [(each.node, each.kind, each.resource.memory_mb) for each in found.node_ends] == [(5, "oom", 900)]
    assert found.job.facts == {"batch_size": 32, "max_steps": 10}
    assert found.job.recipe.dataset_hash == writing.hash_of("a/secret/path")
    text = await store.read(_everything)
    assert b"a/secret/path" not in text
    assert b"a secret" not in text


async def test_the_end_of_a_job_and_its_totals(desk: BrainDesk) -> None:
    await ask(desk, began())
    await ask(desk, ended(reason=ExitReason.WORKER_OOM))
    job = (await record_of(desk)).job
    assert (job.end_reason, job.steps, job.core_hours) == ("WorkerOOM", 1000, 2.0)


async def test_changes_that_gather_are_committed_together(engine: Engine) -> None:
    gathering = BrainStore(engine, gather=0.5)
    changes = [
        gathering.put(
            lambda connection, uid=f"job-{index}": writing.store_beginning(connection, "team", began(uid), 1.0)
        )
        for index in range(50)
    ]  # type: ignore[misc]
    gathering.start()
    await asyncio.gather(*map(asyncio.wrap_future, changes))
    assert gathering.num_commits == 1
    assert (
        await gathering.read(lambda connection: connection.execute(select(func.count()).select_from(JOB)).scalar())
        == 50
    )
    gathering.close()


async def test_a_change_that_fails_spoils_no_other(engine: Engine) -> None:
    gathering = BrainStore(engine, gather=0.5)
    good = gathering.put(lambda connection: writing.store_beginning(connection, "team", began(), 1.0))
    bad = gathering.put(lambda connection: connection.execute(RUN.insert().values(job_id=1, number=None)))
    gathering.start()
    assert await asyncio.wrap_future(good) == 0
    with pytest.raises(Unavailable):
        await asyncio.wrap_future(bad)
    assert await gathering.read(lambda connection: find_job(connection, "team", "job-1")) is not None
    gathering.close()


async def test_what_waits_is_written_when_the_store_is_closed(engine: Engine) -> None:
    closing = BrainStore(engine, gather=5.0)
    closing.start()
    waiting = closing.put(lambda connection: writing.store_beginning(connection, "team", began(), 1.0))
    closing.close()
    assert waiting.result(timeout=0) == 0
    with pytest.raises(Unavailable):
        closing.put(lambda connection: None)


async def test_the_runs_of_a_job_are_read_newest_first_and_told_in_order(desk: BrainDesk, store: BrainStore) -> None:
    await ask(desk, began())
    await ask(desk, RunsTold(job=ref(), runs=tuple(run(number) for number in range(1, 9))))

    def newest(connection: Connection) -> list[int]:
        row = find_job(connection, "team", "job-1")
        assert row is not None
        return [each.number for each in find_runs(connection, row["id"], 3)]

    assert await store.read(newest) == [6, 7, 8]


async def test_defect_34_a_database_that_does_not_answer_is_named_without_its_password() -> None:
    engine = open_engine(make_url("postgresql+psycopg://ann:a-password@127.0.0.1:1/brain?connect_timeout=2"))
    away = BrainStore(engine, gather=0.0)
    with pytest.raises(Unavailable) as caught:
        await away.read(lambda connection: None)
    assert "127.0.0.1" in str(caught.value)
    assert "a-password" not in str(caught.value)
    away.close()


def test_an_sqlite_file_is_made_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "brain.sqlite"
    engine = open_engine(make_url(f"sqlite:///{path}"))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    engine.dispose()
    assert path.exists()


def _everything(connection: Connection) -> bytes:
    return b"\n".join(
        repr(tuple(row)).encode() for table in METADATA.sorted_tables for row in connection.execute(select(table))
    )
