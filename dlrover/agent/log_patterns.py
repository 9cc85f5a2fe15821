"""
What the log of a failed worker says about the node: some errors no restart can help, because the machine or its device is broken.

The user's own texts (`FAILURE_NODE_ERRORS`) count wherever a line contains one. A few that every log of broken hardware shows are built
in. A line that contains `#` does not count: it is the one that shows the configuration itself. Before all of them the user's patterns (`--log-patterns`)
say what shall follow a line, whatever it contains.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dlrover.agent.config import LogAction, LogPattern

NUM_LINES = 5000
MAX_LINE = 2000
"""Characters of a line that patterns are searched for in: expressions can take very long in very long ones."""
_MAX_BYTES = 8 << 20
_BLOCK = 65536
_BANNER = "DLRover agent started with:"
"""A former run of the historical agent ends where this line of the next one is."""

_TEXTS = (
    r"uncorrectable ECC error",
    r"\bGPU has fallen off the bus",
    r"\bGPU is lost\b",
    # Xids after which the vendor asks for a reset or a replacement of the device.
    r"\bXid\b.{0,40}: (?:48|63|64|74|79|94|95|119|120|140)\b",
    # Of Ascend's runtime: the device or its link.
    r"\berror code is 5070(?:10|13|14|35|46|53)\b",
)
_BUILT_IN = re.compile("|".join(_TEXTS), re.IGNORECASE)


class LogVerdict(NamedTuple):
    """What the log of a failed worker calls for."""

    action: LogAction
    line: str


def read_log(
    tail: str, path: str = "", *, texts: Sequence[str] = (), patterns: Sequence[LogPattern] = ()
) -> LogVerdict | None:
    """By the end of its output, and by the file that it logs to. None: nothing that means anything."""
    printed = tail.splitlines()
    written: list[str] | None = None
    for pattern in patterns:
        expression = re.compile(pattern.pattern)
        if written is None:
            written = _newest_run(tail_lines(path, NUM_LINES)) if path else []
        line = next((line for line in (*printed, *written) if expression.search(line[:MAX_LINE])), None)
        if line is not None:
            return LogVerdict(pattern.action, line.strip())
    node_error = find_node_error(printed, texts) or node_error_in(path, texts)
    return LogVerdict(LogAction.RELAUNCH, node_error) if node_error else None


def find_node_error(lines: Iterable[str], texts: Sequence[str] = ()) -> str:
    """The first line that says the node is broken; empty: none does."""
    for line in lines:
        if "#" not in line and (any(text in line for text in texts) or _BUILT_IN.search(line)):
            return line.strip()
    return ""


def node_error_in(path: str, texts: Sequence[str] = ()) -> str:
    """The same for the end of a file; empty also where it cannot be read."""
    return find_node_error(_newest_run(tail_lines(path, NUM_LINES)) if path else [], texts)


def _newest_run(lines: list[str]) -> list[str]:
    for number in range(len(lines) - 1, -1, -1):
        if _BANNER in lines[number]:
            return lines[number + 1 :]
    return lines


def tail_lines(path: str, count: int, *, max_bytes: int = _MAX_BYTES) -> list[str]:
    """
    The last lines of a file, in their order, however long it is: whole ones, but the first if `max_bytes` cut it. Bytes that are no
    text are shown as such. A file that is missing, no file, or not ours has none.
    """
    try:
        with open(path, "rb") as file:
            position = file.seek(0, os.SEEK_END)
            end = position
            blocks: list[bytes] = []
            num_newlines = 0
            while position > 0 and num_newlines <= count and end - position < max_bytes:
                size = min(_BLOCK, position, max_bytes - (end - position))
                position -= size
                file.seek(position)
                blocks.append(file.read(size))
                num_newlines += blocks[-1].count(b"\n")
    except (OSError, ValueError):
        return []
    text = b"".join(reversed(blocks)).decode("utf-8", "backslashreplace")
    return text.splitlines()[-count:] if count > 0 else []
