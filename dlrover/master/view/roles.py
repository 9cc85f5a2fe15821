"""
The roles of a multi-role job, for the pages of its elastic roles.

The conductor of the job runs elsewhere and knows them. It hands its newest report to the host of each elastic role, which keeps it as a file beside
the master. So the master needs no Ray and no question. No file: this job has no roles.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import to_builtins

from dlrover.master.view.gatherer import Gatherer
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.roles import REPEAT, REPORT, RolesReport

STALE = 3 * REPEAT
"""Without a report for so long, the page says that the conductor is away."""


def gather_roles(path: str, *, clock: Callable[[], float] = time.time) -> Callable[[Gatherer], Awaitable[None]]:
    """`path`: the file. `clock`: as the time of files is told."""

    async def gather(gatherer: Gatherer) -> None:
        found = await asyncio.to_thread(_read, path)
        if found is None:
            return
        report, written_at = found
        gatherer.board.put("roles", "", {**to_builtins(report), "is_stale": clock() - written_at > STALE})

    return gather


def _read(path: str) -> tuple[RolesReport, float] | None:
    """With the time when it was written. Raises `Unavailable`."""
    try:
        with open(path, "rb") as file:
            return REPORT.decode(file.read()), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise Unavailable(f"The report of the roles in {path} cannot be read: {error}") from error
