"""The informer's copy stays true through everything that a watch can suffer, with as few lists as possible."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from dlrover.platforms.kubernetes import informer as informers
from dlrover.platforms.kubernetes.access import plain_access
from dlrover.platforms.kubernetes.api import PODS, ClusterApi
from dlrover.platforms.kubernetes.informer import (
    Informer,
    InformerTiming,
    ObjectChanged,
    ObjectDeleted,
    ObjectSight,
    ObjectsListed,
)
from dlrover.platforms.kubernetes.objects import Pod
from dlrover.protocol.errors import Unavailable
from tests.platforms.kubernetes.scripted import (
    Answer,
    Json,
    ScriptedServer,
    bookmark,
    event,
    listing,
    page_of_html,
    pod,
    refuse,
    reply,
    status,
    stream,
    until,
)

QUICK = InformerTiming(first_delay=0.01, longest_delay=0.04)


class Watcher:
    """An informer of pods that runs, and what one subscription has seen."""

    def __init__(self, informer: Informer[Pod], server: ScriptedServer) -> None:
        self.informer = informer
        self.server = server
        self.seen: list[ObjectSight[Pod]] = []

    async def read(self) -> None:
        async for sight in self.informer.subscribe():
            self.seen.append(sight)

    def told(self) -> list[str]:
        return [shown(sight) for sight in self.seen]

    async def until_told(self, *expected: str) -> None:
        try:
            await until(lambda: len(self.seen) >= len(expected))
        except TimeoutError:
            pass
        assert self.told() == list(expected)

    def versions(self) -> list[str]:
        """From which the watches began."""
        return [each.query["resourceVersion"] for each in self.server.requests if "watch" in each.query]


def shown(sight: ObjectSight[Pod]) -> str:
    match sight:
        case ObjectsListed(objects=objects):
            return "listed " + " ".join(sorted(f"{each.metadata.name}:{each.status.phase}" for each in objects))
        case ObjectChanged(object=each):
            return f"changed {each.metadata.name}:{each.status.phase}"
        case ObjectDeleted(object=each):
            return f"deleted {each.metadata.name}:{each.status.phase}"


@contextlib.asynccontextmanager
async def watching(
    *script: Answer | list[Json | bytes], timing: InformerTiming = QUICK, namespace: str | None = "train"
) -> AsyncIterator[Watcher]:
    """A list in the script is a watch that stays open and mute after these lines."""
    async with ScriptedServer() as server:
        server.script = [server.hold(*each) if isinstance(each, list) else each for each in script]
        async with ClusterApi(plain_access(server.url), timeout=60) as api:
            informer = Informer(api, PODS, Pod, namespace=namespace, unreadable=Pod.unreadable, timing=timing)
            watcher = Watcher(informer, server)
            tasks = [asyncio.create_task(informer.run()), asyncio.create_task(watcher.read())]
            try:
                yield watcher
            finally:
                tasks[0].cancel()
                with pytest.raises(asyncio.CancelledError):
                    await tasks[0]
                async with asyncio.timeout(60):
                    await tasks[1]  # a subscription ends with its informer


async def test_a_list_then_each_change() -> None:
    changes = [
        event("ADDED", pod("b", 11, phase="Pending")),
        event("MODIFIED", pod("a", 12, phase="Failed")),
        event("DELETED", pod("a", 13, phase="Failed")),
    ]
    async with watching(reply(listing(pod("a", 3), version=10)), changes) as watcher:
        await watcher.until_told("listed a:Running", "changed b:Pending", "changed a:Failed", "deleted a:Failed")
        assert set(watcher.informer.cache) == {"b"}
        assert watcher.versions() == ["10"]
        query = watcher.server.requests[1].query
        assert query["allowWatchBookmarks"] == "true"
        assert 240 <= int(query["timeoutSeconds"]) <= 300


async def test_a_list_of_several_pages_is_told_once() -> None:
    pages = [reply(listing(pod("a", 3), version=10, token="x")), reply(listing(pod("b", 4), version=10))]
    async with watching(*pages, []) as watcher:
        await watcher.until_told("listed a:Running b:Running")


async def test_after_a_clean_end_the_watch_goes_on_from_the_last_event_or_bookmark() -> None:
    async with watching(
        reply(listing(pod("a", 3), version=10)),
        stream(event("ADDED", pod("b", 11))),
        stream(bookmark(20)),
        [event("ADDED", pod("c", 21))],
    ) as watcher:
        await watcher.until_told("listed a:Running", "changed b:Running", "changed c:Running")
        assert watcher.versions() == ["10", "11", "20"]
        assert watcher.server.count("list") == 1


@pytest.mark.parametrize("tail", [b"", b'{"type": "ADDED", "object": {"metada'])
async def test_after_a_broken_connection_the_watch_goes_on_from_the_last_event(tail: bytes) -> None:
    lines = [event("ADDED", pod("b", 11))] + ([tail] if tail else [])
    async with watching(
        reply(listing(version=10)), stream(*lines, is_cut=True), [event("ADDED", pod("c", 12))]
    ) as watcher:
        await watcher.until_told("listed ", "changed b:Running", "changed c:Running")
        assert watcher.versions() == ["10", "11"]
        assert watcher.server.count("list") == 1


@pytest.mark.parametrize(
    "gone", [refuse(410, "Expired", "too old"), stream(event("ERROR", status(410, "Expired", "too old")))]
)
async def test_a_forgotten_version_costs_one_list(gone: Answer) -> None:
    async with watching(
        reply(listing(pod("a", 3), pod("b", 4), version=10)),
        gone,
        reply(listing(pod("b", 4), pod("c", 30), version=40)),
        [event("MODIFIED", pod("c", 41, phase="Failed"))],
    ) as watcher:
        await watcher.until_told("listed a:Running b:Running", "listed b:Running c:Running", "changed c:Failed")
        assert set(watcher.informer.cache) == {"b", "c"}
        assert watcher.versions() == ["10", "40"]


async def test_a_garbled_stream_costs_one_list() -> None:
    async with watching(
        reply(listing(pod("a", 3), version=10)), stream(b"<html>\n"), reply(listing(pod("a", 3), version=12)), []
    ) as watcher:
        await watcher.until_told("listed a:Running", "listed a:Running")
        await until(lambda: watcher.versions() == ["10", "12"])


async def test_while_the_server_fails_nothing_is_gone_and_one_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=informers.__name__)
    trouble = [
        page_of_html(),
        refuse(500, "InternalError", "etcd"),
        page_of_html(404),
        refuse(403, "Forbidden", "no right"),
    ]
    async with watching(
        reply(listing(pod("a", 3), version=10)),
        *trouble,
        *trouble,
        refuse(410, "Expired", "old"),
        *trouble,
        reply(listing(pod("a", 3), version=50)),
        [event("ADDED", pod("b", 51))],
    ) as watcher:
        await watcher.until_told("listed a:Running", "listed a:Running", "changed b:Running")
        assert watcher.informer.trouble is None
        await until(lambda: len(caplog.records) >= 2)
    assert [(each.levelname, each.getMessage().split(":")[0]) for each in caplog.records] == [
        ("WARNING", "the view of the cluster is out of date and is read again resource=pods"),
        ("INFO", "informer current resource=pods"),
    ]


async def test_a_server_that_only_fails_is_named_and_asked_ever_more_rarely() -> None:
    async with watching(page_of_html(), timing=InformerTiming(first_delay=0.02, longest_delay=0.32)) as watcher:
        await until(lambda: len(watcher.server.times) >= 8)
        with pytest.raises(Unavailable, match=r"No list of pods arrived within 0\.1 s.*Please sign in"):
            await watcher.informer.listed(timeout=0.1)
        assert watcher.informer.trouble is not None
        assert "Please sign in" in watcher.informer.trouble
        times = watcher.server.times
        waits = [late - early for early, late in itertools.pairwise(times)]
        for number, wait in enumerate(waits):
            assert wait >= min(0.02 * 2**number, 0.32) / 2, "at least half of the doubled delay"
        assert watcher.seen == []


async def test_retry_after_is_honoured() -> None:
    async with watching(
        refuse(429, "TooManyRequests", "slow", headers={"Retry-After": "1"}), reply(listing(version=10)), []
    ) as watcher:
        await watcher.until_told("listed ")
        first, second, *_ = watcher.server.times
        assert second - first >= 1.0


@pytest.mark.parametrize("gone", [refuse(410, "Expired", "old"), stream()])
async def test_a_server_that_ends_every_watch_at_once_is_asked_with_pauses(gone: Answer) -> None:
    """One that answers 410 or ends cleanly, for ever: no loop without a pause comes of it."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return await (gone if "watch" in request.query else reply(listing(version=10)))(request)

    async with watching(answer, timing=InformerTiming(first_delay=0.05, longest_delay=0.2)) as watcher:
        await until(lambda: watcher.server.count("watch") >= 5)
        watches = [
            at for at, each in zip(watcher.server.times, watcher.server.requests, strict=True) if "watch" in each.query
        ]
        assert watches[4] - watches[1] >= (0.05 + 0.1 + 0.2) / 2


