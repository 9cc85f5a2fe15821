"""
The informer against a server that really has versions, history and selectors.

`test_a_watch_that_is_cut_again_and_again`: a watch that is cut every second for five
minutes, with a 410 as an ERROR event every tenth time. It is short here and of full length under the marker `chaos`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dlrover.platforms.kubernetes.access import find_access
from dlrover.platforms.kubernetes.api import (
    PODS,
    ClusterApi,
    FoundObject,
    NotFound,
    Page,
    PatchKind,
)
from dlrover.platforms.kubernetes.informer import (
    Informer,
    ObjectChanged,
    ObjectDeleted,
    ObjectsListed,
)
from dlrover.platforms.kubernetes.objects import Pod, decode
from tests.kubernetes.server import ApiServer
from tests.kubernetes.server.faults import Fault
from tests.platforms.kubernetes.scripted import until

JOB = "app=dlrover"


def body(name: str, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "dlrover"} | labels},
        "spec": {"containers": [{"name": "main", "image": "train:1"}]},
    }


class Follower:
    """What a reader knows who believes each sight, and how often each pod came and went for it."""

    def __init__(self, informer: Informer[Pod]) -> None:
        self.informer = informer
        self.pods: dict[str, Pod] = {}
        self.came: Counter[str] = Counter()
        self.went: Counter[str] = Counter()

    async def follow(self) -> None:
        async for sight in self.informer.subscribe():
            match sight:
                case ObjectsListed(objects=objects):
                    now = {each.metadata.uid: each for each in objects}
                case ObjectChanged(object=each):
                    now = self.pods | {each.metadata.uid: each}
                case ObjectDeleted(object=each):
                    assert each.metadata.uid in self.pods, "only what is known can go"
                    now = {uid: pod for uid, pod in self.pods.items() if uid != each.metadata.uid}
            self.came.update(now.keys() - self.pods.keys())
            self.went.update(self.pods.keys() - now.keys())
            self.pods = now


@contextlib.asynccontextmanager
async def following(server: ApiServer) -> AsyncIterator[tuple[ClusterApi, Follower]]:
    async with ClusterApi(find_access({}, kubeconfig=server.kubeconfig), timeout=60) as api:
        informer = Informer(api, PODS, Pod, namespace="default", labels=JOB, unreadable=Pod.unreadable)
        follower = Follower(informer)
        tasks = [asyncio.create_task(informer.run()), asyncio.create_task(follower.follow())]
        try:
            await informer.listed(60)
            yield api, follower
        finally:
            tasks[0].cancel()
            await asyncio.wait(tasks, timeout=60)
        assert tasks[0].cancelled()
        tasks[1].result()


async def until_same(api: ClusterApi, follower: Follower) -> None:
    """The reader, the informer's copy and the server agree, version by version."""
    listed = await api.list_all(PODS, namespace="default", labels=JOB)
    assert isinstance(listed, Page)
    pods = {pod.metadata.uid: pod for pod in (decode(Pod, item) for item in listed.items)}
    await until(lambda: follower.pods == pods)
    assert {each.metadata.uid: each for each in follower.informer.cache.values()} == pods


async def test_the_copy_follows_creates_changes_selectors_and_deletes() -> None:
    async with ApiServer() as server, following(server) as (api, follower):
        for name in ("a", "b", "c"):
            assert isinstance(await api.create(PODS, body(name), namespace="default"), FoundObject)
        await api.create(PODS, body("foreign") | {"metadata": {"name": "foreign"}}, namespace="default")
        await until_same(api, follower)
        assert set(follower.informer.cache) == {"a", "b", "c"}
        change = {"metadata": {"labels": {"app": "other"}}}
        await api.patch(PODS, "b", change, namespace="default", kind=PatchKind.MERGE)
        assert isinstance(await api.delete(PODS, "c", namespace="default", grace=0), FoundObject)
        assert isinstance(await api.delete(PODS, "d", namespace="default"), NotFound)
        await until_same(api, follower)
        assert set(follower.informer.cache) == {"a"}
        assert server.faults.counts["list", "pods"] == 1 + 2, "the informer's and those of this test"


async def test_many_pods_are_listed_in_pages() -> None:
    async with ApiServer() as server:
        for number in range(1200):
            server.cluster.create("pods", "default", body(f"p{number:04}"))
        async with following(server) as (api, follower):
            await until_same(api, follower)
            assert len(follower.informer.cache) == 1200
            assert server.faults.counts["list", "pods"] == 3 + 3


