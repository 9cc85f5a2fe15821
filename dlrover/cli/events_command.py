"""
`dlrover events`: what happened in a job, as lines, as JSON, or as a trace for Perfetto.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.text import Text

from dlrover.cli.show.history import read_history
from dlrover.cli.show.replay import clock_time
from dlrover.cli.tables import plain_console
from dlrover.host.plain_text import printable
from dlrover.protocol.codec import Question
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.goodput import MAX_EVENTS_PER_ANSWER, AskEvents, Events, JobEvent
from dlrover.protocol.messages.job import Reply

FOLLOW_WAIT = 8.0
"""Seconds that the master may keep a question open: below the time that a question may take."""
MAX_OUTAGE = 60.0
"""Seconds for which a master may be away while it is followed."""
_STYLES = {"error": "red", "warn": "yellow"}

Ask = Callable[[Question], Reply]


def print_events(events: Iterator[JobEvent] | list[JobEvent], *, is_json: bool) -> None:
    console = plain_console(highlight=False, soft_wrap=True)
    for event in events:
        if is_json:
            sys.stdout.write(printable(msgspec.json.encode(event).decode()) + "\n")
            sys.stdout.flush()
        else:
            where = (
                ""
                if event.node is None
                else f" node {event.node}" + ("" if event.rank is None else f" rank {event.rank}")
            )
            line = Text(f"{event.number:>6}  {clock_time(event.at)}  ", style="dim")
            line.append(f"{event.name:<22}", style=_STYLES.get(event.level, "default"))
            line.append(f"{event.text}{f' [{where.strip()}]' if where else ''}", style="default")
            console.print(line)


def asked(ask: Ask, *, limit: int, follow: bool) -> Iterator[JobEvent]:
    """What the master has kept, then what happens, until the job or the master is gone."""
    seen, away_since = 0, None
    is_first, is_ending = True, False
    while True:
        wait = FOLLOW_WAIT if follow and not is_first else 0.0
        try:
            reply = ask(AskEvents(after=seen, limit=min(limit, MAX_EVENTS_PER_ANSWER) if is_first else 200, wait=wait))
        except Unavailable:
            if is_ending:
                return  # the master went with the job
            away_since = away_since or time.monotonic()
            if is_first or time.monotonic() - away_since > MAX_OUTAGE:
                raise
            time.sleep(1.0)  # nobody tells when a master is back
            continue
        away_since = None
        assert isinstance(reply, Events)
        yield from reply.events
        seen = max(seen, reply.newest if is_first else max((event.number for event in reply.events), default=seen))
        is_first = False
        is_ending = is_ending or any(event.name in ("job-ending", "job-ended") for event in reply.events)
        if not follow or any(event.name == "job-ended" for event in reply.events):
            return


def of_journal(journal: Path, limit: int) -> list[JobEvent]:
    return read_history(journal).events[-limit:]
