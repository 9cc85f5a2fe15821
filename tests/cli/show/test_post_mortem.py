"""What people see of a job's time and events: lines, a live view, a page, a trace. Made from real journals, by real commands."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from dlrover.cli.connection import JobConnection
from dlrover.cli.events_command import asked
from dlrover.cli.launch.last_words import REDO_UNKNOWN, goodput_line
from dlrover.cli.show import top
from dlrover.cli.show.history import History, read_history
from dlrover.cli.show.post_mortem import as_html, as_markdown
from dlrover.cli.show.trace import build_trace
from dlrover.core.goodput.events import event
from dlrover.core.job import DECISION_VERSION
from dlrover.master.journal.journal import Journal
from dlrover.master.view.events import EventLog
from dlrover.protocol.codec import Question
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.goodput import (
    SPLIT,
    AccountGoodput,
    AskEvents,
    AskGoodput,
    Events,
    NodeAccount,
    TimeClass,
)
from dlrover.protocol.messages.job import AskStatus, Micros, Reply
from dlrover.protocol.messages.watch import Activity, AskActivity, NodeActivity, Phase
from tests.core.scene import Scene, failure, terms

HOSTILE = "<script>alert('x')</script> | **bold** \x1b[31m `tick` [link](http://evil)"


@pytest.fixture(scope="module")
def scene() -> Scene:
    """Two nodes; a worker fails with a hostile message, then a node is lost and replaced."""
    scene = Scene(terms(2, join_timeout=600))
    for name in ("a", "b"):
        scene.attach(name)
    scene.at(10).rejoin("a", "b")
    tell(scene.at(20), 60)
    scene.fail("a", failure(at=20, message=HOSTILE), step=60)
    scene.at(21).rejoin("a", "b")
    tell(scene.at(40), 160)
    scene.at(41).silent("b")
    scene.at(60).attach("c", rank=1)
    scene.rejoin("a", "c")
    tell(scene.at(80), 300)
    return scene


def tell(scene: Scene, step: int) -> None:
    millis = tuple({TimeClass.START_UP: 1000, TimeClass.COMPUTE: 9000}.get(class_, 0) for class_ in SPLIT)
    places = scene.job.state.goodput.places.values()
    live = scene.job.state.nodes.live
    accounts = tuple(NodeAccount(each.node, live[each.node].incarnation, each.round, step, millis) for each in places)
    scene.do(AccountGoodput(accounts=accounts))


@pytest.fixture
def journal(scene: Scene, tmp_path: Path) -> Path:
    path = tmp_path / "journal.sqlite"
    written = Journal(path, job_name="a-job", decision_version=DECISION_VERSION)
    written.append(1, tuple(scene.journal), master_epoch=1)
    written.close()
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlrover.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_everything_and_executes_nothing(journal: Path) -> None:
    page = _Tags()
    page.feed(html := as_html(read_history(journal)))
    assert page.tags.count("svg") == 3
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert "alert('x')" in page.text, "shown as text"
    assert not re.search(r"""(src|href)=["']?http""", html), "nothing is fetched"
    assert "default-src 'none'" in html
    assert "node rank 1" in page.text
    assert "A warm standby" in page.text


def test_markdown_tells_the_same_and_cannot_be_broken_out_of(journal: Path) -> None:
    history = read_history(journal)
    text = as_markdown(history)
    assert [fault.kind for fault in history.faults] == ["worker", "node"]
    assert "<script>" not in text
    rows = [line for line in text.splitlines() if line.startswith("| 1 | +20.0 s | worker |")]
    assert len(rows) == 1
    assert r"\*\*bold\*\*" in text
    assert "goodput since the first step" in text


def test_the_history_sums_up_and_spans_follow_each_other(journal: Path, scene: Scene) -> None:
    history = read_history(journal)
    assert history.goodput == scene.job.goodput(scene.now)
    assert [step for _, step in history.steps] == [60, 160, 300]
    for rank in (0, 1):
        spans = sorted((span for span in history.spans if span.node_rank == rank), key=lambda span: span.begins_at)
        assert all(before.ends_at == after.begins_at for before, after in itertools.pairwise(spans))
        covered = sum(span.ends_at - span.begins_at for span in spans)
        assert covered == pytest.approx(1e6 * history.goodput.nodes[rank].lived)


def test_a_trace_for_perfetto_with_the_events_of_training_processes(journal: Path, tmp_path: Path) -> None:
    (tmp_path / "ev").mkdir()
    line = '[2026-01-02T03:04:05.678901] [42] [0a0b0c0d] [Trainer] [#step] [{}] {{"global_step": 1}}\n'
    log = tmp_path / "ev" / "events_0_42.log"
    log.write_bytes((line.format("BEGIN") + line.format("END") + "rubbish \n").encode() + b"\xff\x00 binary\n")
    done = run("events", str(journal), "--trace", str(tmp_path / "t.json"), "--training-events", str(tmp_path / "ev"))
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert all({"name", "ph", "pid"} <= set(event) for event in trace)
    assert [event["ph"] for event in trace if event["name"] == "#step"] == ["b", "e"]
    assert {"round 1", "round 2", "round 3", "down", "stopping"} <= {event["name"] for event in trace}
    assert sum(event["ph"] == "X" and event["name"].startswith("fault") for event in trace) == 2
    assert trace != build_trace(read_history(journal))["traceEvents"]