async def test_a_bookmark_spares_a_list_when_others_fill_the_history() -> None:
    async with ApiServer(history=50, bookmark_every=0.05) as server, following(server) as (api, follower):
        await api.create(PODS, body("a"), namespace="default")
        await until_same(api, follower)
        for number in range(200):  # pods of another job: no event for us, and the history forgets our version
            server.cluster.create("pods", "default", body(f"x{number}", app="other"))
        await until(lambda: int(follower.informer.version) == server.cluster.store.version)
        lists = server.faults.counts["list", "pods"]
        assert server.faults.cut_watches() == 1
        await api.create(PODS, body("b"), namespace="default")
        await until(lambda: "b" in follower.informer.cache)
        assert server.faults.counts["list", "pods"] == lists


async def test_a_server_that_is_away_makes_nothing_gone(caplog: pytest.LogCaptureFixture) -> None:
    async with ApiServer() as server, following(server) as (api, follower):
        for name in ("a", "b"):
            await api.create(PODS, body(name), namespace="default")
        await until_same(api, follower)
        await server.stop()
        server.cluster.create("pods", "default", body("c"))  # happens while we see nothing
        await until(lambda: "the view of the cluster is out of date" in caplog.text)
        assert follower.informer.trouble is not None
        assert "cannot be reached" in follower.informer.trouble
        assert set(follower.informer.cache) == {"a", "b"}
        assert not follower.went
        await server.start()
        await until_same(api, follower)
        assert set(follower.informer.cache) == {"a", "b", "c"}
        assert follower.informer.trouble is None
        assert server.faults.counts["list", "pods"] == 1 + 2, "it watches on and does not list again"


async def cut_again_and_again(*, every: float, times: int) -> None:
    async with ApiServer(bookmark_every=every / 2) as server, following(server) as (api, follower):
        lists = server.faults.counts["list", "pods"]
        churn = asyncio.create_task(churning(server, random.Random(1)))
        num_gone, num_cut = 0, 0
        for number in range(1, times + 1):
            await asyncio.sleep(every)
            gone = None
            if number % 10 == 0:
                gone = server.faults.inject(Fault(effect="gone", verb="watch", plural="pods", times=1))
                num_gone += 1
            num_cut += server.faults.cut_watches()
            await until(lambda gone=gone: gone is None or gone.times == 0)  # type: ignore[misc]
            assert not churn.done(), churn.exception()
        churn.cancel()
        await asyncio.wait((churn,))
        made = server.faults.counts["list", "pods"] - lists
        await until_same(api, follower)
        assert num_gone == times // 10
        assert made <= num_gone, f"{made} lists for {num_gone} times 410"
        assert max(follower.came.values()) == 1, "no pod came twice"
        assert not follower.went or max(follower.went.values()) == 1
        assert follower.came.total() - follower.went.total() == len(follower.pods)
        assert num_cut > times // 2, "nearly every time a watch was there to be cut"
        assert server.faults.counts["watch", "pods"] >= num_cut, "a new one began after each cut"


async def churning(server: ApiServer, chance: random.Random) -> None:
    """Pods come, change and go, ten times a second."""
    async with ClusterApi(find_access({}, kubeconfig=server.kubeconfig), timeout=60) as api:
        alive: list[str] = []
        free = [f"p{number}" for number in range(20)]  # few names, so that a new pod often has the name of an old one
        for number in itertools.count():
            await asyncio.sleep(chance.uniform(0.0, 0.2))
            action = chance.choice(("create", "create", "change", "delete"))
            if not alive or (action == "create" and free):
                alive.append(free.pop(0))
                answer = await api.create(PODS, body(alive[-1]), namespace="default")
            elif action == "change":
                change = {"metadata": {"annotations": {"seen": str(number)}}}
                name = chance.choice(alive)
                answer = await api.patch(PODS, name, change, namespace="default", kind=PatchKind.MERGE)
            else:
                name = alive.pop(chance.randrange(len(alive)))
                free.append(name)
                answer = await api.delete(PODS, name, namespace="default", grace=0)
            assert isinstance(answer, FoundObject), answer


async def test_a_watch_that_is_cut_again_and_again_loses_and_doubles_nothing() -> None:
    await cut_again_and_again(every=0.15, times=60)


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_a_watch_that_is_cut_every_second_for_five_minutes_loses_and_doubles_nothing() -> None:
    await cut_again_and_again(every=1.0, times=300)
