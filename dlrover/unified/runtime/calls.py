"""
Calls from one role to others: to one instance, to all, or in batches that are cut evenly.

    group("reward").call_rank0("score", answers).result()
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, overload

from msgspec import Struct

from dlrover.protocol.errors import ConfigError
from dlrover.unified.runtime.current import current
from dlrover.unified.runtime.methods import mark_of
from dlrover.unified.runtime.wire import CallHeader, CallTimeout, Ending, Raised, as_error, freeze, thaw

TIMEOUT = 60.0
"""Seconds for a callee that starts or starts again; a method that runs has as long as it needs."""


class CallFuture:
    """The answer to come. Also awaitable."""

    def __init__(self, answer: Future[Any], *, then: Callable[[Any], Any] = thaw) -> None:
        self._answer = answer
        self._then = then

    def result(self, timeout: float | None = None) -> Any:
        """Raises what the method raised as `CallFailed`, or `InstanceLost`, `RoleGone`, `CallTimeout`, `CallRefused`."""
        _refuse_in_loop()
        try:
            return self._then(self._answer.result(timeout))
        except Raised as error:
            failure = as_error(error)
            raise failure from failure.__cause__
        except CancelledError as error:
            raise Ending("This instance is ending, so it makes no more calls.") from error
        except TimeoutError as error:
            if self._answer.done():
                raise
            raise CallTimeout(f"no answer within {timeout:g} s") from error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except Exception as error:  # this is the question
            return error
        return None

    def done(self) -> bool:
        return self._answer.done()

    def add_done_callback(self, callback: Callable[[CallFuture], object]) -> None:
        self._answer.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        try:
            return self._then(await asyncio.wrap_future(self._answer))
        except Raised as error:
            failure = as_error(error)
            raise failure from failure.__cause__


class AllAnswers(CallFuture):
    """A list in the order of ranks."""

    def __init__(self, futures: Sequence[CallFuture]) -> None:
        self._futures = list(futures)

    def result(self, timeout: float | None = None) -> list[Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        return [future.result(_left(deadline)) for future in self._futures]

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def add_done_callback(self, callback: Callable[[CallFuture], object]) -> None:
        left = len(self._futures)

        def one(_: CallFuture) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                callback(self)

        if not left:
            callback(self)
        for future in self._futures:
            future.add_done_callback(one)

    async def _wait(self) -> list[Any]:
        return [await future for future in self._futures]


class FutureSequence(Sequence[Any]):
    """The results of a batch, in the order of its items. Looking at one waits for its part only."""

    def __init__(self, parts: Sequence[CallFuture], sizes: Sequence[int]) -> None:
        self._parts = list(parts)
        self._sizes = list(sizes)

    def __len__(self) -> int:
        return sum(self._sizes)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        for part, size in zip(self._parts, self._sizes, strict=True):
            if place < size:
                return part.result()[place]
            place -= size
        raise AssertionError("sizes add up to the length")

    def __iter__(self) -> Iterator[Any]:
        for part, size in zip(self._parts, self._sizes, strict=True):
            if size:
                yield from part.result()

    def wait(self, timeout: float | None = None) -> list[Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            part.result(_left(deadline))
        return list(self)

    result = wait


class RoleActor(Struct, frozen=True):
    """One instance of a role, as others see it: whichever process it is in now."""

    role: str
    rank: int

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> CallFuture:
        """By the method's name, or by a stub function of that name."""
        return self.send(method, args, kwargs)

    def send(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        retry: bool | None = None,
        timeout: float = TIMEOUT,
    ) -> CallFuture:
        """`retry`: whether it may run twice; else as the stub's @rpc says."""
        name, is_repeatable = named(method)
        header = CallHeader(
            id=os.urandom(8).hex(),
            method=name,
            caller=current().name,
            is_repeatable=is_repeatable if retry is None else retry,
            timeout=timeout,
        )
        return CallFuture(current().wire.call(self.role, self.rank, header, freeze((tuple(args), dict(kwargs or {})))))


