"""
Plots as SVG inside a page: no script, no library, nothing to fetch. All texts are escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

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
        parts.append(
            f'<rect x="{x:.2f}" y="0" width="{max(width, 0.5):.2f}" height="34" fill="{COLOURS[class_]}">'
            f"<title>{escape(label)}</title></rect>"
        )
        x += width
    return _svg(34, parts, "Share of each class of time")


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
        parts.append(f'<text x="0" y="{22 * row + 15}">node rank {rank}</text>')
    for span in spans:
        if span.node_rank not in rows:
            continue
        x, width = _LEFT + (span.begins_at - begins_at) * scale, (span.ends_at - span.begins_at) * scale
        name = f"round {span.round}" if span.doing is None else span.doing.value
        label = f"{name}: {(span.ends_at - span.begins_at) / 1e6:.2f} s"
        parts.append(
            f'<rect x="{x:.2f}" y="{22 * rows[span.node_rank] + 3}" width="{max(width, 0.4):.2f}" height="16" '
            f'fill="{COLOURS[span.doing]}"><title>{escape(label)}</title></rect>'
        )
    for fault in faults:
        x = _LEFT + (fault.at - begins_at) * scale
        parts.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height - 22}" stroke="#b3261e" stroke-dasharray="3 2">'
            f"<title>{escape(f'fault {fault.number}: {fault.cause}')}</title></line>"
        )
    parts.append(f'<text x="{_LEFT}" y="{height - 5}">0 s</text>')
    parts.append(f'<text x="{WIDTH}" y="{height - 5}" text-anchor="end">{(ends_at - begins_at) / 1e6:.0f} s</text>')
    return _svg(height, parts, "What each node did, with faults as dashed lines")


def steps_over_time(steps: Sequence[tuple[int, int]], begins_at: int, ends_at: int) -> str:
    height = 200
    if len(steps) < 2:
        return "<p>The workers reported too few steps to plot.</p>"
    lowest, highest = steps[0][1], max(step for _, step in steps)
    scale_x = (WIDTH - _LEFT) / max(1, ends_at - begins_at)
    scale_y = (height - 40) / max(1, highest - lowest)
    points = " ".join(
        f"{_LEFT + (at - begins_at) * scale_x:.1f},{height - 25 - (step - lowest) * scale_y:.1f}" for at, step in steps
    )
    parts = [
        f'<polyline points="{points}" fill="none" stroke="#2e9e5b" stroke-width="2"/>',
        f'<text x="0" y="20">step {highest}</text><text x="0" y="{height - 25}">step {lowest}</text>',
        f'<text x="{_LEFT}" y="{height - 6}">0 s</text>',
        f'<text x="{WIDTH}" y="{height - 6}" text-anchor="end">{(ends_at - begins_at) / 1e6:.0f} s</text>',
    ]
    return _svg(height, parts, "Highest step over time")


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
