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
    running = asyncio.wrap_future(threads.submit(call))
    threads.shutdown(wait=False)
    return running
