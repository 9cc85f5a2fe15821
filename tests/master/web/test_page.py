"""The page's interface as programs meet it: who gets what, and what strangers get."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from dlrover.master.view.gatherer import Gatherer
from dlrover.master.view.sources import gather_diagnosis, gather_goodput
from dlrover.master.web.access import one_time_link, read_only_token
from dlrover.master.web.app import MAX_BODY, MAX_VIEWERS
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import RequestSave
from dlrover.protocol.messages.goodput import TimeClass
from dlrover.protocol.messages.job import Micros, NodeId, Round, StopJob
from dlrover.protocol.messages.requests import RelaunchNode, RestartWorkers
from dlrover.protocol.messages.watch import (
    Culprit,
    Diagnosis,
    FaultClass,
    PastVerdict,
    SendTail,
    TailSent,
    Verdict,
    WatchOrder,
)
from tests.master.web.page_lab import (
    NO_GOODPUT,
    NOW,
    TOKEN,
    Page,
    StandInJob,
    a_failure,
    a_status,
    bearer,
    fetch,
    populate,
    serve_page,
)

READS = [
    "/api/v1/view",
    "/api/v1/stream",
    "/api/v1/nodes",
    "/api/v1/logs",
    "/api/v1/logs/master",
    "/api/v1/me",
    "/metrics",
]
OLD_READS = ["/api/job", "/api/nodes", "/api/metrics", "/api/logs/master"]


async def act(page: Page, name: str, headers: dict[str, str], **wish: object) -> tuple[int, dict[str, str]]:
    body = json.dumps({"confirm": name, **wish}).encode()
    answer = await fetch(page, f"/api/v1/actions/{name}", method="POST", body=body, headers=headers)
    return answer.status, json.loads(answer.body)


async def test_without_a_token_there_is_nothing_but_a_form() -> None:
    async with serve_page() as page:
        populate(page, 3)
        await page.update()
        for headers in (
            {},
            bearer("wrong"),
            {"Cookie": f"{page.access.cookie_name}=act.9999999999.x.y"},
            {"Authorization": "Basic eDp5"},
        ):
            for path in (*READS, *OLD_READS):
                answer = await fetch(page, path, headers=headers)
                assert answer.status == 401, path
                assert b"host-0" not in answer.body
                assert "access-control-allow-origin" not in answer.headers
            front = await fetch(page, "/", headers=headers)
            assert front.status == 401
            assert b"<form" in front.body
            status, said = await act(page, "stop", headers)
            assert (status, page.job.asked) == (401, []), said


async def test_every_answer_forbids_scripts_of_others() -> None:
    async with serve_page() as page:
        for path in ("/", "/static/app.js", "/api/v1/view", "/nowhere", "/api/job"):
            headers = (await fetch(page, path, headers=bearer())).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy, path
            assert "unsafe-inline" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


async def test_a_link_becomes_a_cookie_and_works_once() -> None:
    async with serve_page() as page:
        await page.update()
        link = f"/?token={one_time_link(TOKEN, time.time())}"
        first = await fetch(page, link)
        assert first.status == 200
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert TOKEN not in cookie
        assert (await fetch(page, link)).status == 401
        session = {"Cookie": cookie.split(";")[0]}
        assert b"<main" in (await fetch(page, "/", headers=session)).body
        assert (await fetch(page, "/api/v1/view", headers=session)).status == 200


async def test_pages_of_two_jobs_on_one_host_do_not_sign_each_other_out() -> None:
    """Browsers tell cookies apart by name and host, and not by port."""
    jar: dict[str, str] = {}
    async with serve_page() as one, serve_page(token="token-of-another") as other:
        for page, token in ((one, TOKEN), (other, "token-of-another")):
            name, _, value = (await fetch(page, f"/?token={token}")).headers["set-cookie"].split(";")[0].partition("=")
            jar[name] = value
            assert token not in name
        session = {"Cookie": "; ".join(f"{name}={value}" for name, value in jar.items())}
        for page in (one, other):
            assert (await fetch(page, "/api/v1/me", headers=session)).status == 200


async def test_actions_need_the_token_a_confirmation_and_our_own_page() -> None:
    async with serve_page() as page:
        reader = bearer(read_only_token(TOKEN))
        assert (await fetch(page, "/api/v1/view", headers=reader)).status == 200
        assert (await act(page, "stop", reader))[0] == 403
        session = {"Cookie": (await fetch(page, f"/?token={TOKEN}")).headers["set-cookie"].split(";")[0]}
        assert (await act(page, "stop", session))[0] == 403, "no origin"
        assert (await act(page, "stop", {**session, "Origin": "http://evil.example"}))[0] == 403
        assert (await act(page, "stop", bearer(), confirm="save"))[0] == 400
        assert (await act(page, "relaunch-node", bearer()))[0] == 400, "no node"
        assert (await act(page, "stop", bearer(), command="rm"))[0] == 400, "unknown field"
        assert (await act(page, "format-disk", bearer()))[0] == 404
        huge = await fetch(page, "/api/v1/actions/stop", method="POST", body=b"x" * (MAX_BODY + 1), headers=bearer())
        assert huge.status == 413
        assert (await fetch(page, "/api/v1/actions/stop", headers=bearer())).status == 405
        assert page.job.asked == []
        assert (await act(page, "stop", {**session, "Origin": page.url}, reason="enough"))[0] == 200
        assert page.job.asked == [StopJob(message="dashboard: enough")]


async def test_actions_are_the_commands_that_others_give_too() -> None:
    async with serve_page() as page:
        for name, wish in (
            ("restart-workers", {}),
            ("save", {}),
            ("relaunch-node", {"node": 2}),
            ("cordon-node", {"node": 2}),
        ):
            assert (await act(page, name, bearer(), **wish))[0] == 200
        assert page.job.asked == [
            RestartWorkers(reason="dashboard"),
            RequestSave(reason="dashboard"),
            RelaunchNode(node=NodeId(2), reason="dashboard"),
            RelaunchNode(node=NodeId(2), reason="dashboard", is_cordoned=True),
        ]
        page.job.refusal = Rejected("No workers run now.", code="bad-stage")
        assert await act(page, "restart-workers", bearer()) == (409, {"error": "No workers run now."})


@contextlib.asynccontextmanager
async def events_of(page: Page, last_id: str = "", *, limit: int = 2**22) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(page.url.rsplit(":", 1)[1]), limit=limit)
    head = (
        f"GET /api/v1/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nLast-Event-ID: {last_id}\r\n\r\n"
    )
    writer.write(head.encode())
    try:
        await reader.readuntil(b"\r\n\r\n")
        yield reader
    finally:
        writer.transport.abort()


async def next_event(reader: asyncio.StreamReader) -> tuple[str, dict]:
    async with asyncio.timeout(30):
        while not (line := await reader.readline()).startswith(b"id: "):
            assert line, "the stream ended"
        data = await reader.readline()
    return line[4:].decode().strip(), json.loads(data.removeprefix(b"data: "))


async def test_events_tell_what_changed_and_go_on_where_a_reader_was() -> None:
    async with serve_page() as page:
        populate(page, 5)
        async with events_of(page) as reader:
            seen, whole = await next_event(reader)
            assert whole["is_whole"]
            assert len(whole["sections"]["nodes"]) == 5
            page.fail(a_failure(1))
            await page.update()
            _, delta = await next_event(reader)
            assert not delta["is_whole"]
            assert "nodes" not in delta["sections"]
            assert len(delta["sections"]["failures"]) == 1
        async with events_of(page, seen) as again:
            _, missed = await next_event(again)
            assert not missed["is_whole"]
            assert len(missed["sections"]["failures"]) == 1
        for strange in ("ffffffff-1", f"{seen.split('-')[0]}-99999999999999999999", "-"):
            async with events_of(page, strange) as other:
                assert (await next_event(other))[1]["is_whole"]


async def test_a_reader_that_takes_nothing_is_let_go_and_readers_are_bounded() -> None:
    async with serve_page(stuck=0.5) as page:
        async with events_of(page, limit=1024), asyncio.timeout(30):
            number = 0
            while page.gatherer.num_viewers:  # until it has more than the sockets' buffers hold
                number += 1
                page.gatherer.board.put("large", "", f"{number % 10}" * 2_000_000)
                page.gatherer.board.publish()
                await page.gatherer.board.wait_beyond(page.gatherer.board.version, 0.02)
        page.gatherer.num_viewers = MAX_VIEWERS
        assert (await fetch(page, "/api/v1/stream", headers=bearer())).status == 503
        page.gatherer.num_viewers = 0


async def test_logs_are_cut_cleaned_and_only_of_known_names(tmp_path: Path) -> None:
    log = tmp_path / "master.log"
    log.write_bytes(
        b"early\n" * 50_000
        + b"\x1b[31mred\x1b[0m \x00\xff\xfe<script>alert(1)</script>\n"
        + b"y" * 10_000
        + b"\nlast\n"
    )
    async with serve_page(master_log=str(log)) as page:
        answer = json.loads((await fetch(page, "/api/v1/logs/master", headers=bearer())).body)
        assert len(answer["text"]) < 70_000
        assert "red \ufffd\ufffd<script>" in answer["text"]
        assert "\x1b" not in answer["text"]
        assert "(10000 characters)" in answer["text"]
        assert answer["text"].endswith("last\n")
        assert "bytes" in answer["note"]
        for name in ("..%2f..%2fetc%2fpasswd", "..", "worker--1", "worker-%C2%B2", "token", "worker-1x"):
            assert (await fetch(page, f"/api/v1/logs/{name}", headers=bearer())).status in (400, 404), name
        assert (await fetch(page, "/api/v1/logs/worker-77", headers=bearer())).status == 404


async def test_a_worker_s_log_is_asked_of_its_agent() -> None:
    async with serve_page() as page:
        populate(page, 3)

        def answer(node: NodeId, order: WatchOrder) -> bool:
            assert isinstance(order.order, SendTail)
            assert (node, order.order.global_rank) == (1, 1)
            for sender, text in ((NodeId(0), "not mine to tell"), (NodeId(1), "step 7 done")):
                tail = TailSent(
                    node=sender, incarnation=a_status().nodes[0].incarnation, request=order.order.request, text=text
                )
                page.logs.observe(tail, Micros(0))
            return True

        page.job.order = answer
        told = json.loads((await fetch(page, "/api/v1/logs/worker-1", headers=bearer())).body)
        assert told["text"] == "step 7 done"
        assert json.loads((await fetch(page, "/api/v1/logs", headers=bearer())).body)["logs"] == [
            "worker-0",
            "worker-1",
            "worker-2",
        ]


async def test_a_verdict_of_each_of_many_nodes_has_its_place_on_the_page() -> None:
    past = tuple(
        PastVerdict(
            at=NOW,
            round=Round(3),
            verdict=Verdict(
                fault=FaultClass.DISK_FULL,
                diagnostician="disk_full",
                culprits=(Culprit(node=NodeId(node), global_rank=-1),),
            ),
        )
        for node in range(5)
    )
    gatherer = Gatherer(StandInJob(diagnosis=Diagnosis(verdicts=past)))
    gatherer.sources.append(gather_diagnosis)
    await gatherer.look()
    views = [msgspec.to_builtins(view) for view in gatherer.board.section("verdicts").values()]
    assert {view["culprits"] for view in views} == {f"node {node}" for node in range(5)}


async def test_the_page_is_told_what_stops_the_master_and_when_it_goes_on() -> None:
    job = StandInJob()
    gatherer = Gatherer(job)
    for blocked in ("its disk is full", ""):
        job.status = replace(job.status, blocked=blocked)
        await gatherer.look()
        (view,) = gatherer.board.section("job").values()
        assert view["blocked"] == blocked


async def test_the_page_is_told_that_redo_is_unknown() -> None:
    seconds = {TimeClass.COMPUTE: 15.0, TimeClass.START_UP: 5.0}
    found = replace(NO_GOODPUT, wall=20.0, seconds=seconds, goodput=0.75, goodput_since_start=0.75)
    for is_redo_known in (True, False):
        gatherer = Gatherer(StandInJob(goodput=replace(found, is_redo_known=is_redo_known)))
        gatherer.sources.append(gather_goodput)
        await gatherer.look()
        (view,) = gatherer.board.section("goodput").values()
        assert view["is_redo_known"] is is_redo_known


async def test_old_paths_and_pages_of_nodes_answer_with_the_job_s_own_data() -> None:
    async with serve_page() as page:
        populate(page, 200)
        job = json.loads((await fetch(page, "/api/job", headers=bearer())).body)
        assert (job["job_name"], job["job_stage"], job["total_nodes"], job["running_nodes"]) == (
            "job",
            "running",
            200,
            198,
        )
        assert len(json.loads((await fetch(page, "/api/nodes", headers=bearer())).body)["worker"]) == 200
        stats = json.loads((await fetch(page, "/api/metrics", headers=bearer())).body)["training_stats"]
        assert stats["global_step"] == 1000
        part = json.loads((await fetch(page, "/api/v1/nodes?offset=190&limit=50", headers=bearer())).body)
        assert part["total"] == 200
        assert [node["rank"] for node in part["nodes"]] == list(range(190, 200))
        assert json.loads((await fetch(page, "/api/v1/nodes?health=lost", headers=bearer())).body)["total"] == 2
        assert (await fetch(page, "/api/v1/nodes?offset=-1", headers=bearer())).status == 400


async def test_half_requests_do_not_keep_readers_out_and_do_not_stay() -> None:
    async with serve_page() as page, asyncio.timeout(60):
        host, port = page.url.removeprefix("http://").split(":")
        halves = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
        try:
            for _, writer in halves:
                writer.write(b"GET /api/v1/view HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            await asyncio.gather(*(writer.drain() for _, writer in halves), return_exceptions=True)
            while (await fetch(page, "/api/v1/view", headers=bearer())).status == 503:
                pass  # uvicorn's answer to too many connections
            for reader, _ in halves:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        finally:
            for _, writer in halves:
                writer.transport.abort()


async def test_a_page_is_opened_by_address_or_by_a_name_that_was_given() -> None:
    """A stranger's site may let its name point here: its browser sends that name."""
    async with serve_page(urls="https://jobs.example.com") as page:
        port = page.url.rsplit(":", 1)[1]

        async def status(host: str, path: str = "/", **headers: str) -> int:
            return (await fetch(page, path, headers={"Host": host, **headers})).status

        for host in (
            "localhost",
            f"localhost:{port}",
            f"127.0.0.1:{port}",
            "[::1]:80",
            "192.0.2.7",
            "JOBS.example.com",
        ):
            assert await status(host) == 401, host
        for host in ("rebound.example.net", "rebound.example.net:8080", "jobs.example.com.example.net", "", "[::1"):
            assert await status(host) == 421, host
        assert await status("anything", "/api/v1/view", **bearer()) == 200, "who shows the token is a program"
        cookie = (
            await fetch(page, f"/?token={one_time_link(TOKEN, time.time())}", headers={"Host": "jobs.example.com"})
        ).headers["set-cookie"]
        assert "Secure" in cookie
        headers = {"Cookie": cookie.split(";")[0], "Host": "jobs.example.com"}
        act = b'{"confirm": "save"}'
        for origin, expected in (("https://jobs.example.com", 200), ("https://rebound.example.net", 403)):
            answer = await fetch(
                page, "/api/v1/actions/save", method="POST", body=act, headers={**headers, "Origin": origin}
            )
            assert answer.status == expected, origin
