"""
The agent between a real `Job` and workers that do what the test says: no wire, no processes, no waiting.

Each test is a short story of a node. The master's clock, and with it every outage, is moved by the test; the agent's
own clock is the real one, so its patience is short here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.agent.agent import EXIT_BY_SIGNAL, EXIT_FAILED, EXIT_MASTER_LOST, Agent, Patience
from dlrover.agent.config import AgentResult
from dlrover.agent.worker_group import PortOffer
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages import (
    Attach,
    Detection,
    End,
    ExitReason,
    FailureKind,
    JobEnd,
    JobTerms,
    Join,
    JoinRendezvous,
    Leave,
    LeaveJob,
    LeaveReason,
    Limits,
    NodeRank,
    ReportFailure,
    ReportFinished,
    RestartPolicy,
    Round,
    Run,
    StopCause,
    Wait,
)
from tests.agent.lab import make_config
from tests.agent.loopback import DEADLINE, LoopbackChannel, LoopbackMaster, News, StandInGroup, StandInNode, a_failure

PATIENCE = Patience(heartbeat=0.005, lease=60.0, farewell=5.0, finished=0.01, first_connection=0.0)
GRACE = 600.0


class Life:
    """One agent process of a node."""

    def __init__(
        self,
        master: LoopbackMaster,
        scratch: Path,
        *,
        patience: Patience | None = PATIENCE,
        warm_up: Callable[[float], Awaitable[None]] | None = None,
        **changes: Any,
    ) -> None:
        self._news = master.news
        self.workers = StandInNode(master.news)
        self.step: int | None = None
        config = make_config(scratch, "train.py", **({"master_grace": GRACE} | changes))
        self._agent = Agent(
            config,
            token="",
            local_world_size=2,
            build_group=self.workers.build,
            step=lambda: self.step,
            connect=master.connect,
            patience=patience,
            warm_up=warm_up,
        )
        self.channel: LoopbackChannel = master.channels[-1]
        self.task = asyncio.create_task(self._agent.run())
        self.task.add_done_callback(lambda _: master.news.tell())

    async def result(self) -> AgentResult:
        async with asyncio.timeout(DEADLINE):
            return await self.task

    async def looks(self) -> None:
        """Until the agent has had a few turns: whatever it wanted to do about the news it has done."""
        enough = self.channel.num_looks + 4
        await self._news.until(lambda: self.channel.num_looks >= enough)

    async def die(self) -> None:
        """As after SIGKILL: nobody is told."""
        self.channel.cut()
        self.task.cancel()
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(self.task, return_exceptions=True)


class Stage:
    def __init__(self, scratch: Path) -> None:
        self.master = LoopbackMaster(News())
        self.lives: list[Life] = []
        self._scratch = scratch

    @property
    def until(self) -> Any:
        return self.master.news.until

    def begin(self, launch: str = "a", *, nodes: int = 1, **changes: Any) -> Life:
        """Start the agent of a node, called by its launch."""
        terms = JobTerms(
            limits=Limits(min_nodes=nodes, max_nodes=nodes), restarts=changes.pop("restarts", RestartPolicy())
        )
        life = Life(self.master, self._scratch, **({"launch": launch, "terms": terms} | changes))
        self.lives.append(life)
        return life

    def offers(self) -> list[str]:
        return [join.offer for join in self.master.heard_of(JoinRendezvous)]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for life in stage.lives:
        await life.die()


def free_ports(count: int) -> tuple[int, ...]:
    offers = [PortOffer.bind("127.0.0.1") for _ in range(count)]
    for offer in offers:
        offer.release()
    return tuple(offer.port for offer in offers)


# The usual life.


async def test_a_node_joins_when_its_workers_could_start(stage):
    """Others stop when it joins: they would wait for its imports."""
    is_warm = asyncio.Event()

    async def warm_up(timeout: float) -> None:
        async with asyncio.timeout(timeout):
            await is_warm.wait()

    life = stage.begin(warm_up=warm_up)
    await life.looks()
    assert stage.offers() == []
    is_warm.set()
    await life.workers.running(1)
    assert len(stage.offers()) == 1


async def test_a_node_that_is_stopped_does_not_finish_its_imports(stage):
    async def warm_up(timeout: float) -> None:
        await asyncio.Event().wait()

    life = stage.begin(warm_up=warm_up)
    await life.looks()
    os.kill(os.getpid(), signal.SIGTERM)
    result = await life.result()
    assert result.exit_code == 143
    assert stage.offers() == []


async def test_join_run_finish(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    assert group.world.coordinator == stage.offers()[0]
    group.step = 12
    group.finish()
    result = await life.result()
    assert result.exit_code == 0
    assert result.end.reason is ExitReason.COMPLETED
    assert [(report.round, report.step) for report in stage.master.heard_of(ReportFinished)] == [(1, 12)]
    assert [leave.reason for leave in stage.master.heard_of(LeaveJob)] == [LeaveReason.JOB_ENDED]
    assert group.is_stopped


async def test_a_failed_group_is_reported_and_started_again_with_another_offer(stage):
    life = stage.begin()
    first = await life.workers.running(1)
    first.step = 3
    first.fail()
    second = await life.workers.running(2)
    assert first.is_stopped
    (report,) = stage.master.heard_of(ReportFailure)
    assert (report.round, report.step, report.lived) == (1, 3, 1.0)
    assert second.world.round == 2
    assert second.world.restart_count == 1
    assert len(set(stage.offers())) == 2
    second.finish()
    result = await life.result()
    assert (result.exit_code, result.num_restarts) == (0, 1)


async def test_the_end_names_the_first_failure(stage):
    life = stage.begin(restarts=RestartPolicy(max_restarts=0))
    group = await life.workers.running(1)
    group.fail(a_failure(FailureKind.SIGNAL, signal=9, global_rank=1))
    result = await life.result()
    assert result.exit_code == EXIT_FAILED
    assert result.worker_exit_code == EXIT_BY_SIGNAL + 9
    assert result.first_failed_rank == 1


async def test_the_end_names_a_culprit_that_came_to_light_while_its_victim_was_told(stage):
    life = stage.begin(restarts=RestartPolicy(max_restarts=0))
    group = await life.workers.running(1)
    group.late = (a_failure(FailureKind.EXIT_CODE, exit_code=3, global_rank=1, exited_at=5),)
    group.may_stop.clear()
    group.fail(a_failure(FailureKind.EXIT_CODE, exit_code=4, global_rank=0, exited_at=6))
    await stage.until(lambda: stage.master.job.end)
    group.may_stop.set()
    result = await life.result()
    assert (result.first_failed_rank, result.worker_exit_code) == (1, 3)
    assert len(stage.master.heard_of(ReportFailure)) == 2


async def test_heartbeats_tell_the_step(stage):
    life = stage.begin()
    await life.workers.running(1)
    life.step = 41
    await stage.until(lambda: any(beat.step == 41 for beat in stage.master.beats))


async def test_workers_that_cannot_be_started_here_end_the_node(stage):
    life = stage.begin()
    life.workers.prepare = lambda group: setattr(group, "start_error", ConfigError("no log directory"))
    result = await life.result()
    assert (result.exit_code, result.message) == (EXIT_FAILED, "no log directory")
    assert [leave.reason for leave in stage.master.heard_of(LeaveJob)] == [LeaveReason.FAILED]


async def test_a_bug_in_the_watch_ends_the_agent_and_kills_its_workers(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    group.break_down(ZeroDivisionError("a bug"))
    with pytest.raises(ExceptionGroup) as caught:
        await life.result()
    assert caught.group_contains(ZeroDivisionError)
    assert group.num_kills == 1


async def test_an_agent_that_is_taken_down_tells_nobody(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    life.task.cancel()
    group.fail()
    with pytest.raises(asyncio.CancelledError):
        await life.result()
    assert group.num_kills == 1
    assert stage.master.heard_of(ReportFailure) == []


async def test_an_agent_that_did_not_run_for_a_lease_kills_its_workers(stage):
    life = stage.begin(patience=PATIENCE._replace(lease=0.0))
    group = await life.workers.running(1)
    await stage.until(lambda: group.num_kills)


# Wishes.


async def test_a_repeated_wish_means_nothing(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    for _ in range(3):
        life.channel.push(stage.master.job.desired(life.channel.whom()[0]))
    life.channel.wish(Run(group.world))
    group.fail()
    await life.workers.running(2)
    assert len(life.workers.groups) == 2
    assert len(stage.offers()) == 2


async def test_an_older_wish_never_overrides_a_newer_one(stage):
    life = stage.begin()
    joining = await stage.until(lambda: life.channel.attached and life.channel.attached.desired)
    assert isinstance(joining.wish, Join)
    group = await life.workers.running(1)
    life.channel.push(joining)
    group.finish()
    assert (await life.result()).exit_code == 0
    assert len(stage.offers()) == 1


async def test_wait_stops_workers(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    life.channel.wish(Wait("you are a spare now"))
    await stage.until(lambda: group.is_stopped)
    assert group.stops == [(StopCause.MEMBERSHIP, signal.SIGTERM)]
    assert stage.master.heard_of(ReportFailure) == []


async def test_wait_stops_workers_that_were_not_even_begun(stage):
    life = stage.begin()
    first = await life.workers.running(1)
    first.may_stop.clear()
    first.fail()
    await stage.until(lambda: isinstance(stage.master.job.desired(life.channel.whom()[0]).wish, Run) and first.stops)
    await life.looks()
    life.channel.wish(Wait("you are a spare now"))
    await life.looks()
    first.may_stop.set()
    await stage.until(lambda: first.is_stopped)
    await life.looks()
    assert life.workers.groups == [first]


async def test_the_end_comes_during_a_start(stage):
    life = stage.begin()
    life.workers.prepare = lambda group: group.may_start.clear()
    await stage.until(lambda: life.workers.groups and life.workers.groups[0].offer)
    life.channel.wish(End(JobEnd(reason=ExitReason.STOPPED_BY_USER, exit_code=1, message="enough")))
    result = await life.result()
    assert (result.exit_code, result.message) == (1, "enough")
    (group,) = life.workers.groups
    assert group.is_start_cancelled
    assert group.is_stopped


# Ports.


async def test_an_offer_that_was_used_leads_to_another_port(stage):
    ports = free_ports(2)
    former = stage.begin(host_ports=ports)
    await former.workers.running(1)
    await former.die()
    life = stage.begin(host_ports=ports)  # knows nothing of what its predecessor offered
    group = await life.workers.running(1)
    assert [code for _, code in stage.master.refused] == ["offer-used"]
    assert stage.offers() == [f"127.0.0.1:{port}" for port in (ports[0], ports[0], ports[1])]
    assert group.world.coordinator == f"127.0.0.1:{ports[1]}"


async def test_a_used_offer_is_taken_where_there_is_no_other(stage):
    ports = free_ports(1)
    former = stage.begin(host_ports=ports)
    await former.workers.running(1)
    await former.die()
    life = stage.begin(host_ports=ports)
    group = await life.workers.running(1)
    assert group.world.round == 2
    assert [join.is_offer_reused for join in stage.master.heard_of(JoinRendezvous)] == [False, False, True]


@pytest.mark.parametrize("count", [1, 2])
async def test_a_few_host_ports_survive_many_rounds(stage, count):
    life = stage.begin(host_ports=free_ports(count), restarts=RestartPolicy(max_restarts=9))
    for number in range(1, 6):
        group = await life.workers.running(number)
        # The coordinator's port is held until the workers are gone, and the next round opens before.
        group.may_stop.clear()
        group.fail()
        await stage.until(lambda number=number: len(stage.master.heard_of(ReportFailure)) == number)
        await life.looks()
        group.may_stop.set()
    last = await life.workers.running(6)
    last.finish()
    assert (await life.result()).exit_code == 0


async def test_the_one_host_port_is_waited_for_while_workers_stop(stage):
    life = stage.begin(host_ports=free_ports(1))
    first = await life.workers.running(1)
    first.may_stop.clear()
    first.fail()
    await stage.until(lambda: stage.master.heard_of(ReportFailure))
    await life.looks()
    assert len(stage.offers()) == 1
    first.may_stop.set()
    second = await life.workers.running(2)
    assert second.world.coordinator == first.world.coordinator


async def test_a_host_port_that_a_stranger_holds_ends_the_node(stage):
    stranger = PortOffer.bind("127.0.0.1")
    life = stage.begin(host_ports=(stranger.port,))
    result = await life.result()
    stranger.release()
    assert result.exit_code == EXIT_FAILED
    assert "HOST_PORTS" in result.message


async def test_the_port_of_a_world_that_is_superseded_while_it_starts_serves_the_next(stage):
    life = stage.begin(host_ports=free_ports(1))
    life.workers.prepare = lambda group: group.may_start.clear() if group.world.round == 1 else None
    await stage.until(lambda: life.workers.groups and life.workers.groups[0].offer)
    node, incarnation = life.channel.whom()
    stage.master.apply(ReportFailure(node=node, incarnation=incarnation, round=Round(1), failures=(a_failure(),)))
    second = await life.workers.running(2)
    first = life.workers.groups[0]
    assert first.is_start_cancelled
    assert second.world.coordinator == first.world.coordinator


# The master away.


async def test_training_goes_on_without_a_master_and_is_told_when_it_is_back(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    life.channel.cut()
    group.finish()
    await stage.until(lambda: group.is_stopped)
    assert stage.master.heard_of(ReportFinished) == []
    stage.master.restart()
    life.channel.restore()
    assert (await life.result()).exit_code == 0
    assert len(stage.master.heard_of(ReportFinished)) == 1


async def test_a_master_that_is_away_when_training_finishes_is_not_waited_for_long(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    life.channel.cut()
    group.finish()
    await stage.until(lambda: group.is_stopped)
    stage.master.advance(1)
    result = await life.result()
    assert (result.exit_code, result.end) == (0, None)
    assert group.stops == [(StopCause.END_OF_JOB, signal.SIGTERM)]


async def test_a_master_away_beyond_the_grace_ends_the_node(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    life.channel.cut()
    stage.master.advance(GRACE - 1)
    num_beats = len(stage.master.beats)
    await life.looks()
    assert group.stops == []
    stage.master.advance(2)
    result = await life.result()
    assert result.exit_code == EXIT_MASTER_LOST
    assert "--master-grace 600 s" in result.message
    assert group.is_stopped
    assert len(stage.master.beats) == num_beats
    assert stage.master.heard_of(LeaveJob) == []


async def test_a_master_that_never_appears_has_its_own_patience(stage):
    stage.master.advance(1)
    life = stage.begin(master_grace=1.0, patience=PATIENCE._replace(first_connection=100.0))
    life.channel.cut()
    stage.master.advance(99)
    await life.looks()
    assert not life.task.done()
    stage.master.advance(2)
    assert (await life.result()).exit_code == EXIT_MASTER_LOST


async def test_a_restarted_master_disturbs_nobody(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    for _ in range(3):
        stage.master.restart()
        await stage.until(lambda: life.channel.is_attached)
    assert group.is_running
    group.finish()
    assert (await life.result()).exit_code == 0
    assert len(life.workers.groups) == 1


@pytest.mark.parametrize("kind", [JoinRendezvous, ReportFailure, ReportFinished])
async def test_a_lost_answer_changes_nothing(stage, kind):
    life = stage.begin()
    life.channel.lose_answer_to(kind)
    first = await life.workers.running(1)
    first.fail()
    second = await life.workers.running(2)
    second.finish()
    result = await life.result()
    assert (result.exit_code, result.num_restarts) == (0, 1)
    assert len(life.workers.groups) == 2
    assert len({command.incarnation for command in stage.master.heard_of(kind)}) == 1


# Lives.


async def test_a_node_that_was_given_up_begins_a_new_life(stage):
    life = stage.begin()
    first = await life.workers.running(1)
    life.channel.cut()
    stage.master.advance(30)  # its stream is broken for longer than anybody waits
    first.may_stop.clear()
    life.channel.restore()
    await stage.until(lambda: first.stops)
    assert life.workers.groups == [first]
    first.may_stop.set()
    second = await life.workers.running(2)
    assert first.stops == [(StopCause.FAILURE, signal.SIGTERM)]
    second.finish()
    assert (await life.result()).exit_code == 0


async def test_a_report_of_a_life_that_is_over_begins_a_new_one(stage):
    life = stage.begin()
    first = await life.workers.running(1)
    stage.master.give_up(life.channel)
    first.fail()
    second = await life.workers.running(2)
    assert [(type(command), code) for command, code in stage.master.refused] == [(ReportFailure, "stale-incarnation")]
    assert [attach.incarnation for attach in stage.master.heard_of(Attach)] == [0, 0]
    assert first.is_stopped
    second.finish()
    assert (await life.result()).exit_code == 0


async def test_what_the_former_life_had_to_tell_does_not_end_the_new_one(stage):
    life = stage.begin()
    first = await life.workers.running(1)
    life.channel.cut()
    first.fail()
    await stage.until(lambda: first.is_stopped)
    stage.master.advance(30)
    life.channel.restore()
    second = await life.workers.running(2)
    second.finish()
    result = await life.result()
    assert result.exit_code == 0
    assert [(type(command), code) for command, code in stage.master.refused] == [(ReportFailure, "wrong-sender")]
    assert len(stage.master.heard_of(Attach)) == 2
    assert len(life.workers.groups) == 2


async def test_a_wish_for_the_life_just_given_up_is_not_followed(stage):
    life = stage.begin()
    first = await life.workers.running(1)
    stage.master.give_up(life.channel)
    life.channel.is_lingering = True
    first.fail()
    await stage.until(lambda: life.channel.is_leaving)
    life.channel.wish(Run(first.world))
    await life.looks()
    assert life.workers.groups == [first]
    life.channel.break_stream()
    second = await life.workers.running(2)
    assert second.world.round == 2


async def test_a_failure_that_cannot_be_told_leads_to_a_new_life(stage):
    life = stage.begin()
    first = await life.workers.running(1)
    stage.master.refuse[ReportFailure] = "internal"
    first.fail()
    second = await life.workers.running(2)
    assert second.world.round == 2


async def test_an_end_that_cannot_be_told_is_said_by_attaching(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    stage.master.refuse[ReportFinished] = "internal"
    group.finish()
    assert (await life.result()).exit_code == 0
    assert [attach.is_finished for attach in stage.master.heard_of(Attach)] == [False, True]


async def test_a_master_that_forgot_everything_takes_the_running_world_up_again(stage):
    lives = [stage.begin(launch, nodes=2) for launch in "ab"]
    groups = [await life.workers.running(1) for life in lives]
    stage.master.restart(forget=True)
    await stage.until(lambda: all(life.channel.is_attached for life in lives))
    await stage.until(lambda: stage.master.job.state.rendezvous.is_active)
    for life in lives:
        await life.looks()
    assert all(group.is_running for group in groups), "nobody restarts"
    assert [len(life.workers.groups) for life in lives] == [1, 1]
    assert "no worker restarts" in stage.master.job.status().verdict

    groups[0].fail()  # and it is a world like any other
    seconds = [await life.workers.running(2) for life in lives]
    assert {group.world.round for group in seconds} == {2}
    for group in seconds:
        group.finish()
    assert [(await life.result()).exit_code for life in lives] == [0, 0]


async def test_a_failure_that_waited_for_a_master_without_its_journal_costs_one_restart(stage):
    lives = [stage.begin(launch, nodes=2) for launch in "ab"]
    groups = [await life.workers.running(1) for life in lives]
    lives[0].channel.cut()
    groups[0].may_stop.clear()
    groups[0].fail()
    await stage.until(lambda: groups[0].stops)
    stage.master.restart(forget=True)
    await stage.until(lambda: lives[1].channel.is_attached)
    assert lives[1].channel.attached.node == 1, "the numbers are given anew, in the order of coming back"
    lives[0].channel.restore()
    await stage.until(lambda: lives[0].channel.is_attached)
    groups[0].may_stop.set()
    seconds = [await life.workers.running(2) for life in lives]
    assert [type(command) for command, code in stage.master.refused if code == "wrong-sender"] == [ReportFailure]
    assert [report.node for report in stage.master.heard_of(ReportFailure)] == [1, 2], "told again under the new number"
    assert {group.world.round for group in seconds} == {2}
    assert [attach.incarnation for attach in stage.master.heard_of(Attach)].count(0) == 2, "nobody began a new life"


async def test_a_forgotten_world_of_which_a_member_is_missing_gets_a_new_round(stage):
    lives = [stage.begin(launch, nodes=2) for launch in "ab"]
    groups = [await life.workers.running(1) for life in lives]
    lives[1].channel.cut()
    stage.master.restart(forget=True)
    await stage.until(lambda: lives[0].channel.is_attached)
    await lives[0].looks()
    assert groups[0].is_running, "the other one may still come back"
    stage.master.advance(41)
    await stage.until(lambda: groups[0].is_stopped)
    lives[1].channel.restore()
    seconds = [await life.workers.running(2) for life in lives]
    assert {group.world.round for group in seconds} == {2}  # the number 1 is not given twice


# Leaving.


async def test_a_node_that_is_dismissed_stops_its_workers_and_leaves_with_that_code(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    life.channel.wish(Leave("the job has too many nodes", 22))
    result = await life.result()
    assert (result.exit_code, result.is_job_alive) == (22, True)
    assert "the job has too many nodes" in result.message
    assert group.stops == [(StopCause.MEMBERSHIP, signal.SIGTERM)]
    assert [leave.reason for leave in stage.master.heard_of(LeaveJob)] == [LeaveReason.DISMISSED]


async def test_a_preemption_notice_is_told_before_workers_have_stopped(stage, tmp_path):
    notice = tmp_path / "preempted"
    terms = JobTerms(limits=Limits(min_nodes=1, max_nodes=2))
    lives = [stage.begin(launch, terms=terms, preemption_file=str(notice) if launch == "b" else "") for launch in "ab"]
    first, other = [await life.workers.running(1) for life in lives]
    other.may_stop.clear()
    notice.touch()
    alone = await lives[0].workers.running(2)
    assert not other.is_stopped, "it still has its grace while the others go on"
    assert alone.world.group_world_size == 1
    other.may_stop.set()
    result = await lives[1].result()
    assert other.stops == [(StopCause.PREEMPTION, signal.SIGTERM)]
    assert result.exit_code == EXIT_BY_SIGNAL + signal.SIGTERM
    assert [leave.reason for leave in stage.master.heard_of(LeaveJob)] == [LeaveReason.PREEMPTED]
    assert first.is_stopped


async def test_heartbeat_and_lease_come_from_the_terms_of_the_job(stage):
    """With the heartbeat of 5 s that is the default nobody would look within the deadline of this test."""
    terms = JobTerms(detection=Detection(heartbeat=0.005, silence=40.0, suspicion=12.0))
    life = stage.begin(terms=terms, patience=None)
    await life.workers.running(1)
    await stage.until(lambda: len(stage.master.beats) > 2)


async def test_an_attach_whose_answer_was_lost_is_repeated(stage):
    life = stage.begin()
    life.channel.lose_answer_to(Attach)
    first = await life.workers.running(1)
    life.channel.cut()
    stage.master.advance(30)
    life.channel.lose_answer_to(Attach)
    life.channel.restore()
    second = await life.workers.running(2)
    assert first.is_stopped
    second.finish()
    assert (await life.result()).exit_code == 0


async def test_a_node_that_runs_again_does_not_say_that_it_has_finished(stage):
    one, two = stage.begin("a", nodes=2), stage.begin("b", nodes=2)
    first = await one.workers.running(1)
    await two.workers.running(1)
    first.finish()
    await stage.until(lambda: stage.master.heard_of(ReportFinished) and first.is_stopped)
    one.channel.wish(Run(replace(first.world, round=Round(2))))
    await one.workers.running(2)
    one.channel.break_stream()
    await stage.until(lambda: one.channel.is_attached)
    newest = stage.master.heard_of(Attach)[-1]
    assert (newest.running_round, newest.is_finished) == (2, False)


# Refused for good.


async def test_other_terms_are_refused_with_the_difference(stage):
    first = stage.begin()
    await first.workers.running(1)
    other = stage.begin("b", nodes=2)
    result = await other.result()
    assert result.exit_code == EXIT_FAILED
    assert "refused this node" in result.message
    assert "max_nodes is 1 in the job and 2 there" in result.message
    assert first.workers.groups[0].is_running


async def test_a_held_rank_is_refused_with_its_holder(stage):
    first = stage.begin(node_rank=0)
    await first.workers.running(1)
    other = stage.begin("b", node_rank=0)
    result = await other.result()
    assert result.exit_code == EXIT_FAILED
    assert "Node rank 0 is asked for by 127.0.0.1 and held by 127.0.0.1" in result.message


# Signals.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
async def test_a_signal_ends_the_node_with_the_grace_of_the_user(stage, number):
    life = stage.begin()
    group = await life.workers.running(1)
    group.may_stop.clear()
    os.kill(os.getpid(), number)
    await stage.until(lambda: group.stops and stage.master.heard_of(LeaveJob))
    os.kill(os.getpid(), number)  # an impatient user
    group.may_stop.set()
    result = await life.result()
    assert result.exit_code == EXIT_BY_SIGNAL + number
    assert group.stops == [(StopCause.END_OF_JOB, number)]
    (leave,) = stage.master.heard_of(LeaveJob)
    assert (leave.reason, leave.message) == (LeaveReason.STOPPED_BY_USER, f"{number.name} received")
    assert stage.master.job.end.reason is ExitReason.STOPPED_BY_USER


async def test_a_node_that_leaves_does_not_come_back(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    group.may_stop.clear()
    group.late = (a_failure(),)
    os.kill(os.getpid(), signal.SIGTERM)
    await stage.until(lambda: stage.master.heard_of(LeaveJob) and life.channel.attached is None)
    group.fail(a_failure())
    group.may_stop.set()
    assert (await life.result()).exit_code == EXIT_BY_SIGNAL + signal.SIGTERM
    assert len(stage.master.heard_of(Attach)) == 1


async def test_a_farewell_whose_answer_was_lost_is_said_again(stage):
    one, two = stage.begin("b", nodes=2), stage.begin("a", nodes=2)  # the newest agent of the process gets the signal
    groups = [await life.workers.running(1) for life in (one, two)]
    groups[1].may_stop.clear()
    two.channel.lose_answer_to(LeaveJob)
    os.kill(os.getpid(), signal.SIGTERM)
    await stage.until(lambda: stage.master.heard_of(LeaveJob) and two.channel.attached is None)
    groups[1].may_stop.set()
    assert (await two.result()).exit_code == EXIT_BY_SIGNAL + signal.SIGTERM
    assert len(stage.master.job.state.nodes.live) == 1
    assert not one.task.done()


async def test_a_report_refused_while_leaving_brings_no_new_life(stage):
    life = stage.begin()
    group = await life.workers.running(1)
    group.may_stop.clear()
    life.channel.wish(End(JobEnd(reason=ExitReason.STOPPED_BY_USER, exit_code=1, message="enough")))
    await stage.until(lambda: group.stops)
    stage.master.refuse[ReportFailure] = "stale-incarnation"
    group.fail()
    await stage.until(lambda: stage.master.refused)
    await life.looks()
    group.may_stop.set()
    assert (await life.result()).exit_code == 1
    assert len(stage.master.heard_of(Attach)) == 1


async def test_a_signal_before_there_is_any_master(stage):
    life = stage.begin(patience=PATIENCE._replace(first_connection=100.0))
    life.channel.cut()
    await life.looks()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await life.result()).exit_code == EXIT_BY_SIGNAL + signal.SIGTERM


# Two nodes.


async def test_when_one_of_two_nodes_fails_both_start_again(stage):
    one, two = stage.begin("a", nodes=2), stage.begin("b", nodes=2)
    first = [await life.workers.running(1) for life in (one, two)]
    assert {group.world.group_rank for group in first} == {0, 1}
    first[1].fail()
    second = [await life.workers.running(2) for life in (one, two)]
    assert [group.stops for group in first] == [[(StopCause.FAILURE, signal.SIGTERM)]] * 2
    assert {group.world.round for group in second} == {2}
    assert len({group.world.coordinator for group in second}) == 1
    for group in second:
        group.finish()
    assert [(await life.result()).exit_code for life in (one, two)] == [0, 0]
    assert [report.round for report in stage.master.heard_of(ReportFailure)] == [1]


async def test_a_finished_node_is_not_started_again(stage):
    limits = {"nodes": 2, "restarts": RestartPolicy(max_restarts=3)}
    one, two = stage.begin("a", **limits), stage.begin("b", **limits)
    first = [await life.workers.running(1) for life in (one, two)]
    first[0].finish()
    await stage.until(lambda: stage.master.heard_of(ReportFinished) and first[0].is_stopped)
    first[1].fail()
    # Alone the other is no world of two: the job ends, and says so on both.
    results = [await life.result() for life in (one, two)]
    assert len(one.workers.groups) == 1
    assert {result.end.reason for result in results} == {ExitReason.WORKER_ERROR}


async def test_a_finished_node_waits_for_the_other(stage):
    one, two = stage.begin("a", nodes=2), stage.begin("b", nodes=2)
    first = [await life.workers.running(1) for life in (one, two)]
    first[0].finish()
    await stage.until(lambda: stage.master.heard_of(ReportFinished) and first[0].is_stopped)
    assert not one.task.done()
    first[1].finish()
    assert [(await life.result()).exit_code for life in (one, two)] == [0, 0]
    assert [len(life.workers.groups) for life in (one, two)] == [1, 1]


async def test_a_finished_node_of_a_new_life_still_leaves_with_success(stage):
    one, two = stage.begin("a", nodes=2), stage.begin("b", nodes=2)
    first = [await life.workers.running(1) for life in (one, two)]
    first[0].finish()
    await stage.until(lambda: stage.master.heard_of(ReportFinished) and first[0].is_stopped)
    stage.master.give_up(one.channel)
    one.channel.break_stream()
    await stage.until(lambda: one.channel.is_attached)
    assert first[1].is_running
    one.channel.cut()
    stage.master.advance(1)
    assert (await one.result()).exit_code == 0
    assert len(one.workers.groups) == 1


async def test_a_finished_node_stays_finished_when_the_master_forgot_everything(stage):
    one, two = stage.begin("a", nodes=2), stage.begin("b", nodes=2)
    first = [await life.workers.running(1) for life in (one, two)]
    first[0].finish()
    await stage.until(lambda: stage.master.heard_of(ReportFinished) and first[0].is_stopped)
    stage.master.restart(forget=True)
    await stage.until(lambda: one.channel.is_attached)
    await one.looks()
    assert len(one.workers.groups) == 1


async def test_node_ranks_are_kept_through_lives(stage):
    one, two = stage.begin("a", nodes=2), stage.begin("b", nodes=2)
    await one.workers.running(1)
    await two.workers.running(1)
    await one.die()
    again = stage.begin("a", nodes=2)
    group = await again.workers.running(1)
    assert again.channel.attached.node_rank == NodeRank(0)
    assert group.world.group_rank == 0
    assert (await two.workers.running(2)).world.round == 2


# Anything at any moment.


class Misfortune:
    """Does to two nodes whatever a seed says, then heals everything and lets them finish."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage = stage
        self._master = stage.master
        self._random = random.Random(seed)
        self._ports = {launch: self._random.choice([(), free_ports(1), free_ports(2)]) for launch in ("a", "b")}
        self._is_healed = False
        self.lives = {launch: self._begin(launch) for launch in ("a", "b")}

    async def strike(self) -> None:
        launch = self._random.choice(["a", "b"])
        life = self.lives[launch]
        blow = self._random.choice(
            ["fail", "fail", "finish", "cut", "restore", "break", "lose", "restart", "forget", "wait", "give up", "die"]
        )
        match blow:
            case "fail":
                self._end_workers(life, is_well=False)
            case "finish" if self._random.random() < 0.3:
                self._end_workers(life, is_well=True)
            case "cut":
                life.channel.cut()
            case "restore":
                life.channel.restore()
            case "break":
                life.channel.break_stream()
            case "lose":
                kinds = [Attach, JoinRendezvous, ReportFailure, ReportFinished, LeaveJob]
                life.channel.lose_answer_to(self._random.choice(kinds))
            case "restart":
                self._master.restart()
            case "forget" if self._random.random() < 0.5:
                self._master.restart(forget=True)
            case "wait":
                self._master.advance(self._random.choice([0.5, 4.0, 6.0, 31.0]))
            case "give up" if life.channel.attached is not None:
                with contextlib.suppress(Rejected):
                    self._master.give_up(life.channel)
                await turns(self._random.choice([0, 1, 3]))
                life.channel.break_stream()
            case "die":
                await life.die()
                self.lives[launch] = self._begin(launch)
        await turns(self._random.choice([0, 1, 2, 3, 5, 10, 30]))

    async def heal(self) -> None:
        self._is_healed = True
        while not all(life.task.done() for life in self.lives.values()):
            for life in self.lives.values():
                life.channel.restore()
                for group in life.workers.groups:
                    group.may_start.set()
                    group.may_stop.set()
                self._end_workers(life, is_well=True)
            await turns(30)
            self._master.advance(2)

    def _begin(self, launch: str) -> Life:
        limits = Limits(min_nodes=1, max_nodes=2, join_timeout=1e6)
        life = self._stage.begin(
            launch,
            terms=JobTerms(limits=limits, restarts=RestartPolicy(max_restarts=1000)),
            master_grace=1e6,
            host_ports=self._ports[launch],
        )
        life.workers.prepare = self._prepare
        return life

    def _prepare(self, group: StandInGroup) -> None:
        if self._is_healed:
            return
        if self._random.random() < 0.2:
            group.may_start.clear()
        if self._random.random() < 0.2:
            group.may_stop.clear()
        if self._random.random() < 0.2:
            group.late = (a_failure(),)

    def _end_workers(self, life: Life, *, is_well: bool) -> None:
        for group in life.workers.groups:
            if group.is_running and not group.has_ended:
                group.finish() if is_well else group.fail()


async def turns(count: int) -> None:
    """Let everybody else have so many turns of the event loop; no time passes."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_the_nodes_finish_when_it_is_over(stage, seed):
    misfortune = Misfortune(stage, seed)
    async with asyncio.timeout(DEADLINE):
        for _ in range(25):
            await misfortune.strike()
        await misfortune.heal()
    for life in misfortune.lives.values():
        result = await life.result()
        # The one ending that is nobody's fault: some had finished, and the last one was given up before it could.
        assert result.exit_code == 0 or "had finished already" in result.message
