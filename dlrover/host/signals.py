"""Signals: their names, and how a process that may have ended meanwhile gets one."""

from __future__ import annotations

import logging
import os
import signal

from dlrover.host.processes import RunningProcess, look_up, open_pidfd

_log = logging.getLogger(__name__)


def signal_name(number: int) -> str:
    """Real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def send_signal(process: RunningProcess, number: int) -> bool:
    """Whether it was there to be signalled."""
    try:
        descriptor = open_pidfd(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not process.is_same(look_up(process.pid)):
            return False
        if descriptor is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        _log.warning("pid %d belongs to the job, but it runs as another user now. It cannot be signalled.", process.pid)
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True
