"""What watches see of pods: each change once, ends that stay, and states that mean something else after a while."""

from __future__ import annotations

import asyncio

import pytest

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.exits import GONE_LIMIT, SIDECAR_LIMIT, STUCK_LIMIT
from dlrover.platforms.kubernetes.informer import ObjectChanged, ObjectDeleted, ObjectsListed
from dlrover.platforms.kubernetes.lookout import KEPT_FAILED, MAX_UNREAD, PodLookout
from dlrover.platforms.kubernetes.objects import Pod
from dlrover.protocol.messages.fleet import (
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    PlatformNode,
)
from tests.platforms.kubernetes.test_exits import DELETED, REMOVAL, RUNNING, ended, pod, status_of


def running(**metadata: object) -> Pod:
    return pod(status_of(RUNNING, phase="Running"), metadata={"uid": "u", **metadata})


class Scene:
    def __init__(self) -> None:
        self.spared: list[str] = []
        self.lookout = PodLookout(
            listing=lambda nodes: NodesListed(nodes=nodes),
            on_spare=lambda spare, reason: self.spared.append(spare.metadata.uid),
        )
        self.sights = self.lookout.sights()

    def show(self, *pods: Pod) -> None:
        for each in pods:
            self.lookout.take(ObjectChanged(each))

    next: asyncio.Future


@pytest.fixture
async def scene():
    made = Scene()
    made.lookout.take(ObjectsListed(()))
    made.next = asyncio.ensure_future(anext(made.sights))
    await asyncio.sleep(0)
    yield made
    made.next.cancel()
    made.lookout.close()


