"""The decorators of the original's `function_util`: retry, time limits, ignored exceptions."""

from __future__ import annotations

import functools
import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from dlrover.host.edges import contained, handed_over

log = logging.getLogger(__name__)

TIMEOUT_MAX = 24 * 60 * 60

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class TimeoutException(Exception):
    """The function took too long."""


def timeout(secs: float = -1, callback_func: Callable[[], float] | None = None) -> Decorator:
    """By SIGALRM, so in the main thread only. Not positive: a day."""
    limit = _limit(secs, callback_func)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def limited(*arguments: Any, **named: Any) -> Any:
            def on_alarm(_signal: int, _frame: FrameType | None) -> None:
                raise TimeoutException(f"{function.__name__} took longer than {limit:g} s")

            before = signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, limit)
            try:
                return function(*arguments, **named)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)

        return limited

    return decorate


def threading_timeout(secs: float = -1, callback_func: Callable[[], float] | None = None) -> Decorator:
    """In any thread: the function runs in one of its own, which goes on when the time is over."""
    limit = _limit(secs, callback_func)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def limited(*arguments: Any, **named: Any) -> Any:
            results: list[Any] = []
            errors: list[BaseException] = []

            def run() -> None:
                with handed_over(errors.append):
                    results.append(function(*arguments, **named))

            thread = threading.Thread(target=run, name=function.__name__, daemon=True)
            thread.start()
            thread.join(limit)
            if thread.is_alive():
                raise TimeoutException(f"{function.__name__} took longer than {limit:g} s")
            if errors:
                raise errors[0]
            return results[0]

        return limited

    return decorate


def retry(retry_times: int = 10, retry_interval: float = 5, raise_exception: bool = True) -> Decorator:
    """Any exception counts; after the last attempt it is raised, or None is returned."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def retried(*arguments: Any, **named: Any) -> Any:
            for attempt in range(1, retry_times + 1):
                try:
                    return function(*arguments, **named)
                except Exception as error:
                    log.warning("%s failed, attempt %d of %d: %s", function.__name__, attempt, retry_times, error)
                    if attempt == retry_times and raise_exception:
                        raise
                time.sleep(retry_interval)
            return None

        return retried

    return decorate


def ignore_exceptions() -> Decorator:
    """None instead, and a warning with the traceback."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def ignoring(*arguments: Any, **named: Any) -> Any:
            with contained(lambda _error: log.warning("%s failed", function.__name__, exc_info=True)):
                return function(*arguments, **named)
            return None

        return ignoring

    return decorate


def _limit(secs: float, callback_func: Callable[[], float] | None) -> float:
    limit = secs if callback_func is None else callback_func()
    return limit if limit > 0 else TIMEOUT_MAX
