"""
The node check on a node: the agent between a real `Job` and tasks that do what the test says, and real tasks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dlrover.agent.agent import Agent
from dlrover.agent.config import AgentResult
from dlrover.agent.node_check import CheckOutcome, CheckTask, class_of
from dlrover.agent.seams import AgentPatience
from dlrover.agent.workers.group import PortOffer
from dlrover.agent.workers.process_tree import ProcessTree
from dlrover.agent.workers.spawner import Spawner
from dlrover.protocol.messages.check import CheckTerms, ExitClass, ReportCheck
from dlrover.protocol.messages.job import (
    NODE_CHECK_RENDEZVOUS,
    Check,
    FailureKind,
    JobTerms,
    JoinRendezvous,
    Limits,
    NodeRank,
    ScaleJob,
)
from tests.agent.lab import make_config, make_world, until, write
from tests.agent.loopback import DEADLINE, LoopbackMaster, News, StandInNode, a_failure

PATIENCE = AgentPatience(heartbeat=0.005, lease=60.0, farewell=5.0, finished=0.01, first_connection=0.0)


class StandInTask:
    """A task of one phase that ends when the test says so."""

    def __init__(self, check: Check, news: News) -> None:
        self.check = check
        self.is_cancelled = False
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self._news = news
        self._outcome: asyncio.Future[CheckOutcome] = asyncio.get_running_loop().create_future()

    async def run(self) -> CheckOutcome:
        try:
            return await asyncio.shield(self._outcome)
        except asyncio.CancelledError:
            self.is_cancelled = True
            self._news.tell()
            await self.may_stop.wait()
            raise

    def end(self, exit_class: ExitClass = ExitClass.OK, **details: Any) -> None:
        self._outcome.set_result(CheckOutcome(exit_class, **({"elapsed_ms": 12.0} | details)))


class Life:
    """One agent process."""

    def __init__(self, master: LoopbackMaster, scratch: Path, launch: str, terms: JobTerms) -> None:
        self.news = master.news
        self.workers = StandInNode(master.news)
        self.tasks: list[StandInTask] = []
        agent = Agent(
            make_config(scratch, "train.py", launch=launch, terms=terms, master_grace=600.0),
            token="",
            local_world_size=2,
            build_group=self.workers.build,
            step=lambda: None,
            run_check=self._run_check,
            connect=master.connect,
            patience=PATIENCE,
        )
        self.channel = master.channels[-1]
        self.task = asyncio.create_task(agent.run())
        self.task.add_done_callback(lambda _: master.news.tell())

    async def _run_check(self, check: Check, node_rank: NodeRank, offer: PortOffer | None) -> CheckOutcome:
        self.tasks.append(StandInTask(check, self.news))
        self.news.tell()
        return await self.tasks[-1].run()

    async def checking(self, number: int) -> StandInTask:
        """The task that was started so and so often, counted from 1."""
        await self.news.until(lambda: len(self.tasks) >= number)
        return self.tasks[number - 1]

    async def result(self) -> AgentResult:
        async with asyncio.timeout(DEADLINE):
            return await self.task

    async def die(self) -> None:
        self.channel.cut()
        self.task.cancel()
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(self.task, return_exceptions=True)


class Stage:
    def __init__(self, scratch: Path) -> None:
        self.master = LoopbackMaster(News())
        self.lives: list[Life] = []
        self._scratch = scratch

    def begin(self, launch: str = "a", *, nodes: int = 1, max_nodes: int | None = None, **check: Any) -> Life:
        limits = Limits(min_nodes=nodes, max_nodes=nodes if max_nodes is None else max_nodes)
        terms = JobTerms(limits=limits, check=CheckTerms(**({"module": "some.check"} | check)))
        self.lives.append(Life(self.master, self._scratch, launch, terms))
        return self.lives[-1]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for life in stage.lives:
        await life.die()


async def test_the_check_comes_before_the_workers(stage: Stage) -> None:
    life = stage.begin()
    task = await life.checking(1)
    assert task.check.world.world_size == 2
    assert not life.workers.groups
    task.end(elapsed_ms=7.0, bandwidth_gbps=2.5)
    group = await life.workers.running(1)
    (report,) = stage.master.heard_of(ReportCheck)
    assert (report.round, report.exit_class, report.elapsed_ms, report.bandwidth_gbps) == (1, ExitClass.OK, 7.0, 2.5)
    joins = stage.master.heard_of(JoinRendezvous)
    assert [join.name == NODE_CHECK_RENDEZVOUS for join in joins] == [True, False]
    assert joins[0].offer != joins[1].offer, "a port serves once"
    group.finish()
    assert (await life.result()).exit_code == 0


async def test_a_node_that_fails_leaves_with_the_reason(stage: Stage) -> None:
    good, bad = stage.begin("a", nodes=1, max_nodes=2), stage.begin("b", nodes=1, max_nodes=2)
    (await good.checking(1)).end(ExitClass.COMMUNICATION)
    (await bad.checking(1)).end(ExitClass.COMPUTE, message="matrix was wrong")
    (await good.checking(2)).end()
    if len(bad.tasks) < 2:
        await bad.news.until(lambda: len(bad.tasks) > 1 or bad.task.done())
    for task in bad.tasks[1:]:
        task.end(ExitClass.COMPUTE, message="matrix was wrong")
    result = await bad.result()
    assert result.exit_code == 20
    assert "its computation failed (matrix was wrong)" in result.message
    stage.master.advance(31)
    await good.workers.running(1)


async def test_a_task_runs_once_through_a_restart_of_the_master(stage: Stage) -> None:
    life = stage.begin()
    task = await life.checking(1)
    stage.master.restart()
    await life.news.until(lambda: life.channel.is_attached)
    task.end()
    await life.workers.running(1)
    assert len(life.tasks) == 1
    assert not task.is_cancelled


async def test_a_report_that_nobody_heard_is_told_again(stage: Stage) -> None:
    life = stage.begin()
    task = await life.checking(1)
    life.channel.lose_answer_to(ReportCheck)
    task.end()
    await life.workers.running(1)
    assert [report.exit_class for report in stage.master.heard_of(ReportCheck)] == [ExitClass.OK] * 2
    assert len(life.tasks) == 1


async def test_a_task_ends_when_its_partner_is_lost(stage: Stage) -> None:
    first, second = stage.begin("a", nodes=2), stage.begin("b", nodes=2)
    task = await first.checking(1)
    await second.checking(1)
    await second.die()
    stage.master.advance(6)
    await first.news.until(lambda: task.is_cancelled)
    assert stage.master.heard_of(ReportCheck) == [], "a cancelled task has no result"


async def test_workers_start_only_when_nothing_of_a_task_is_left(stage: Stage) -> None:
    """The master takes the node for passed, or wants another phase, while the task of the last one still dies."""
    life, other = stage.begin("a", nodes=2), stage.begin("b", nodes=2)
    first = await life.checking(1)
    first.may_stop.clear()
    await other.checking(1)
    await other.die()
    stage.master.advance(6)
    await life.news.until(lambda: first.is_cancelled)
    replacement = stage.begin("c", nodes=2)
    joins = stage.master.heard_of
    await life.news.until(lambda: len(joins(JoinRendezvous)) >= 4)  # both came to the next phase
    assert len(life.tasks) == 1
    first.may_stop.set()
    (await life.checking(2)).end()  # alone, because nobody else was there
    (await life.checking(3)).end()
    (await replacement.checking(1)).end()
    await life.workers.running(1)


async def test_a_check_before_a_restart_waits_for_the_workers_to_stop(stage: Stage) -> None:
    life = stage.begin(fresh_for=0.0)
    (await life.checking(1)).end()
    group = await life.workers.running(1)
    group.may_stop.clear()
    group.fail(a_failure())
    joins = stage.master.heard_of
    await life.news.until(lambda: [join.name for join in joins(JoinRendezvous)].count(NODE_CHECK_RENDEZVOUS) == 2)
    assert len(life.tasks) == 1
    group.may_stop.set()
    (await life.checking(2)).end()
    assert (await life.workers.running(2)).world.round == 2


async def test_the_end_of_the_job_ends_a_task(stage: Stage) -> None:
    life = stage.begin()
    task = await life.checking(1)
    stage.master.apply(ScaleJob(min_nodes=1, max_nodes=2))  # of no importance to it
    assert not task.is_cancelled
    stage.master.restart(forget=True)  # a new life: it is checked anew
    await life.news.until(lambda: task.is_cancelled)
    second = await life.checking(2)
    life.task.get_loop().call_soon(os.kill, os.getpid(), 15)
    result = await life.result()
    assert result.exit_code == 128 + 15
    assert second.is_cancelled


# Real tasks.


TASK = """
    import json, os, sys, time
    rank = os.environ["LOCAL_RANK"]
    print("node", os.environ["NODE_RANK"], "of", os.environ["WORLD_SIZE"])
    what = os.environ.get("TASK", "")
    if what == "hang":
        time.sleep(600)
    if what.startswith("exit") and rank == "1":
        print("it broke here", file=sys.stderr)
        sys.exit(int(what[4:]))
    if what != "silent":
        folder = os.environ["DLROVER_CHECK_DIR"]
        with open(os.path.join(folder, rank + ".part"), "w") as file:
            milliseconds = float(what[6:]) if what.startswith("absurd") else 10.0 + int(rank)
            json.dump({"time": milliseconds, "bandwidth_gbps": 3.0, "local_rank": int(rank)}, file)
        os.rename(file.name, os.path.join(folder, rank + ".json"))
    if what == "late" and rank == "1":
        while not os.path.exists(os.path.join(folder, "0.json")):
            time.sleep(0.01)  # the other one is stopped when this one has failed
        sys.exit(1)
