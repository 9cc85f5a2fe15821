"""
A forecast as one picture: an SVG that needs nothing else.
"""

from __future__ import annotations

import math
from html import escape

from dlrover.simulator.forecast import Forecast

WIDTH, HEIGHT = 900, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 50
BAR = 22
_INK, _FAINT, _GOOD, _BAD = "#1f2933", "#d5dbe1", "#2563eb", "#dc2626"


def draw(chosen: Forecast, others: list[Forecast]) -> str:
    """How the work gets done over time, and below it how long each choice takes."""
    height = HEIGHT + 60 + BAR * len(others)
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_curves(chosen),
        *_bars(others, HEIGHT + 30),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


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
    parts = [_text(LEFT, 28, title, size=15)]
    for tick in range(5):
        part = tick / 4
        parts.append(_line(LEFT, y(part), right, y(part), _FAINT))
        parts.append(_text(LEFT - 8, y(part) + 4, f"{part:.0%}", anchor="end"))
        parts.append(_text(x(longest * part), bottom + 20, f"{longest * part:.3g} h", anchor="middle"))
    ideal = min(question.hours, longest)
    parts.append(_line(x(0), y(0), x(ideal), y(ideal / question.hours), _INK, dash="4 4"))
    for life in chosen.lives:
        points = " ".join(f"{x(hours)},{y(part)}" for hours, part, _ in life.curve)
        colour = _GOOD if life.is_completed else _BAD
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-opacity="0.6"/>')
    parts.append(_text(right, bottom + 40, "dashed: if nothing ever failed", anchor="end"))
    return parts


def _bars(forecasts: list[Forecast], top: float) -> list[str]:
    known = [one.median_hours for one in forecasts if math.isfinite(one.median_hours)]
    longest = max(known, default=1.0)
    parts = [_text(LEFT, top, "time to finish, by minimum and spares", size=15)] if forecasts else []
    for number, one in enumerate(forecasts):
        at = top + 14 + number * BAR
        label = f"min {one.question.min_nodes}, {one.question.spares} spare"
        parts.append(_text(LEFT + 110, at + 14, label, anchor="end"))
        is_known = math.isfinite(one.median_hours)
        width = round((WIDTH - RIGHT - LEFT - 260) * (one.median_hours / longest if is_known else 1.0), 1)
        colour = _GOOD if is_known else _BAD
        parts.append(
            f'<rect x="{LEFT + 120}" y="{at + 2}" width="{width}" height="{BAR - 6}" fill="{colour}" fill-opacity="0.7"/>'
        )
        parts.append(_text(LEFT + 126 + width, at + 14, f"{_hours(one.median_hours)} ({one.goodput:.0%})"))
    return parts


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{_INK}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"{dashes}/>'


def _hours(hours: float) -> str:
    return "never" if math.isinf(hours) else f"{hours:.1f} h"
