"""The event SDK: what it writes, and that nothing it does can hurt a training."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest

from dlrover.trainer.events import DLRoverAgentEvent, DLRoverMasterEvent, Process, TrainerProcess, WarningType
from dlrover.trainer.events.event import Event, EventType
from dlrover.trainer.events.exporters import AsyncExporter
from dlrover.trainer.events.process import Nothing, Outlet
from dlrover.trainer.events.settings import read_settings

LINE = re.compile(r"\[(.+?)\] \[(\d+)\] \[([0-9a-f]{8})\] \[(.+?)\] \[(.+?)\] \[(BEGIN|END|INSTANT)\] (\{.*\})")


@pytest.fixture
def outlet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outlet:
    monkeypatch.setenv("DLROVER_EVENT_FILE_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    return Outlet()


def lines(folder: Path) -> list[tuple[str, ...]]:
    found = [LINE.fullmatch(line) for line in (folder / "events_3.log").read_text().splitlines()]
    assert all(found)
    return [match.groups() for match in found if match is not None]


def test_a_span_and_an_instant_in_the_form_that_followers_know(outlet: Outlet, tmp_path: Path) -> None:
    trainer = TrainerProcess("AtorchTrainerV2", outlet)
    with trainer.step(global_step=7):
        trainer.substep(7)
    begin, instant, end = lines(tmp_path)
    assert begin[3:6] == ("AtorchTrainerV2", "#step", "BEGIN")
    assert json.loads(begin[6]) == {"global_step": 7}
    assert end[2] == begin[2], "one id for a span"
    assert json.loads(end[6])["success"] is True
    assert json.loads(end[6])["duration"] >= 0
    assert instant[4] == "#substep"
    datetime.fromisoformat(begin[0])


def test_an_exception_in_a_span_is_told_and_goes_on(outlet: Outlet, tmp_path: Path) -> None:
    def fail_in_a_span() -> None:
        with TrainerProcess("t", outlet).save(global_step=1):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError):
        fail_in_a_span()
    content = json.loads(lines(tmp_path)[-1][6])
    assert content["success"] is False
    assert "fail_in_a_span" in content["error"]


def test_a_span_begins_once_ends_once_and_the_first_way_to_end_wins(outlet: Outlet, tmp_path: Path) -> None:
    span = Process("p", outlet).duration("#work")
    span.end()  # not begun: nothing
    span.begin().begin()
    stage = span.extra_args(a=1).stage("part", {"b": 2})
    stage.begin()
    stage.success()
    span.fail("bad")
    span.success()
    assert isinstance(span.stage("late"), Nothing)
    found = lines(tmp_path)
    assert [(line[4], line[5]) for line in found] == [
        ("#work", "BEGIN"),
        ("#work#part", "BEGIN"),
        ("#work#part", "END"),
        ("#work", "END"),
    ]
    assert json.loads(found[1][6]) == {"a": 1, "b": 2, "parent_id": span.event_id}
    assert json.loads(found[3][6])["error"] == "bad"


def test_predefined_events_have_their_names(outlet: Outlet, tmp_path: Path) -> None:
    master, agent = DLRoverMasterEvent(outlet=outlet), DLRoverAgentEvent(outlet=outlet)
    master.node_join(node_id=1, rdzv_round=2)
    with agent.rendezvous(node_rank=0):
        pass
    TrainerProcess("t", outlet).warning(WarningType.LOSS, "it grows")
    with TrainerProcess("t", outlet).init() as init, init.load_ckpt():
        pass
    names = [(line[3], line[4]) for line in lines(tmp_path)]
    assert names[0] == ("dlrover-master", "#node_join")
    assert names[1] == ("dlrover-agent", "#rendezvous")
    assert ("t", "#init#load_ckpt") in names


def test_no_chain_of_calls_breaks(outlet: Outlet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_EVENT_FILE_DIR", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    trainer = TrainerProcess("t", outlet)
    with trainer.step(global_step=1) as span:
        span.stage("x").begin().whatever(3).success()
    trainer.no_such_event(1, 2).begin().and_so_on()
    trainer.substep()  # type: ignore[call-arg]
    Process("p", outlet).instant("x", 3)  # type: ignore[arg-type]


def test_anything_can_be_content(outlet: Outlet, tmp_path: Path) -> None:
    around: dict[str, object] = {}
    around["self"] = around
    process = Process("a]\nb", outlet)
    for content in (
        {"when": datetime(2026, 1, 2), "thing": object(), "raw": b"\x00\xff", "odd": "\ud800"},
        around,
        {"long": "x" * 1_000_000},
    ):
        process.instant("#odd", content)
    found = [json.loads(line[6]) for line in lines(tmp_path)]
    assert found[0]["when"] == "2026-01-02T00:00:00"
    assert "bytes" in found[0]["raw"]
    assert found[2]["cut"] is True
    assert (tmp_path / "events_3.log").stat().st_size < 100_000


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("ENABLE", "off", "enable", False),
        ("ENABLE", "perhaps", "enable", True),
        ("QUEUE_SIZE", "-4", "queue_size", 1024),
        ("TEXT_FORMATTER", "json", "text_formatter", "JSON"),
        ("EVENT_EXPORTER", "carrier pigeon", "event_exporter", "TEXT_FILE"),
        ("ASYNC_EXPORTER", "Enabled", "async_exporter", True),
        ("COLOUR", "red", "enable", True),
    ],
)
def test_settings_come_from_the_environment_and_wrong_ones_are_ignored(
    key: str, value: str, field: str, expected: object
) -> None:
    settings = read_settings({f"DLROVER_EVENT_{key}": value})
    assert getattr(settings, field) == expected
    assert bool(settings.troubles) == (value in ("perhaps", "-4", "carrier pigeon", "red"))


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"queue_size": 5, "text_formatter": "JSON", "file_dir": "/x"}))
    settings = read_settings(
        {"DLROVER_EVENT_CONFIG_PATH": str(tmp_path / "c.json"), "DLROVER_EVENT_FILE_DIR": "/y", "RANK": ""}
    )
    assert (settings.queue_size, settings.text_formatter, settings.file_dir) == (5, "JSON", "/y")
    assert settings.rank == "empty"


def test_files_rotate_and_each_process_has_its_own(
    outlet: Outlet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLROVER_EVENT_MAX_FILE_BYTES", "2000")
    monkeypatch.setenv("DLROVER_EVENT_TEXT_FORMATTER", "JSON")
    process = Process("p", outlet)
    for number in range(100):
        process.instant("#n", {"number": number})
    child = os.fork()
    if not child:
        process.instant("#child")
        os._exit(0)
    os.waitpid(child, 0)
    mine = tmp_path / f"events_3_{os.getpid()}.log"
    assert mine.stat().st_size <= 2000
    assert mine.with_name(f"{mine.name}.1").exists()
    assert json.loads((tmp_path / f"events_3_{child}.log").read_text())["name"] == "#child"
    assert os.readlink(tmp_path / "events_3.log") == f"events_3_{child}.log"
    outlet.close()


class _Stuck:
    """Exports nothing before it may."""

    def __init__(self) -> None:
        self.exported: list[Event] = []
        self.may_go_on = threading.Event()

    def export(self, event: Event) -> None:
        assert self.may_go_on.wait(30)
        if event.name == "#bad":
            raise OSError("full")
        self.exported.append(event)

    def close(self) -> None:
        self.exported.append(Event("", "", "closed", EventType.INSTANT, {}))


def test_a_flood_of_events_is_dropped_and_counted_and_nobody_waits() -> None:
    inner = _Stuck()
    exporter = AsyncExporter(inner, 16)
    for number in range(500):
        exporter.export(Event("0", "t", "#bad" if number == 3 else "#n", EventType.INSTANT, {}))
    assert exporter.num_dropped in (483, 484), "16 are queued, and the thread may have taken one"
    inner.may_go_on.set()
    exporter.close()
    assert exporter.num_errors == 1
    assert inner.exported[-1].name == "closed"
    assert len(inner.exported) - 1 + exporter.num_dropped + exporter.num_errors == 500


def test_last_words_of_a_process_that_is_killed_or_fails(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from dlrover.python.training_event import TrainerProcess\n"
        "TrainerProcess('t').start(lr=0.1)\n"
        "if sys.argv[1] == 'raise': raise ValueError('last words')\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    environment = {**os.environ, "DLROVER_EVENT_FILE_DIR": str(tmp_path), "DLROVER_EVENT_HOOK_ERROR": "1", "RANK": "3"}
    for how, code in (("raise", 1), ("kill", -signal.SIGTERM)):
        done = subprocess.run([sys.executable, "-c", script, how], env=environment, capture_output=True, timeout=60)
        assert done.returncode == code
        start, last = lines(tmp_path)
        assert start[4] == "#start"
        assert last[3:5] == ("ErrorReporter", "exception" if how == "raise" else "exit_sig")
        assert (b"last words" in done.stderr) == (how == "raise"), "the former hook is still called"


HANDLER = """
import queue, signal, sys
from dlrover.trainer.events import Process, exporters

