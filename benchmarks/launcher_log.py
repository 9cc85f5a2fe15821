"""
What a launcher's own log says about a recovery: when it noticed that a worker was dead, and when it had its new world.

Nothing outside a launcher sees these two instants. Each launcher writes the time of day with its lines, in its own form and to the
millisecond; the benchmark has noted what the monotonic clock said at that time of day, and translates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

RESOLUTION = 0.001
"""Seconds. A line may seem up to this much older than what it tells."""


@dataclass(frozen=True)
class LogLine:
    """A kind of line that marks an instant."""

    pattern: str
    """Regular expression whose group `at` is the time; `{victim}` stands for the pid that was killed."""
    time_format: str
    """For `strptime`. Without a year, that of the kill is taken."""

    def first_after(self, lines: Iterable[str], *, killed_at: float, victim: int) -> float | None:
        """Unix time of the first such line that is not older than the kill; None if there is none."""
        pattern = re.compile(self.pattern.replace("{victim}", str(victim)))
        for line in lines:
            found = pattern.search(line)
            if found is None:
                continue
            at = self._parse(found["at"], killed_at)
            if at >= killed_at - RESOLUTION:
                return max(at, killed_at)
        return None

    def _parse(self, text: str, killed_at: float) -> float:
        if "%Y" in self.time_format:
            return datetime.strptime(text, self.time_format).timestamp()
        year = datetime.fromtimestamp(killed_at).year
        return datetime.strptime(f"{year} {text}", f"%Y {self.time_format}").timestamp()


TORCH_DETECTED = LogLine(
    r"^[WE](?P<at>\d{4} \d\d:\d\d:\d\d\.\d+) +\d+ .*"
    r"(?:Sending process \d+ closing signal SIGTERM|failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: {victim}\))",
    "%m%d %H:%M:%S.%f",
)
"""
Of torch's elastic agent, on which dlrover 0.6.1 is built as well. It looks at its workers every 0.1 s; what it does first is to
signal the survivors. Where none is left it only says who failed.
"""
OURS_DETECTED = LogLine(
    r"^(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) INFO dlrover\.agent\.(?:workers\.)?process_tree end(?:ing|ed) pid={victim} ",
    "%Y-%m-%d %H:%M:%S,%f",
)
OURS_MET = LogLine(
    r"^(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) INFO dlrover\.agent round=\d+ group_rank=",
    "%Y-%m-%d %H:%M:%S,%f",
)
