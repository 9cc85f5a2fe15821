"""What each answer of an API server, good or odd, becomes for the caller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from dlrover.platforms.kubernetes.access import ClusterAccess, plain_access
from dlrover.platforms.kubernetes.api import (
    ELASTIC_JOBS,
    NODES,
    PODS,
    ApiRefusal,
    ClusterApi,
    Conflict,
    ConflictReason,
    EventKind,
    Forbidden,
    FoundObject,
    Gone,
    Invalid,
    NotFound,
    ObjectAnswer,
    Page,
    PatchKind,
    Throttled,
    WatchEvent,
    error_of,
)
from dlrover.platforms.kubernetes.credentials import Credential, FixedCredential, TlsSettings, TokenFile
from dlrover.platforms.kubernetes.objects import Pod, decode
from dlrover.protocol.errors import Rejected, Unavailable
from tests.platforms.kubernetes.scripted import (
    Answer,
    ScriptedServer,
    TestAuthority,
    bookmark,
    break_off,
    event,
    listing,
    page_of_html,
    pod,
    refuse,
    reply,
    status,
    stream,
)

LONG = 60.0


@contextlib.asynccontextmanager
async def asking(
    *script: Answer, timeout: float = LONG, token: str | None = None
) -> AsyncIterator[tuple[ClusterApi, ScriptedServer]]:
    async with ScriptedServer(*script) as server:
        async with ClusterApi(plain_access(server.url, token=token), timeout=timeout) as api:
            yield api, server


async def answer_to_get(script: Answer, *, timeout: float = LONG) -> ObjectAnswer:
    async with asking(script, timeout=timeout) as (api, _):
        return await api.get(PODS, "p", namespace="train")


async def test_a_found_object_comes_with_its_version() -> None:
    async with asking(reply(pod("p", 7)), token="t0k") as (api, server):
        answer = await api.get(PODS, "p", namespace="train")
        assert isinstance(answer, FoundObject)
        assert answer.version == "7"
        assert decode(Pod, answer.body).metadata.name == "p"
        [request] = server.requests
        assert request.path_qs == "/api/v1/namespaces/train/pods/p"
        assert request.headers["Authorization"] == "Bearer t0k"
        assert request.headers["Accept"] == "application/json"
        assert request.headers["User-Agent"].startswith("dlrover/")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            refuse(404, "NotFound", 'pods "p" not found', details={"name": "p", "kind": "pods"}),
            NotFound('pods "p" not found'),
        ),
        (
            refuse(409, "AlreadyExists", 'pods "p" already exists'),
            Conflict(ConflictReason.ALREADY_EXISTS, 'pods "p" already exists'),
        ),
        (refuse(409, "Conflict", "modified"), Conflict(ConflictReason.OLD_VERSION, "modified")),
        (refuse(403, "Forbidden", "User x cannot get"), Forbidden("User x cannot get")),
        (
            refuse(403, "Forbidden", "exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4"),
            Forbidden("exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4", is_quota=True),
        ),
        (
            refuse(403, "Forbidden", "no new content", details={"causes": [{"reason": "NamespaceTerminating"}]}),
            Forbidden("no new content", is_terminating=True),
        ),
        (refuse(422, "Invalid", "spec.containers: Required value"), Invalid("spec.containers: Required value")),
        (refuse(400, "BadRequest", "bad"), Invalid("bad")),
        (refuse(405, "MethodNotAllowed", "not here"), Invalid("not here")),
        (refuse(410, "Expired", "too old"), Gone("too old")),
    ],
)
async def test_a_definite_answer_is_told_by_its_reason(script: Answer, expected: ObjectAnswer) -> None:
    assert await answer_to_get(script) == expected


@pytest.mark.parametrize(
    ("script", "error", "after", "words"),
    [
        (refuse(429, "TooManyRequests", "slow", headers={"Retry-After": "3"}), Throttled, 3.0, "slow"),
        (refuse(429, "TooManyRequests", "slow", details={"retryAfterSeconds": 4}), Throttled, 4.0, "slow"),
        (refuse(503, "ServiceUnavailable", "away", headers={"Retry-After": "5"}), Unavailable, 5.0, "503: away"),
        (refuse(500, "InternalError", "etcd"), Unavailable, None, "etcd"),
        (refuse(504, "Timeout", "too late", headers={"Retry-After": "soon"}), Unavailable, None, "too late"),
        (refuse(418, "", ""), Unavailable, None, "418"),
        (page_of_html(), Unavailable, None, "Please sign in.*Check that this is the address of an API server"),
        (page_of_html(404), Unavailable, None, "404.*Please sign in"),
        (page_of_html(403), Unavailable, None, "403.*Please sign in"),
        (page_of_html(502), Unavailable, None, "502.*Please sign in"),
        (reply({"error": "session ended"}), Unavailable, None, "session ended"),
        (reply({"error": "no such page"}, code=404), Unavailable, None, "no such page"),
        (reply({}, code=302, headers={"Location": "/login"}), Unavailable, None, "302"),
        (break_off(), Unavailable, None, "cannot be reached"),
        (
            refuse(404, "NotFound", "the server could not find the requested resource", details={}),
            Unavailable,
            None,
            "Check that the CRD is installed",
        ),
    ],
)
async def test_no_usable_answer_is_an_error_to_retry(
    script: Answer, error: type[Unavailable], after: float | None, words: str
) -> None:
    with pytest.raises(Unavailable, match=words) as raised:
        await answer_to_get(script)
    assert type(raised.value) is error
    assert raised.value.retry_after == after


async def test_each_verb_asks_as_the_api_wants_it() -> None:
    async with asking(reply(pod("p", 8))) as (api, server):
        await api.create(PODS, {"a": 1}, namespace="train", dry_run=True)
        await api.replace(PODS, "p", {"a": 2}, namespace="train", subresource="status")
        await api.patch(
            ELASTIC_JOBS,
            "j",
            {"a": 3},
            namespace="train",
            kind=PatchKind.APPLY,
            subresource="status",
            field_manager="dlrover-master",
            force=True,
        )
        await api.delete(PODS, "p", namespace="train", uid="u1", grace=0)
        await api.delete(NODES, "n", namespace=None, resource_version="5", propagation="Foreground")
        asked = [(request.method, request.path, dict(request.query)) for request in server.requests]
        jobs = "/apis/elastic.iml.github.io/v1alpha1/namespaces/train/elasticjobs/j/status"
        assert asked == [
            ("POST", "/api/v1/namespaces/train/pods", {"dryRun": "All"}),
            ("PUT", "/api/v1/namespaces/train/pods/p/status", {}),
            ("PATCH", jobs, {"fieldManager": "dlrover-master", "force": "true"}),
            ("DELETE", "/api/v1/namespaces/train/pods/p", {}),
            ("DELETE", "/api/v1/nodes/n", {}),
        ]
        assert [request.headers["Content-Type"] for request in server.requests[:3]] == [
            "application/json",
            "application/json",
            "application/apply-patch+yaml",
        ]
        first, second = (json.loads(body) for body in server.bodies[3:])
        options = {"kind": "DeleteOptions", "apiVersion": "v1"}
        assert first == options | {
            "propagationPolicy": "Background",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": "u1"},
        }
        assert second == options | {"propagationPolicy": "Foreground", "preconditions": {"resourceVersion": "5"}}


@pytest.mark.parametrize("name", ["", ".", ".."])
async def test_a_name_that_leads_to_another_path_is_not_sent(name: str) -> None:
    async with asking(reply(pod("p", 1))) as (api, server):
        with pytest.raises(Rejected, match="not a valid name of a Kubernetes object"):
            await api.delete(PODS, name, namespace="train")
        assert server.requests == []


async def test_a_name_is_one_part_of_the_path() -> None:
    async with asking(reply(pod("p", 1))) as (api, server):
        await api.get(PODS, "a/../b?x=1", namespace="train")
        assert server.requests[0].raw_path == "/api/v1/namespaces/train/pods/a%2F..%2Fb%3Fx%3D1"


async def test_pages_make_one_list() -> None:
    async with asking(
        reply(listing(pod("a", 1), pod("b", 2), version=9, token="next")), reply(listing(pod("c", 3), version=9))
    ) as (api, server):
        page = await api.list_all(PODS, namespace="train", labels="app=dlrover", limit=2)
        assert isinstance(page, Page)
        assert [decode(Pod, item).metadata.name for item in page.items] == ["a", "b", "c"]
        assert page.version == "9"
        queries = [dict(request.query) for request in server.requests]
        assert queries == [
            {"labelSelector": "app=dlrover", "limit": "2"},
            {"labelSelector": "app=dlrover", "limit": "2", "continue": "next"},
        ]


@pytest.mark.parametrize("second", [page_of_html(), refuse(500, "InternalError", "etcd"), reply({"kind": "PodList"})])
async def test_a_list_that_fails_on_its_second_page_is_no_shorter_list(second: Answer) -> None:
    async with asking(reply(listing(pod("a", 1), version=9, token="next")), second) as (api, _):
        with pytest.raises(Unavailable):
            await api.list_all(PODS, namespace="train")


async def test_a_list_whose_version_is_forgotten_is_gone() -> None:
    async with asking(reply(listing(pod("a", 1), version=9, token="n")), refuse(410, "Expired", "old")) as (api, _):
        assert await api.list_all(PODS, namespace="train") == Gone("old")


async def test_a_call_to_a_mute_server_times_out() -> None:
    async with ScriptedServer() as server:
        server.script = [server.mute()]
        async with ClusterApi(plain_access(server.url), timeout=0.2) as api:
            with pytest.raises(Unavailable, match="did not answer in time"):
                await api.get(PODS, "p", namespace="train")


async def test_an_answer_that_stops_in_the_middle_times_out() -> None:
    async with ScriptedServer() as server:
        server.script = [server.hold(b'{"kind": ')]
        async with ClusterApi(plain_access(server.url), timeout=0.2) as api:
            with pytest.raises(Unavailable, match="did not answer in time"):
                await api.get(PODS, "p", namespace="train")


async def test_a_server_that_is_away_is_unavailable() -> None:
    with socket.socket() as taken:  # bound and not listening
        taken.bind(("127.0.0.1", 0))
        async with ClusterApi(plain_access(f"http://127.0.0.1:{taken.getsockname()[1]}")) as api:
            with pytest.raises(Unavailable, match="cannot be reached"):
                await api.get(PODS, "p", namespace="train")


def slowly(answer: Answer) -> Answer:
    async def later(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        return await answer(request)

    return later


async def test_calls_are_bounded_and_a_watch_takes_no_call_s_place() -> None:
    async with ScriptedServer() as server:
        server.script = [server.hold(bookmark(5)), server.hold(bookmark(5)), slowly(reply(pod("p", 1)))]
        async with ClusterApi(plain_access(server.url), timeout=LONG, num_connections=2) as api:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(2):
                    watch = await stack.enter_async_context(contextlib.aclosing(api.watch(PODS, namespace="train")))
                    await anext(watch)
                server.most_busy = 0
                await asyncio.gather(*(api.get(PODS, f"p{n}", namespace="train") for n in range(50)))
                assert len(server.requests) == 52
                assert server.most_busy <= 2 + 2


# Credentials


async def test_an_expired_token_is_read_again_at_once_and_the_request_repeated(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    async with ScriptedServer(reply(pod("p", 1)), refuse(401, "Unauthorized", "no"), reply(pod("p", 2))) as server:
        # A clock that stands still: only the 401 makes it look again.
        source = TokenFile(path, None, clock=lambda: 1000.0)
        async with ClusterApi(ClusterAccess(server.url, source)) as api:
            await api.get(PODS, "p", namespace="train")
            keep_times(path, "new")
            answer = await api.get(PODS, "p", namespace="train")
            assert isinstance(answer, FoundObject)
            assert answer.version == "2"
        tokens = [request.headers["Authorization"] for request in server.requests]
        assert tokens == ["Bearer old", "Bearer old", "Bearer new"]


def keep_times(path: Path, text: str) -> None:
    """New content under the old time stamp."""
    stamp = path.stat().st_mtime_ns
    path.write_text(text)
    os.utime(path, ns=(stamp, stamp))


async def test_a_token_that_stays_refused_is_an_error_that_says_where_it_is_from(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    async with ScriptedServer(refuse(401, "Unauthorized", "no")) as server:
        access = ClusterAccess(server.url, TokenFile(tmp_path / "token", None), origin="from the test")
        async with ClusterApi(access) as api:
            with pytest.raises(Unavailable, match=r"rejected the credential.*from the test") as raised:
                await api.get(PODS, "p", namespace="train")
            assert "s3cret" not in str(raised.value)
            assert len(server.requests) == 1, "the same token once more would be of no use"


async def test_a_second_401_ends_it() -> None:
    class Rotating:
        count = 0

        async def fetch(self, refused: Credential | None = None) -> Credential:
            self.count += 1
            return Credential(f"token-{self.count}")

    async with ScriptedServer(refuse(401, "Unauthorized", "no")) as server:
        async with ClusterApi(ClusterAccess(server.url, Rotating())) as api:
            with pytest.raises(Unavailable, match="rejected the credential"):
                await api.get(PODS, "p", namespace="train")
        assert len(server.requests) == 2


# TLS


def access_with(server: ScriptedServer, authority: TestAuthority, *, server_name: str | None = None) -> ClusterAccess:
    tls = TlsSettings(authority=authority.certificate.read_text()).build()
    return ClusterAccess(
        server.url, FixedCredential(Credential("t", tls)), origin="from the test", server_name=server_name
    )


async def test_a_certificate_of_the_cluster_s_authority_is_accepted(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    async with ScriptedServer(reply(pod("p", 1)), tls=authority.server_side("api")) as server:
        async with ClusterApi(access_with(server, authority), timeout=LONG) as api:
            assert isinstance(await api.get(PODS, "p", namespace="train"), FoundObject)


async def test_a_certificate_of_another_authority_is_refused_before_the_token_is_sent(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ours, other = TestAuthority(tmp_path / "a"), TestAuthority(tmp_path / "b")
    async with ScriptedServer(reply(pod("p", 1)), tls=other.server_side("api")) as server:
        async with ClusterApi(access_with(server, ours), timeout=LONG) as api:
            with pytest.raises(
                Unavailable, match=r"certificate of https.* cannot be verified.*from the test"
            ) as raised:
                await api.get(PODS, "p", namespace="train")
        assert raised.value.code == "bad-certificate"
        assert server.requests == []


async def test_a_certificate_for_another_name_is_refused_unless_that_name_is_meant(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    tls = authority.server_side("api", alternative="DNS:kubernetes.default.svc")
    async with ScriptedServer(reply(pod("p", 1)), tls=tls) as server:
        async with ClusterApi(access_with(server, authority), timeout=LONG) as api:
            with pytest.raises(Unavailable, match="cannot be verified"):
                await api.get(PODS, "p", namespace="train")
        named = access_with(server, authority, server_name="kubernetes.default.svc")
        async with ClusterApi(named, timeout=LONG) as api:
            assert isinstance(await api.get(PODS, "p", namespace="train"), FoundObject)


# Watches


async def watched(*script: Answer, timeout: float = LONG) -> list[WatchEvent | ApiRefusal]:
    async with asking(*script) as (api, _):
        async with contextlib.aclosing(
            api.watch(PODS, namespace="train", version="5", timeout=timeout, silence=0.2)
        ) as watch:
            return [each async for each in watch]


async def test_a_watch_gives_events_in_order_and_ends_with_the_server() -> None:
    async with asking(stream(event("ADDED", pod("a", 6)), bookmark(8), event("DELETED", pod("a", 9)))) as (api, server):
        opened: list[bool] = []
        watch = api.watch(PODS, namespace="train", version="5", timeout=240, opened=lambda: opened.append(True))
        seen = [each async for each in watch]
        assert [each.kind for each in seen if isinstance(each, WatchEvent)] == [
            EventKind.ADDED,
            EventKind.BOOKMARK,
            EventKind.DELETED,
        ]
        assert opened == [True]
        assert dict(server.requests[0].query) == {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": "5",
            "timeoutSeconds": "240",
        }


async def test_events_come_whole_whatever_the_chunks() -> None:
    large = event("ADDED", pod("a", 6, padding="x" * 300_000))
    text = json.dumps(large).encode() + b"\n" + json.dumps(bookmark(7)).encode() + b"\n"
    parts = [text[at : at + 50_001] for at in range(0, len(text), 50_001)]
    seen = await watched(stream(*parts))
    assert [each.kind for each in seen if isinstance(each, WatchEvent)] == [EventKind.ADDED, EventKind.BOOKMARK]


@pytest.mark.parametrize(
    "script",
    [
        refuse(410, "Expired", "too old resource version: 5 (900)"),
        stream(bookmark(6), event("ERROR", status(410, "Expired", "too old resource version: 5 (900)"))),
    ],
)
async def test_a_forgotten_version_is_gone_as_status_and_within_the_stream(script: Answer) -> None:
    seen = await watched(script)
    assert seen[-1] == Gone("too old resource version: 5 (900)")


async def test_another_error_within_the_stream_is_to_be_retried() -> None:
    with pytest.raises(Unavailable, match="etcd"):
        await watched(stream(event("ERROR", status(500, "InternalError", "etcd"))))


@pytest.mark.parametrize(
    "line", [b"<html>\n", b'{"type": "RENAMED", "object": {}}\n', b'{"type": 3}\n', b"\xff\n", b"\n"]
)
async def test_a_line_that_is_no_event_asks_for_a_list(line: bytes) -> None:
    seen = await watched(stream(bookmark(6), line, bookmark(7)))
    assert isinstance(seen[0], WatchEvent)
    assert isinstance(seen[1], Gone)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "script",
    [
        stream(bookmark(6), is_cut=True),
        stream(bookmark(6), b'{"type": "ADDED", "obj', is_cut=True),
        stream(bookmark(6), b'{"type": "ADDED", "obj'),
    ],
)
async def test_a_broken_connection_is_to_be_retried(script: Answer) -> None:
    with pytest.raises(Unavailable):
        await watched(script)


async def test_a_mute_watch_is_cut() -> None:
    async with ScriptedServer() as server:
        server.script = [server.hold(bookmark(6))]
        async with ClusterApi(plain_access(server.url), timeout=LONG) as api:
            with pytest.raises(Unavailable, match="did not answer in time"):
                async for _ in api.watch(PODS, namespace="train", timeout=0.1, silence=0.2):
                    pass


def test_a_refusal_has_an_error_for_callers_without_a_better_use() -> None:
    assert isinstance(error_of(Forbidden("no right")), Unavailable)
    error = error_of(Invalid("spec.replicas: must be at least 0"))
    assert isinstance(error, Rejected)
    assert str(error) == "spec.replicas: must be at least 0"
