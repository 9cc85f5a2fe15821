"""
What every platform must keep to, as tests. Subclass `PlatformContract` with a fixture `lab` that builds a `Lab`.

Written for people who add a platform: when these pass, the master can rely on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Protocol

import pytest
from msgspec.structs import replace

from dlrover.platforms.base import LaunchNotTaken, Platform, Sight, StaleMaster
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import (
    LaunchNode,
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    RemoveNode,
    Resource,
)
from dlrover.protocol.messages.identity import PlatformId

DEADLINE = 60.0
JOB = "job-a"


class Lab(Protocol):
    """A platform with room for three nodes, and a hand inside them."""

    def platform(self, job_uid: str = JOB) -> Platform: ...

    def end(self, node: int, exit_code: int, job_uid: str = JOB) -> None:
        """The node's program ends with this code; 128 + n: by signal n."""
        ...

    def exhaust_memory(self, node: int) -> None: ...


def launch(node: int, *, rank: int | None = None, master_epoch: int = 1, memory_mb: int = 0) -> LaunchNode:
    return LaunchNode(
        id=PlatformId(node),
        node_type=NodeType.WORKER,
        rank=node if rank is None else rank,
        name=f"worker-{node}",
        resource=Resource(memory_mb=memory_mb),
        master_epoch=master_epoch,
    )


def remove(node: int, *, master_epoch: int = 1, grace: float = 5.0) -> RemoveNode:
    return RemoveNode(
        id=PlatformId(node), name=f"worker-{node}", reason="scaled down", grace=grace, master_epoch=master_epoch
    )


@contextlib.asynccontextmanager
async def watching(platform: Platform) -> AsyncIterator[Watcher]:
    """From the first sight on, which is a list for every platform and in every test."""
    sights = platform.watch()
    watcher = Watcher(sights)
    try:
        first = await watcher.next()
        assert isinstance(first, NodesListed), f"a watch begins with a full list, not with {first}"
        watcher.listed, watcher.first = first.nodes, first
        yield watcher
    finally:
        await sights.aclose()  # type: ignore[attr-defined]


class Watcher:
    def __init__(self, sights: AsyncIterator[Sight]) -> None:
        self._sights = sights
        self.listed: tuple[PlatformNode, ...] = ()
        self.first = NodesListed(nodes=())

    async def next(self) -> Sight:
        async with asyncio.timeout(DEADLINE):
            return await anext(self._sights)

    async def until(self, node: int, phase: NodePhase) -> NodeChanged:
        """The next event that shows the node in this phase; what comes before is skipped."""
        while True:
            sight = await self.next()
            if isinstance(sight, NodeChanged) and sight.node.id == node and sight.node.phase is phase:
                return sight


async def room_becomes(platform: Platform, free: int) -> None:
    """A cluster counts again a moment after it has told of the end."""
    async with asyncio.timeout(DEADLINE):
        while (await platform.room(Resource())).free != free:  # noqa: ASYNC110 - the platform has no event for it
            await asyncio.sleep(0.05)


async def room_is_taken(platform: Platform, intent: LaunchNode) -> None:
    """Tries again as the keeper does, for the same reason."""
    async with asyncio.timeout(DEADLINE):
        while True:
            with contextlib.suppress(LaunchNotTaken):
                return await platform.apply(intent)
            await asyncio.sleep(0.05)


async def run_nodes(platform: Platform, *nodes: int) -> None:
    async with watching(platform) as watch:
        for node in nodes:
            await platform.apply(launch(node))
            await watch.until(node, NodePhase.RUNNING)


