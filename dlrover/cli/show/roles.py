"""The roles of a multi-role job in the terminal: once for `dlrover ray status`, live for `dlrover top`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.roles import RolesReport

PAUSE = 1.0
MAX_FAILURES = 30
"""Questions in a row that the conductor may leave unanswered, a second apart: it may be starting again."""


def watch_roles(
    ask: Callable[[RolesReport | None], RolesReport],
    console: Console,
    *,
    once: bool,
    is_over: Callable[[], bool],
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """
    Until the job is over, or Ctrl-C. Raises what asking raises, if the conductor stays away.

    `ask`: for a report that differs from the given one; it waits for it. `pause`: between two failures, which cost no time.
    """
    if once or not console.is_terminal:
        console.print(view_of_roles(ask(None)))
        return
    known, failures = None, 0
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    known = ask(known)
                except Unavailable as error:
                    if is_over():
                        break
                    failures += 1
                    if failures > MAX_FAILURES:
                        raise
                    live.update(Panel(Text(str(error))), refresh=True)
                    pause(PAUSE)  # nobody tells when a conductor is back
                    continue
                failures = 0
                live.update(view_of_roles(known), refresh=True)
    except KeyboardInterrupt:
        return
    if known is not None:
        console.print(view_of_roles(known))


def view_of_roles(report: RolesReport) -> RenderableType:
    restarts = f"{report.num_job_restarts} restart{'' if report.num_job_restarts == 1 else 's'} of the whole job"
    table = Table("role", "kind", "ready", "instances", "restarts", "last failure", box=None, pad_edge=False)
    for role in report.roles:
        failed = f"{datetime.fromtimestamp(role.failed_at / 1e6):%H:%M:%S} {role.failure}" if role.failed_at else ""
        table.add_row(
            *(role.name, role.kind, f"{role.num_ready} of {role.num_wanted}", role.states, str(role.num_restarts)),
            Text(failed),
        )
    return Group(Text(f"{report.job}: {report.stage}, {restarts}. {report.verdict}"), table)
