"""Processes that somebody stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from dlrover.agent.monitor.stopped import StoppedProcesses
from dlrover.host.processes import look_up


def test_only_who_is_found_stopped_twice_in_a_row_is_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        looks = StoppedProcesses()
        assert looks.look([child.pid]) == ()
        os.kill(child.pid, signal.SIGSTOP)
        wait_for_state(child.pid, "T")
        assert looks.look([child.pid]) == ()
        assert looks.look([child.pid]) == (child.pid,)
        os.kill(child.pid, signal.SIGCONT)
        wait_for_state(child.pid, "SR")
        assert looks.look([child.pid]) == ()
        os.kill(child.pid, signal.SIGSTOP)
        wait_for_state(child.pid, "T")
        assert looks.look([child.pid]) == ()
    finally:
        child.kill()
        child.communicate()


def wait_for_state(pid: int, states: str) -> None:
    end_at = time.monotonic() + 60
    while (found := look_up(pid)) is None or found.state not in states:
        assert time.monotonic() < end_at, f"process {pid} did not come to one of {states}"
