"""A token of one tenant reads and writes nothing of another."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import Connection, select

from dlrover.brain.desk import BrainDesk
from dlrover.brain.room import ROOM_KEY
from dlrover.brain.settings import change_setting
from dlrover.brain.store.schema import METADATA
from dlrover.brain.store.store import BrainStore
from dlrover.brain.tenants import Doorkeeper, TokenHolder, TokenRole, add_token, list_tenants, remove_tokens
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.brain import (
    Allowance,
    AllowanceAsked,
    BrainQuestion,
    ClusterSeen,
    DecisionsTold,
    FactsTold,
    JobAsked,
    JobEnded,
    JobList,
    JobsAsked,
    JobSettings,
    MachinesSeen,
    NodeEnded,
    NodeEndKind,
    PlanAsked,
    PlanList,
    PlansAsked,
    PodSeen,
    RunsTold,
    SettingsAsked,
    StartPlan,
)
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import Micros, PlatformId
from dlrover.protocol.messages.job import ExitReason
from dlrover.protocol.messages.scaling import JobFacts, ScaleDecision, ScaleOutcome, SpeedPoint
from tests.brain.jobs import ADMIN, OTHERS, TEAM, Clock, ask, began, ref, run, whole_job

MONITOR_OF_OTHERS = TokenHolder(tenant="others", role=TokenRole.MONITOR)
DECISION = ScaleDecision(number=9, at=Micros(1), outcome=ScaleOutcome.KEPT, sentence="of others")


def wish(**more: object) -> AllowanceAsked:
    points = (SpeedPoint(1, 1.0), SpeedPoint(8, 8.0))
    return AllowanceAsked(**{"job": ref(), "min_nodes": 1, "max_nodes": 8, "points": points, **more})  # type: ignore[arg-type]


WRITES: list[BrainQuestion] = [
    began(name="theirs", user="eve"),
    RunsTold(job=ref(), runs=(run(1, seconds=999.0), run(7))),
    FactsTold(job=ref(), facts=JobFacts(batch_size=666)),
    DecisionsTold(job=ref(), decisions=(DECISION,)),
    NodeEnded(job=ref(), node=PlatformId(3), node_type=NodeType.WORKER, kind=NodeEndKind.FAILED),
    JobEnded(job=ref(), reason=ExitReason.CODE_ERROR),
    PlanAsked(job=ref(), algorithm="start_like"),
    SettingsAsked(job=ref()),
    wish(),
    JobsAsked(),
    JobAsked(uid="job-1"),
    PlansAsked(),
    ClusterSeen(cluster="c", machines=MachinesSeen(count=1), pods=(PodSeen(uid="p", job_uid="job-1", is_oom=True),)),
]


def test_every_message_is_in_the_list() -> None:
    assert {type(each) for each in WRITES} == set(BrainQuestion.__args__)


@pytest.mark.parametrize("question", WRITES, ids=lambda each: type(each).__name__)
async def test_no_message_of_another_tenant_reads_or_changes_anything(
    desk: BrainDesk, store: BrainStore, clock: Clock, question: BrainQuestion
) -> None:
    """The same uid, and even the same secret: whoever the caller is, it is another job."""
    await whole_job(desk, "earlier", run(1, nodes=6))
    clock.now += 100
    await ask(desk, began(cluster="c"))
    await ask(desk, RunsTold(job=ref(), runs=(run(1), run(2))))
    before = await store.read(rows_of_team)
    caller = MONITOR_OF_OTHERS if isinstance(question, ClusterSeen) else OTHERS
    try:
        answer = await ask(desk, question, caller)
    except (Rejected, Unavailable) as error:
        answer = str(error)  # type: ignore[assignment]
    assert await store.read(rows_of_team) == before
    told = msgspec.json.encode(answer).decode()
    assert not any(word in told for word in ("earlier", "ann", "a-job", '"nodes":6', '"count":6'))
    match answer:
        case StartPlan():
            assert (answer.plan, answer.newest_run, answer.similar) == (None, 0, 0)
        case JobList():
            assert answer.jobs == ()
        case PlanList():
            assert answer.plans == ()


def rows_of_team(connection: Connection) -> list[tuple[object, ...]]:
    job = METADATA.tables["job"]
    ours = connection.execute(select(job.c.id).where(job.c.tenant == "team")).scalars().all()
    found = [tuple(row) for row in connection.execute(select(job).where(job.c.tenant == "team").order_by(job.c.id))]
    for name in ("run", "node_event", "plan"):
        table = METADATA.tables[name]
        keys = list(table.primary_key)
        found += [
            tuple(row) for row in connection.execute(select(table).where(table.c.job_id.in_(ours)).order_by(*keys))
        ]
    return found


@pytest.mark.parametrize(
    "question",
    [JobsAsked(tenant="team"), PlansAsked(tenant="*"), JobAsked(uid="job-1", tenant="team")],
    ids=lambda each: type(each).__name__,
)
async def test_only_an_admin_reads_the_jobs_of_others(desk: BrainDesk, question: BrainQuestion) -> None:
    await whole_job(desk, "job-1", run(1))
    for role in (TokenRole.JOB, TokenRole.READER, TokenRole.MONITOR):
        with pytest.raises(Rejected, match="admin"):
            await ask(desk, question, TokenHolder(tenant="others", role=role))
    assert await ask(desk, question, ADMIN) is not None


async def test_a_reader_writes_nothing_and_a_monitor_reads_nothing(desk: BrainDesk) -> None:
    reads = (JobsAsked, JobAsked, PlansAsked)
    for question in WRITES:
        is_read, is_cluster = isinstance(question, reads), isinstance(question, ClusterSeen)
        if not is_read:
            with pytest.raises(Rejected, match="role"):
                await ask(desk, question, TokenHolder(tenant="team", role=TokenRole.READER))
        if not is_cluster:
            with pytest.raises(Rejected, match="role"):
                await ask(desk, question, TokenHolder(tenant="team", role=TokenRole.MONITOR))


async def test_rooms_of_tenants_are_apart(desk: BrainDesk, store: BrainStore) -> None:
    await store.write(lambda connection: change_setting(connection, 1, [f"{ROOM_KEY}=8"], None, None))
    for caller in (TEAM, OTHERS):
        await ask(desk, began(cluster="c"), caller)
        share = await ask(desk, wish(min_nodes=8), caller)
        assert isinstance(share, Allowance)
        assert share.nodes == 8


async def test_settings_fit_by_their_scopes_and_the_first_that_fits_counts(desk: BrainDesk, store: BrainStore) -> None:
    def settings(connection: Connection) -> None:
        change_setting(connection, 1, ["k=bob"], ["user=bob,cid"], None)
        change_setting(connection, 2, ["k=not-ann"], None, ["user=ann"])
        change_setting(connection, 3, ["k=team"], ["tenant=team", "user=ann"], None)
        change_setting(connection, 4, ["k=rest"], None, None)

    await store.write(settings)
    for caller, user, expected in (
        (TEAM, "cid", ("bob", 1)),
        (TEAM, "dan", ("not-ann", 2)),
        (TEAM, "ann", ("team", 3)),
        (OTHERS, "ann", ("rest", 4)),
    ):
        await ask(desk, began(user=user), caller)
        found = await ask(desk, SettingsAsked(job=ref()), caller)
        assert isinstance(found, JobSettings)
        assert (found.values["k"], found.entry) == expected


async def test_a_token_opens_what_its_role_says_and_stands_nowhere(store: BrainStore) -> None:
    token = await store.write(lambda connection: add_token(connection, "team", TokenRole.READER, 1.0))
    second = await store.write(lambda connection: add_token(connection, "team", TokenRole.JOB, 1.0))
    keeper = Doorkeeper(store)
    await keeper.refresh()
    assert keeper.caller_of(token) == TokenHolder(tenant="team", role=TokenRole.READER)
    assert keeper.caller_of(second) == TokenHolder(tenant="team", role=TokenRole.JOB)
    for wrong in ("", token[:-1], token + "a", token.swapcase(), "x" * 100_000):
        assert keeper.caller_of(wrong) is None
    text = await store.read(
        lambda connection: repr(
            [tuple(row) for table in METADATA.sorted_tables for row in connection.execute(select(table))]
        )
    )
    assert token not in text
    assert second not in text


async def test_without_any_token_the_machine_itself_is_trusted_until_there_is_one(store: BrainStore) -> None:
    now = [0.0]
    keeper = Doorkeeper(store, clock=lambda: now[0])
    await keeper.refresh()
    assert keeper.caller_of("") == TokenHolder(tenant="default", role=TokenRole.ADMIN)
    strict = Doorkeeper(store, may_open=False)
    await strict.refresh()
    assert strict.caller_of("") is None
    token = await store.write(lambda connection: add_token(connection, "team", TokenRole.JOB, 1.0))
    now[0] += 10
    await keeper.refresh()
    assert keeper.caller_of("") is None
    assert keeper.caller_of(token) is not None


async def test_tokens_are_removed_by_role_and_jobs_stay(desk: BrainDesk, store: BrainStore) -> None:
    await whole_job(desk, "job-1", run(1))
    for role in (TokenRole.JOB, TokenRole.JOB, TokenRole.READER):
        await store.write(lambda connection, role=role: add_token(connection, "team", role, 1.0, row_limit=7))  # type: ignore[misc]
    assert await store.write(lambda connection: remove_tokens(connection, "team", TokenRole.JOB)) == 2
    (row,) = await store.read(list_tenants)
    assert (row.name, row.roles, row.row_limit, row.num_jobs) == ("team", {"reader": 1}, 7, 1)


@pytest.mark.parametrize("name", ["", "a b", "-a", "*", "a" * 129, "a/b"])
async def test_names_of_tenants_are_plain(store: BrainStore, name: str) -> None:
    with pytest.raises(ConfigError, match="name of letters"):
        with store.engine.connect() as connection:
            add_token(connection, name, TokenRole.JOB, 1.0)
