"""
What the log of a failed worker says about the node: some errors no restart can help, because the machine or its device is broken.

The user's own texts (`FAILURE_NODE_ERRORS`) count wherever a line contains one. A few that every log of broken hardware shows are built
in. A line that contains `#` does not count: it is the one that shows the configuration itself. Before all of them the user's patterns (`--log-patterns`,
`dlrover.agent.workers.user_patterns`) say what shall follow a line, whatever it contains. Only those can be slow: what is searched for here takes
time in proportion to the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dlrover.agent.config import LogAction

NUM_LINES = 5000
MAX_LINE = 2000
"""Characters of a line that the user's patterns are searched for in: expressions can take very long in very long ones."""
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
_HINTS = ("ecc error", "gpu", "xid", "error code")
"""A line without any of them matches none of `_TEXTS`; looking for them is a hundred times faster."""


class LogVerdict(NamedTuple):
    """What the log of a failed worker calls for."""

    action: LogAction
    line: str


def log_lines(tail: str, path: str = "") -> list[str]:
    """The end of its output, then that of the file that it logs to."""
    return [*tail.splitlines(), *(_newest_run(tail_lines(path, NUM_LINES)) if path else [])]


def find_node_error(lines: Iterable[str], texts: Sequence[str] = ()) -> str:
    """The first line that says the node is broken; empty: none does."""
    for line in lines:
        if "#" not in line and (any(text in line for text in texts) or _names_broken_device(line)):
            return line.strip()
    return ""


def _names_broken_device(line: str) -> bool:
    lowered = line.lower()
    return any(hint in lowered for hint in _HINTS) and _BUILT_IN.search(line) is not None


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
