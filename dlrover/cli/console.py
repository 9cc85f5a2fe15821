"""What the launcher itself says to a person: on stderr, one line per event, always with the same beginning."""

from __future__ import annotations

import atexit
import contextlib
import select
import signal
import sys
from collections import deque
from collections.abc import Iterator

from dlrover.host.plain_text import printable

PREFIX = "dlrover-run: "
PATIENCE = 1.0
"""Seconds for a console that takes no bytes (a paused pager, a frozen terminal): there may be a master to start again meanwhile."""
SIGNAL_PERIOD = 0.1
"""Seconds between two looks for a signal while the last lines wait to be taken."""
MAX_HELD = 100

_held: deque[str] = deque(maxlen=MAX_HELD)
"""Lines that the console has not taken yet."""


def say(text: str, *, patience: float = PATIENCE) -> None:
    """What the console does not take within so many seconds comes before the next line, or at the end."""
    _held.append(f"{PREFIX}{printable(text)}\n")
    _say_held(patience)


def say_block(text: str) -> None:
    """
    Several lines in one write, so that workers' output does not fall between them.

    For the end: it waits until they are taken, or until the process is told to end.
    """
    text = printable(text)
    texts = [*_held, text if text.endswith("\n") else text + "\n"]
    _held.clear()
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        for each in texts:  # it is closed, or no file at all
            _write(each)
        return
    from dlrover.host.console import ConsoleWriter  # late: threads and logging, the usual job needs neither

    writer = ConsoleWriter()
    with _noted_signals() as noted:
        for each in texts:
            writer.write(descriptor, each.encode(sys.stderr.encoding or "utf-8", "backslashreplace"))
        while writer.held_bytes and not noted:
            writer.flush(SIGNAL_PERIOD)


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Those that would not end the process by themselves, because they have a handler that takes its time."""
    noted: list[int] = []
    formers = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        former = signal.getsignal(number)
        if callable(former):
            with contextlib.suppress(ValueError):  # not the main thread: its signals are not ours
                formers[number] = signal.signal(number, lambda number, _frame: noted.append(number))
    try:
        yield noted
    finally:
        for number, former in formers.items():
            signal.signal(number, former)


@atexit.register
def _say_held(patience: float = PATIENCE) -> None:
    while _held and _takes_bytes(patience):
        _write(_held.popleft())


def _takes_bytes(patience: float) -> bool:
    """A line or so: as much as a pipe takes at once."""
    poll = select.poll()
    try:
        poll.register(sys.stderr.fileno(), select.POLLOUT)
    except (OSError, ValueError):
        return True  # it is closed, or no file at all: writing does not wait
    return bool(poll.poll(patience * 1000))


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # the terminal is gone (SIGHUP); there is nobody left to tell