process = Process("t")
process.instant("#first")
num_handled = 0

def handle(number, frame):
    global num_handled
    num_handled += 1
    process.instant("#handled")

seen = set()

def trace(frame, event, arg):
    if frame.f_code.co_filename not in (exporters.__file__, queue.__file__):
        return None
    place = (frame.f_code.co_filename, frame.f_lineno)
    if event == "line" and place not in seen:
        seen.add(place)
        signal.raise_signal(signal.SIGALRM)  # handled here and now, and not traced
    return trace

signal.signal(signal.SIGALRM, handle)
sys.settrace(trace)
for _ in range(20):
    process.instant("#n")
sys.settrace(None)
assert num_handled >= 3, num_handled
"""


@pytest.mark.parametrize("is_async", ["0", "1"], ids=["at once", "by a thread"])
def test_a_signal_handler_may_tell_an_event_wherever_its_thread_is(tmp_path: Path, is_async: str) -> None:
    """Also in the middle of another one."""
    environment = {
        **os.environ,
        "DLROVER_EVENT_FILE_DIR": str(tmp_path),
        "DLROVER_EVENT_ASYNC_EXPORTER": is_async,
        "DLROVER_EVENT_MAX_FILE_BYTES": "2000",
    }
    subprocess.run([sys.executable, "-c", HANDLER], env=environment, check=True, timeout=30)


FORK = """
import os, threading
from dlrover.trainer.events import Process
from dlrover.trainer.events.process import OUTLET