"""


@pytest.fixture
async def make_task(tmp_path: Path, spawner: Spawner, cold_spawner: Spawner) -> AsyncIterator[Any]:
    write(tmp_path / "modules" / "some_check.py", TASK)
    runtime_dir = tmp_path / "run"
    runtime_dir.mkdir()
    spawners = [spawner, cold_spawner]  # those of the whole session are not ours to stop
    tree = ProcessTree(keep=lambda: [pid for one in spawners for pid in one.zygote_pids])

    def make(what: str = "", **check: Any) -> CheckTask:
        environ = {**os.environb, b"PYTHONPATH": os.fsencode(tmp_path / "modules"), b"TASK": what.encode()}
        spawners.append(Spawner.start(is_warm=False, environ=environ))
        terms = JobTerms(check=CheckTerms(**({"module": "some_check"} | check)))
        return CheckTask(make_config(runtime_dir, "train.py", terms=terms), spawner=spawners[-1], tree=tree)

    yield make
    tree.close()
    for own in spawners[2:]:
        own.close()


async def run(task: CheckTask) -> CheckOutcome:
    offer = PortOffer.bind("127.0.0.1")
    check = Check(make_world(2, coordinator=offer.address), "initial")
    async with asyncio.timeout(DEADLINE):
        return await task(check, NodeRank(3), offer)


async def test_a_real_task_reports_the_slowest_rank(make_task: Any, tmp_path: Path) -> None:
    assert await run(make_task()) == CheckOutcome(ExitClass.OK, 11.0, 3.0)
    assert os.listdir(tmp_path / "run") == [], "nothing of it stays"


@pytest.mark.parametrize(
    ("code", "expected"),
    [(10, ExitClass.COMPUTE), (11, ExitClass.COMMUNICATION), (12, ExitClass.SETUP), (1, ExitClass.SETUP)],
)
async def test_the_exit_code_says_what_failed(make_task: Any, code: int, expected: ExitClass) -> None:
    outcome = await run(make_task(f"exit{code}"))
    assert (outcome.exit_class, outcome.message) == (expected, "it broke here")


async def test_a_task_that_did_its_work_and_failed_afterwards_has_passed(make_task: Any) -> None:
    assert (await run(make_task("late"))).exit_class is ExitClass.OK


async def test_a_task_that_writes_no_result_has_passed_by_its_exit_code(make_task: Any) -> None:
    outcome = await run(make_task("silent"))
    assert outcome.exit_class is ExitClass.OK
    assert outcome.elapsed_ms > 0


@pytest.mark.parametrize("milliseconds", ["-5", "9e9"])
async def test_a_time_that_cannot_be_is_none(make_task: Any, milliseconds: str) -> None:
    """The master would refuse it, and wait for a report that never comes."""
    outcome = await run(make_task(f"absurd{milliseconds}"))
    assert outcome.exit_class is ExitClass.OK
    assert 0 < outcome.elapsed_ms < DEADLINE * 1000


async def test_a_task_that_hangs_is_stopped(make_task: Any) -> None:
    outcome = await run(make_task("hang", timeout=1.0))
    assert outcome.exit_class is ExitClass.COMMUNICATION
    assert "did not end within 1 s" in outcome.message


async def test_a_cancelled_task_leaves_no_process(make_task: Any, tmp_path: Path) -> None:
    running = asyncio.create_task(run(make_task("hang")))
    await until(lambda: list((tmp_path / "run").glob("check-1-*/log/*/attempt_0/1/stdout.log")))
    running.cancel()
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(running, return_exceptions=True)
    assert os.listdir(tmp_path / "run") == []


async def test_a_module_that_does_not_exist_is_a_setup_failure(make_task: Any) -> None:
    outcome = await run(make_task(module="no.such.module"))
    assert outcome.exit_class is ExitClass.SETUP
    assert "no.such" in outcome.message or "No module named" in outcome.message


async def test_devices_that_nobody_can_ask_are_no_obstacle(make_task: Any) -> None:
    """The memory program runs first, finds nothing to ask here, and the task follows."""
    assert (await run(make_task(accelerator="nvidia.com/gpu"))).exit_class is ExitClass.OK


def test_the_node_s_own_fault_outweighs_the_others() -> None:
    codes = [a_failure(FailureKind.EXIT_CODE, exit_code=code) for code in (11, 10)]
    assert class_of(tuple(codes)) is ExitClass.COMPUTE
    assert class_of((a_failure(FailureKind.SIGNAL, signal=9),)) is ExitClass.SETUP
