"""
Pictures as SVG text: no script, no library, nothing to fetch. All texts are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def picture(box: tuple[float, float], parts: Iterable[str], *, label: str = "", **attributes: str) -> str:
    """The whole picture, `box` wide and high. It scales to the page unless `width` and `height` are among the attributes."""
    told = f' role="img" aria-label="{escape(label)}"' if label else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box[0]:g} {box[1]:g}"{told}{_attributes(attributes)}>'
        + "\n".join(parts)
        + "</svg>"
    )


def rect(x: float, y: float, width: float, height: float, fill: str, *, title: str = "", **attributes: str) -> str:
    place = f'x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}"'
    return f'<rect {place} fill="{fill}"{_attributes(attributes)}' + _end("rect", title)


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, *, dash: str = "", title: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    place = f'x1="{x1:.2f}" y1="{y1:g}" x2="{x2:.2f}" y2="{y2:g}"'
    return f'<line {place} stroke="{stroke}"{dashes}' + _end("line", title)


def polyline(points: Sequence[tuple[float, float]], stroke: str, **attributes: str) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{stroke}"{_attributes(attributes)}/>'


def text(x: float, y: float, content: str, *, anchor: str = "start", **attributes: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{_attributes(attributes)}>{escape(content)}</text>'


def _attributes(attributes: dict[str, str]) -> str:
    """`font_size` is written `font-size`."""
    return "".join(f' {name.replace("_", "-")}="{escape(value)}"' for name, value in attributes.items())


def _end(tag: str, title: str) -> str:
    return f"><title>{escape(title)}</title></{tag}>" if title else "/>"
