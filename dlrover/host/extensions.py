"""
Extensions: code of users that our processes load by name and call with a time limit.

This is the one place that runs their code, so it is also the one place that catches whatever they raise. An extension that cannot be
loaded, raises, or does not return costs a warning and its own answer, never the job. A thread cannot be ended: while a call that
exceeded its limit still runs, further calls are refused, and after `max_timeouts` such calls the extension is disabled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dlrover.host import side_thread

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class UnusableExtension(Exception):
    """The extension cannot be imported or built, or it lacks a method. The text gives the reason without the extension's name."""


class NoAnswer(Exception):
    """A call raised, exceeded its limit, or was refused. The text gives the reason without the extension's name."""


def build(name: str, *, method: str) -> Any:
    """An object of the class `module::Class`, made without arguments, that has this method. Raises UnusableExtension."""
    module, _, class_name = name.partition("::")
    if not module or not class_name:
        raise UnusableExtension("give the form module::Class")
    return _build(lambda: getattr(importlib.import_module(module), class_name)(), method)


def build_installed(
    group: str, *, what: str, method: str, log: logging.Logger, adapt: Callable[[str, Any], Any]
) -> Iterator[tuple[str, Any]]:
    """
    Name and object of each extension that a package installed under this group of entry points.

    `adapt` turns an object of the original's shape into ours before the method is looked for; None leaves it out without a warning.
    An unusable extension is left out with a warning.
    """
    from importlib import metadata  # late: a worker that has no use for it starts sooner

    for point in metadata.entry_points(group=group):
        try:
            extension = _build(partial(_load, point, adapt), method)
        except UnusableExtension as error:
            log.warning("The %s %s is not used: %s", what, point.name, error)
            continue
        if extension is not None:
            yield point.name, extension


def _load(point: EntryPoint, adapt: Callable[[str, Any], Any]) -> Any:
    return adapt(point.name, point.load()())


def _build(make: Callable[[], Any], method: str) -> Any:
    try:
        extension = make()
        found = getattr(extension, method, None)
    except (Exception, SystemExit) as error:  # importing and building run the user's code
        raise UnusableExtension(f"{type(error).__name__}: {error}") from error
    if extension is not None and not callable(found):
        raise UnusableExtension(f"it has no method `{method}`")
    return extension


class TimedCalls:
    """The calls of one extension: each in a thread, each with the same limit."""

    def __init__(self, name: str, *, time_limit: float, max_timeouts: int, num_threads: int = 1) -> None:
        self._name = name
        self._time_limit = time_limit
        self._max_timeouts = max_timeouts
        self._num_threads = num_threads
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._num_timeouts = 0
        """In a row."""
        self._overdue: set[asyncio.Future[Any]] = set()
        """Calls that exceeded the limit and still run."""

    @property
    def is_disabled(self) -> bool:
        return self._num_timeouts >= self._max_timeouts

    async def call(self, work: Callable[[], T]) -> T:
        """Calls wait for each other where there are more of them than threads, and the limit includes that. Raises NoAnswer."""
        self._check()
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(self._num_threads, thread_name_prefix=self._name)
        begun = self._threads.submit(side_thread.contain, work)
        return await self._limit(asyncio.wrap_future(begun), drop=begun.cancel)

    async def call_async(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """For an extension whose method is a coroutine. Raises NoAnswer."""
        self._check()
        return await self._limit(asyncio.ensure_future(_contain(work)), drop=lambda: False)

    async def wait_until_idle(self) -> None:
        """Until calls that exceeded the limit have returned."""
        if self._overdue:
            await asyncio.wait(self._overdue)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self) -> None:
        if self.is_disabled:
            raise NoAnswer(f"it is disabled after {self._max_timeouts} timeouts in a row")
        if len(self._overdue) >= self._num_threads:
            raise NoAnswer("an earlier call has not returned")

    async def _limit(self, running: asyncio.Future[T], *, drop: Callable[[], bool]) -> T:
        """`drop` takes back a call that has not begun, and returns whether it did."""
        done, _ = await asyncio.wait([running], timeout=self._time_limit)
        if not done:
            self._num_timeouts += 1
            if not drop():
                self._overdue.add(running)
                running.add_done_callback(self._came_back)
            raise NoAnswer(f"it took longer than {self._time_limit:g} s")
        self._num_timeouts = 0
        try:
            return running.result()
        except Exception as error:  # the user's code
            raise NoAnswer(f"{type(error).__name__}: {error}") from error

    def _came_back(self, running: asyncio.Future[Any]) -> None:
        self._overdue.discard(running)
        if not running.cancelled():
            running.exception()  # too late to be reported


async def _contain(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return await work()
    except SystemExit as error:
        raise side_thread.as_error(error) from error
