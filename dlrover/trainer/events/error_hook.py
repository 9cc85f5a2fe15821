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
from typing import Protocol

_NAMES = ("SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGBUS", "SIGPIPE", "SIGSEGV", "SIGILL", "SIGHUP", "SIGQUIT")


class _Reporter(Protocol):
    """A `Process` of events, as far as a hook needs it."""

    def instant(self, name: str, content: dict[str, object] | None = None) -> None: ...


def hook_errors(process: _Reporter) -> None:
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


def _hook_signal(number: signal.Signals, process: _Reporter) -> None:
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
