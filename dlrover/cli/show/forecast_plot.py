"""
A forecast as one picture: an SVG that needs nothing else.
"""

from __future__ import annotations

import math

from dlrover.cli.show import svg
from dlrover.simulator.forecast import Forecast

WIDTH, HEIGHT = 900, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 50
BAR = 22
_INK, _FAINT, _GOOD, _BAD = "#1f2933", "#d5dbe1", "#2563eb", "#dc2626"


def draw(chosen: Forecast, others: list[Forecast]) -> str:
    """How the work gets done over time, and below it how long each choice takes."""
    height = HEIGHT + 60 + BAR * len(others)
    parts = [svg.rect(0, 0, WIDTH, height, "white"), *_curves(chosen), *_bars(others, HEIGHT + 30)]
    size = {"width": f"{WIDTH}", "height": f"{height}", "fill": _INK, "font_family": "sans-serif", "font_size": "13"}
    return svg.picture((WIDTH, height), parts, **size) + "\n"


def _curves(chosen: Forecast) -> list[str]:
    question = chosen.question
    longest = max(life.hours for life in chosen.lives)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(hours: float) -> float:
        return round(LEFT + (right - LEFT) * hours / longest, 1)

    def y(part: float) -> float:
        return round(bottom - (bottom - TOP) * part, 1)

    title = (
        f"{question.nodes} nodes (at least {question.min_nodes}, {question.spares} spare), "
        f"{question.hours:g} h of training: median {_hours(chosen.median_hours)}, goodput {chosen.goodput:.1%}"
    )
    parts = [svg.text(LEFT, 28, title, font_size="15")]
    for tick in range(5):
        part = tick / 4
        parts.append(svg.line(LEFT, y(part), right, y(part), _FAINT))
        parts.append(svg.text(LEFT - 8, y(part) + 4, f"{part:.0%}", anchor="end"))
        parts.append(svg.text(x(longest * part), bottom + 20, f"{longest * part:.3g} h", anchor="middle"))
    ideal = min(question.hours, longest)
    parts.append(svg.line(x(0), y(0), x(ideal), y(ideal / question.hours), _INK, dash="4 4"))
    for life in chosen.lives:
        points = [(x(hours), y(part)) for hours, part, _ in life.curve]
        parts.append(svg.polyline(points, _GOOD if life.is_completed else _BAD, stroke_opacity="0.6"))
    parts.append(svg.text(right, bottom + 40, "dashed: time without any failure", anchor="end"))
    return parts


def _bars(forecasts: list[Forecast], top: float) -> list[str]:
    known = [one.median_hours for one in forecasts if math.isfinite(one.median_hours)]
    longest = max(known, default=1.0)
    parts = [svg.text(LEFT, top, "time to finish, by minimum and spares", font_size="15")] if forecasts else []
    for number, one in enumerate(forecasts):
        at = top + 14 + number * BAR
        label = f"min {one.question.min_nodes}, {one.question.spares} spare"
        parts.append(svg.text(LEFT + 110, at + 14, label, anchor="end"))
        is_known = math.isfinite(one.median_hours)
        width = round((WIDTH - RIGHT - LEFT - 260) * (one.median_hours / longest if is_known else 1.0), 1)
        colour = _GOOD if is_known else _BAD
        parts.append(svg.rect(LEFT + 120, at + 2, width, BAR - 6, colour, fill_opacity="0.7"))
        parts.append(svg.text(LEFT + 126 + width, at + 14, f"{_hours(one.median_hours)} ({one.goodput:.0%})"))
    return parts


def _hours(hours: float) -> str:
    return "never" if math.isinf(hours) else f"{hours:.1f} h"
