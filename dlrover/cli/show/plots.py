"""
The plots of a job's report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from dlrover.cli.show import svg
from dlrover.cli.show.history import HistorySpan
from dlrover.protocol.messages.goodput import FaultCost, TimeClass

COLOURS: Mapping[TimeClass | None, str] = {
    None: "#2e9e5b",
    TimeClass.COMPUTE: "#2e9e5b",
    TimeClass.REDO: "#e0a100",
    TimeClass.CHECKPOINT: "#4e79a7",
    TimeClass.RESTORE: "#76b7e0",
    TimeClass.DATA_WAIT: "#b07aa1",
    TimeClass.EVALUATION: "#59a5a5",
    TimeClass.HANG: "#b3261e",
    TimeClass.STRAGGLER_WAIT: "#d37295",
    TimeClass.STOPPING: "#f28e2b",
    TimeClass.DOWN: "#7f0000",
    TimeClass.START_UP: "#9c9c5e",
    TimeClass.RENDEZVOUS: "#edc948",
    TimeClass.NODE_CHECK: "#8cd17d",
    TimeClass.IDLE: "#c9c9c9",
}
WIDTH = 960
_LEFT = 90


def goodput_bar(seconds: Mapping[TimeClass, float]) -> str:
    total = sum(seconds.values()) or 1.0
    parts, x = [], 0.0
    for class_ in sorted(seconds, key=lambda each: -seconds[each]):
        width = WIDTH * seconds[class_] / total
        label = f"{class_.value}: {seconds[class_]:.1f} s, {100 * seconds[class_] / total:.2f} %"
        parts.append(svg.rect(x, 0, max(width, 0.5), 34, COLOURS[class_], title=label))
        x += width
    return svg.picture((WIDTH, 34), parts, label="Share of each class of time")


def legend(classes: Sequence[TimeClass]) -> str:
    items = "".join(
        f'<span><i style="background:{COLOURS[class_]}"></i>{escape(class_.value)}</span>' for class_ in classes
    )
    return f'<p class="legend">{items}</p>'


def timeline(
    spans: Sequence[HistorySpan], faults: Sequence[FaultCost], begins_at: int, ends_at: int, *, most_rows: int = 32
) -> str:
    ranks = sorted({span.node_rank for span in spans})[:most_rows]
    rows = {rank: index for index, rank in enumerate(ranks)}
    height = 22 * max(1, len(ranks)) + 24
    scale = (WIDTH - _LEFT) / max(1, ends_at - begins_at)
    parts = []
    for rank, row in rows.items():
        parts.append(svg.text(0, 22 * row + 15, f"node rank {rank}"))
    for span in spans:
        if span.node_rank not in rows:
            continue
        x, width = _LEFT + (span.begins_at - begins_at) * scale, (span.ends_at - span.begins_at) * scale
        name = f"round {span.round}" if span.doing is None else span.doing.value
        label = f"{name}: {(span.ends_at - span.begins_at) / 1e6:.2f} s"
        top = 22 * rows[span.node_rank] + 3
        parts.append(svg.rect(x, top, max(width, 0.4), 16, COLOURS[span.doing], title=label))
    for fault in faults:
        x = _LEFT + (fault.at - begins_at) * scale
        title = f"fault {fault.number}: {fault.cause}"
        parts.append(svg.line(x, 0, x, height - 22, "#b3261e", dash="3 2", title=title))
    parts += _time_axis(height - 5, begins_at, ends_at)
    return svg.picture((WIDTH, height), parts, label="What each node did, with faults as dashed lines")


def steps_over_time(steps: Sequence[tuple[int, int]], begins_at: int, ends_at: int) -> str:
    height = 200
    if len(steps) < 2:
        return "<p>The workers reported too few steps to plot.</p>"
    lowest, highest = steps[0][1], max(step for _, step in steps)
    scale_x = (WIDTH - _LEFT) / max(1, ends_at - begins_at)
    scale_y = (height - 40) / max(1, highest - lowest)
    points = [(_LEFT + (at - begins_at) * scale_x, height - 25 - (step - lowest) * scale_y) for at, step in steps]
    parts = [
        svg.polyline(points, "#2e9e5b", stroke_width="2"),
        svg.text(0, 20, f"step {highest}"),
        svg.text(0, height - 25, f"step {lowest}"),
        *_time_axis(height - 6, begins_at, ends_at),
    ]
    return svg.picture((WIDTH, height), parts, label="Highest step over time")


def _time_axis(y: float, begins_at: int, ends_at: int) -> list[str]:
    return [svg.text(_LEFT, y, "0 s"), svg.text(WIDTH, y, f"{(ends_at - begins_at) / 1e6:.0f} s", anchor="end")]
