"""
`dlrover top`: a job at work, live in the terminal. Where there is no terminal it is printed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from dlrover.cli.launch.last_words import REDO_UNKNOWN, goodput_line
from dlrover.protocol.codec import Question
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.goodput import AskEvents, AskGoodput, Events, GoodputStatus, JobEvent
from dlrover.protocol.messages.job import AskStatus, JobStatus, NodeStatus, Reply
from dlrover.protocol.messages.watch import Activity, AskActivity, NodeActivity
from dlrover.protocol.units import amount

REFRESH = 1.0
"""Seconds between two looks when nothing happens; an event is shown at once."""
MAX_FAILURES = 30
"""Looks in a row that the master may leave unanswered, a second apart: it may be starting again."""
_STYLES = {"error": "red", "warn": "yellow", "info": "default"}

Ask = Callable[[Question], Reply]


def show(ask: Ask, console: Console, *, once: bool = False, pause: Callable[[float], object] = time.sleep) -> None:
    """Until the job is over, or Ctrl-C. Raises what asking raises, if the master stays away. `pause`: between two failures, which cost no time."""
    if once or not console.is_terminal:
        console.print(_look(ask, 0, console)[0])
        return
    newest, failures = 0, 0
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    view, newest, is_over = _look(ask, newest, console)
                except DLRoverError as error:
                    failures += 1
                    if failures > MAX_FAILURES:
                        raise
                    view = Panel(Text(f"The master does not answer: {error}"))
                    live.update(view, refresh=True)
                    pause(REFRESH)  # nobody tells when a master is back
                    continue
                failures = 0
                live.update(view, refresh=True)
                if is_over:
                    break
    except KeyboardInterrupt:
        return
    console.print(view)


def _look(ask: Ask, newest: int, console: Console) -> tuple[RenderableType, int, bool]:
    if newest:
        ask(AskEvents(after=newest, limit=1, wait=REFRESH))
    status, goodput, activity, events = (
        ask(AskStatus()),
        ask(AskGoodput()),
        ask(AskActivity()),
        ask(AskEvents(limit=12)),
    )
    assert isinstance(status, JobStatus)
    assert isinstance(goodput, GoodputStatus)
    assert isinstance(activity, Activity)
    assert isinstance(events, Events)
    room = max(5, console.height - 20) if console.is_terminal else 1000
    return (
        view_of(status, goodput, activity, events.events, most_nodes=room),
        max(newest, events.newest),
        status.end is not None,
    )


def view_of(
    status: JobStatus, goodput: GoodputStatus, activity: Activity, events: Sequence[JobEvent], *, most_nodes: int
) -> RenderableType:
    step = "" if goodput.highest_step is None else f", step {goodput.highest_step}"
    head = Text(
        f"job {status.job_name}: {status.stage_text}, round {status.round}, {status.world_size} workers, {status.num_restarts} "
        f"restarts, {goodput.num_faults} fault{'' if goodput.num_faults == 1 else 's'}{step}, {goodput.wall:.0f} s",
        style="bold",
    )
    lines = [
        head,
        Text(goodput_line(goodput)),
        *([] if goodput.is_redo_known else [Text(REDO_UNKNOWN)]),
        Text(f"because: {status.reason}", style="dim"),
    ]
    doing = {node.node_rank: node.doing for node in goodput.nodes}
    told = {node.node: node for node in activity.nodes}
    # So that a terminal of 80 columns has room for the words: no lines between, and what is too wide is folded.
    names = ("node", "host", "status", "does", "phase", "step", "s/step", "steps/s", "CPU", "memory")
    columns = (Column(name, overflow="fold") for name in names)
    table = Table(*columns, expand=True, box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for node in status.nodes[:most_nodes]:
        does = doing.get(node.node_rank)
        table.add_row(*(Text(cell) for cell in _cells(node, "" if does is None else does.value, told.get(node.node))))
    hidden = max(0, len(status.nodes) - most_nodes) + sum(status.left_out.nodes.values())
    below = [Text(f"and {hidden} more nodes")] if hidden > 0 else []
    return Group(*lines, table, *below, _events(events))


def _cells(node: NodeStatus, does: str, told: NodeActivity | None) -> tuple[str, ...]:
    step = "" if node.step is None else str(node.step)
    first = (node.label, node.host, node.status, does)
    if told is None:
        return (*first, "", step, "", "", "", "")
    phase = "" if told.phase is None else told.phase.value + (" (stalled)" if told.is_stalled else "")
    step = step if told.step is None else str(told.step)
    seconds = f"{told.step_seconds:.3f}" if told.step_seconds else ""
    speed = f"{1 / told.step_seconds:.2f}" if told.step_seconds else ""
    cpu = "" if told.cpu is None else f"{told.cpu:.1f}"
    memory = "" if told.memory_bytes is None else amount(told.memory_bytes)
    if told.memory_limit_bytes and told.memory_bytes is not None:
        memory += f" ({100 * told.memory_bytes / told.memory_limit_bytes:.0f} %)"
    return (*first, phase, step, seconds, speed, cpu, memory)


def _events(events: Sequence[JobEvent]) -> Table:
    table = Table(
        "time", Column("event", overflow="fold"), "what", expand=True, box=SIMPLE_HEAD, padding=0, pad_edge=False
    )
    for event in events:
        at = datetime.fromtimestamp(event.at / 1e6).strftime("%H:%M:%S")
        text = event.text.split("\n", 1)[0][:300]
        table.add_row(at, Text(event.name, style=_STYLES.get(event.level, "default")), Text(text))
    return table