process = Process("t")
process.instant("#first")
with OUTLET._exporter._lock:  # as another thread would have it
    child = os.fork()
    if not child:
        process.instant("#child")
        OUTLET.close()
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_fork_tells_events_whoever_was_telling_one_at_that_moment(tmp_path: Path) -> None:
    environment = {**os.environ, "DLROVER_EVENT_FILE_DIR": str(tmp_path), "RANK": "3"}
    with subprocess.Popen([sys.executable, "-c", FORK], env=environment, start_new_session=True) as parent:
        try:
            assert parent.wait(30) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    assert [line[4] for line in lines(tmp_path)] == ["#child"]


def test_importing_opens_nothing_and_needs_little(tmp_path: Path) -> None:
    script = (
        "import sys; before = set(sys.modules); import dlrover.trainer.events\n"
        "new = set(sys.modules) - before\n"
        "assert not {'torch', 'grpc', 'opentelemetry', 'rich'} & new, new\n"
    )
    environment = {**os.environ, "DLROVER_EVENT_FILE_DIR": str(tmp_path / "none")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
    assert not (tmp_path / "none").exists()


def test_opentelemetry_gets_spans() -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from dlrover.trainer.events.opentelemetry import OpenTelemetryExporter

    kept = memory.InMemorySpanExporter()
    exporter = OpenTelemetryExporter(SimpleSpanProcessor(kept))
    for kind in (EventType.BEGIN, EventType.END):
        exporter.export(Event("00000001", "t", "#step", kind, {"success": False, "error": "boom"}))
    exporter.export(Event("00000002", "t", "#log", EventType.INSTANT, {"loss": 1.5}))
    step, log = kept.get_finished_spans()
    assert step.name == "#step"
    assert step.end_time >= step.start_time
    assert not step.status.is_ok
    assert json.loads(log.attributes["dlrover.content"]) == {"loss": 1.5}
    exporter.close()


WORKER_WITH_SPANS = """
import contextlib, sys, time
from dlrover.protocol.messages.watch import Phase
from dlrover.protocol.progress_page import ProgressPage
from dlrover.trainer import phases, progress
from dlrover.trainer.events import TrainerProcess

page = ProgressPage()
phases.open_page(page.path)

def now():
    reading = page.read(time.monotonic_ns())
    return reading.phase, reading.step

trainer = TrainerProcess("mine")
with trainer.init() as init, init.load_ckpt():
    assert now()[0] is Phase.RESTORE
with trainer.step(global_step=7):
    assert now() == (Phase.START, None)
assert now() == (Phase.FORWARD, 7)
with trainer.evaluate(global_step=7):
    saving = trainer.save(global_step=7).begin()
    assert now()[0] is Phase.CHECKPOINT
    saving.end()
    saving.end()
    assert now()[0] is Phase.EVALUATION
assert now() == (Phase.FORWARD, 7)
with contextlib.suppress(ValueError), trainer.step(global_step=8):
    raise ValueError("no step")
progress.report(20)
with trainer.step(global_step=9):
    pass
assert now() == (Phase.FORWARD, 20), "what the script says itself counts"
page.close()
"""


def test_spans_tell_the_progress_page_what_the_worker_does(tmp_path: Path) -> None:
    environment = {**os.environ, "DLROVER_EVENT_FILE_DIR": str(tmp_path), "RANK": "3"}
    subprocess.run([sys.executable, "-c", WORKER_WITH_SPANS], env=environment, check=True, timeout=60)
