"""Calls that may never come back: of users' code, of drivers, of name servers. Each gets a thread of its own, so that nothing queues behind it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def begin(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """A thread cannot be ended. One that hangs is left behind; the agent ends without waiting for it, because it does not shut the interpreter down."""
    threads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)
    running = asyncio.wrap_future(threads.submit(_contain, call))
    threads.shutdown(wait=False)
    return running


def as_error(raised: BaseException) -> RuntimeError:
    """For what a task cannot carry: `sys.exit()` passes through the event loop and would end the agent with all its workers."""
    return RuntimeError(f"{type(raised).__name__}: {raised}")


def _contain(call: Callable[[], T]) -> T:
    try:
        return call()
    except StopIteration as error:
        raise as_error(error) from error  # a future refuses it, and whoever waits would wait for ever
    except Exception:
        raise
    except BaseException as error:  # of this call only: Ctrl-C and cancellation never come to a thread
        raise as_error(error) from error
