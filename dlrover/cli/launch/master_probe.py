"""
Waiting for a master that another launcher hosts.

There is no event for "a process now listens on another host", so this is one of the few polls, with jitter, in a thread of
its own; the agent imports torch meanwhile and tries by itself. What this adds is a limit and a line of progress.
"""

from __future__ import annotations

import random
import threading
import time

from dlrover.cli.console import say
from dlrover.cli.launch import discovery
from dlrover.cli.launch.processes import SignalInbox
from dlrover.protocol.addresses import Address

PROGRESS_PERIOD = 10.0


class MasterProbe:
    """Runs from construction on. `is_over`, `has_found` and `trouble` are written by its thread, then the inbox is woken."""

    def __init__(self, address: Address, inbox: SignalInbox, *, timeout: float) -> None:
        self.timeout = timeout
        self._address = address
        self._inbox = inbox
        self._is_closed = threading.Event()
        self.has_found = False
        self.trouble = "not tried yet"
        """Why the newest connection did not come about."""
        self.is_over = False
        self._thread = threading.Thread(target=self._run, name="master-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()

    def _run(self) -> None:
        begun = said_at = time.monotonic()
        while not self._is_closed.is_set() and time.monotonic() - begun < self.timeout:
            self.trouble = discovery.why_silent(self._address)
            if not self.trouble:
                self.has_found = True
                break
            now = time.monotonic()
            if now - said_at >= PROGRESS_PERIOD:
                said_at = now
                so_far = f"{now - begun:.0f} s of {self.timeout:.0f} s"
                say(f"waiting for the master at {self._address}, {so_far} ({self.trouble})")
            self._is_closed.wait(random.uniform(0.2, 1.0))
        self.is_over = True
        if not self._is_closed.is_set():
            self._inbox.wake()
