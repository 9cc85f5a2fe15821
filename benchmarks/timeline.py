"""
What the event files of the reference job say about one start and one recovery. Pure but for the reading of the files.

A *life* is one process of one rank. A kill ends the lives that were there; the job has recovered when new lives of all
ranks have completed a step that no former life had completed. Steps done twice are not progress and do not stop the
clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PHASES: tuple[tuple[str, str], ...] = (
    ("detected", "detect"),
    ("stop", "stop"),
    ("process", "rendezvous"),
    ("script", "start"),
    ("imported", "import torch"),
    ("initialised", "process group"),
    ("built", "model, AdamW"),
    ("restored", "restore"),
    ("step", "to new step"),
)
"""
The event that ends a phase, and the phase. Only the launcher itself sees the end of the first, and of the rendezvous: they
come from its log. Without its word detection is part of the stop, and the rendezvous lasts until there is a new process.
"""


@dataclass(frozen=True)
class Event:
    name: str
    at_ns: int
    rank: int
    pid: int
    step: int | None = None


class EventFolder:
    """Reads what the ranks appended since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.events: list[Event] = []

    def refresh(self) -> list[Event]:
        for path in sorted(self._folder.glob("rank*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            self.events.extend(parse_event(line) for line in whole.splitlines())
        return self.events


def parse_event(line: bytes) -> Event:
    fields = json.loads(line)
    return Event(fields["event"], fields["at_ns"], fields["rank"], fields["pid"], fields.get("step"))


@dataclass(frozen=True)
class Recovery:
    seconds: float
    """From the kill to the first new step, completed by all ranks."""
    phases: Mapping[str, float]
    """Where they went; sums up to `seconds`. Without `detect` where the launcher did not say: it is in `stop` then."""
    num_steps_lost: int
    """Steps that had been completed and were done again."""


def lives(events: Iterable[Event], num_ranks: int) -> dict[int, int]:
    """The newest pid of each rank, once all ranks have completed a step in it; else empty."""
    newest = {event.rank: event.pid for event in events if event.name == "process"}
    stepped = {event.pid for event in events if event.name == "step"}
    is_complete = len(newest) == num_ranks and stepped.issuperset(newest.values())
    return newest if is_complete else {}


def first_step_at_ns(events: Iterable[Event], num_ranks: int) -> int | None:
    """When all ranks had completed a step for the first time."""
    firsts: dict[int, int] = {}
    for event in events:
        if event.name == "step":
            firsts[event.rank] = min(event.at_ns, firsts.get(event.rank, event.at_ns))
    return max(firsts.values()) if len(firsts) == num_ranks else None


def num_steps_since(events: Iterable[Event], pids: Iterable[int]) -> int:
    """The number of steps the slowest of these processes has completed in its life."""
    counts = dict.fromkeys(pids, 0)
    for event in events:
        if event.name == "step" and event.pid in counts:
            counts[event.pid] += 1
    return min(counts.values())


def recovery(
    events: Iterable[Event],
    *,
    killed_at_ns: int,
    survivors_gone_at_ns: int | None,
    old_pids: Iterable[int],
    num_ranks: int,
    detected_at_ns: int | None = None,
    met_at_ns: int | None = None,
) -> Recovery | None:
    """
    None while the job has not recovered. `old_pids`: all lives before the kill, also those of earlier kills.

    `detected_at_ns` and `met_at_ns` are what the launcher said: when it noticed the death, and had its new world.
    """
    old = frozenset(old_pids)
    # A survivor may still complete the step to which its dead peer had contributed: steps after the kill can be old
    # too.
    last_old_step = max((event.step or 0 for event in events if event.name == "step" and event.pid in old), default=0)
    steps: dict[int, dict[int, Event]] = {}
    for event in events:
        if event.name == "step" and event.pid not in old and event.step is not None and event.step > last_old_step:
            steps.setdefault(event.step, {}).setdefault(event.rank, event)
    complete = [by_rank for _, by_rank in sorted(steps.items()) if len(by_rank) == num_ranks]
    if not complete:
        return None
    new_steps = complete[0].values()
    new_pids = {event.pid for event in new_steps}

    ends = {"stop": killed_at_ns if survivors_gone_at_ns is None else survivors_gone_at_ns}
    for event in events:
        if event.pid in new_pids and event.name != "step":
            ends[event.name] = max(event.at_ns, ends.get(event.name, 0))
    ends["step"] = max(event.at_ns for event in new_steps)
    if detected_at_ns is not None:
        ends["detected"] = detected_at_ns
    if met_at_ns is not None:
        ends["process"] = met_at_ns
    elif ends.get("process", killed_at_ns) < killed_at_ns:
        # Forked ahead of need: no interpreter starts, and all until the script's first line is the way of the order to
        # it.
        ends["process"] = ends["script"]

    phases = {}
    begun_at_ns = killed_at_ns
    for name, phase in PHASES:
        if name == "detected" and detected_at_ns is None:
            continue
        # /proc gives the birth of a process in steps of 10 ms, so it can seem older than what came before it.
        ended_at_ns = min(max(begun_at_ns, ends.get(name, begun_at_ns)), ends["step"])
        phases[phase] = (ended_at_ns - begun_at_ns) / 1e9
        begun_at_ns = ended_at_ns
    restored = min(event.step or 0 for event in events if event.name == "restored" and event.pid in new_pids)
    return Recovery((ends["step"] - killed_at_ns) / 1e9, phases, last_old_step - restored)
