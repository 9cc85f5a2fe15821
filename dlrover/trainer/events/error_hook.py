"""
The last words of a process, as events: an uncaught exception or a deadly signal. A hook that was there before is called afterwards.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlrover.trainer.events.process import Process

_NAMES = ("SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGBUS", "SIGPIPE", "SIGSEGV", "SIGILL", "SIGHUP", "SIGQUIT")


def hook_errors(process: Process) -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        stack = "".join(traceback.format_exception(kind, error, where))
        process.instant("exception", {"stack": stack, "pid": os.getpid()})
        before(kind, error, where)

    sys.excepthook = hook
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may handle signals
    for name in _NAMES:
        _hook_signal(getattr(signal, name), process)


def _hook_signal(number: signal.Signals, process: Process) -> None:
    before = signal.getsignal(number)
    if before is None or before is signal.SIG_IGN:
        return  # not ours to handle, or wished to be ignored

    def handle(received: int, frame: FrameType | None) -> None:
        stack = "".join(traceback.format_stack(frame))
        content = {"sig": received, "sig_name": signal.Signals(received).name, "pid": os.getpid(), "stack": stack}
        process.instant("exit_sig", content)
        if callable(before):
            before(received, frame)
        else:
            signal.signal(received, signal.SIG_DFL)
            os.kill(os.getpid(), received)

    signal.signal(number, handle)
