"""The job's events: numbered, bounded, durable as far as they need be, and told to whoever wants to know."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from dlrover.python.common.event.reporter import EventReporter

from dlrover.core.goodput.events import event, of_node
from dlrover.master.view.event_reporters import MAX_QUEUED, WebhookReporter, as_line, build_reporters
from dlrover.master.view.events import BURST, NUM_KEPT, EventLog, read_events
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.goodput import AskEvents, AskGoodput, Events, GoodputStatus, JobEvent
from dlrover.protocol.messages.job import (
    FailureKind,
    Incarnation,
    Join,
    Micros,
    NodeId,
    ReportFailure,
    Run,
    WorkerFailure,
)
from dlrover.protocol.messages.watch import Activity, AskActivity, NodeEvent, Phase, ProgressReport, WorkerProgress
from dlrover.protocol.rpc.client import ask
from tests.master.conftest import TOKEN, Connect, StartMaster


def an_event(text: str = "something", at: float = 0.0) -> JobEvent:
    return event(Micros(round(at * 1e6)), "info", "test", text)


def a_told(text: str = "x", **labels: str) -> NodeEvent:
    return NodeEvent(node=NodeId(1), incarnation=Incarnation(1), level="info", name="told", text=text, labels=labels)


async def written(log: EventLog) -> None:
    """What was added is in the file and with the reporters."""
    task = asyncio.ensure_future(log.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class TestTheLog:
    async def test_events_are_numbered_and_the_newest_are_kept(self) -> None:
        log = EventLog()
        for number in range(NUM_KEPT + 100):
            log.add(an_event(str(number)))
        assert [each.number for each in log.after(0, 2).events] == [NUM_KEPT + 99, NUM_KEPT + 100]
        assert [each.number for each in log.after(NUM_KEPT, 3).events] == [NUM_KEPT + 1, NUM_KEPT + 2, NUM_KEPT + 3]
        assert len(log.after(1, 10**9).events) == 1000, "an answer is bounded"
        assert log.after(10**9, 10).events == ()

    async def test_who_waits_is_told_at_once(self) -> None:
        log = EventLog()
        waiting = asyncio.ensure_future(log.answer(AskEvents(wait=30)))
        await asyncio.sleep(0)
        log.add(an_event("news"))
        assert (await asyncio.wait_for(waiting, 10)).events[0].text == "news"

    async def test_a_new_master_counts_on_from_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        log = EventLog(path)
        for text in ("one", "two"):
            log.add(an_event(text))
        await written(log)
        with path.open("ab") as file:
            file.write(b'{"number": 3, "torn')
        again = EventLog(path)
        assert again.add(an_event("three")).number == 3
        await written(again)
        assert [each.text for each in again.after(0, 10).events] == ["one", "two", "three"]
        assert [each.number for each in read_events(path)] == [1, 2, 3]

    async def test_files_rotate(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        for number in range(30):
            log = EventLog(path, max_file_bytes=1000)
            log.add(an_event("x" * 100, at=number))
            await written(log)
        assert {file.name for file in tmp_path.iterdir()} <= {"events.jsonl", "events.jsonl.1", "events.jsonl.2"}
        assert read_events(path)[-1].number == 30

    async def test_a_file_that_cannot_be_written_stops_nothing(self, tmp_path: Path) -> None:
        log = EventLog(tmp_path / "missing" / "events.jsonl")
        log.add(an_event())
        await written(log)
        assert log.after(0, 10).newest == 1

    async def test_a_flood_from_nodes_is_counted_and_decisions_pass(self) -> None:
        log = EventLog()
        for _ in range(BURST + 250):
            log.add_from_node(of_node(a_told(), Micros(0)))
        log.add(an_event("a decision"))
        assert log.after(0, 10).num_dropped == 250
        assert log.after(0, 1).events[0].text == "a decision"
        log.add_from_node(of_node(a_told("later"), Micros(1_000_000)))
        dropped, later = log.after(0, 2).events
        assert dropped.name == "events-dropped"
        assert "250" in dropped.text
        assert later.text == "later"

    def test_what_nodes_tell_is_cut_and_cleaned(self) -> None:
        told = of_node(
            a_told("\x1b[31m<script>\x00" + "x" * 10_000, **{f"k{i}": "\x07" for i in range(100)}), Micros(0)
        )
        assert "\x1b" not in told.text
        assert "\x00" not in told.text
        assert len(told.text) <= 2048
        assert len(told.labels) == 16
        assert "\x07" not in "".join(told.labels.values())


class _Hook(http.server.BaseHTTPRequestHandler):
    received: list[bytes]
    failures: int

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).failures -= 1
        if type(self).failures < 0:
            self.received.append(body)
        self.send_response(500 if type(self).failures >= 0 else 200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hook() -> Iterator[tuple[str, type[_Hook]]]:
    kind = type("Hook", (_Hook,), {"received": [], "failures": 0})
    server = http.server.HTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/events", kind
    server.shutdown()
    thread.join()
    server.server_close()


class TestReporters:
    def test_a_web_hook_gets_each_event_and_is_tried_again(self, hook: tuple[str, type[_Hook]]) -> None:
        url, kind = hook
        kind.failures = 2
        reporter = WebhookReporter(url, timeout=60, pause=0.01)
        reporter.report(an_event("first"))
        reporter.report(an_event("second"))
        reporter.close()
        assert [json.loads(body)["text"] for body in kind.received] == ["first", "second"]
        assert reporter.num_lost == 0

    def test_a_web_hook_that_does_not_answer_loses_events_and_nothing_else(self) -> None:
        reporter = WebhookReporter("http://127.0.0.1:9/", timeout=60, pause=0.01)
        for _ in range(3):
            reporter.report(an_event())
        reporter.close()
        assert reporter.num_lost == 3

    @pytest.mark.parametrize(
        ("url", "receiver"),
        [
            ("http://user:secret@127.0.0.1:9/services/secret?key=secret", "http://127.0.0.1:9"),
            ("http://127.0.0.1:9?key=secret", "http://127.0.0.1:9"),
            ("http://127.0.0.1:9/secret with a space", "http://127.0.0.1:9"),
            ("http://[127.0.0.1/secret", "http://[127.0.0.1"),
        ],
    )
    def test_the_log_does_not_tell_what_opens_a_web_hook(
        self, url: str, receiver: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        reporter = WebhookReporter(url, timeout=60, pause=0.01)
        reporter.report(an_event())
        reporter.close()
        assert reporter.num_lost == 1
        assert f"receiver={receiver} " in caplog.text
        assert "secret" not in caplog.text

    def test_an_answer_that_refuses_is_told_by_its_number(
        self, hook: tuple[str, type[_Hook]], caplog: pytest.LogCaptureFixture
    ) -> None:
        url, kind = hook
        kind.failures = 3
        reporter = WebhookReporter(url, timeout=60, pause=0.01)
        reporter.report(an_event())
        reporter.close()
        assert "reason=it answered 5" in caplog.text

    def test_a_misspelt_web_hook_is_refused_without_what_opens_it(self) -> None:
        with pytest.raises(ConfigError, match=r"htps://hooks.example.com") as caught:
            build_reporters(["htps://user:secret@hooks.example.com/secret"])
        assert "secret" not in str(caught.value)

    async def test_a_file_and_a_class_of_the_user(self, tmp_path: Path) -> None:
        reporters = build_reporters(["log", f"file:{tmp_path / 'out'}", "tests.master.view.test_events::Raising"])
        log = EventLog(None, reporters)
        log.add(an_event("told"))
        await written(log)
        assert json.loads((tmp_path / "out").read_text())["text"] == "told"

    async def test_a_class_written_for_the_original(self) -> None:
        Historical.told.clear()
        reporters = build_reporters(["tests.master.view.test_events::Historical"])
        log = EventLog(None, reporters)
        log.add(an_event("told"))
        await written(log)
        await asyncio.to_thread(reporters[0].close)
        assert Historical.told == [("info", "job", "test", "told", {})]

    @pytest.mark.parametrize("name", ["", "carrier-pigeon", "file:/nowhere/at/all", "no.such.module::Class"])
    def test_what_cannot_be_used_is_refused_at_the_start(self, name: str) -> None:
        with pytest.raises(ConfigError):
            build_reporters([name])

    def test_a_line_of_the_log_is_one_line(self) -> None:
        line = as_line(an_event("two\nlines"))
        assert "\n" not in line
        assert line.endswith("[info][job][test][two lines][{}]")


class Historical(EventReporter):  # type: ignore[misc,valid-type]
    told: ClassVar[list[tuple[object, ...]]] = []

    @classmethod
    def report(cls, event_type, instance, action, msg, labels):
        cls.told.append((event_type, instance, action, msg, labels))


class Hanging:
    """Never comes back of its own accord."""

    began = threading.Event()
    let_go = threading.Event()
    told: ClassVar[list[str]] = []

    def report(self, event: JobEvent) -> None:
        self.told.append(event.text)
        self.began.set()
        self.let_go.wait(60)

    def close(self) -> None:
        """Nothing is kept."""


@pytest.fixture
def hanging() -> Iterator[type[Hanging]]:
    Hanging.began.clear()
    Hanging.let_go.clear()
    Hanging.told.clear()
    yield Hanging
    Hanging.let_go.set()


async def test_a_reporter_that_hangs_keeps_neither_the_others_nor_the_end(
    tmp_path: Path, hanging: type[Hanging], caplog: pytest.LogCaptureFixture
) -> None:
    names = ["tests.master.view.test_events::Hanging", f"file:{tmp_path / 'out'}"]
    reporters = build_reporters(names, user_timeout=0.05)
    log = EventLog(tmp_path / "events.jsonl", reporters)
    for number in range(MAX_QUEUED + 3):
        log.add(an_event(str(number)))
    await asyncio.wait_for(written(log), 20)
    assert len((tmp_path / "out").read_text().splitlines()) == MAX_QUEUED + 3
    assert hanging.began.wait(20)
    assert hanging.told == ["0"]
    assert (
        "an event reporter did not return in time and is not called again name=tests.master.view.test_events::Hanging"
        in caplog.text
    )
    assert "event reporter lost num_events=1 " in caplog.text


async def test_a_file_that_hangs_does_not_keep_the_master(
    hanging: type[Hanging], caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(None, [hanging()], farewell=0.05)  # as one of ours on a disk that does not answer
    log.add(an_event())
    await asyncio.wait_for(written(log), 20)
    assert "the last events could not be written" in caplog.text


class Raising:
    def report(self, event: JobEvent) -> None:
        raise RuntimeError("a bug of the user")

    def close(self) -> None:
        raise RuntimeError("another one")


async def test_a_master_tells_what_happened_where_the_time_went_and_what_nodes_do(
    start_master: StartMaster, connect: Connect
) -> None:
    master = await start_master()
    agents = [connect(master.address, launch=name) for name in ("a", "b")]
    for agent in agents:
        await agent.attached()
        await agent.wish(Join)
        await agent.channel.call(agent.a_join(), timeout=30)
    agent = agents[0]
    running = (await agent.wish(Run)).wish
    assert isinstance(running, Run)
    world = running.world
    incarnation = agent.incarnation
    worker = WorkerProgress(
        local_rank=0,
        global_rank=0,
        step=5,
        num_steps=5,
        phase=Phase.DATA,
        seconds={Phase.FORWARD: 0.01},
        step_seconds=0.5,
    )
    report = ProgressReport(node=agent.node, incarnation=incarnation, round=world.round, workers=(worker,))
    agent.channel.observe(report)
    failure = WorkerFailure(
        global_rank=0, local_rank=0, pid=1, kind=FailureKind.EXCEPTION, exited_at=Micros(0), message="boom"
    )
    failed = ReportFailure(node=agent.node, incarnation=incarnation, round=world.round, failures=(failure,), step=5)
    await agent.channel.call(failed, timeout=30)

    goodput = await ask(master.address, AskGoodput(), token=TOKEN, tls=None, timeout=30)
    assert isinstance(goodput, GoodputStatus)
    assert goodput.highest_step == 5
    assert [fault.kind for fault in goodput.faults] == ["worker"]
    for node in goodput.nodes:
        assert sum(node.seconds.values()) == pytest.approx(node.lived, abs=1e-6)

    events = await ask(master.address, AskEvents(), token=TOKEN, tls=None, timeout=30)
    assert isinstance(events, Events)
    names = [each.name for each in events.events]
    assert names[0] == "master-started"
    assert names.count("node-attached") == 2
    assert names.index("round-started") < names.index("worker-failed")
    failed_event = next(each for each in events.events if each.name == "worker-failed")
    assert (failed_event.rank, failed_event.labels["step"]) == (0, "5")
    assert "boom" in failed_event.text
    assert (await agent.channel.call(AskEvents(after=events.newest - 1), timeout=30)).events[0] == events.events[-1]  # type: ignore[union-attr]

    activity = await ask(master.address, AskActivity(), token=TOKEN, tls=None, timeout=30)
    assert isinstance(activity, Activity)
    assert (activity.nodes[0].phase, activity.nodes[0].step) == (Phase.DATA, 5)
