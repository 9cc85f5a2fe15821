"""
What the master sees of its pods: one copy of them, made into sights for every watch.

Several things that a sight depends on are not in a pod: whether the deletion is our own, how long a state has lasted,
and what was told before. They are kept here, once per platform, so that all watches see the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from dlrover.platforms.base import Sight
from dlrover.platforms.kubernetes.exits import PodWait, gone_node_of, identity_of, is_left_by_main, node_of, wait_of
from dlrover.platforms.kubernetes.informer import ObjectChanged, ObjectDeleted, ObjectSight, ObjectsListed
from dlrover.platforms.kubernetes.objects import Pod
from dlrover.protocol.messages.fleet import (
    LaunchNode,
    NodeChanged,
    NodeEventKind,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    RemoveNode,
)
from dlrover.protocol.messages.identity import PlatformId

KEPT_FAILED = 10
"""Failed pods of each type that stay, so that their logs can be read."""
MAX_UNREAD = 10_000
"""Sights for a watch that does not read. Then it gets a full list instead."""

_ENDED = (NodePhase.SUCCEEDED, NodePhase.FAILED)


@dataclass(eq=False)
class _Timed:
    wait: PodWait
    began_at: float
    timer: asyncio.TimerHandle


class PodLookout:
    """`take` is fed by the informer; `sights` is what a watch reads. It calls no server."""

    def __init__(
        self,
        *,
        listing: Callable[[tuple[PlatformNode, ...]], NodesListed],
        on_spare: Callable[[Pod, str], None] = lambda pod, reason: None,
    ) -> None:
        """
        `listing`: a full list with what the ledger adds. `on_spare`: this pod may go, and why. It has ended, and either
        only its sidecars run on or enough failed ones of its type stay.
        """
        self._listing = listing
        self._on_spare = on_spare
        self._pods: dict[str, Pod] = {}
        """By uid."""
        self._uids: dict[PlatformId, str] = {}
        self._shown: dict[str, PlatformNode] = {}
        """As last told, by the uid of the pod."""
        self._removals: dict[PlatformId, RemoveNode] = {}
        self._timed: dict[str, _Timed] = {}
        self._watches: list[asyncio.Queue[Sight]] = []
        self.is_listed = asyncio.Event()

    # What the platform asks and tells.

    def expect(self, removal: RemoveNode) -> None:
        """We delete the pod of this node: its end is our own."""
        self._removals[removal.id] = removal

    def pod_of(self, node: PlatformId) -> Pod | None:
        return self._pods.get(self._uids.get(node, ""))

    def launch_of(self, node: PlatformId) -> LaunchNode | None:
        pod = self.pod_of(node)
        return None if pod is None else identity_of(pod)

    def judge(self, pod: Pod) -> PlatformNode | None:
        """The pod as a node, with all that is known about it. None: it is no node of the job."""
        launch = identity_of(pod)
        if launch is None:
            return None
        told = self._shown.get(pod.metadata.uid)
        if told is not None and told.phase is NodePhase.DELETED:
            return told
        removal = self._removals.get(launch.id)
        node = node_of(pod, removal=removal, waited=self._waited(pod))
        if told is not None and told.phase in _ENDED and pod.metadata.deletion_timestamp is not None:
            return told  # it ended before; what its deletion does to it is no news
        return node

    def nodes(self) -> tuple[PlatformNode, ...]:
        return tuple(sorted(self._shown.values(), key=lambda node: node.id))

    async def sights(self) -> AsyncIterator[Sight]:
        await self.is_listed.wait()
        queue: asyncio.Queue[Sight] = asyncio.Queue()
        self._watches.append(queue)
        try:
            yield self._listing(self.nodes())
            while True:
                yield await queue.get()
        finally:
            self._watches.remove(queue)

    def close(self) -> None:
        for timed in self._timed.values():
            timed.timer.cancel()
        self._timed.clear()

    # What the informer tells.

    def take(self, sight: ObjectSight[Pod]) -> None:
        match sight:
            case ObjectsListed():
                self._take_list(sight.objects)
            case ObjectChanged():
                self._take_pod(sight.object)
            case ObjectDeleted():
                self._take_end(sight.object)

    def _take_list(self, pods: tuple[Pod, ...]) -> None:
        known = set(self._shown)
        self._pods = {pod.metadata.uid: pod for pod in pods}
        self._uids.clear()
        self._shown = {uid: node for uid, node in self._shown.items() if uid in self._pods}
        for uid in known - set(self._shown):
            self._clear(uid)
        for pod in pods:
            self._time(pod)
            if (node := self.judge(pod)) is not None:
                self._shown[pod.metadata.uid] = node
                self._uids[node.id] = pod.metadata.uid
        self.is_listed.set()
        self._tell(self._listing(self.nodes()))
        self._trim()

    def _take_pod(self, pod: Pod) -> None:
        self._pods[pod.metadata.uid] = pod
        self._time(pod)
        self._show(pod)

    def _take_end(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        last = self.judge(pod)
        told = self._shown.pop(uid, None)
        self._pods.pop(uid, None)
        self._clear(uid)
        if last is None:
            return
        if self._uids.get(last.id) == uid:
            del self._uids[last.id]
        removal = self._removals.pop(last.id, None)
        if told is None or told.phase is not NodePhase.DELETED:
            self._tell(NodeChanged(kind=NodeEventKind.DELETED, node=gone_node_of(last, removal)))

    def _show(self, pod: Pod) -> None:
        node = self.judge(pod)
        told = self._shown.get(pod.metadata.uid)
        if node is None or node == told:
            return
        self._shown[pod.metadata.uid] = node
        self._uids[node.id] = pod.metadata.uid
        if node.phase is NodePhase.DELETED:
            kind = NodeEventKind.DELETED
        else:
            kind = NodeEventKind.ADDED if told is None else NodeEventKind.MODIFIED
        self._tell(NodeChanged(kind=kind, node=node))
        if node.phase is NodePhase.FAILED:
            self._trim()

    def _tell(self, sight: Sight) -> None:
        for queue in self._watches:
            if queue.qsize() >= MAX_UNREAD:
                while not queue.empty():
                    queue.get_nowait()
                sight = self._listing(self.nodes())
            queue.put_nowait(sight)

    # What takes time.

    def _time(self, pod: Pod) -> None:
        uid, wait = pod.metadata.uid, wait_of(pod)
        timed = self._timed.get(uid)
        if timed is not None and timed.wait == wait:
            return
        self._clear(uid)
        if wait is not None:
            loop = asyncio.get_running_loop()
            self._timed[uid] = _Timed(wait, loop.time(), loop.call_later(wait.limit, self._time_is_over, uid))

    def _time_is_over(self, uid: str) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        if is_left_by_main(pod):
            self._on_spare(pod, "its main container ended while other containers kept running")
        else:
            self._show(pod)

    def _waited(self, pod: Pod) -> float:
        timed = self._timed.get(pod.metadata.uid)
        if timed is None or timed.wait != wait_of(pod):
            return 0.0
        # The timer may run a little early by its clock, and must not see one instant less than the limit.
        elapsed = asyncio.get_running_loop().time() - timed.began_at
        return timed.wait.limit if elapsed >= timed.wait.limit - 0.1 else elapsed

    def _clear(self, uid: str) -> None:
        timed = self._timed.pop(uid, None)
        if timed is not None:
            timed.timer.cancel()

    def _trim(self) -> None:
        """Let the oldest failed pods of each type go."""
        failed: dict[NodeType, list[tuple[PlatformId, str]]] = {}
        for uid, node in self._shown.items():
            if node.phase is NodePhase.FAILED and self._pods[uid].metadata.deletion_timestamp is None:
                failed.setdefault(node.node_type, []).append((node.id, uid))
        for ended in failed.values():
            for _, uid in sorted(ended)[:-KEPT_FAILED]:
                self._on_spare(self._pods[uid], f"only the newest {KEPT_FAILED} failed pods of each type are kept")
