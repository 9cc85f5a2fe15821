"""
The launcher's two children, the agent and the master: each runs, or waits for the time of its next start.

What starts a child may be missing for a while: memory, a process, room on the disk. The launcher then tries again until a limit.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection

from dlrover.cli.console import say
from dlrover.cli.launch import processes
from dlrover.cli.launch.processes import SignalInbox
from dlrover.protocol.errors import DLRoverError

LONGEST_PAUSE = 5.0
SHORTEST_PAUSE = 0.1


class LaunchedChild:
    """One of the two."""

    def __init__(self, name: str) -> None:
        """`name` is for messages."""
        self._name = name
        self.pid: int | None = None
        """None: it does not run."""
        self.starts_at: float | None = None
        """A start that waits for its time."""
        self._missed_since: float | None = None
        """It could not be started again so far."""

    def send(self, number: int) -> None:
        if self.pid is not None:
            processes.send(self.pid, number)

    def start_again(self, start: Callable[[], None], *, limit: float) -> str:
        """
        The job is under way: what keeps the child from starting may pass.

        Returns why it is given up after `limit` seconds. Empty: it runs, or `starts_at` says when it is tried again.
        """
        self.starts_at = None
        try:
            start()
            self._missed_since = None
        except (DLRoverError, OSError) as error:
            now = time.monotonic()
            if self._missed_since is None:
                self._missed_since = now
                say(f"the {self._name} cannot start now; the launcher tries again for up to {limit:.0f} s. {error}")
            if now - self._missed_since >= limit:
                return f"The {self._name} could not start within {limit:.0f} s. {error}"
            self.starts_at = now + pause_after(now - self._missed_since)
        return ""


def pause_after(missed: float) -> float:
    """Before the next try: as long again as it has been missed so far."""
    return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, missed))


def await_exit(child: LaunchedChild, *, among: Collection[LaunchedChild], inbox: SignalInbox, patience: float) -> None:
    """Until that child has ended; a signal ends the patience. Ends of others are noted, too."""
    deadline = time.monotonic() + patience
    while child.pid is not None:
        ended = processes.reap_children()
        for each in among:
            if each.pid in ended:
                each.pid = None
        remaining = deadline - time.monotonic()
        if child.pid is None or remaining <= 0:
            return
        if any(number != signal.SIGCHLD for number in inbox.wait(remaining)):
            return