class RoleGroup(Sequence[RoleActor]):
    def __init__(self, role: str, *, optional: bool = False) -> None:
        """Raises ValueError for a role that the job does not have, unless it is `optional`: then the group is empty."""
        known = current().wire.roles()
        if role not in known and not optional:
            raise ValueError(f"The job has no role {role!r}. It has: {', '.join(known)}.")
        self.role = role
        self._actors = [RoleActor(role, rank) for rank in range(known.get(role, 0))]

    def __len__(self) -> int:
        return len(self._actors)

    @overload
    def __getitem__(self, index: int) -> RoleActor: ...
    @overload
    def __getitem__(self, index: slice) -> list[RoleActor]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._actors[index]

    def call(self, method: str | Callable[..., Any], *args: Any, _scatter: bool = False, **kwargs: Any) -> CallFuture:
        """On all instances; the answer is a list. `_scatter`: each argument is a list with one element for each instance."""
        if not _scatter:
            return AllAnswers([actor.call(method, *args, **kwargs) for actor in self._actors])
        for name, value in [*((f"argument {place}", each) for place, each in enumerate(args)), *kwargs.items()]:
            if not isinstance(value, Sequence) or len(value) != len(self):
                raise ValueError(
                    f"{name}: with _scatter, give a list with {len(self)} elements, one for each {self.role}."
                )
        return AllAnswers(
            [
                actor.call(method, *(each[rank] for each in args), **{key: kwargs[key][rank] for key in kwargs})
                for rank, actor in enumerate(self._actors)
            ]
        )

    def call_rank0(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> CallFuture:
        if not self._actors:
            raise ConfigError(f"The job has no role {self.role!r}.")
        return self._actors[0].call(method, *args, **kwargs)

    def call_batch(self, method: str | Callable[..., Any], size: int, *args: Any, **kwargs: Any) -> FutureSequence:
        """
        `size` items, cut evenly over the instances. Arguments that are lists or tuples of that length are cut with them; others are given to all.

        The method gets its part and returns a list of the same length.
        """
        for name, value in [*((f"argument {place}", each) for place, each in enumerate(args)), *kwargs.items()]:
            if isinstance(value, list | tuple) and len(value) != size:
                raise ValueError(f"{name} has {len(value)} items and the batch {size}.")
        if size and not self._actors:
            raise ConfigError(f"The job has no role {self.role!r}.")
        cuts = evenly(size, len(self._actors))
        parts = []
        for actor, (start, end) in zip(self._actors, cuts, strict=True):
            if start == end:
                continue
            own = [_cut(value, start, end) for value in args]
            parts.append((actor.call(method, *own, **{k: _cut(v, start, end) for k, v in kwargs.items()}), end - start))
        return FutureSequence(
            [_checked(future, number, self.role) for future, number in parts], [number for _, number in parts]
        )


def group(role: str, *, optional: bool = False) -> RoleGroup:
    return RoleGroup(role, optional=optional)


def evenly(size: int, parts: int) -> list[tuple[int, int]]:
    """So many ranges of `size` items; their lengths differ by one at most, the longer ones first."""
    if not parts:
        return []
    least, more = divmod(size, parts)
    cuts, start = [], 0
    for place in range(parts):
        end = start + least + (1 if place < more else 0)
        cuts.append((start, end))
        start = end
    return cuts


def named(method: str | Callable[..., Any]) -> tuple[str, bool]:
    """Its name for calls, and whether it may run twice."""
    if isinstance(method, str):
        return method, False
    mark = mark_of(method)
    return (mark.name, mark.retry) if mark is not None else (method.__name__, False)


def _cut(value: Any, start: int, end: int) -> Any:
    return value[start:end] if isinstance(value, list | tuple) else value


def _checked(future: CallFuture, number: int, role: str) -> CallFuture:
    def check(parts: Any) -> Any:
        result = thaw(parts)
        if not isinstance(result, Sequence) or len(result) != number:
            raise ValueError(f"A batch method of {role} got {number} items and must return as many (got {result!r}).")
        return result

    return CallFuture(future._answer, then=check)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _refuse_in_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise AssertionError("This call would block the event loop. Await it instead: await future.")
