"""The agent when its master is away, comes back, has forgotten, or refuses: stories of nodes as in `test_agent.py`."""

from __future__ import annotations

import signal

import pytest
from msgspec.structs import replace

from dlrover.agent.decisions.departure import EXIT_BY_SIGNAL, EXIT_FAILED, EXIT_MASTER_LOST
from dlrover.protocol.messages.fleet import DefineFleet, FleetSpec, NodesListed, NodeType, ReplicaSpec
from dlrover.protocol.messages.job import (
    Attach,
    Detection,
    JobTerms,
    JoinRendezvous,
    Leave,
    LeaveJob,
    LeaveReason,
    Limits,
    ReportFailure,
    ReportFinished,
    Round,
    Run,
    StopCause,
)
from dlrover.protocol.messages.requests import RelaunchNode
from tests.agent.stage import GRACE, PATIENCE

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


@pytest.mark.parametrize("has_stream", [True, False])
async def test_a_node_that_is_exchanged_stops_its_workers_and_does_not_come_again(stage, has_stream):
    """Whether it hears so at once, or has no stream then and hears it when it is back."""
    stage.master.apply(DefineFleet(spec=FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=1)})))
    stage.master.apply(NodesListed(nodes=()))
    life = stage.begin(platform_node=0)
    group = await life.workers.running(1)
    node, _ = life.channel.whom()
    if not has_stream:
        life.channel.cut()
    stage.master.apply(RelaunchNode(node=node, reason="slow disk"))
    life.channel.restore()
    result = await life.result()
    assert (result.exit_code, result.is_job_alive) == (0, True), "no failure that a platform could charge to it"
    assert "it was requested (slow disk)" in result.message
    assert group.stops == [(StopCause.MEMBERSHIP, signal.SIGTERM)]
    assert [(type(command), code) for command, code in stage.master.refused] == [(Attach, "node-released")]
    assert not stage.master.heard_of(LeaveJob), "nobody waits for its farewell"
    assert not stage.master.job.state.nodes.live


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
    """With the heartbeat of 5 s that is the default so many would not come within the deadline of this test."""
    terms = JobTerms(detection=Detection(heartbeat=0.005, silence=40.0, suspicion=12.0))
    life = stage.begin(terms=terms, patience=None)
    await life.workers.running(1)
    await stage.until(lambda: len(stage.master.beats) > 20)


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
