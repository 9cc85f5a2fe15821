"""Samples to figures: order statistics, ratios and tables that can be pasted into the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BUSY = 10.0
"""Per cent of the machine that others may use before its figures are worth nothing."""


@dataclass(frozen=True)
class Summary:
    num_samples: int
    median: float
    p95: float
    lowest: float
    highest: float


def summarise(samples: Sequence[float]) -> Summary | None:
    """None without samples: a figure nobody measured must not look like one."""
    if not samples:
        return None
    return Summary(len(samples), statistics.median(samples), percentile(samples, 95), min(samples), max(samples))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear between the two nearest samples, so that few samples do not make every high percentile the maximum."""
    if not samples:
        raise ValueError("a percentile of no samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent}: give 0 to 100")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def ratio(value: Summary | None, base: Summary | None) -> float | None:
    """How many times `base` the value's median is; None if either was not measured."""
    if value is None or base is None or base.median == 0:
        return None
    return value.median / base.median


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def quietness(strangers: Sequence[float]) -> str:
    """Whether these figures may be shown to anybody."""
    if not strangers:
        return ""
    if max(strangers) > BUSY:
        return (
            f"NOT FOR PUBLICATION: between the runs others used up to {max(strangers):.0f} % of the machine. "
            "Run it again when nothing else runs."
        )
    return f"Between the runs others used at most {max(strangers):.0f} % of the machine."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, the first to the left and the rest to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|" + "|".join("-" * (width + 1) + ("-" if column == 0 else ":") for column, width in enumerate(widths)) + "|"
    )
    return "\n".join([line(head), rule, *(line(row) for row in rows)])
