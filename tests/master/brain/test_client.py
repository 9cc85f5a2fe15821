"""The master's side of Brain: nothing is lost, nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dlrover.core.commit_order import CommitSequence
from dlrover.core.job import DECISION_VERSION, Job
from dlrover.master.brain.client import BrainClient, BrainPatience, job_ref
from dlrover.master.brain.past_runs import past_runs
from dlrover.master.config import BrainTerms
from dlrover.master.journal.journal import Journal
from dlrover.protocol.messages.brain import Allowance, BrainQuestion, BrainReply, JobRecipe, NodeEndKind
from dlrover.protocol.messages.fleet import (
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodeType,
    PlatformNode,
)
from dlrover.protocol.messages.identity import Micros, NodeRank, PlatformId
from dlrover.protocol.messages.job import Attach, Command, ExitReason, JobEnd, JobTerms, Limits, MasterStarted
from dlrover.protocol.messages.scaling import (
    JobFacts,
    PlannedGroup,
    PlanOffered,
    RunMeasured,
    ScaleMode,
    ScaleTerms,
    SizePlan,
)
from tests.master.brain.brains import FLEET, DrivenJob, FakeBrain, run

TERMS = BrainTerms(address="brain:50001", recipe=JobRecipe(name="nightly"), user="ann")
END = JobEnd(reason=ExitReason.COMPLETED, exit_code=0, message="done")
HASTE = BrainPatience(start=0.5, first_pause=0.01, gathering=0.01, farewell=0.5)
PLAN = SizePlan(groups=(PlannedGroup(node_type=NodeType.WORKER, count=3),))


def client_of(brain: FakeBrain, shell: DrivenJob, journal: Path) -> BrainClient:
    return BrainClient(
        TERMS,
        brain,
        shell,
        job=job_ref("uid-1", "token"),
        job_name="a-job",
        journal=journal,
        fleet=FLEET,
        scaling=ScaleTerms(mode=ScaleMode.ON),
        patience=HASTE,
    )


@contextlib.asynccontextmanager
async def running(client: BrainClient) -> AsyncIterator[None]:
    task = asyncio.ensure_future(client.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def measured(client: BrainClient, shell: DrivenJob, told: RunMeasured) -> None:
    decided(client, shell, told)


def decided(client: BrainClient, shell: DrivenJob, command: Command) -> None:
    outcome = shell.do(command)
    client.hear(command, outcome, shell.now())


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return journal_of(tmp_path / "journal.sqlite", [])


def journal_of(path: Path, runs: list[RunMeasured]) -> Path:
    """As a master writes it."""
    journal = Journal(path, job_name="a-job", decision_version=DECISION_VERSION)
    journal.load()
    sequence = CommitSequence(Job(), master_epoch=journal.master_epoch, next_number=1)
    commands: list[Command] = [MasterStarted(1, "a-job"), *runs]
    for at, command in enumerate(commands, start=1):
        sequence.stage(command, Micros(at))
    batch = sequence.take()
    assert batch is not None
    journal.append(batch.first_number, batch.records)
    journal.close()
    return path


async def test_a_start_plan_becomes_an_offer(journal: Path) -> None:
    brain = FakeBrain(plan=PLAN)
    shell = DrivenJob(is_defined=False)
    offer = await client_of(brain, shell, journal).begin()
    assert offer == PlanOffered(plan=PLAN, sentence="five alike")
    told = brain.began[0]
    assert (told.name, told.user, told.recipe.name, told.wants_plan) == ("a-job", "ann", "nightly", True)
    assert (told.bounds.min_nodes, told.bounds.max_nodes) == (1, 4)
    assert told.job.uid == "uid-1"
    assert told.job.secret
    assert "token" not in told.job.secret


@pytest.mark.parametrize("trouble", ["is_away", "is_frozen", "is_refusing"])
async def test_a_job_begins_without_a_brain_that_is_away(journal: Path, trouble: str) -> None:
    brain = FakeBrain(plan=PLAN)
    setattr(brain, trouble, True)
    async with asyncio.timeout(60):
        assert await client_of(brain, DrivenJob(is_defined=False), journal).begin() is None


async def test_an_unexpected_error_costs_the_job_its_brain_only(
    journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenBrain(FakeBrain):
        def _answer(self, question: BrainQuestion) -> BrainReply:
            raise ArithmeticError("a mistake in the client's own code")

    brain = BrokenBrain()
    task = asyncio.ensure_future(client_of(brain, DrivenJob(), journal).run())
    await brain.until(lambda: "ArithmeticError" in caplog.text)
    assert not task.done(), "the master ends when one of its own tasks returns"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_defect_25_runs_decisions_facts_and_lost_nodes_are_told(journal: Path) -> None:
    brain, shell = FakeBrain(), DrivenJob()
    client = client_of(brain, shell, journal)
    async with running(client):
        measured(client, shell, run(1))
        decided(client, shell, JobFacts(dataset_size=1000))
        gone = PlatformNode(
            id=PlatformId(0), node_type=NodeType.WORKER, rank=0, phase=NodePhase.FAILED, exit_reason=NodeExit.OOM
        )
        decided(client, shell, NodeChanged(kind=NodeEventKind.MODIFIED, node=gone))
        await brain.until(lambda: brain.runs and brain.facts and brain.node_ends and brain.decisions)
    assert brain.runs == {1: run(1)}
    assert brain.facts[-1].facts.dataset_size == 1000
    assert [(each.node, each.kind) for each in brain.node_ends] == [(PlatformId(0), NodeEndKind.OOM)]
    assert brain.decisions == {each.number: each for each in shell.state().scaling.decisions}


async def test_defect_26_a_job_whose_brain_is_away_decides_from_the_same_runs(journal: Path) -> None:
    brain, shell = FakeBrain(is_away=True), DrivenJob()
    client = client_of(brain, shell, journal)
    async with running(client):
        measured(client, shell, run(1))
        assert [each.number for each in shell.state().scaling.runs] == [1]
        assert shell.state().scaling.decisions, "it decides by itself"
        brain.is_away = False
        await brain.until(lambda: brain.runs)
    assert brain.runs == {1: run(1)}, "Brain hears the facts that the job decided from"


async def test_each_run_is_stored_once_through_outages_of_brain(journal: Path) -> None:
    brain, shell = FakeBrain(), DrivenJob()
    client = client_of(brain, shell, journal)
    async with running(client):
        for number in range(1, 21):
            brain.is_away, brain.loses_answers = number % 3 == 0, number % 3 == 1
            measured(client, shell, run(number))
            measured(client, shell, run(number, seconds=61.0 + number))
            brain.changed.clear()
            await asyncio.wait_for(brain.changed.wait(), 60)
        brain.is_away = brain.loses_answers = False
        await brain.until(lambda: len(brain.runs) == 20 and brain.runs[20].seconds == 81.0)
    assert brain.runs == {number: run(number, seconds=61.0 + number) for number in range(1, 21)}


async def test_a_new_master_tells_what_its_predecessor_could_not(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "journal.sqlite", [run(1), run(2), run(2, seconds=90.0), run(3)])
    brain, shell = FakeBrain(runs={1: run(1), 2: run(2)}), DrivenJob()
    async with running(client_of(brain, shell, path)):
        await brain.until(lambda: 3 in brain.runs)
    assert brain.runs == {1: run(1), 2: run(2, seconds=90.0), 3: run(3)}
    assert past_runs(path, since=3) == {3: run(3)}


async def test_a_brain_that_lost_its_store_hears_all_again(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "journal.sqlite", [run(1), run(2)])
    brain, shell = FakeBrain(), DrivenJob()
    client = client_of(brain, shell, path)
    async with running(client):
        await brain.until(lambda: 2 in brain.runs)
        brain.is_away = True
        measured(client, shell, run(3))
        brain.changed.clear()
        await asyncio.wait_for(brain.changed.wait(), 60)
        brain.runs.clear()
        brain.is_away = False
        await brain.until(lambda: len(brain.runs) == 3)
    assert brain.runs == {1: run(1), 2: run(2), 3: run(3)}


async def test_a_plan_of_brain_is_an_offer_to_the_job(journal: Path) -> None:
    brain, shell = FakeBrain(offer=PLAN), DrivenJob()
    client = client_of(brain, shell, journal)
    async with running(client):
        measured(client, shell, run(1))
        await brain.until(lambda: shell.told)
    assert shell.told == [PlanOffered(plan=PLAN, sentence="the last jobs used two", expected_speed=100.0)]


async def test_a_job_that_does_not_scale_itself_is_offered_nothing(journal: Path) -> None:
    brain, shell = FakeBrain(offer=PLAN), DrivenJob(ScaleMode.OFF)
    client = client_of(brain, shell, journal)
    async with running(client):
        measured(client, shell, run(1))
        await brain.until(lambda: brain.runs)
        measured(client, shell, run(2))
        await brain.until(lambda: 2 in brain.runs)
    assert not brain.asked
    assert not shell.told


async def test_what_brain_has_not_heard_is_told_at_the_end(journal: Path) -> None:
    brain, shell = FakeBrain(), DrivenJob()
    client = client_of(brain, shell, journal)
    measured(client, shell, run(1))
    await client.finish(END)
    assert brain.runs == {1: run(1)}
    assert [each.reason for each in brain.ends] == [ExitReason.COMPLETED]
    assert brain.is_closed


async def test_the_end_of_a_job_does_not_wait_for_a_frozen_brain(
    journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(FakeBrain(is_frozen=True), DrivenJob(), journal)
    await asyncio.wait_for(client.finish(END), 30)
    assert "Brain did not receive all measurements of this job" in caplog.text


async def test_an_allowance_is_the_jobs_room_until_it_lapses(journal: Path) -> None:
    brain, shell = (
        FakeBrain(allowance=Allowance(nodes=2, lasts=0.05, sentence="two jobs share four nodes")),
        DrivenJob(),
    )
    allowed: list[int | None] = []
    lapsed = asyncio.Event()

    def allow(nodes: int | None, _: str) -> None:
        allowed.append(nodes)
        if nodes is None:
            lapsed.set()

    terms = JobTerms(limits=Limits(min_nodes=1, max_nodes=4))
    shell.do(Attach(launch="l", host="h", local_world_size=1, node_rank=NodeRank(0), terms=terms))
    client = client_of(brain, shell, journal)
    client.allow = allow
    async with running(client):
        await asyncio.wait_for(lapsed.wait(), 60)
    assert allowed[:2] == [2, None]
