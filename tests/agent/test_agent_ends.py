"""How the life of an agent ends: by a signal, by success, in company. Stories of nodes as in `test_agent.py`."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from dlrover.agent.decisions.departure import EXIT_BY_SIGNAL
from dlrover.protocol.messages.job import (
    Attach,
    End,
    ExitReason,
    JobEnd,
    JobTerms,
    LeaveJob,
    LeaveReason,
    Limits,
    NodeRank,
    ReportFailure,
    ReportFinished,
    RestartPolicy,
    StopCause,
)
from tests.agent.loopback import DEADLINE, a_failure
from tests.agent.stage import PATIENCE

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


async def test_the_others_meet_again_while_a_node_that_was_told_to_end_still_stops(stage):
    """Many platforms announce with SIGTERM that they take a machine away."""
    terms = JobTerms(limits=Limits(min_nodes=1, max_nodes=2))
    lives = [stage.begin(launch, terms=terms) for launch in "ab"]
    first, other = [await life.workers.running(1) for life in lives]
    other.may_stop.clear()
    os.kill(os.getpid(), signal.SIGTERM)  # the newest agent of the process gets it
    alone = await lives[0].workers.running(2)
    assert not other.is_stopped, "it still has its grace while the others go on"
    assert alone.world.group_world_size == 1
    other.may_stop.set()
    assert (await lives[1].result()).exit_code == EXIT_BY_SIGNAL + signal.SIGTERM
    assert first.is_stopped
    assert alone.is_running
    assert stage.master.job.status().num_restarts == 0


async def test_a_signal_that_was_asked_for_goes_on_to_the_workers(stage):
    life = stage.begin(signals=(signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE))
    group = await life.workers.running(1)
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN  # a peer that hangs up is no reason to leave
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL, "it would end this process"
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (await life.result()).exit_code == EXIT_BY_SIGNAL + signal.SIGUSR1
    assert group.stops == [(StopCause.END_OF_JOB, signal.SIGUSR1)]


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


async def test_a_signal_after_the_end_is_known_to_whoever_finishes_the_work(stage):
    life = stage.begin()
    (await life.workers.running(1)).finish()
    assert (await life.result()).exit_code == 0
    assert not life.told_to_end.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(DEADLINE):
        await life.told_to_end.wait()


# Farewells.


async def test_who_leaves_by_itself_says_so_before_the_master_hears_the_farewell(stage):
    heard: list[int] = []
    life = stage.begin(on_leaving=lambda: heard.append(len(stage.master.heard_of(LeaveJob))))
    (await life.workers.running(1)).finish()
    assert (await life.result()).exit_code == 0
    assert len(stage.master.heard_of(LeaveJob)) == 1
    assert heard == [0]


async def test_who_is_sent_away_announces_nothing(stage):
    heard: list[int] = []
    life = stage.begin(on_leaving=lambda: heard.append(1))
    await life.workers.running(1)
    os.kill(os.getpid(), signal.SIGTERM)
    await life.result()
    assert heard == []


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
