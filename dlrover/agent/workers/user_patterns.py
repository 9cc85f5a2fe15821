"""
The user's patterns (`--log-patterns`), searched for in the log of a failed worker without stopping the agent.

A regular expression such as `(a+)+$` takes longer than a lifetime on some lines. So the search runs in a process of its own
(`dlrover.agent.workers.pattern_search`), which is started when a worker failed and ends with the answer. A pattern that uses up its
processor time is switched off until the agent ends, with one warning that names it; the other patterns still count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from dlrover.agent.config import LogPattern
from dlrover.agent.workers.log_patterns import MAX_LINE, LogVerdict, log_lines

_log = logging.getLogger(__name__)

LIMIT = 2.0
"""Seconds of processor time for one pattern. All 5,000 lines, each at its greatest length, take a common pattern half a second."""
_PATIENCE = 60.0
"""Seconds for the whole search. A machine that is this busy delays the report of the failure no longer."""
_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pattern_search.py")


class UserPatterns:
    """Of one agent."""

    def __init__(self, patterns: Sequence[LogPattern], *, limit: float = LIMIT) -> None:
        self._patterns = list(patterns)
        """Without those that were switched off."""
        self._limit = limit
        self._turn = asyncio.Lock()
        """Several workers fail at once: one search after the other, so that each pattern is switched off once."""

    async def find(self, tail: str, path: str = "") -> LogVerdict | None:
        """By the end of its output, and by the file that it logs to. None: no pattern was found."""
        async with self._turn:
            if not self._patterns:
                return None
            lines = log_lines(tail, path)
            try:
                async with asyncio.timeout(_PATIENCE):
                    return await self._find(lines)
            except TimeoutError:
                _log.warning(
                    "The search for --log-patterns took more than %g s; it was stopped and runs again after the next "
                    "failure.",
                    _PATIENCE,
                )
            except OSError as error:
                _log.warning(
                    "The agent could not search the failed worker's log for --log-patterns: %s. It treats this failure as if no "
                    "pattern matched, and searches again after the next failure.",
                    error,
                )
            return None

    async def _find(self, lines: Sequence[str]) -> LogVerdict | None:
        tried = 0
        while tried < len(self._patterns):
            answers = await self._search(self._patterns[tried:], lines)
            tried += len(answers)
            if answers and answers[-1] >= 0:
                return LogVerdict(self._patterns[tried - 1].action, lines[answers[-1]].strip())
            if tried < len(self._patterns):
                slow = self._patterns.pop(tried)
                _log.warning(
                    "The pattern %r of --log-patterns is switched off: a search for it took more than %g s of processor time. "
                    "Write it without nested repetition.",
                    slow.pattern,
                    self._limit,
                )
        return None

    async def _search(self, patterns: Sequence[LogPattern], lines: Sequence[str]) -> list[int]:
        """For each pattern the number of the first line with it, or -1; up to the first that is found or that was too slow."""
        task = {
            "patterns": [each.pattern for each in patterns],
            "lines": [line[:MAX_LINE] for line in lines],
            "limit": self._limit,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", _PROGRAM,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            output, _ = await process.communicate(msgspec.json.encode(task))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process.returncode not in (0, -signal.SIGPROF):
            raise OSError(f"its process ended with {process.returncode}")
        return [int(line) for line in output.split()]