async def test_a_mute_watch_is_cut_and_taken_up_again() -> None:
    timing = InformerTiming(shortest_watch=0.1, longest_watch=0.1, silence=0.1, first_delay=0.01, longest_delay=0.04)
    async with watching(reply(listing(version=10)), [], [event("ADDED", pod("b", 11))], timing=timing) as watcher:
        await watcher.until_told("listed ", "changed b:Running")
        assert watcher.versions()[:2] == ["10", "10"]
        assert watcher.server.count("list") == 1


async def test_a_pod_that_does_not_decode_is_shown_as_unknown_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    odd = {"status": {"phase": 7}}
    async with watching(
        reply(listing(pod("a", 3), pod("odd", 4, **odd), version=10)),
        stream(event("MODIFIED", pod("odd", 11, **odd)), event("MODIFIED", pod("odd", 12, **odd))),
        refuse(410, "Expired", "old"),
        reply(listing(pod("a", 3), pod("odd", 12, **odd), version=20)),
        [
            event("ADDED", {"metadata": "nonsense"}),
            event("MODIFIED", pod("odd", 21)),
            event("DELETED", pod("odd", 22, **odd)),
        ],
    ) as watcher:
        await watcher.until_told(
            "listed a:Running odd:Unknown",
            "changed odd:Unknown",
            "changed odd:Unknown",
            "listed a:Running odd:Unknown",
            "changed odd:Running",
            "deleted odd:Unknown",
        )
    lines = [each.getMessage() for each in caplog.records if "object cannot be read" in each.getMessage()]
    assert len(lines) == 2
    assert "name=odd" in lines[0]
    assert "$.status.phase" in lines[0]
    assert "name=?" in lines[1]


