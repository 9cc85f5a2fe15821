"""
Parent and child on one host: a process that must not outlive the one that started it asks the kernel to see to it.

Beside the sockets because it is the other half of the same conversation: who is at the other end, and is it still there.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
HANDLER_INSTALLED = signal.SIGRTMAX - 3
HANDLER_BEGAN = signal.SIGRTMAX - 4
"""
Never sent. A worker that catches the first has a Python handler for SIGTERM, one that catches the second has begun to run it:
`dlrover.agent.workers.sigterm` reads that from outside.
"""


def follow_parent(number: signal.Signals, parent_pid: int = 0) -> bool:
    """
    Have the kernel send us this signal when our parent ends. False: it has ended already.

    The kernel ties it to the *thread* that forked us, so a parent must fork from a thread that lives as long as it does.
    `parent_pid` names the expected parent; 0 takes the present one, which misses a parent that died in our first moments
    only if no process but init adopts its children.
    """
    expected = parent_pid or os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    return os.getppid() == expected
