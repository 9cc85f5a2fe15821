"""The master's shell with a real core, a real journal and real connections, in one process."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.cli.show.replay import replay
from dlrover.core.job import Job
from dlrover.core.outcome import NotYet, Origin, Outcome
from dlrover.protocol.codec import decode_from_master, encode_frame
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.checkpoint import AwaitSaveDuties, SaveDuties
from dlrover.protocol.messages.data import DatasetSpec, DatasetState, RegisterDataset
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    FleetSpec,
    LaunchRefused,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    ReplicaSpec,
)
from dlrover.protocol.messages.frames import Push, Request
from dlrover.protocol.messages.goodput import AskGoodput
from dlrover.protocol.messages.job import (
    MAX_MESSAGE_BYTES,
    MAX_REQUESTS_IN_WORK,
    Attach,
    Command,
    DeadlinePassed,
    Detection,
    Done,
    End,
    Heartbeat,
    JobTerms,
    Join,
    JoinRendezvous,
    LeaveJob,
    LeaveReason,
    Limits,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
    Ping,
    PlatformId,
    Pong,
    Query,
    Reply,
    ReportFinished,
    Round,
    Run,
    StopJob,
)
from dlrover.protocol.messages.peers import AskPeers, Peers
from dlrover.protocol.messages.precheck import OperatorResult, PreCheckNoted, PreCheckStage
from dlrover.protocol.messages.requests import RelaunchNode
from dlrover.protocol.rpc.client import ask
from dlrover.protocol.rpc.transport import AGENT_METHOD, SERVICE, call_metadata, open_channel
from tests.master.conftest import TOKEN, Agent, Connect, Master, StartMaster, journalled


async def test_two_agents_meet_and_are_told_their_world(start_master: StartMaster, connect: Connect) -> None:
    master = await start_master()
    agents = [connect(master.address, launch=name) for name in ("a", "b")]
    for agent in agents:
        await agent.attached()
        await agent.wish(Join)
        assert await agent.join() == Done()
    worlds = [(await agent.wish(Run)).wish.world for agent in agents]  # type: ignore[union-attr]
    assert {world.group_rank for world in worlds} == {0, 1}
    assert {(world.round, world.world_size) for world in worlds} == {(1, 2)}
    status = await master.status()
    assert [node.wish for node in status.nodes] == ["run", "run"]


async def test_the_step_of_a_heartbeat_is_seen_and_not_journalled(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    master = await start_master()
    agent = connect(master.address)
    await agent.attached()
    digest = (await master.status()).digest
    agent.channel.beat(Heartbeat(node=agent.node, incarnation=agent.incarnation, step=41))
    agent.channel.beat(Heartbeat(node=agent.node, incarnation=agent.incarnation, step=42))
    assert isinstance(await agent.channel.call(Ping(), timeout=10), Pong)  # behind the beats on the same stream
    status = await master.status()
    assert status.nodes[0].step == 42
    assert status.digest == digest
    assert [type(command) for command in journalled(tmp_path / "journal.sqlite")] == [MasterStarted, Attach]


async def test_a_finished_job_ends_the_master(start_master: StartMaster, connect: Connect) -> None:
    master = await start_master()
    agent = connect(master.address, terms=JobTerms())
    await agent.attached()
    await agent.join()
    await agent.wish(Run)
    finished = ReportFinished(node=agent.node, incarnation=agent.incarnation, round=Round(1), step=9)
    assert await agent.channel.call(finished, timeout=10) == Done()
    end = await agent.wish(End)
    assert end.wish.end.exit_code == 0  # type: ignore[union-attr]
    assert not master.master_loop.finished.done()
    leave = LeaveJob(node=agent.node, incarnation=agent.incarnation, reason=LeaveReason.JOB_ENDED)
    assert await agent.channel.call(leave, timeout=10) == Done()
    assert (await asyncio.wait_for(master.master_loop.finished, 10)).exit_code == 0


async def test_a_deadline_of_the_job_passes_by_itself(start_master: StartMaster, connect: Connect) -> None:
    master = await start_master()
    terms = JobTerms(limits=Limits(min_nodes=2, max_nodes=2, join_timeout=0.2))
    agent = connect(master.address, terms=terms)
    end = await agent.wish(End)
    assert "0 of at least 2 nodes joined within 0.2 s" in end.wish.end.message  # type: ignore[union-attr]


async def test_a_broken_stream_is_a_finding_and_a_newer_stream_supersedes_it(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    master = await start_master()
    agent = connect(master.address)
    first = await agent.attached()
    await agent.channel.reattach()
    second = await agent.attached()
    assert (first.node, first.incarnation) == (second.node, second.incarnation)
    assert [node.status for node in (await master.status()).nodes] == ["alive"]
    await agent.leave()
    async with asyncio.timeout(20):
        while [node.status for node in (await master.status()).nodes] == ["alive"]:
            continue  # each question is a turn of the loop
    assert NodeDisconnected(node=first.node, incarnation=first.incarnation) in journalled(tmp_path / "journal.sqlite")


async def test_a_silent_node_is_given_up_and_has_to_present_itself_anew(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    master = await start_master()
    hasty = Detection(silence=0.3, suspicion=0.3, lease=0.15, heartbeat=0.1)
    agent = connect(master.address, terms=JobTerms(detection=hasty))
    first = await agent.attached()
    second = await agent.attached()  # nothing was heard of it, so its stream was ended, and it came back
    assert second.incarnation == first.incarnation + 1
    silent = [command for command in journalled(tmp_path / "journal.sqlite") if isinstance(command, NodeSilent)]
    assert [(finding.node, finding.incarnation) for finding in silent[:1]] == [(first.node, first.incarnation)]


async def test_a_node_that_is_exchanged_is_told_so_at_once(start_master: StartMaster, connect: Connect) -> None:
    master = await start_master()
    await master.master_loop.tell(DefineFleet(spec=FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=1)})))
    await master.master_loop.tell(NodesListed(nodes=()))
    agent = connect(master.address, terms=JobTerms(), platform_node=0)
    await agent.attached()
    assert (
        await ask(master.address, RelaunchNode(node=agent.node, reason="slow disk"), token=TOKEN, timeout=10) == Done()
    )
    with pytest.raises(Rejected, match=r"it was requested \(slow disk\)") as refused:
        await asyncio.wait_for(agent.running, 20)
    assert refused.value.code == "node-released"
    assert agent.attachments.empty()


PATIENT = 60.0
"""Seconds for a commit that the test holds back, however slow the machine is."""


async def in_work(master: Master, number: int) -> None:
    """Until so many requests are there and not decided."""
    async with asyncio.timeout(20):
        while master.master_loop.num_in_work < number:  # noqa: ASYNC110 (what comes in is no news to anybody)
            await asyncio.sleep(0.005)


async def test_a_command_sent_again_after_a_broken_stream_is_applied_once(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    master = await start_master(busy_timeout=PATIENT)
    agent = connect(master.address)
    await agent.attached()
    lock = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")  # holds the commit back while the stream breaks
    call = asyncio.ensure_future(agent.join())
    await in_work(master, 1)
    await agent.channel.reattach()
    await in_work(master, 2)  # the attach of the next stream
    lock.execute("ROLLBACK")
    lock.close()
    await agent.attached()
    assert await call == Done()
    joins = [command for command in journalled(tmp_path / "journal.sqlite") if isinstance(command, JoinRendezvous)]
    assert len(joins) == 1


async def test_a_command_is_not_answered_before_it_is_durable(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    master = await start_master()
    agent = connect(master.address)
    await agent.attached()
    lock = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    call = asyncio.ensure_future(agent.join())
    done, _ = await asyncio.wait({call}, timeout=0.5)
    assert not done
    lock.execute("ROLLBACK")
    lock.close()
    assert await call == Done()


async def test_more_requests_than_fit_are_refused_for_now_and_all_answered_in_the_end(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    master = await start_master(busy_timeout=PATIENT)
    agent = connect(master.address)
    await agent.attached()
    lock = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    calls = [asyncio.ensure_future(agent.join()) for _ in range(600)]
    await in_work(master, MAX_REQUESTS_IN_WORK)
    with pytest.raises(Unavailable, match="already works on 256 requests"):
        await master.master_loop.ask(Ping())
    assert not any(call.done() for call in calls)
    lock.execute("ROLLBACK")
    lock.close()
    assert await asyncio.gather(*calls) == [Done()] * 600
    joins = [command for command in journalled(tmp_path / "journal.sqlite") if isinstance(command, JoinRendezvous)]
    assert [join.offer for join in joins] == [f"host-l0:{number}" for number in range(1, 601)]


async def test_a_restarted_master_continues_and_the_agent_does_not_notice(
    start_master: StartMaster, connect: Connect
) -> None:
    master = await start_master()
    agent = connect(master.address)
    first = await agent.attached()
    await agent.join()
    before = await master.status()
    await master.stop()
    again = await start_master(port=int(master.address.split(":")[1]))
    second = await agent.attached()
    assert (second.node, second.incarnation, second.node_rank) == (first.node, first.incarnation, first.node_rank)
    assert second.master_epoch == first.master_epoch + 1
    after = await again.status()
    assert [node.node for node in after.nodes] == [node.node for node in before.nodes]


async def test_deadlines_do_not_pass_while_there_is_no_master(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    master = await start_master()
    agent = connect(master.address)
    first = await agent.attached()
    await agent.join()
    await master.stop()
    again = await start_master(port=int(master.address.split(":")[1]), hours_later=5)
    assert (await agent.attached()).incarnation == first.incarnation
    assert (await again.status()).end is None
    assert not any(isinstance(command, DeadlinePassed) for command in journalled(tmp_path / "journal.sqlite"))


class FragileJob(Job):
    """Breaks in the middle of one particular command, as a bug would."""

    def apply(self, command: Command, now: Micros, origin: Origin | None = None) -> Outcome:
        if command == StopJob(message="break"):
            self.state.job_name = "half changed"
            raise ZeroDivisionError("a bug")
        return super().apply(command, now, origin)


async def test_a_command_that_breaks_the_core_changes_nothing_and_is_refused_from_then_on(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    master = await start_master(make_job=lambda job: FragileJob(job.state))
    agent = connect(master.address)
    await agent.attached()
    before = await master.status()
    others = [asyncio.ensure_future(agent.join()) for _ in range(3)]
    with pytest.raises(Rejected, match="The master failed on StopJob") as caught:
        await ask(master.address, StopJob(message="break"), token=TOKEN, timeout=10)
    assert caught.value.code == "internal"
    assert await asyncio.gather(*others) == [Done()] * 3
    after = await master.status()
    assert after.job_name == before.job_name
    with pytest.raises(Rejected, match="made the master fail before"):  # now with the rebuilt job, which could do it
        await ask(master.address, StopJob(message="break"), token=TOKEN, timeout=10)
    await master.stop()
    again = await start_master(port=int(master.address.split(":")[1]))
    with pytest.raises(Rejected, match="made the master fail before"):
        await ask(again.address, StopJob(message="break"), token=TOKEN, timeout=10)
    assert isinstance(await ask(again.address, StopJob(message="other"), token=TOKEN, timeout=10), Done)


async def test_what_concerns_one_node_is_told_to_no_other(start_master: StartMaster, connect: Connect) -> None:
    """Who asks again under the number that a lost journal had given it asks for another node."""
    master = await start_master()
    agents = [connect(master.address, launch=launch) for launch in "ab"]
    own, other = [await agent.attached() for agent in agents]
    await asyncio.gather(*(agent.join() for agent in agents))
    await agents[0].wish(Run)

    def questions(node: NodeId) -> list[AwaitSaveDuties | AskPeers]:
        return [AwaitSaveDuties(node=node, incarnation=own.incarnation), AskPeers(node=node, round=Round(1))]

    answers = [await agents[0].channel.call(question, timeout=20) for question in questions(own.node)]
    assert [type(answer) for answer in answers] == [SaveDuties, Peers]
    for question in questions(other.node):
        with pytest.raises(
            Rejected, match=f"node {own.node} may not send requests in the name of node {other.node}"
        ) as refused:
            await agents[0].channel.call(question, timeout=20)
        assert refused.value.code == "wrong-sender"


async def test_a_stream_attaches_first_and_once_and_numbers_its_commands(start_master: StartMaster) -> None:
    master = await start_master()
    attach = Attach(launch="l", host="h", terms=JobTerms(), local_world_size=1)
    async with open_channel(master.address, None) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/{AGENT_METHOD}")(metadata=call_metadata(TOKEN))

        async def send(*requests: Request) -> list[str]:
            await stream.write(encode_frame(requests))
            told: list[str] = []
            while len(told) < len(requests):
                parcels = decode_from_master(await stream.read())
                told += [getattr(parcel, "code", "ok") for parcel in parcels if not isinstance(parcel, Push)]
            return told

        assert await send(Request(id=1, body=StopJob(), sequence=1)) == ["not-attached"]
        assert await send(Request(id=0, body=attach), Request(id=0, body=attach)) == ["attached", "ok"]
        assert await send(Request(id=0, body=attach)) == ["attached"]
        assert await send(Request(id=2, body=StopJob())) == ["malformed"]
        assert await send(Request(id=3, body=StopJob(), sequence=1), Request(id=4, body=Ping())) == ["ok", "ok"]
        stream.cancel()


async def test_snapshots_are_taken_before_a_replay_would_cost_too_much(
    start_master: StartMaster, connect: Connect, tmp_path: Path
) -> None:
    master = await start_master()
    agent = connect(master.address)
    await agent.attached()
    connection = sqlite3.connect(tmp_path / "journal.sqlite")
    async with asyncio.timeout(60):
        while not connection.execute("SELECT count(*) FROM snapshots").fetchone()[0]:
            await asyncio.gather(*(agent.join() for _ in range(100)))
            connection.rollback()
    connection.close()
    before = await master.status()
    await master.stop()
    again = await start_master(port=int(master.address.split(":")[1]))
    await agent.attached()
    after = await again.status()
    assert after.nodes == before.nodes
    assert after.master_epoch == before.master_epoch + 1
    await again.stop()
    assert replay(tmp_path / "journal.sqlite") == 0


async def test_an_agent_speaks_for_itself_only(start_master: StartMaster, connect: Connect) -> None:
    master = await start_master()
    one, other = connect(master.address, launch="a"), connect(master.address, launch="b")
    await one.attached()
    await other.attached()
    with pytest.raises(Rejected, match="may not speak for"):
        await one.channel.call(other.a_join(), timeout=10)


async def test_a_rank_that_a_live_node_holds_is_refused_for_good(start_master: StartMaster, connect: Connect) -> None:
    master = await start_master()
    await connect(master.address, launch="a", node_rank=0).attached()
    with pytest.raises(Rejected, match="held by host-a") as caught:
        await connect(master.address, launch="b", node_rank=0).attached()
    assert caught.value.code == "rank-held"


def a_dataset(agent: Agent, **changes: Any) -> RegisterDataset:
    spec = DatasetSpec(**({"name": "d", "size": 100, "shard_size": 10} | changes))
    return RegisterDataset(node=agent.node, incarnation=agent.incarnation, dataset="d", spec=spec)


async def test_what_cannot_be_written_is_refused_and_the_next_master_serves_as_well(
    start_master: StartMaster, connect: Connect
) -> None:
    """Commands of the master's own plug-ins come through no decoder, and numbers grow beyond what a message carries."""
    half = "caf\udce9"
    bad: list[Command] = [
        PreCheckNoted(stage=PreCheckStage.CHECKING, results=(OperatorResult(name="mine"),), message=half),
        LaunchRefused(node=PlatformId(0), reason=half),
        StopJob(message=half),  # one that is cut before it is written
    ]
    port = 0
    for _life in range(2):
        master = await start_master(port=port, make_job=lambda job: FragileJob(job.state))
        port = int(master.address.split(":")[1])
        agent = connect(master.address)
        await agent.attached()
        for is_one_quarantined in (False, True):
            for command in bad:
                with pytest.raises(Rejected, match="cannot be written") as caught:
                    await asyncio.wait_for(master.master_loop.tell(command), 10)
                assert caught.value.code == "malformed"
            if not is_one_quarantined:
                with pytest.raises(Rejected, match=r"The master failed on|made the master fail before"):
                    await master.master_loop.tell(StopJob(message="break"))
        with pytest.raises(Rejected, match="more than can be counted"):
            await agent.channel.call(a_dataset(agent, size=10**8, num_epochs=1 << 40), timeout=10)
        assert isinstance(await agent.channel.call(a_dataset(agent), timeout=10), DatasetState)
        assert (await master.status()).job_name == "job"
        await agent.leave()
        await master.stop()


