"""
Why a job has the size that it has: `dlrover scale --why`, in words and as a picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from dlrover.cli.show import svg
from dlrover.protocol.messages.identity import Micros
from dlrover.protocol.messages.scaling import (
    MOST_CANDIDATES_SHOWN,
    MOST_DECISIONS_SHOWN,
    Brake,
    Configuration,
    ScaleCandidate,
    ScaleDecision,
    ScaleFit,
    ScaleMode,
    ScalingStatus,
    SpeedPoint,
)

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 50
_INK, _FAINT, _CURVE, _POINT, _MARK = "#1f2933", "#d5dbe1", "#2563eb", "#2e9e5b", "#d97706"
_MODES = {
    ScaleMode.OFF: "off: only people change the size of this job",
    ScaleMode.DRY_RUN: "dry-run: the master decides and reports, and changes nothing",
    ScaleMode.ON: "on",
}


def why_lines(status: ScalingStatus) -> Iterator[str]:
    yield f"Automatic scaling is {_MODES[status.mode]} (for {status.scale_for.value}, optimizer {status.optimizer.value})."
    yield f"Why: {status.sentence or 'no decision yet'}"
    if status.brake is not Brake.NONE:
        opens = ""
        if status.brake_opens_at is not None:
            opens = f"; it opens in {max(0.0, (status.brake_opens_at - status.now) / 1e6):.0f} s"
        yield f"Brake: {brake_name(status.brake)}{opens}"
    else:
        yield "Brake: none"
    yield f"Now: {_present(status)}"
    if status.on_probation:
        yield f"On probation: {status.on_probation}"
    yield from _room(status)
    yield ""
    yield f"Last decisions ({min(len(status.decisions), MOST_DECISIONS_SHOWN)}):"
    yield from (_decision(each, status.unit) for each in status.decisions[-MOST_DECISIONS_SHOWN:])
    yield ""
    yield f"Best candidates (a change pauses training for about {status.cost:.1f} s):"
    yield from _candidates(status.candidates[:MOST_CANDIDATES_SHOWN], status.unit)
    forecast = [point for point in status.points if point.is_predicted]
    if forecast:
        told = ", ".join(f"{point.nodes}: {point.speed:.4g}" for point in sorted(forecast, key=lambda each: each.nodes))
        yield f"Forecast by nodes ({status.unit}): {told}"
    yield ""
    yield from _fit(status.fit)
    for refused in status.refused:
        seconds = max(0.0, (refused.until - status.now) / 1e6)
        yield f"Undone {refused.times} times: {refused.text}; it is not tried again for {seconds:.0f} s."
    if status.tuning.version:
        tuned = status.tuning
        yield f"Tuning, version {tuned.version}: micro-batch {tuned.micro_batch}, {tuned.accumulation} passes for each step."
    yield from (f"Warning: {text}" for text in status.warnings)


def brake_name(brake: Brake) -> str:
    """`5, cool-down`."""
    return f"{brake.value}, {brake.name.lower().replace('_', '-')}"


def text_of(configuration: Configuration) -> str:
    parts = []
    for group in configuration.groups:
        size = [f"{group.cpu:g} cores"] if group.cpu else []
        size += [f"{group.memory_mb} MiB"] if group.memory_mb else []
        parts.append(f"{group.count} {group.node_type.value}" + (f" of {', '.join(size)}" if size else ""))
    if configuration.micro_batch:
        parts.append(f"micro-batch {configuration.micro_batch} x {configuration.accumulation}")
    return ", ".join(parts)


def draw(status: ScalingStatus) -> str:
    """Speed over nodes: what was measured, the fitted curve, and the size that the job has."""
    points = [point for point in status.points if point.speed > 0]
    title = f"Speed over nodes ({status.unit})"
    if status.fit is not None and status.fit.is_used:
        title += f", error of the fit {status.fit.error:.1%}"
    parts = [svg.rect(0, 0, WIDTH, HEIGHT, "white"), svg.text(LEFT, 28, title, font_size="15")]
    if points:
        parts += _plot(points, status)
    else:
        parts.append(svg.text(LEFT, HEIGHT / 2, "There is no measurement yet."))
    size = {"width": f"{WIDTH}", "height": f"{HEIGHT}", "fill": _INK, "font_family": "sans-serif", "font_size": "13"}
    return svg.picture((WIDTH, HEIGHT), parts, label=title, **size) + "\n"


def _plot(points: Sequence[SpeedPoint], status: ScalingStatus) -> list[str]:
    most_nodes = max(status.max_nodes, *(point.nodes for point in points))
    fastest = 1.1 * max(point.speed for point in points)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(nodes: float) -> float:
        return round(LEFT + (right - LEFT) * nodes / most_nodes, 1)

    def y(speed: float) -> float:
        return round(bottom - (bottom - TOP) * speed / fastest, 1)

    parts = []
    for tick in range(5):
        speed = fastest * tick / 4
        parts.append(svg.line(LEFT, y(speed), right, y(speed), _FAINT))
        parts.append(svg.text(LEFT - 8, y(speed) + 4, f"{speed:.3g}", anchor="end"))
    step = max(1, most_nodes // 8)
    parts += [
        svg.text(x(nodes), bottom + 20, str(nodes), anchor="middle") for nodes in range(step, most_nodes + 1, step)
    ]
    curve = sorted((point.nodes, point.speed) for point in points if point.is_predicted)
    parts.append(svg.polyline([(x(nodes), y(speed)) for nodes, speed in curve], _CURVE, stroke_width="2"))
    for point in points:
        if not point.is_predicted:
            told = f"{point.nodes} nodes: {point.speed:.4g} {status.unit}"
            parts.append(svg.rect(x(point.nodes) - 4, y(point.speed) - 4, 8, 8, _POINT, title=told, rx="4"))
    if status.target:
        parts.append(svg.line(x(status.target), TOP, x(status.target), bottom, _MARK, dash="4 4"))
        parts.append(svg.text(x(status.target), TOP - 6, f"{status.target} nodes", anchor="middle", fill=_MARK))
    parts.append(svg.text(right, bottom + 40, "nodes; dots: measured, line: fitted", anchor="end"))
    return parts


def _present(status: ScalingStatus) -> str:
    bounds = f"{status.target} nodes wanted, {status.min_nodes} to {status.max_nodes} allowed"
    if status.node_unit > 1:
        bounds += f" in multiples of {status.node_unit}"
    if status.configuration is None:
        return f"{bounds}; there is no measurement yet"
    speed = f"{status.speed:.4g} {status.unit}" if status.speed else "not measured yet"
    return f"{bounds}; {text_of(status.configuration)}: {speed}"


def _room(status: ScalingStatus) -> Iterator[str]:
    for room in status.room:
        most = "unknown" if room.most is None else f"at most {room.most} nodes"
        yield f"Room for {room.node_type.value}: {most}" + (f" ({room.reason})" if room.reason else "")
    if not status.room:
        yield "Room: unknown"


def _decision(decision: ScaleDecision, unit: str) -> str:
    speeds = []
    if decision.speed_before:
        speeds.append(f"before {decision.speed_before:.4g}")
    if decision.expected_speed:
        speeds.append(f"expected {decision.expected_speed:.4g}")
    if decision.speed_after:
        speeds.append(f"came {decision.speed_after:.4g}")
    told = f" [{', '.join(speeds)} {unit}]" if speeds else ""
    return f"  {_clock(decision.at)}  {decision.outcome.value:<10}  {decision.sentence}{told}"


def _candidates(candidates: Sequence[ScaleCandidate], unit: str) -> Iterator[str]:
    for each in candidates:
        speed = f"{each.speed:.4g} {unit}" if each.speed else "no forecast"
        held = f"held by brake {brake_name(each.brake)}: {each.why}" if each.brake is not Brake.NONE else "free"
        yield f"  {each.text:<24} {speed:<22} gain {each.gain:+.1%}  resources x{each.resources:.2f}  {held}"
    if not candidates:
        yield "  none: there is no measurement yet, or the size of the job cannot change"


def _fit(fit: ScaleFit | None) -> Iterator[str]:
    if fit is None:
        yield "Fit: none yet."
        return
    terms = ", ".join(f"{name} {theta:.3g}" for name, theta in zip(fit.features, fit.thetas, strict=True))
    used = "used" if fit.is_used else f"not used ({fit.why})"
    yield f"Fit: median error {fit.error:.1%} on {fit.num_runs} runs of {fit.num_counts} sizes, {used}."
    yield f"  seconds of a step = {terms}"


def _clock(at: Micros) -> str:
    return datetime.fromtimestamp(at / 1e6).astimezone().strftime("%H:%M:%S")
