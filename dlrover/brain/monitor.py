"""
`dlrover brain monitor`: a process beside Brain that reads the pods and machines of one Kubernetes cluster, and reports them to Brain.

It lists and watches pods and nodes, and does nothing else with the cluster. It is a process of its own because Brain itself needs no cluster, and one Brain may serve several. Changes are
gathered for some seconds and sent together. While Brain does not answer, the newest state of each pod waits here; a restarted monitor tells all pods again, which changes nothing in Brain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from msgspec import Struct

from dlrover.brain.cluster_sight import gone, is_news, machines_seen, pod_seen
from dlrover.platforms.kubernetes.answers import NODES, PODS
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.informer import Informer, ObjectChanged, ObjectDeleted, ObjectSight, ObjectsListed
from dlrover.platforms.kubernetes.objects import ClusterNode, Pod
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.brain import ClusterSeen, MachinesSeen, PodSeen

log = logging.getLogger(__name__)

MOST_TOLD = 512
"""Pods in one message: a pod takes less than a kilobyte, and Brain takes 1 MiB a second."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0


class MonitorTiming(Struct, frozen=True, kw_only=True):
    """Seconds."""

    gather: float = 5.0
    """For which changes are gathered: all pods are counted for each message about the machines."""
    renew: float = 240.0
    """After which the machines are told again if nothing changed: Brain trusts what it was told for ten minutes."""
    start: float = 60.0
    """Within which the first lists must come."""


USUAL = MonitorTiming()

Tell = Callable[[ClusterSeen], Awaitable[object]]
"""Raises Unavailable, or Rejected."""


class ClusterMonitor:
    """Of one cluster, for one event loop."""

    def __init__(self, api: ClusterApi, tell: Tell, cluster: str, timing: MonitorTiming = USUAL) -> None:
        self._pods: Informer[Pod] = Informer(api, PODS, Pod, namespace=None, unreadable=Pod.unreadable)
        self._machines: Informer[ClusterNode] = Informer(api, NODES, ClusterNode, namespace=None)
        self._tell = tell
        self._cluster = cluster
        self._timing = timing
        self._told: dict[str, PodSeen] = {}
        """By uid, as Brain has them."""
        self._waiting: dict[str, PodSeen] = {}
        """What Brain does not have yet, the oldest change first."""
        self._told_machines: MachinesSeen | None = None
        self._told_at = 0.0
        self._news = asyncio.Event()
        self._failures = 0

    async def run(self) -> None:
        """For ever: cancel it to stop. Raises Unavailable if no list comes in time, and Rejected if Brain refuses for good."""
        informers = (self._pods, self._machines)
        tasks = [asyncio.ensure_future(each.run()) for each in informers]
        try:
            for informer in informers:
                await informer.listed(self._timing.start)
            tasks += [
                asyncio.ensure_future(work) for work in (self._follow_pods(), self._follow_machines(), self._send())
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # none of them ends by itself but with an exception
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _follow_pods(self) -> None:
        async for sight in self._pods.subscribe():
            self._note(sight)
            self._news.set()

    async def _follow_machines(self) -> None:
        async for _ in self._machines.subscribe():
            self._news.set()

    def _note(self, sight: ObjectSight[Pod]) -> None:
        match sight:
            case ObjectsListed(objects=pods):
                there = {pod.metadata.uid for pod in pods}
                for uid, former in {**self._told, **self._waiting}.items():
                    if uid not in there:
                        self._wait_with(gone(former))
                for pod in pods:
                    self._note_pod(pod)
            case ObjectChanged(object=pod):
                self._note_pod(pod)
            case ObjectDeleted(object=pod):
                seen = pod_seen(pod, datetime.now(UTC))
                if seen is not None:
                    self._wait_with(gone(seen))

    def _note_pod(self, pod: Pod) -> None:
        seen = pod_seen(pod, datetime.now(UTC))
        if seen is not None and is_news(seen, self._waiting.get(seen.uid) or self._told.get(seen.uid)):
            self._wait_with(seen)

    def _wait_with(self, seen: PodSeen) -> None:
        self._waiting.pop(seen.uid, None)
        self._waiting[seen.uid] = seen

    async def _send(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.renew):
                    await self._news.wait()
            await asyncio.sleep(self._timing.gather)
            self._news.clear()
            while (message := self._next()) is not None:
                await self._say(message)

    def _next(self) -> ClusterSeen | None:
        """None: Brain knows everything."""
        machines = machines_seen(self._machines.cache.values(), self._pods.cache.values())
        pods = tuple(self._waiting.values())[:MOST_TOLD]
        is_stale = asyncio.get_running_loop().time() - self._told_at >= self._timing.renew
        if not pods and machines == self._told_machines and not is_stale:
            return None
        return ClusterSeen(cluster=self._cluster, machines=machines, pods=pods)

    async def _say(self, message: ClusterSeen) -> None:
        """Until Brain has it, or newer news take its place."""
        try:
            await self._tell(message)
        except Unavailable as error:
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(self._failures, 10))
            if not self._failures:
                log.warning("Brain does not take reports cluster=%s: %s", self._cluster, error)
            self._failures += 1
            await asyncio.sleep(max(error.retry_after or 0.0, wait * random.uniform(0.5, 1.0)))
            return
        if self._failures:
            log.info("Brain takes reports again cluster=%s", self._cluster)
        self._failures = 0
        self._told_machines, self._told_at = message.machines, asyncio.get_running_loop().time()
        for seen in message.pods:
            if self._waiting.get(seen.uid) is seen:
                del self._waiting[seen.uid]
            if seen.is_gone:
                self._told.pop(seen.uid, None)
            else:
                self._told[seen.uid] = seen