async def test_what_the_next_master_could_not_read_is_not_written(start_master: StartMaster) -> None:
    """A platform may be anybody's, and what it shows goes to the journal."""
    master = await start_master()
    wrong: Any = None
    node = PlatformNode(id=PlatformId(0), node_type=NodeType.WORKER, rank=0, phase=NodePhase.RUNNING, name=wrong)
    spec = FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=1)})
    await master.master_loop.tell(DefineFleet(spec=spec))
    for command in (NodesListed(nodes=(node,)), wrong):
        with pytest.raises(Rejected) as caught:
            await asyncio.wait_for(master.master_loop.tell(command), 10)
        assert caught.value.code == "malformed"
    await master.master_loop.tell(NodesListed(nodes=(replace(node, name="n0"),)))
    await master.stop()
    again = await start_master()
    assert (await again.status()).job_name == "job"


async def test_what_a_platform_shows_may_be_longer_than_a_message(start_master: StartMaster) -> None:
    """It comes over no wire, and thousands of nodes that wait, each with the reason, are more than one message holds."""
    master = await start_master()
    nodes = tuple(
        PlatformNode(
            id=PlatformId(number),
            node_type=NodeType.WORKER,
            rank=number,
            phase=NodePhase.PENDING,
            message="no machine has room " * 100,
        )
        for number in range(MAX_MESSAGE_BYTES // 2000 + 1)
    )
    await master.master_loop.tell(
        DefineFleet(spec=FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=len(nodes))}))
    )
    await master.master_loop.tell(NodesListed(nodes=nodes))
    await master.stop()
    again = await start_master()
    fleet = again.master_loop.job.state.fleet
    assert fleet is not None
    assert len(fleet.nodes) == len(nodes)