def test_events_of_a_journal_as_lines_and_as_json(journal: Path) -> None:
    as_json = run("events", str(journal), "--json")
    names = [json.loads(line)["name"] for line in as_json.stdout.splitlines()]
    assert names.count("round-started") == 3
    assert "worker-failed" in names
    assert "node-silent" in names
    lines = run("events", str(journal), "--limit", "3")
    assert len(lines.stdout.splitlines()) == 3
    assert "\x1b" not in run("events", str(journal)).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--html", "--markdown"], "not both"),
        (["-o", "/nowhere/at/all.html"], "/nowhere/at/all.html"),
    ],
)
def test_wrong_options_of_report_are_explained(journal: Path, arguments: list[str], says: str) -> None:
    done = run("report", str(journal), *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_report_writes_by_the_name_of_the_file(journal: Path, tmp_path: Path) -> None:
    done = run("report", str(journal), "-o", str(tmp_path / "r.html"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    (tmp_path / "text").write_text("no journal")
    refused = run("report", str(tmp_path / "text"))
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr


def test_redo_that_is_unknown_is_said_in_top_and_in_the_report(scene: Scene) -> None:
    known = scene.job.goodput(scene.now)
    fault = replace(known.faults[0], is_redo_known=False)
    unknown = replace(known, is_redo_known=False, faults=(fault, *known.faults[1:]))
    assert goodput_line(unknown).startswith("goodput at most ")
    assert goodput_line(unknown).endswith("redo unknown")
    assert "at most" not in goodput_line(known)
    output = StringIO()
    status = scene.job.status()
    Console(file=output, width=400).print(top.view_of(status, unknown, Activity(nodes=()), (), most_nodes=10))
    assert REDO_UNKNOWN in output.getvalue()
    history = History(job_name="a-job", goodput=unknown, faults=list(unknown.faults), events=[])
    for text in (as_html(history), as_markdown(history)):
        assert "Redo time is unknown" in text
        assert "at most" in text
        assert "redo unknown)" in text, "what the fault cost"


async def test_top_prints_once_without_a_terminal_and_ends_cleanly_on_ctrl_c(scene: Scene) -> None:
    log = EventLog()
    node = next(iter(scene.job.state.nodes.live))
    activity = Activity(
        nodes=(
            NodeActivity(node=node, phase=Phase.BACKWARD, step=7, step_seconds=0.25, cpu=1.5, memory_bytes=512 * 2**20),
        )
    )

    def ask(question: Question) -> Reply:
        match question:
            case AskStatus():
                return replace(scene.job.status(), blocked=blocked)
            case AskGoodput():
                return scene.job.goodput(scene.now)
            case AskActivity():
                return activity
            case AskEvents():
                return log.after(question.after, question.limit)
        raise AssertionError(question)

    blocked, output = "", StringIO()
    top.show(ask, Console(file=output, width=160))
    text = output.getvalue()
    assert "blocked" not in text
    assert "512 MiB" in text
    assert "backward" in text
    assert "4.00" in text, "steps per second"
    assert "goodput" in text
    assert goodput_line(scene.job.goodput(scene.now)) in text
    blocked, output = "its disk is full", StringIO()
    top.show(ask, Console(file=output, width=160))
    assert f"blocked ({scene.job.status().stage})" in output.getvalue()
    assert "because: its disk is full" in output.getvalue()

    narrow = StringIO()
    top.show(ask, Console(file=narrow, width=80))
    assert "…" not in narrow.getvalue()
    assert "backward" in narrow.getvalue()

    looks = 0

    def interrupted(question: Question) -> Reply:
        nonlocal looks
        looks += isinstance(question, AskGoodput)
        if looks == 3:
            raise KeyboardInterrupt
        return ask(question)

    log.add(event(scene.now, "info", "test", "[bold]no markup[/bold]"))
    terminal = StringIO()
    top.show(interrupted, Console(file=terminal, width=160, force_terminal=True))
    assert "[bold]no markup[/bold]" in terminal.getvalue()
    assert "\x1b[?1049l" in terminal.getvalue(), "the terminal is given back"


def test_watching_waits_for_a_master_that_starts_again() -> None:
    pauses: list[float] = []

    def ask(question: Question) -> Reply:
        if len(pauses) == 5:
            raise KeyboardInterrupt
        raise Unavailable("nobody listens there", 1.0)

    terminal = Console(file=StringIO(), width=160, force_terminal=True)
    top.show(ask, terminal, pause=pauses.append)
    assert pauses == [top.REFRESH] * 5

    def never(question: Question) -> Reply:
        raise Unavailable("nobody listens there", 1.0)

    pauses.clear()
    with pytest.raises(Unavailable):
        top.show(never, terminal, pause=pauses.append)
    assert len(pauses) == top.MAX_FAILURES


def test_a_history_is_asked_of_the_master_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_MASTER_ADDR", "127.0.0.1:1")
    monkeypatch.setenv("DLROVER_JOB_TOKEN", "token")
    with pytest.raises(Unavailable):  # and not that no job runs on this host
        JobConnection().history()


def test_following_ends_with_the_job_although_its_master_is_gone() -> None:
    answers = iter(
        [
            Events(events=(replace(event(Micros(1), "info", "test", "one"), number=1),), newest=1),
            Events(events=(replace(event(Micros(2), "info", "job-ending", "over"), number=2),), newest=2),
        ]
    )

    def ask(question: Question) -> Reply:
        for answer in answers:
            return answer
        raise Unavailable("the master is gone", 1.0)

    assert [each.text for each in asked(ask, limit=10, follow=True)] == ["one", "over"]