@pytest.fixture
def jump(monkeypatch):
    """Moves the clock of the event loop on, so that its timers are due."""

    async def move(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time
        monkeypatch.setattr(loop, "time", lambda: before() + seconds)
        for _ in range(3):
            await asyncio.sleep(0)

    return move


async def changes(scene: Scene) -> list[tuple[NodeEventKind, NodePhase]]:
    return [(sight.kind, sight.node.phase) for sight in await drain(scene) if isinstance(sight, NodeChanged)]


async def drain(scene: Scene) -> list[NodeChanged | NodesListed]:
    """Everything that waits for the watch, without waiting for more."""
    found: list[NodeChanged | NodesListed] = []
    while True:
        for _ in range(3):
            await asyncio.sleep(0)
        if not scene.next.done():
            return found
        found.append(scene.next.result())
        scene.next = asyncio.ensure_future(anext(scene.sights))


async def test_what_does_not_change_what_we_read_is_no_news(scene):
    scene.show(running(), running(resourceVersion="2"), running(resourceVersion="3", labels={}))
    assert await changes(scene) == [(NodeEventKind.ADDED, NodePhase.RUNNING)]


async def test_a_node_that_is_gone_is_told_once_whatever_follows(scene):
    failed = pod(
        status_of(ended(143, "Error", finishedAt="2026-05-01T10:00:02Z"), phase="Failed"),
        metadata={"uid": "u", **DELETED},
    )
    target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drain"}
    marked = pod(status_of(RUNNING, phase="Running", conditions=[target]), metadata={"uid": "u", **DELETED})
    scene.show(running(), running(**DELETED), marked, failed)
    scene.lookout.take(ObjectDeleted(failed))
    assert await changes(scene) == [
        (NodeEventKind.ADDED, NodePhase.RUNNING),
        (NodeEventKind.DELETED, NodePhase.DELETED),
    ]
    assert scene.lookout.nodes() == ()


async def test_an_end_that_was_told_stays_while_the_pod_is_deleted(scene):
    """Also if the kubelet's clock says that it ended after the deletion was asked for."""
    state = ended(1, "Error", finishedAt="2026-05-01T10:00:30Z")
    over = pod(status_of(state, phase="Failed"), metadata={"uid": "u"})
    leaving = pod(status_of(state, phase="Failed"), metadata={"uid": "u", **DELETED})
    scene.show(running(), over, leaving)
    scene.lookout.take(ObjectDeleted(leaving))
    *_, last = await drain(scene)
    assert isinstance(last, NodeChanged)
    assert (last.node.phase, last.node.exit_reason) == (NodePhase.DELETED, NodeExit.FATAL)


async def test_our_own_removal_ends_without_a_reason_of_others(scene):
    scene.show(running())
    scene.lookout.expect(REMOVAL)
    scene.show(running(**DELETED))
    scene.lookout.take(ObjectDeleted(running(**DELETED)))
    *_, removing, last = await drain(scene)
    assert isinstance(removing, NodeChanged)
    assert isinstance(last, NodeChanged)
    assert removing.node.message == "being removed"
    assert (last.node.exit_reason, last.node.message) == (NodeExit.NONE, "scaled down")


async def test_a_list_drops_what_is_gone_and_is_told_whole(scene):
    scene.show(running())
    scene.lookout.take(ObjectsListed((running(name="job-edljob-worker-7", uid="other"),)))
    *_, listed = await drain(scene)
    assert isinstance(listed, NodesListed)
    assert [node.id for node in listed.nodes] == [7]
    assert scene.lookout.pod_of(listed.nodes[0].id).metadata.uid == "other"


async def test_a_pod_that_can_never_start_fails_when_its_minute_is_over(scene, jump):
    state = {"waiting": {"reason": "InvalidImageName", "message": "m"}}
    scene.show(pod(status_of(state, phase="Pending"), metadata={"uid": "u"}))
    await jump(STUCK_LIMIT - 5)
    scene.show(pod(status_of(state, phase="Pending"), metadata={"uid": "u", "resourceVersion": "9"}))
    assert await changes(scene) == [(NodeEventKind.ADDED, NodePhase.PENDING)]
    await jump(5.0)
    assert await changes(scene) == [(NodeEventKind.MODIFIED, NodePhase.FAILED)]


async def test_a_secret_that_comes_in_time_ends_the_wait(scene, jump):
    state = {"waiting": {"reason": "CreateContainerConfigError", "message": "m"}}
    scene.show(pod(status_of(state, phase="Pending"), metadata={"uid": "u"}))
    await jump(STUCK_LIMIT - 5)
    scene.show(running())
    await jump(60.0)
    assert (await changes(scene))[-1] == (NodeEventKind.MODIFIED, NodePhase.RUNNING)


async def test_a_removal_that_its_machine_does_not_confirm_ends_in_time(scene, jump):
    scene.show(running())
    scene.lookout.expect(REMOVAL)
    scene.show(running(**DELETED))
    await drain(scene)
    await jump(60 + GONE_LIMIT)
    assert await changes(scene) == [(NodeEventKind.DELETED, NodePhase.DELETED)]


async def test_sidecars_that_run_on_are_ended_after_a_while(scene, jump):
    statuses = [{"name": "proxy", "state": RUNNING}, {"name": "main", "state": ended(0, "Completed")}]
    spec = {"containers": [{"name": "proxy"}, {"name": "main"}]}
    scene.show(pod({"phase": "Running", "containerStatuses": statuses}, metadata={"uid": "u"}, spec=spec))
    await jump(SIDECAR_LIMIT - 5)
    assert scene.spared == []
    await jump(5.0)
    assert scene.spared == ["u"]


async def test_the_newest_failed_pods_stay(scene):
    for number in range(KEPT_FAILED + 2):
        labels = {names.REPLICA_TYPE: "worker", names.REPLICA_INDEX: str(number)}
        metadata = {"uid": f"u{number}", "name": f"p{number}", "labels": labels, "annotations": {}}
        scene.show(pod(status_of(ended(1, "Error"), phase="Failed"), metadata=metadata))
    assert sorted(set(scene.spared)) == ["u0", "u1"]


async def test_a_watch_that_does_not_read_gets_a_list_instead(scene):
    await drain(scene)
    for number in range(MAX_UNREAD + 10):
        scene.show(running(labels={"elasticjob.dlrover/replica-type": "worker", "scheduling/rack-group": str(number)}))
    found = await drain(scene)
    assert len(found) < MAX_UNREAD
    assert any(isinstance(sight, NodesListed) for sight in found)
    last = found[-1]
    node = last.nodes[0] if isinstance(last, NodesListed) else last.node
    assert isinstance(node, PlatformNode)
    assert node.group == MAX_UNREAD + 9
