"""What the pod platform does beyond the contract: losses, refusals, quotas, and jobs made anew under their name."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial

import pytest
from msgspec.structs import replace

from dlrover.master.platform_driver import PlatformDriver
from dlrover.platforms.base import LaunchNotTaken
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.informer import InformerTiming
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.fleet import (
    FleetSpec,
    NodeChanged,
    NodeExit,
    NodePhase,
    NodesListed,
    NodeType,
    ReplicaSpec,
    Resource,
)
from tests.kubernetes.kubelet.client import ApiError
from tests.kubernetes.platform.lab import ELASTIC_JOBS, PodLab
from tests.kubernetes.server.faults import Fault
from tests.master.test_platform_driver import StandInJob
from tests.platforms.contract import DEADLINE, JOB, launch, remove, run_nodes, watching

QUICK = InformerTiming(first_delay=0.02, longest_delay=0.2)


def pod_of(node: int, job: str = JOB) -> str:
    return names.pod_name(job, "worker", node)


@pytest.fixture
async def large(server):
    async with PodLab(server.kubeconfig, capacity=0) as built:
        yield built


async def until(condition) -> None:
    """For what only a look at the server tells."""
    async with asyncio.timeout(DEADLINE):
        while not await condition():  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.02)


# Losses.


async def test_a_deleted_pod_is_told_at_once_and_only_once(lab):
    """The sight comes with the deletion time and not with the end of the object."""
    platform = lab.platform()
    await run_nodes(platform, 0)
    async with watching(platform) as watch:
        lab.is_awake.clear()  # the pod goes on terminating
        await lab.cluster.delete(lab.path(pod_of(0)), grace=30)
        seen = await watch.until(0, NodePhase.DELETED)
        assert (seen.node.exit_reason, seen.node.message) == (NodeExit.KILLED, "deleted")
        assert pod_of(0) in await lab.pods(), "its object is still there"
        [listed] = await platform.list()
        assert listed.phase is NodePhase.DELETED
        await platform.apply(launch(1))
        lab.is_awake.set()
        while True:
            sight = await watch.next()
            assert isinstance(sight, NodeChanged)
            assert sight.node.id == 1, f"nothing more is told of the node that is gone: {sight}"
            if sight.node.phase is NodePhase.RUNNING:
                break


async def test_thirty_of_thirty_two_pods_lost_at_once_are_replaced(large):
    """The figure is 1 s; a loaded machine gets ten times as long."""
    platform = large.platform()
    async with watching(platform) as watch:
        await asyncio.gather(*(platform.apply(launch(node)) for node in range(32)))
        running: set[int] = set()
        while len(running) < 32:
            sight = await watch.next()
            if isinstance(sight, NodeChanged) and sight.node.phase is NodePhase.RUNNING:
                running.add(sight.node.id)
        asked_at: dict[int, float] = {}
        accepted: dict[int, float] = {}
        replacing: list[asyncio.Future[None]] = []

        async def delete(node: int) -> None:
            asked_at[node] = time.monotonic()
            await large.cluster.delete(large.path(pod_of(node)), grace=30)

        async def relaunch(node: int) -> None:
            await platform.apply(launch(node + 32, rank=node))
            accepted[node] = time.monotonic()

        deleting = asyncio.gather(*(delete(node) for node in range(30)))
        while len(replacing) < 30:
            sight = await watch.next()
            if isinstance(sight, NodeChanged) and sight.node.phase is NodePhase.DELETED and sight.node.id < 30:
                replacing.append(asyncio.ensure_future(relaunch(sight.node.id)))
        await asyncio.gather(deleting, *replacing)
    assert sorted(accepted) == list(range(30))
    slowest = max(accepted[node] - asked_at[node] for node in accepted)
    assert slowest < 10.0, f"{slowest:.1f} s"
    pods = await large.pods()
    assert {pod_of(node) for node in range(30, 62)} <= set(pods)


# Refusals and retries.


@pytest.mark.parametrize(
    ("fault", "error", "what"),
    [
        (Fault(effect="status", verb="create", plural="pods", code=500), Unavailable, "injected"),
        (Fault(effect="status", verb="create", plural="pods", code=429, retry_after=7), Unavailable, "throttled"),
        (Fault(effect="status", verb="create", plural="pods", code=403), Unavailable, "forbidden"),
        (Fault(effect="html", verb="create", plural="pods"), Unavailable, "Sign in"),
        (Fault(effect="status", verb="update", plural="configmaps", code=500), Unavailable, "injected"),
        (Fault(effect="status", verb="update", plural="configmaps", code=403), Unavailable, "cannot be written"),
    ],
)
async def test_a_launch_that_fails_on_the_way_is_tried_again(server, lab, fault, error, what):
    platform = lab.platform()
    server.faults.inject(fault)
    with pytest.raises(error, match=what):
        await platform.apply(launch(0))
    assert await lab.pods() == {}
    server.faults.withdraw()
    await platform.apply(launch(0))
    assert set(await lab.pods()) == {pod_of(0)}


async def test_a_create_whose_answer_is_lost_makes_one_pod(server, lab):
    platform = lab.platform()
    server.faults.inject(Fault(effect="lose", verb="create", plural="pods", times=1))
    with pytest.raises(Unavailable):
        await platform.apply(launch(0))
    assert (await lab.ledger())["used"] == "0+", "the next attempt may create it"
    await platform.apply(launch(0))
    assert set(await lab.pods()) == {pod_of(0)}
    with pytest.raises(Rejected, match="give a new node a new id"):
        await platform.apply(launch(0, rank=5))


async def test_marks_of_answered_creates_are_cleared(lab):
    platform = lab.platform()
    await platform.apply(launch(0))
    assert (await lab.ledger())["used"] == "0+"

    async def is_cleared() -> bool:
        return (await lab.ledger())["used"] == "0"

    await until(is_cleared)


async def test_a_template_that_the_server_does_not_take_is_rejected_with_its_sentence(lab):
    platform = lab.platform()
    intent = replace(launch(0), priority="no-such-class")
    with pytest.raises(Rejected, match="no-such-class"):
        await platform.apply(intent)
    assert await lab.pods() == {}


async def test_a_quota_that_leaves_nothing_is_told_in_numbers(lab):
    platform = lab.platform()
    await run_nodes(platform, 0, 1, 2)
    with pytest.raises(LaunchNotTaken, match=r"^worker-3: 3 of at most 3 pods are in use \(quota few\)$"):
        await platform.apply(launch(3))


async def test_a_pod_without_a_grace_gets_one_second(lab):
    """With 0 the server would forget a pod whose processes run."""
    platform = lab.platform()
    await run_nodes(platform, 0)
    lab.is_awake.clear()
    await platform.apply(remove(0, grace=0.0))
    pod = (await lab.pods())[pod_of(0)]
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 1


async def test_a_node_that_was_never_seen_is_found_and_removed(lab):
    """Made by the master before, a moment ago: no event has come yet, and its mark says that it may be there."""
    first, second = lab.platform(), lab.platform()
    async with watching(second):
        await first.apply(launch(0))
        await second.apply(remove(0, master_epoch=2))

    async def is_gone() -> bool:
        pod = (await lab.pods()).get(pod_of(0))
        return pod is None or "deletionTimestamp" in pod["metadata"]

    await until(is_gone)
    assert (await lab.ledger()) == {"epoch": "2", "used": "0", "plans": ""}


async def test_a_removal_does_not_hit_another_pod_of_the_same_name(server, lab):
    """Our copy is old: the pod is gone, and another one has its name."""
    platform = lab.platform()
    await run_nodes(platform, 0)
    server.faults.inject(Fault(effect="hang", verb="watch", plural="pods"))
    server.faults.inject(Fault(effect="hang", verb="list", plural="pods"))
    server.faults.cut_watches()
    await lab.cluster.delete(lab.path(pod_of(0)), grace=0)
    body = {"metadata": {"name": pod_of(0)}, "spec": {"containers": [{"name": "main", "image": "other"}]}}
    other = await lab.create(f"/api/v1/namespaces/{lab.namespace}/pods", body)
    await platform.apply(remove(0))
    found = await lab.cluster.get(lab.path(pod_of(0)))
    assert found["metadata"]["uid"] == other["metadata"]["uid"]
    assert "deletionTimestamp" not in found["metadata"]


async def test_failed_pods_stay_for_their_logs_but_not_all_of_them(large):
    platform = large.platform()
    async with watching(platform) as watch:
        for node in range(12):
            await platform.apply(launch(node, rank=0))
            await watch.until(node, NodePhase.RUNNING)
            large.end(node, 1)
            await watch.until(node, NodePhase.FAILED)

        async def are_ten() -> bool:
            return set(await large.pods()) == {pod_of(node) for node in range(2, 12)}

        await until(are_ten)


# The API server away.


async def test_nothing_is_gone_while_the_server_is_away_and_the_first_intent_passes_after(server, lab):
    """With seconds instead of minutes (the whole time is in `make chaos`)."""
    platform = lab.platform(timing=QUICK)
    await run_nodes(platform, 0, 1)
    async with watching(platform) as watch:
        await server.stop()
        with pytest.raises(Unavailable):
            await platform.apply(launch(2))
        with pytest.raises(Unavailable):
            await platform.list()
        async with watching(platform) as other:
            assert [node.phase for node in other.listed] == [NodePhase.RUNNING] * 2, "the copy stays as it is"
        await server.start()
        back_at = time.monotonic()
        async with asyncio.timeout(DEADLINE):
            while True:
                with contextlib.suppress(Unavailable):
                    await platform.apply(launch(2))
                    break
        assert time.monotonic() - back_at < 100.0
        while True:
            sight = await watch.next()
            nodes = sight.nodes if isinstance(sight, NodesListed) else (sight.node,)
            assert all(node.phase is not NodePhase.DELETED for node in nodes), f"nothing was gone: {sight}"
            if any(node.id == 2 and node.phase is NodePhase.RUNNING for node in nodes):
                break


# Names that are used again.


async def test_a_job_made_anew_under_its_name_takes_no_old_pod_for_its_own(lab):
    """The old pods still terminate meanwhile."""
    old = lab.platform()
    await run_nodes(old, 0)
    lab.is_awake.clear()
    await lab.cluster.delete(lab.path(pod_of(0)), grace=30)
    await lab.cluster.delete(f"{ELASTIC_JOBS.format(lab.namespace)}/{JOB}")

    async def is_collected() -> bool:
        try:
            await lab.ledger()
        except ApiError as error:
            return error.code == 404
        return False

    await until(is_collected)
    await lab.add_job(JOB)
    new = lab.platform()
    assert await new.list() == (), "the old pod still terminates, and is none of ours"
    async with watching(new) as watch:
        assert (watch.first.nodes, watch.first.next_id) == ((), 0)
        with pytest.raises(LaunchNotTaken, match="belongs to another job"):
            await new.apply(launch(0))
        with pytest.raises(Unavailable, match="belongs to a newer job of the same name"):
            await old.apply(launch(5, master_epoch=9))
        assert (await lab.ledger())["epoch"] == "1", "the old job's master does not write the new job's ledger"
        lab.is_awake.set()

        async def is_taken() -> bool:
            try:
                await new.apply(launch(0))
            except LaunchNotTaken:
                return False
            return True

        await until(is_taken)
        await watch.until(0, NodePhase.RUNNING)
    assert (await lab.pods())[pod_of(0)]["metadata"]["labels"][names.JOB_UID] == lab.uids[JOB]


# Other types.


async def test_the_masters_own_pod_is_no_node(lab):
    body = {
        "metadata": {
            "name": "elasticjob-job-a-dlrover-master-0",
            "labels": {names.JOB_UID: lab.uids[JOB], names.REPLICA_TYPE: names.MASTER_TYPE, names.REPLICA_INDEX: "0"},
        },
        "spec": {"containers": [{"name": "main", "image": "m"}]},
    }
    await lab.create(f"/api/v1/namespaces/{lab.namespace}/pods", body)
    platform = lab.platform()
    assert await platform.list() == ()
    async with watching(platform) as watch:
        await platform.apply(replace(launch(0), node_type=NodeType.PS, service_address="s"))
        sight = await watch.next()
        assert isinstance(sight, NodeChanged)
        assert (sight.node.id, sight.node.node_type, sight.node.service_address) == (0, NodeType.PS, "s")


# Room.


async def test_room_is_unknown_without_the_right_to_see_the_machines(server, lab):
    platform = lab.platform()
    server.faults.inject(Fault(effect="status", verb="list", plural="nodes", code=403))
    room = await platform.room(Resource())
    assert (room.free, room.reason) == (
        None,
        "quotas leave room for 3, and the master may not list nodes and pods of the cluster",
    )
    server.faults.withdraw()
    await run_nodes(platform, 0, 1, 2)
    server.faults.inject(Fault(effect="status", verb="list", plural="nodes", code=403))
    assert (await platform.room(Resource())).free == 0, "the quota alone says enough"


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_five_minutes_without_a_server_lose_nothing(server, lab):
    """As a master drives the platform, with its own patience."""
    platform = lab.platform()
    await run_nodes(platform, 0, 1)
    job = StandInJob()
    keeper = PlatformDriver(platform, FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=3)}), job.tell)
    running = asyncio.ensure_future(keeper.run())
    await job.until(1, NodesListed)
    await server.stop()
    keeper.take(launch(2))
    await asyncio.sleep(300)
    assert not [word for word in job.heard if isinstance(word, NodeChanged)], "nothing is declared gone"
    await server.start()
    back_at = time.monotonic()
    await until(partial(_is_there, lab, 2))
    assert time.monotonic() - back_at <= 10.0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await keeper.drain()


async def _is_there(lab: PodLab, node: int) -> bool:
    return pod_of(node) in await lab.pods()