class PlatformContract:
    async def test_a_launched_node_is_listed_with_all_that_was_asked_for(self, lab):
        platform = lab.platform()
        assert await platform.list() == ()
        await run_nodes(platform, 4)
        [node] = await platform.list()
        assert (node.id, node.node_type, node.rank, node.name) == (4, NodeType.WORKER, 4, "worker-4")
        assert node.phase is NodePhase.RUNNING
        assert node.exit_code is None

    async def test_a_server_is_listed_with_the_address_that_it_was_given(self, lab):
        platform = lab.platform()
        await platform.apply(replace(launch(3), node_type=NodeType.PS, service_address="a-job-ps-0"))
        [node] = await platform.list()
        assert node.service_address == "a-job-ps-0"

    async def test_a_launch_is_idempotent(self, lab):
        platform = lab.platform()
        for _ in range(3):
            await platform.apply(launch(0))
        assert len(await platform.list()) == 1

    async def test_a_launch_of_a_node_that_was_there_before_does_nothing(self, lab):
        platform = lab.platform()
        await run_nodes(platform, 0)
        async with watching(platform) as watch:
            await platform.apply(remove(0))
            await watch.until(0, NodePhase.DELETED)
        await platform.apply(launch(0))
        assert await platform.list() == ()

    async def test_a_removal_is_idempotent_and_a_late_launch_does_not_undo_it(self, lab):
        platform = lab.platform()
        await platform.apply(remove(7))
        await platform.apply(remove(7))
        await platform.apply(launch(7))
        assert await platform.list() == ()

    async def test_events_come_in_order(self, lab):
        platform = lab.platform()
        async with watching(platform) as watch:
            assert watch.listed == ()
            await platform.apply(launch(0))
            added = await watch.next()
            assert isinstance(added, NodeChanged)
            assert added.kind is NodeEventKind.ADDED
            running = added if added.node.phase is NodePhase.RUNNING else await watch.until(0, NodePhase.RUNNING)
            lab.end(0, 0)
            ended = await watch.until(0, NodePhase.SUCCEEDED)
            await platform.apply(remove(0))
            deleted = await watch.until(0, NodePhase.DELETED)
        assert running.node.rank == 0
        assert (ended.kind, deleted.kind) == (NodeEventKind.MODIFIED, NodeEventKind.DELETED)

    @pytest.mark.parametrize(
        ("exit_code", "phase", "reason"),
        [
            (0, NodePhase.SUCCEEDED, NodeExit.SUCCEEDED),
            (1, NodePhase.FAILED, NodeExit.FATAL),
            (3, NodePhase.FAILED, NodeExit.UNKNOWN),
            (201, NodePhase.FAILED, NodeExit.HARDWARE),
            (128 + signal.SIGKILL, NodePhase.FAILED, NodeExit.KILLED),
            (128 + signal.SIGABRT, NodePhase.FAILED, NodeExit.FATAL),
        ],
    )
    async def test_the_end_of_a_node_is_told_with_code_and_reason(self, lab, exit_code, phase, reason):
        platform = lab.platform()
        await run_nodes(platform, 0)
        async with watching(platform) as watch:
            lab.end(0, exit_code)
            seen = (await watch.until(0, phase)).node
        assert (seen.exit_code, seen.exit_reason) == (exit_code, reason)

    async def test_a_node_that_exceeds_its_memory_ends_as_out_of_memory(self, lab):
        platform = lab.platform()
        if not platform.capabilities.can_limit_memory:
            pytest.skip("this platform cannot limit memory here")
        async with watching(platform) as watch:
            await platform.apply(launch(0, memory_mb=64))
            await watch.until(0, NodePhase.RUNNING)
            lab.exhaust_memory(0)
            seen = (await watch.until(0, NodePhase.FAILED)).node
        assert seen.exit_reason is NodeExit.OOM

    async def test_a_watch_that_begins_late_sees_who_ended_before(self, lab):
        platform = lab.platform()
        await run_nodes(platform, 0, 1)
        async with watching(platform):
            pass
        async with watching(platform) as other:  # tells us that it has happened, while the first watch is away
            lab.end(0, 3)
            await other.until(0, NodePhase.FAILED)
        async with watching(platform) as watch:
            nodes = {node.id: node for node in watch.listed}
        assert (nodes[PlatformId(0)].phase, nodes[PlatformId(0)].exit_code) == (NodePhase.FAILED, 3)
        assert nodes[PlatformId(1)].phase is NodePhase.RUNNING

    async def test_two_watches_see_the_same(self, lab):
        platform = lab.platform()
        async with watching(platform) as one, watching(lab.platform()) as other:
            await platform.apply(launch(0))
            assert await one.next() == await other.next()

    async def test_a_node_that_is_removed_while_it_runs_vanishes(self, lab):
        platform = lab.platform()
        await run_nodes(platform, 0, 1)
        async with watching(platform) as watch:
            await platform.apply(remove(0))
            seen = (await watch.until(0, NodePhase.DELETED)).node
        assert (seen.exit_reason, seen.message) == (NodeExit.NONE, "scaled down"), "nobody else took it away"
        assert [node.id for node in await platform.list()] == [1]

    async def test_an_older_master_changes_nothing(self, lab):
        platform = lab.platform()
        await platform.apply(launch(0, master_epoch=5))
        for intent in (launch(1, master_epoch=4), remove(0, master_epoch=4)):
            with pytest.raises(StaleMaster, match="epoch 4") as caught:
                await platform.apply(intent)
            assert caught.value.code == "old-master"
        assert [node.id for node in await platform.list()] == [0]
        await platform.apply(remove(0, master_epoch=6))

    async def test_a_list_tells_a_master_without_a_journal_where_to_count_on(self, lab):
        platform = lab.platform()
        await platform.apply(launch(2, master_epoch=5))
        await platform.apply(remove(2, master_epoch=5))
        async with watching(platform) as watch:
            assert (watch.first.master_epoch, watch.first.next_id) == (5, 3)

    async def test_a_launch_without_room_is_not_taken_and_can_be_tried_again(self, lab):
        platform = lab.platform()
        await run_nodes(platform, 0, 1, 2)
        with pytest.raises(LaunchNotTaken, match="3 of at most 3"):
            await platform.apply(launch(3))
        assert len(await platform.list()) == 3
        async with watching(platform) as watch:
            await platform.apply(remove(1))  # removals go on
            await watch.until(1, NodePhase.DELETED)
            await room_is_taken(platform, launch(3))
            await watch.until(3, NodePhase.RUNNING)

    async def test_room_shrinks_with_each_node_and_grows_with_each_end(self, lab):
        platform = lab.platform()
        if not platform.capabilities.knows_room:
            pytest.skip("this platform does not know its room")
        assert (await platform.room(Resource())).free == 3
        await run_nodes(platform, 0, 1)
        assert (await platform.room(Resource())).free == 1
        await run_nodes(platform, 2)
        full = await platform.room(Resource())
        assert (full.free, "3 of at most 3" in full.reason) == (0, True), full.reason
        async with watching(platform) as watch:
            lab.end(0, 0)
            await watch.until(0, NodePhase.SUCCEEDED)
        await room_becomes(platform, 1)

    async def test_room_is_that_of_all_jobs_together(self, lab):
        ours, theirs = lab.platform(), lab.platform("job-b")
        if not ours.capabilities.knows_room:
            pytest.skip("this platform does not know its room")
        await run_nodes(theirs, 0)
        assert (await ours.room(Resource())).free == 2

    async def test_there_is_no_room_for_a_node_that_is_larger_than_any_machine(self, lab):
        platform = lab.platform()
        if not platform.capabilities.knows_room:
            pytest.skip("this platform does not know its room")
        room = await platform.room(Resource(memory_mb=1 << 40))
        assert room.free == 0
        assert room.reason

    async def test_a_question_for_room_that_makes_no_sense_is_refused(self, lab):
        with pytest.raises(Rejected, match="resources must be at least 0"):
            await lab.platform().room(Resource(cpu=-1.0))

    async def test_two_jobs_do_not_see_each_others_nodes(self, lab):
        ours, theirs = lab.platform(), lab.platform("job-b")
        await run_nodes(ours, 0)
        async with watching(theirs) as watch:
            assert watch.listed == ()
            await theirs.apply(remove(0, master_epoch=9))
            await theirs.apply(launch(1, rank=0, master_epoch=9))
            assert (await watch.until(1, NodePhase.RUNNING)).node.rank == 0
        assert [node.id for node in await ours.list()] == [0]
        await ours.apply(launch(0, master_epoch=1))  # the other job's epoch is no business of ours

    @pytest.mark.parametrize(
        ("intent", "what"),
        [
            (launch(-1), "node ids must be 0 or more"),
            (launch(0, rank=-2), "ranks are 0 or more"),
            (launch(0, memory_mb=-1), "resources must be at least 0"),
            (
                LaunchNode(id=PlatformId(0), node_type=NodeType.WORKER, rank=0, name=""),
                "must have printable characters",
            ),
            (remove(0, grace=float("nan")), "give 0 or more"),
        ],
    )
    async def test_an_intent_that_makes_no_sense_is_refused_for_good(self, lab, intent, what):
        platform = lab.platform()
        with pytest.raises(Rejected, match=what) as caught:
            await platform.apply(intent)
        assert caught.value.code == "bad-intent"
        assert await platform.list() == ()

    async def test_a_node_never_becomes_another(self, lab):
        platform = lab.platform()
        await run_nodes(platform, 0)
        with pytest.raises(Rejected, match="give a new node a new id"):
            await platform.apply(launch(0, rank=1))
