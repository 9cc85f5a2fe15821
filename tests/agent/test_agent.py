"""
The agent between a real `Job` and workers that do what the test says: no wire, no processes, no waiting.

Each test is a short story of a node. The master's clock, and with it every outage, is moved by the test; the agent's
own clock is the real one, so its patience is short here.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from dlrover.agent.decisions.departure import EXIT_BY_SIGNAL, EXIT_FAILED
from dlrover.agent.workers.group import PortOffer
from dlrover.protocol.codec import check_size
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.frames import Request
from dlrover.protocol.messages.job import (
    End,
    ExitReason,
    FailureKind,
    JobEnd,
    Join,
    JoinRendezvous,
    LeaveJob,
    LeaveReason,
    ReportFailure,
    ReportFinished,
    RestartPolicy,
    Round,
    Run,
    StopCause,
    Wait,
)
from tests.agent.loopback import a_failure
from tests.agent.stage import PATIENCE, free_ports

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


@pytest.mark.parametrize(
    ("kind", "is_whole", "is_told"),
    [(FailureKind.PEER_LOST, True, True), (FailureKind.PEER_LOST, False, False), (FailureKind.SIGNAL, True, False)],
)
async def test_who_lost_a_peer_tells_whether_the_memory_of_another_node_is_needed(stage, kind, is_whole, is_told):
    life = stage.begin(has_whole_state=lambda: is_whole)
    group = await life.workers.running(1)
    group.fail(a_failure(kind))
    (await life.workers.running(2)).finish()
    assert (await life.result()).exit_code == 0
    assert [report.has_whole_state for report in stage.master.heard_of(ReportFailure)] == [is_told]


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


async def test_failures_of_very_many_workers_are_told_in_one_message(stage):
    """Refused for its size, the report would never come, and nobody learned why they failed."""
    life = stage.begin(restarts=RestartPolicy(max_restarts=0))
    group = await life.workers.running(1)
    texts = {"traceback": "t" * 2**15, "log_tail": "l" * 3 * 2**13}
    group.fail(*(a_failure(global_rank=rank, exited_at=rank, message=f"boom {rank}", **texts) for rank in range(400)))
    assert (await life.result()).first_failed_rank == 0
    [report] = stage.master.heard_of(ReportFailure)
    check_size(Request(id=1, body=report))
    assert [failure.message for failure in report.failures] == [f"boom {rank}" for rank in range(400)]
    assert (report.failures[0].traceback, report.failures[0].log_tail) == tuple(texts.values())
    assert set(report.failures[-1].traceback) == {"t"}


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


async def test_a_node_that_waits_long_for_its_first_world_says_so_once(stage, caplog):
    alone = stage.begin("a", nodes=2, patience=PATIENCE._replace(wait_told=0.0))
    said = "waits for a place in a world"
    await stage.until(lambda: said in caplog.text)
    second = stage.begin("b", nodes=2)
    await alone.workers.running(1)
    await second.workers.running(1)
    alone.channel.wish(Wait("you are a spare now"))
    await alone.looks()
    assert caplog.text.count(said) == 1


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


async def test_a_mistake_that_comes_to_light_while_workers_stop_is_told_before_the_next_round_is_joined(stage):
    alike = {"traceback": "boom", "exceptions": ("ValueError", "Exception"), "is_before_step": True}
    life = stage.begin()
    group = await life.workers.running(1)
    group.may_be_mistaken = True
    group.late = (a_failure(global_rank=1, local_rank=1, **alike),)
    group.may_stop.clear()
    group.fail(a_failure(**alike))
    await stage.until(lambda: stage.master.heard_of(ReportFailure))
    await life.looks()
    assert len(stage.offers()) == 1, "it has joined only the first round"
    group.may_stop.set()
    result = await life.result()
    assert group.num_waits_alike == 1
    assert result.exit_code == EXIT_FAILED
    assert "All ranks failed with the same exception before the first step" in result.message


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


async def test_nodes_of_one_host_meet_again_and_again_at_the_port_of_the_user_and_only_when_all_workers_have_stopped(
    stage,
):
    [port] = free_ports(1)
    lives = [stage.begin(launch, nodes=2, coordinator_port=port) for launch in "ab"]
    groups = [await life.workers.running(1) for life in lives]
    groups[0].may_stop.clear()
    groups[1].fail()
    await stage.until(lambda: len(stage.offers()) == 3)  # the node whose workers are gone has come back
    await lives[0].looks()
    assert len(stage.offers()) == 3, "a worker of the last round could still meet those of the next"
    groups[0].may_stop.set()
    later = [await life.workers.running(2) for life in lives]
    assert {group.world.coordinator for group in (*groups, *later)} == {f"127.0.0.1:{port}"}
    assert not stage.master.refused


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
