"""
The autopsy: one page about a job that stood still, for a person who was woken up by it.

Who, since when, what, how sure, and what follows; then the stack of the odd rank against the one that the others have in common; then all ranks
in one table, ranks at the same place in one row.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlrover.core.diagnosis import stacks
from dlrover.core.diagnosis.hang import Sight
from dlrover.core.diagnosis.picture import Picture
from dlrover.core.diagnosis.stacks import say_collective, say_ranks
from dlrover.protocol.messages.watch import Verdict, WorkerDump

MAX_ROWS = 24
MAX_SHOWN = 24
"""Frames of a stack that are printed."""
MAX_PAGE = 64 * 1024


def write_page(
    *, job_name: str, picture: Picture, sights: Sequence[Sight], verdict: Verdict, stalled_for: float, source: str = ""
) -> str:
    guilty = {culprit.global_rank: None for culprit in verdict.culprits}
    odd = [sight for sight in sights if sight.rank in guilty]
    rest = [sight for sight in sights if sight.rank not in guilty]
    lines = [
        f"# {_headline(picture, verdict)}",
        "",
        f"Job {job_name or '(no name)'}, round {picture.scene.round}: it has stood still for {stalled_for:.1f} s"
        + _at_step(picture),
        "",
        f"- **What:** {verdict.fault.value} (confidence {verdict.confidence:.0%})",
        f"- **What follows:** {verdict.action.value}. {verdict.reasoning}",
        *(f"- {sentence}" for sentence in verdict.evidence),
    ]
    if odd:
        lines += ["", f"## {_subject([odd[0].rank])} is here", "", *_stack(odd[0].second)]
        lines += _details(odd[0])
    common = stacks.cluster([sight.second for sight in (rest if odd else sights)])
    if common:
        ranks = [dump.global_rank for dump in common[0]]
        verb = "is" if len(ranks) == 1 else "are"
        lines += ["", f"## {_subject(ranks)} {verb} here", "", *_stack(common[0][0])]
    lines += ["", "## All ranks", "", *_table(picture, sights)]
    if source:
        lines += ["", source]
    return "\n".join(lines)[:MAX_PAGE] + "\n"


def _headline(picture: Picture, verdict: Verdict) -> str:
    if not verdict.culprits:
        return f"No rank is to blame: {verdict.fault.value}"
    ranks = [culprit.global_rank for culprit in verdict.culprits]
    place = picture.place_of(ranks[0])
    host = f" on {place.host} (node rank {place.node_rank})" if place is not None else ""
    return f"{_subject(ranks)}{host}: {verdict.fault.value}"


def _at_step(picture: Picture) -> str:
    step = picture.newest_step()
    return "." if step is None else f", at step {step}."


def _stack(dump: WorkerDump) -> list[str]:
    found = stacks.frames(dump)
    if not found and not dump.native and not dump.kernel_stack:
        return [f"No stack: the process is in state {dump.state} and did not answer."]
    shown = [f"{frame.file}:{frame.line} {frame.function}" for frame in found[:MAX_SHOWN]]
    if len(found) > MAX_SHOWN:
        shown.append(f"... {len(found) - MAX_SHOWN} more")
    if not found:
        why = f"(no Python stack: the process is in state {dump.state}; py-spy, extra `stacks`, reads it all the same)"
        shown = [why, *dump.native[:MAX_SHOWN]]
        shown += dump.kernel_stack[:MAX_SHOWN]
    return ["```", *shown, "```"]


def _details(sight: Sight) -> list[str]:
    dump = sight.second
    channel = f", waits in `{dump.wait_channel}`" if dump.wait_channel else ""
    said = [
        f"Process {dump.pid}: state {dump.state}{channel}; {sight.cpu:.2f} cores in use, {sight.io_bytes} bytes moved."
    ]
    if dump.data_cursor:
        said.append(f"Data: {dump.data_cursor}.")
    if dump.recorded:
        last = "; ".join(f"{say_collective(each)}{'' if each.is_inside else ' (done)'}" for each in dump.recorded[-4:])
        said.append(f"Last collectives by torch's own numbers, newest last: {last}.")
    said += [f"Its own process: {child}." for child in dump.children[:8]]
    if dump.native and dump.threads:
        said += ["Native frames:", "```", *dump.native[:MAX_SHOWN], "```"]
    return ["", *said]


def _table(picture: Picture, sights: Sequence[Sight]) -> list[str]:
    groups: dict[tuple[str, ...], list[Sight]] = {}
    for sight in sights:
        groups.setdefault(_row(sight), []).append(sight)
    rows = [
        f"| {say_ranks([sight.rank for sight in group]).split(' ', 1)[1]} | {' | '.join(map(_cell, key))} |"
        for key, group in list(groups.items())[:MAX_ROWS]
    ]
    more = [f"... and {len(groups) - MAX_ROWS} more rows"] if len(groups) > MAX_ROWS else []
    return ["| ranks | state | phase | step | collective | where |", "|---|---|---|---|---|---|", *rows, *more]


def _row(sight: Sight) -> tuple[str, ...]:
    dump, progress = sight.second, sight.second.progress
    where = stacks.user_frame(dump)
    collective = "" if progress is None or progress.collective is None else say_collective(progress.collective)
    if collective and progress is not None and progress.collective is not None and not progress.collective.is_inside:
        collective = f"(done) {collective}"
    return (
        dump.state,
        "" if progress is None else progress.phase.value,
        "" if progress is None or progress.step is None else str(progress.step),
        collective,
        "" if where is None else f"{where.file.rsplit('/', 1)[-1]}:{where.line} {where.function}",
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:120]


def _subject(ranks: Sequence[int]) -> str:
    text = say_ranks(ranks)
    return text[0].upper() + text[1:]
