"""
`dlrover report`: one page about a job that people can read afterwards, as HTML that needs nothing else, or as Markdown.

Everything in it that came from outside (names, messages, causes) is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from dlrover.cli.launch.last_words import REDO_UNKNOWN, at_most
from dlrover.cli.show import plots
from dlrover.cli.show.history import History
from dlrover.protocol.messages.goodput import FaultCost, JobEvent, TimeClass

MAX_EVENTS = 300
"""Shown, the newest; warnings and errors first of all."""
MAX_FAULTS = 500
_BAR = 40


def as_html(history: History) -> str:
    goodput = history.goodput
    begins_at, ends_at = history.begins_at, goodput.now
    classes = [class_ for class_ in TimeClass if goodput.seconds.get(class_)]
    parts = [
        f"<h1>Job {escape(history.job_name)}</h1>",
        f"<p>{escape(_how_it_ended(history))}</p>",
        "<p class='figure'>{} %<small> {}</small></p>".format(*_figure(history)),
        "" if goodput.is_redo_known else f"<p>{escape(REDO_UNKNOWN)}</p>",
        plots.goodput_bar(goodput.seconds),
        plots.legend(classes),
        _html_table(("class", "node-seconds", "share"), _class_rows(goodput.seconds)),
        "<h2>Timeline</h2>",
        plots.timeline(history.spans, history.faults, begins_at, ends_at)
        if history.spans
        else "<p>Without the job's journal there is no timeline.</p>",
        "<h2>Steps</h2>",
        plots.steps_over_time(history.steps, begins_at, ends_at),
        "<h2>Faults</h2>",
        _html_table(_FAULT_COLUMNS, _fault_rows(history)) if history.faults else "<p>None.</p>",
        "<h2>What would have helped</h2>",
        "<ul>" + "".join(f"<li>{escape(each.text)}</li>" for each in goodput.counterfactuals) + "</ul>"
        if goodput.counterfactuals
        else "<p>Nothing that is known.</p>",
        "<h2>Nodes</h2>",
        _html_table(("node rank", "seconds", "goodput", "most else"), _node_rows(history)),
        f"<h2>Events</h2>{_html_table(('time', 'level', 'event', 'text'), _event_rows(history.events))}",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Job {escape(history.job_name)}</title><style>{_STYLE}</style></head><body><main>"
        + "\n".join(parts)
        + "</main></body></html>\n"
    )


def as_markdown(history: History) -> str:
    goodput = history.goodput
    lines = [
        f"# Job {_md(history.job_name)}",
        "",
        _md(_how_it_ended(history)),
        "",
        "**{} %** {}.".format(*_figure(history)),
        "",
        *([] if goodput.is_redo_known else [_md(REDO_UNKNOWN), ""]),
        *_md_table(
            ("class", "node-seconds", "share", ""),
            [(*row, _bar(goodput.seconds, row[0])) for row in _class_rows(goodput.seconds)],
        ),
        "",
        "## Faults",
        "",
        *(_md_table(_FAULT_COLUMNS, _fault_rows(history)) if history.faults else ["None."]),
        "",
        "## What would have helped",
        "",
        *([f"* {_md(each.text)}" for each in goodput.counterfactuals] or ["Nothing that this report can tell."]),
        "",
        "## Nodes",
        "",
        *_md_table(("node rank", "seconds", "goodput", "most else"), _node_rows(history)),
        "",
        "## Events",
        "",
        *_md_table(("time", "level", "event", "text"), _event_rows(history.events)),
    ]
    return "\n".join(lines) + "\n"


def _figure(history: History) -> tuple[str, str]:
    """Per cent, and what of."""
    goodput = history.goodput
    most = at_most(goodput)
    whole, spent = (
        f"{most}{100 * goodput.goodput:.2f}",
        f"{goodput.wall:.1f} s wall, {_total(goodput.seconds):.1f} node-seconds",
    )
    if goodput.highest_step is None:
        return whole, f"goodput of all time; no step is known ({spent})"
    since = f"{most}{100 * goodput.goodput_since_start:.2f}"
    return since, f"goodput since the first step ({whole} % of all time; {spent})"


def _how_it_ended(history: History) -> str:
    began = _clock(history.begins_at)
    so_far = f"It began at {began}, had {history.num_rounds} rounds, {history.num_restarts} restarts, {len(history.faults)} faults"
    if history.end is None:
        return f"{so_far}, and was still running at {_clock(history.goodput.now)}."
    return f"{so_far}, and ended ({history.end.reason.value}, exit code {history.end.exit_code}): {history.end.message}"


def _class_rows(seconds: Mapping[TimeClass, float]) -> list[tuple[str, ...]]:
    total = _total(seconds) or 1.0
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return [(class_.value, f"{value:.1f}", f"{100 * value / total:.2f} %") for class_, value in ordered]


_FAULT_COLUMNS = ("fault", "time", "kind", "rank", "cause", "stood still", "new steps after", "cost in node-seconds")


def _fault_rows(history: History) -> list[tuple[str, ...]]:
    return [_fault_row(fault, history.begins_at) for fault in history.faults[-MAX_FAULTS:]]


def _fault_row(fault: FaultCost, begins_at: int) -> tuple[str, ...]:
    rank = "" if fault.node_rank is None else f"node {fault.node_rank}"
    if fault.global_rank is not None:
        rank += f", global {fault.global_rank}"
    costs = [f"{class_.value} {value:.2f}" for class_, value in fault.seconds.items()]
    by_class = ", ".join(costs if fault.is_redo_known else [*costs, "redo unknown"])
    recovered = "" if fault.recovered_after is None else f"{fault.recovered_after:.1f} s"
    return (
        str(fault.number),
        f"+{(fault.at - begins_at) / 1e6:.1f} s",
        fault.kind,
        rank,
        fault.cause,
        "" if fault.stood_still is None else f"{fault.stood_still:.2f} s",
        recovered if fault.is_redo_known else "unknown",
        f"{sum(fault.seconds.values()):.2f} ({by_class})" if by_class else "0",
    )


def _node_rows(history: History) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for node in history.goodput.nodes[:1000]:
        others = sorted(
            ((value, class_) for class_, value in node.seconds.items() if class_ is not TimeClass.COMPUTE), reverse=True
        )
        compute = node.seconds.get(TimeClass.COMPUTE, 0.0)
        most = ", ".join(f"{class_.value} {value:.1f} s" for value, class_ in others[:3])
        rows.append((str(node.node_rank), f"{node.lived:.1f}", f"{100 * compute / (node.lived or 1):.1f} %", most))
    return rows


def _event_rows(events: Sequence[JobEvent]) -> list[tuple[str, ...]]:
    shown = [event for event in events if event.level != "info"][-MAX_EVENTS:]
    room = MAX_EVENTS - len(shown)
    if room > 0:
        shown += [event for event in events if event.level == "info"][-room:]
    shown.sort(key=lambda event: event.number)
    return [(_clock(event.at), event.level, event.name, event.text) for event in shown]


def _total(seconds: Mapping[TimeClass, float]) -> float:
    return sum(seconds.values())


def _clock(at: int) -> str:
    return datetime.fromtimestamp(at / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _bar(seconds: Mapping[TimeClass, float], class_: str) -> str:
    return "█" * round(_BAR * seconds[TimeClass(class_)] / (_total(seconds) or 1.0))


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _md_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(_md(cell) for cell in row)} |" for row in rows]


def _md(text: str) -> str:
    """Shown as it is: no markup, no HTML, no new row."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text.replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;"))


_STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:0;background:Canvas;color:CanvasText}
main{max-width:980px;margin:0 auto;padding:1rem}svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:currentColor}
table{border-collapse:collapse;width:100%;margin:1rem 0;font-size:13px}th,td{border-bottom:1px solid color-mix(in srgb,currentColor 20%,transparent);
padding:.25rem .5rem;text-align:left;vertical-align:top;overflow-wrap:anywhere}.figure{font-size:2.2rem;margin:.5rem 0}.figure small{font-size:.95rem}
.legend span{margin-right:1rem;white-space:nowrap}.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
"""
