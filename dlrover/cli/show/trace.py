"""
A whole job as a trace that Perfetto and chrome://tracing open: rounds, what each node did, faults, events, the step, and the spans that training
processes told of themselves.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from dlrover.cli.show.history import History

_JOB, _FIRST_NODE, _FIRST_PROCESS = 1, 10, 100_000
_LINE = re.compile(
    r"\[([^\]]{1,64})\] \[(\d{1,10})\] \[([0-9a-f]{1,32})\] \[([^\]]{0,200})\] \[([^\]]{0,200})\] \[(BEGIN|END|INSTANT)\] ?(.*)"
)
MAX_LINES = 1_000_000
"""Of the training processes' own events."""


def build_trace(history: History, training_events: Path | None = None) -> dict[str, Any]:
    found: list[dict[str, Any]] = [_name(_JOB, f"job {history.job_name}")]
    ranks = sorted({span.node_rank for span in history.spans})
    found += [_name(_FIRST_NODE + rank, f"node rank {rank}") for rank in ranks]
    for span in history.spans:
        name = f"round {span.round}" if span.doing is None else span.doing.value
        found.append(
            {
                "name": name,
                "cat": "running" if span.doing is None else "node",
                "ph": "X",
                "ts": span.begins_at,
                "dur": span.ends_at - span.begins_at,
                "pid": _FIRST_NODE + span.node_rank,
                "tid": 0,
            }
        )
    for fault in history.faults:
        found.append(
            {
                "name": f"fault {fault.number}: {fault.kind}",
                "cat": "fault",
                "ph": "X",
                "ts": fault.at,
                "dur": round(1e6 * (fault.recovered_after or fault.stood_still or 0.0)),
                "pid": _JOB,
                "tid": 1,
                "args": {"cause": fault.cause, **{class_.value: cost for class_, cost in fault.seconds.items()}},
            }
        )
    for event in history.events:
        found.append(
            {
                "name": event.name,
                "cat": event.level,
                "ph": "i",
                "s": "g" if event.node is None else "p",
                "ts": event.at,
                "pid": _JOB,
                "tid": 0,
                "args": {"text": event.text, "node": event.node, "rank": event.rank, **event.labels},
            }
        )
    found += [{"name": "step", "ph": "C", "ts": at, "pid": _JOB, "args": {"step": step}} for at, step in history.steps]
    if training_events is not None:
        found += _training(training_events)
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"job": history.job_name}}


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    path.write_text(json.dumps(trace), encoding="utf-8")


def _training(folder: Path) -> list[dict[str, Any]]:
    """Spans and instants of `dlrover.trainer.events` in that directory; lines of other kinds are left out."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("events_*.log*")):
        if path.is_symlink() or path.name.startswith("events_sys_"):
            continue
        rank = path.name.split("_")[1]
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                event = _parsed(line, rank)
                if event is not None:
                    found.append(event)
                if len(found) >= MAX_LINES:
                    return found
    pids = {event["pid"] for event in found}
    return [*(_name(pid, f"process {pid - _FIRST_PROCESS}") for pid in sorted(pids)), *found]


def _parsed(line: str, rank: str) -> dict[str, Any] | None:
    match = _LINE.match(line)
    if match is None:
        return None
    at, pid, id_, target, name, kind, content = match.groups()
    try:
        when = round(datetime.fromisoformat(at).timestamp() * 1e6)
    except ValueError:
        return None
    phase = {"BEGIN": "b", "END": "e", "INSTANT": "i"}[kind]
    event: dict[str, Any] = {
        "name": name,
        "cat": target,
        "ph": phase,
        "ts": when,
        "pid": _FIRST_PROCESS + int(pid),
        "tid": 0,
    }
    if kind == "INSTANT":
        event["s"] = "p"
    else:
        event["id"] = id_
    event["args"] = {"rank": rank, "content": content[:2000].strip()}
    return event


def _name(pid: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