class TalkativeJob(Job):
    """Answers what no message can carry, or not at all, as bugs would."""

    def apply(self, command: Command, now: Micros, origin: Origin | None = None) -> Outcome:
        outcome = super().apply(command, now, origin)
        return Outcome(Pong(job_name="", master_epoch=1 << 64)) if isinstance(command, LeaveJob) else outcome

    def ask(self, query: Query) -> Reply | NotYet:
        if isinstance(query, AskGoodput):
            raise ZeroDivisionError("a bug")
        return super().ask(query)


async def test_an_answer_that_cannot_be_encoded_or_given_breaks_nothing(
    start_master: StartMaster, connect: Connect
) -> None:
    master = await start_master(make_job=lambda job: TalkativeJob(job.state))
    agent = connect(master.address)
    await agent.attached()
    with pytest.raises(Rejected, match="AskGoodput cannot be answered") as caught:
        await ask(master.address, AskGoodput(), token=TOKEN, timeout=10)
    assert caught.value.code == "internal"
    leave = LeaveJob(node=agent.node, incarnation=agent.incarnation, reason=LeaveReason.PREEMPTED)
    with pytest.raises(Rejected, match="The master failed on LeaveJob"):
        await agent.channel.call(leave, timeout=10)
    assert await agent.join() == Done()
    assert not master.working.done()