async def test_an_unreadable_object_without_a_stand_in_is_left_out_and_the_version_goes_on() -> None:
    async with ScriptedServer() as server:
        server.script = [
            reply(listing(pod("odd", 4, status=[]), pod("a", 3), version=10)),
            stream(event("MODIFIED", pod("a", 11, status=[])), event("ADDED", pod("b", 12, status=[]))),
            server.hold(),
        ]
        async with ClusterApi(plain_access(server.url), timeout=60) as api:
            informer = Informer(api, PODS, Pod, namespace="train", timing=QUICK)
            running = asyncio.create_task(informer.run())
            await informer.listed(60)
            assert set(informer.cache) == {"a"}
            await until(lambda: server.count("watch") == 2)
            assert set(informer.cache) == set()
            assert server.requests[-1].query["resourceVersion"] == "12"
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running


async def test_a_repeated_event_is_told_once() -> None:
    repeated = event("ADDED", pod("b", 11))
    async with watching(reply(listing(version=10)), [repeated, repeated, event("ADDED", pod("c", 12))]) as watcher:
        await watcher.until_told("listed ", "changed b:Running", "changed c:Running")


async def test_a_later_subscription_begins_with_the_list_and_costs_no_request() -> None:
    async with watching(reply(listing(pod("a", 3), version=10)), [event("ADDED", pod("b", 11))]) as watcher:
        await watcher.until_told("listed a:Running", "changed b:Running")
        num_requests = len(watcher.server.requests)
        for _ in range(3):
            async with contextlib.aclosing(watcher.informer.subscribe()) as again:
                assert shown(await anext(again)) == "listed a:Running b:Running"
        assert len(watcher.server.requests) == num_requests


async def test_a_reader_that_falls_far_behind_gets_a_list_instead() -> None:
    many = [event("MODIFIED", pod("a", 11 + number)) for number in range(informers.MAX_BEHIND + 500)]

    def is_last(sight: ObjectSight[Pod]) -> bool:
        return isinstance(sight, ObjectChanged) and sight.object.metadata.resource_version == str(10 + len(many))

    async with watching(reply(listing(pod("a", 3), version=10)), many) as watcher:
        await watcher.informer.listed(60)
        async with contextlib.aclosing(watcher.informer.subscribe()) as slow:
            assert shown(await anext(slow)).startswith("listed")
            await until(lambda: watcher.informer.cache["a"].metadata.resource_version == str(10 + len(many)))
            sights = [await anext(slow)]
            while not is_last(sights[-1]):
                sights.append(await anext(slow))
            assert isinstance(sights[0], ObjectsListed)
            assert len(sights) < informers.MAX_BEHIND


async def test_objects_of_all_namespaces_are_told_apart() -> None:
    other = pod("a", 4)
    other["metadata"]["namespace"] = "research"
    async with watching(reply(listing(pod("a", 3), other, version=10)), [], namespace=None) as watcher:
        await watcher.informer.listed(60)
        assert set(watcher.informer.cache) == {"train/a", "research/a"}
        assert watcher.server.requests[0].path == "/api/v1/pods"
