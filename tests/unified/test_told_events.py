"""What tools of the original read of a job: each change of its stage, its restarts and its end, once (spec 11, §16)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.trainer.events.process import OUTLET
from dlrover.unified.core.messages import EnsembleStatus, StageOfJob
from dlrover.unified.shell.told_events import CONTROLLER, ControllerEvents, ToldEvents


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process's events go."""
    monkeypatch.setenv("DLROVER_EVENT_FILE_DIR", str(tmp_path))
    monkeypatch.setenv("DLROVER_EVENT_TEXT_FORMATTER", "JSON")
    monkeypatch.setenv("RANK", "0")
    OUTLET.close()
    yield tmp_path
    OUTLET.close()


def status(stage: StageOfJob, *, restarts: int = 0, exit_code: int = 0) -> EnsembleStatus:
    return EnsembleStatus(
        name="job", stage=stage, exit_code=exit_code, num_job_restarts=restarts, verdict="it failed", roles=()
    )


def told(folder: Path) -> list[str]:
    found = []
    for path in folder.glob("events_0_*.log"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            assert event["target"] == CONTROLLER
            stages = [event["content"][key] for key in ("old_stage", "new_stage") if key in event["content"]]
            found.append(" ".join([event["name"].lstrip("#"), event["event_type"], *stages]))
    return found


def test_a_job_that_restarts_and_then_fails(folder: Path):
    events = ControllerEvents(ToldEvents(CONTROLLER, is_told=True))
    events.begin(status(StageOfJob.INIT))
    for stage, restarts, exit_code in (
        (StageOfJob.INIT, 0, 0),
        (StageOfJob.RUNNING, 0, 0),
        (StageOfJob.RUNNING, 0, 0),
        (StageOfJob.READY, 1, 0),
        (StageOfJob.RUNNING, 1, 0),
        (StageOfJob.STOPPING, 1, 3),
        (StageOfJob.STOPPED, 1, 3),
    ):
        events.look(status(stage, restarts=restarts, exit_code=exit_code))
    assert told(folder) == [
        "inited INSTANT",
        "stage_changed INSTANT INIT READY",
        "stage_changed INSTANT READY RUNNING",
        "restarting BEGIN",
        "stage_changed INSTANT RUNNING READY",
        "stage_changed INSTANT READY RUNNING",
        "restarting END",
        "failover_success INSTANT",
        "stage_changed INSTANT RUNNING STOPPING",
        "stop_requested INSTANT",
        "failover_stop INSTANT",
        "stopping BEGIN",
        "stage_changed INSTANT STOPPING STOPPED",
        "stopping END",
    ]


def test_a_conductor_that_takes_over_tells_nothing_again(folder: Path):
    events = ControllerEvents(ToldEvents(CONTROLLER, is_told=True))
    events.begin(status(StageOfJob.RUNNING, restarts=2))
    events.look(status(StageOfJob.RUNNING, restarts=2))
    assert told(folder) == ["inited INSTANT"]


def test_other_jobs_write_no_events(folder: Path):
    events = ControllerEvents(untold := ToldEvents(CONTROLLER, is_told=False))
    events.begin(status(StageOfJob.INIT))
    with untold.span("#running") as span:
        assert span is None
    for stage in (StageOfJob.READY, StageOfJob.RUNNING, StageOfJob.STOPPING, StageOfJob.STOPPED):
        events.look(status(stage, restarts=1))
    assert list(folder.iterdir()) == []
