"""
Calls that may never return: code of users, drivers, name servers. Each call gets a thread of its own, so that no other call waits behind it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def begin(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """A thread cannot be ended. One that hangs is left behind: our processes exit without a shutdown of the interpreter."""
    threads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)
    running = asyncio.wrap_future(threads.submit(contain, call))
    threads.shutdown(wait=False)
    return running


def as_error(raised: BaseException) -> RuntimeError:
    """For what a task cannot carry: `sys.exit()` passes through the event loop and would end the whole process."""
    return RuntimeError(f"{type(raised).__name__}: {raised}")


def contain(call: Callable[[], T]) -> T:
    """What it raises, in a form that a future and a task can carry."""
    try:
        return call()
    except StopIteration as error:
        raise as_error(error) from error  # a future refuses it, and its waiter would wait for ever
    except Exception:
        raise
    except BaseException as error:  # of this call only: Ctrl-C and cancellation never reach a thread
        raise as_error(error) from error
