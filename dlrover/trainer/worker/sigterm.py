"""
Announces to the agent that this worker has a Python handler for SIGTERM, and that it has begun to run.

After a failure elsewhere the agent waits for a worker only if its handler can run at all: `dlrover.agent.workers.sigterm` says why and how
the two facts travel. Here `signal.signal` learns to announce. A script sees no difference: it gets its own function back from
`signal.signal` and `signal.getsignal`, and only a traceback through its handler shows one more line.
"""

from __future__ import annotations

import functools
import signal
from types import FrameType
from typing import Any

from dlrover.host.lifeline import HANDLER_BEGAN, HANDLER_INSTALLED
from dlrover.trainer.worker import hooks as worker_hooks

_set, _get = signal.signal, signal.getsignal


def announce() -> None:
    """From now on, here and in all processes forked from this one. Before other modules take `signal.signal` for themselves."""
    signal.signal = _announcing_signal
    signal.getsignal = _unwrapping_getsignal


class _Announced:
    """A user's handler."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        _mark(HANDLER_BEGAN, is_on=True)
        return self.handler(number, frame)


@functools.wraps(_set)
def _announcing_signal(signalnum: Any, handler: Any) -> Any:
    if signalnum != signal.SIGTERM:
        before = _set(signalnum, handler)
        worker_hooks.notice_signal(signalnum)
        return before
    is_python = callable(handler)
    before = _set(signalnum, _Announced(handler) if is_python else handler)
    _mark(HANDLER_INSTALLED, is_on=is_python)
    return _unwrap(before)


@functools.wraps(_get)
def _unwrapping_getsignal(signalnum: Any) -> Any:
    return _unwrap(_get(signalnum))


def _unwrap(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Announced) else handler


def _mark(number: int, *, is_on: bool) -> None:
    """Catch this signal, or not. If the script has a use for it, it says nothing more about SIGTERM."""
    if _get(number) in (signal.SIG_DFL, _never_called):
        _set(number, _never_called if is_on else signal.SIG_DFL)


def _never_called(number: int, frame: FrameType | None) -> None:
    """No process sends these signals; that they are caught is all there is to them."""
