"""Events by the original's names: what scripts build, derive and call leads to the same files, and nothing raises."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
from dlrover.python.training_event import DLRoverAgentEvent, DLRoverMasterEvent, TrainerProcess, WarningType
from dlrover.python.training_event.config import Config, get_env_key, parse_bool, parse_int, parse_str
from dlrover.python.training_event.emitter import DurationSpan, EventEmitter, Process, SafeCallable, generate_event_id
from dlrover.python.training_event.event import Event, EventTargetName, EventType, EventTypeName
from dlrover.python.training_event.exporter import (
    AsyncExporter,
    EventExporter,
    JsonFormatter,
    LogFormatter,
    TextFileExporter,
    close_default_exporter,
    get_default_exporter,
    init_default_exporter,
)
from dlrover.python.training_event.predefined.trainer import TrainerEventName

from dlrover.trainer.events.process import OUTLET


class Kept(EventExporter):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def export(self, event: Event) -> None:
        self.events.append(event)

    @property
    def told(self) -> list[tuple[str, str, dict[str, object]]]:
        return [(event.name, event.event_type.name, event.content) for event in self.events]


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where this process's own events go."""
    monkeypatch.setenv("DLROVER_EVENT_FILE_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    OUTLET.close()
    yield tmp_path
    OUTLET.close()
    own_log = logging.getLogger("dlrover.events")
    for handler in list(own_log.handlers):
        own_log.removeHandler(handler)
        handler.close()


def test_an_exporter_of_the_scripts_own_gets_events_of_the_old_form(kept: Kept) -> None:
    process = Process("trainer", kept)
    process.instant("#one", {"a": 1})
    with process.duration("#two") as span:
        span.extra_args(b=2)
    assert [event.name for event in kept.events] == ["#one", "#two", "#two"]
    first, _, end = kept.events
    assert str(first).endswith('[trainer] [#one] [INSTANT] {"a": 1}')
    assert first.to_dict()["event_type"] == "INSTANT"
    assert json.loads(first.to_json())["content"] == {"a": 1}
    assert end.content["success"] is True


def test_a_span_is_made_of_an_emitter(kept: Kept) -> None:
    emitter = EventEmitter("trainer", kept)
    emitter.instant("#instant")
    with DurationSpan(emitter, "#span", {"a": 1}) as span, span.stage("part", {"b": 2}):
        pass
    names = [(event.name, event.event_type) for event in kept.events]
    assert names == [
        ("#instant", EventType.INSTANT),
        ("#span", EventType.BEGIN),
        ("#span#part", EventType.BEGIN),
        ("#span#part", EventType.END),
        ("#span", EventType.END),
    ]
    assert len({event.event_id for event in kept.events}) == 3


def test_methods_of_a_span_of_the_scripts_own_are_safe(kept: Kept) -> None:
    class Loading(DurationSpan):  # type: ignore[misc,valid-type]
        def from_disk(self) -> object:
            return self.stage("disk")

        def broken(self) -> object:
            raise RuntimeError("of the script")

    with Process("trainer", kept).custom_duration(Loading, "#load") as span:
        span.from_disk().begin()
        span.broken().more.chained()
    assert [event.name for event in kept.events] == ["#load", "#load#disk", "#load"]


def test_the_original_calls_of_the_predefined_events(folder: Path) -> None:
    master, agent = DLRoverMasterEvent().singleton_instance(), DLRoverAgentEvent().singleton_instance()
    assert agent is DLRoverAgentEvent.singleton_instance()
    assert master is not agent
    master.start({"platform": "local"})
    master.worker_event("pod-0", "Pending", "Running", "", extra=1)
    agent.start(args={"entrypoint": "train.py"})
    with agent.rendezvous("elastic-training", "node0", 0, timeout=3):
        agent.process_restart(0, restart_count=1)
    agent.job_restart(0, reason="why")
    agent.exit(success=True)
    trainer = TrainerProcess(EventTargetName.TRAINER)
    trainer.start({"lr": 0.1}, run="a")
    trainer.start(lr=0.2)
    trainer.warning(WarningType.DEPRECATED, "old option")
    lines = (folder / "events_0.log").read_text().splitlines()
    found = [(*line.split("] ")[3:6], json.loads(line.split("] ", 6)[6])) for line in lines]
    assert [
        (target.lstrip("["), name.lstrip("["), content) for target, name, _, content in found if "END" not in _
    ] == [
        ("dlrover-master", "#master_start", {"params": {"platform": "local"}}),
        (
            "dlrover-master",
            "#worker_event",
            {"pod_name": "pod-0", "from_state": "Pending", "to_state": "Running", "exit_reason": "", "extra": 1},
        ),
        ("dlrover-agent", "#agent_start", {"params": {"entrypoint": "train.py"}}),
        (
            "dlrover-agent",
            "#rendezvous",
            {"rendezvous_type": "elastic-training", "node_name": "node0", "node_rank": 0, "timeout": 3},
        ),
        ("dlrover-agent", "#process_restart", {"node_rank": 0, "restart_count": 1}),
        ("dlrover-agent", "#job_restart", {"caused_node_rank": 0, "reason": "why"}),
        ("dlrover-agent", "#agent_exit", {"success": True}),
        ("AtorchTrainerV2", "#start", {"params": {"lr": 0.1}, "run": "a"}),
        ("AtorchTrainerV2", "#start", {"params": {"lr": 0.2}}),
        ("AtorchTrainerV2", "#warning", {"warning_type": "deprecated", "msg": "old option"}),
    ]


def test_exporters_write_what_formatters_make(folder: Path, kept: Kept) -> None:
    event = Event.instant(generate_event_id(), "trainer", TrainerEventName.TRAIN_START.value, {"a": 1})
    file = TextFileExporter(str(folder / "own"), JsonFormatter())
    file.export(event)
    file.close()
    assert json.loads((folder / "own" / "events_0.log").read_text())["name"] == "#start"
    assert LogFormatter().format(event).endswith('[#start] [INSTANT] {"a": 1}')
    queued = AsyncExporter(kept, max_queue_size=8)
    queued.export(event)
    queued.close(timeout=60)
    assert kept.events == [event]
    assert queued.get_metrics()["dropped_events"] == 0


def test_what_a_slow_exporter_leaves_behind_is_counted() -> None:
    class Slow(EventExporter):  # type: ignore[misc,valid-type]
        let_go = threading.Event()
        is_busy = threading.Event()

        def export(self, event: Event) -> None:
            self.is_busy.set()
            self.let_go.wait(60)

    queued = AsyncExporter(Slow())
    for _ in range(3):
        queued.export(Event.instant(generate_event_id(), "trainer", "#one"))
    assert Slow.is_busy.wait(60)
    queued.close(timeout=0.01)
    assert queued.get_metrics()["dropped_events"] == 2
    Slow.let_go.set()


def test_the_default_exporter_begins_and_ends_on_demand(folder: Path) -> None:
    assert get_default_exporter() is None
    init_default_exporter()
    assert get_default_exporter() is not None
    close_default_exporter()
    assert get_default_exporter() is None


def test_settings_come_from_the_environment_and_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "settings.json").write_text('{"queue_size": 7, "text_formatter": "JSON"}')
    monkeypatch.setenv(get_env_key("queue_size"), "9")
    config = Config(str(folder / "settings.json"))
    assert (config.queue_size, config.text_formatter, config.file_dir, config.rank) == (9, "JSON", str(folder), "0")
    config.enable = False
    assert "has no effect on events: set DLROVER_EVENT_ENABLE" in caplog.text
    assert [parse_bool(text) for text in ("True", "off", "perhaps")] == [True, False, None]
    assert (parse_int("3"), parse_str(3), EventTypeName.BEGIN) == (3, None, "BEGIN")


def test_the_object_that_accepts_everything() -> None:
    with SafeCallable().any.attribute(1) as nothing:
        assert nothing.more() is not None
