"""What the launcher itself says to a person: on stderr, one line per event, always with the same beginning."""

from __future__ import annotations

import atexit
import select
import sys
from collections import deque

PREFIX = "dlrover-run: "
PATIENCE = 1.0
"""Seconds for a console that takes no bytes (a paused pager, a frozen terminal): there may be a master to start again meanwhile."""
MAX_HELD = 100

_held: deque[str] = deque(maxlen=MAX_HELD)
"""Lines that the console has not taken yet."""


def say(text: str) -> None:
    """What the console does not take now comes before the next line, or at the end."""
    _held.append(f"{PREFIX}{text}\n")
    _say_held()


def say_block(text: str) -> None:
    """Several lines in one write, so that workers' output does not fall between them. For the end: it waits until they are taken."""
    while _held:
        _write(_held.popleft())
    _write(text if text.endswith("\n") else text + "\n")


@atexit.register
def _say_held() -> None:
    while _held and _takes_bytes():
        _write(_held.popleft())


def _takes_bytes() -> bool:
    """A line or so: as much as a pipe takes at once."""
    poll = select.poll()
    try:
        poll.register(sys.stderr.fileno(), select.POLLOUT)
    except (OSError, ValueError):
        return True  # it is closed, or no file at all: writing does not wait
    return bool(poll.poll(PATIENCE * 1000))


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # the terminal is gone (SIGHUP); there is nobody left to tell
