"""Calls between actors of one job: the way of those whose process is an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from dlrover.platforms.ray.store import ClusterKeyValues
from dlrover.protocol.errors import ConfigError
from dlrover.unified.runtime.wire import CallHeader, CallRefused, Ending, Parts, Raised, as_raised
from dlrover.unified.shell.book import KeyBook, Place
from dlrover.unified.shell.sender import CalleeGone, CalleeUnsure, CallSender

MAX_CALLS = 64
"""Methods that run at a time in one instance."""


class ActorTransport:
    """Through Ray's own calls. Nothing is opened."""

    def __init__(self) -> None:
        self._actors: dict[tuple[str, str], Any] = {}

    async def deliver(self, place: Place, header: CallHeader, parts: Parts) -> Parts:
        import ray
        import ray.exceptions

        key = (place.namespace, place.actor)
        actor = self._actors.get(key)
        if actor is None:
            try:
                actor = self._actors[key] = ray.get_actor(place.actor, namespace=place.namespace)
            except ValueError as error:
                raise CalleeGone(was_sent=False) from error
        target = (place.role, place.rank, place.incarnation) if place.is_relayed else None
        try:
            answer = await actor.answer.remote(msgspec.msgpack.encode(header), target, *(as_ray_part(p) for p in parts))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Raised):
                raise cause from None
            if isinstance(cause, CalleeGone | CalleeUnsure):
                raise cause from None
            raise
        except ray.exceptions.ActorUnavailableError as error:
            raise CalleeUnsure from error
        except ray.exceptions.RayActorError as error:
            self._actors.pop(key, None)
            raise CalleeGone(was_sent=True) from error
        except ray.exceptions.RayError as error:  # the machine went with the answer
            self._actors.pop(key, None)
            raise CalleeUnsure from error
        return list(answer) if isinstance(answer, tuple | list) else [answer]


class ActorWire:
    """Of one actor. `loop`: the actor's own, which sends; the user's threads wait."""

    def __init__(
        self,
        job_uid: str,
        num_ranks: Mapping[str, int],
        loop: asyncio.AbstractEventLoop,
        *,
        silent_roles: Collection[str] = (),
    ) -> None:
        """`silent_roles`: they take no calls."""
        self._num_ranks = dict(num_ranks)
        self._loop = loop
        self.book = KeyBook(ClusterKeyValues(), job_uid)
        self._sender = CallSender(self.book, ActorTransport(), silent_roles=silent_roles)
        self._answer: Callable[[CallHeader, Parts], Parts] | None = None
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="rpc")
        self._pending: set[Future[Parts]] = set()
        self._is_ending = False

    def call(self, role: str, rank: int, header: CallHeader, parts: Parts) -> Future[Parts]:
        self.num_ranks(role)
        if self._is_ending:
            raise Ending("This instance is ending, so it takes no more calls.")
        future = asyncio.run_coroutine_threadsafe(self.send(role, rank, header, parts), self._loop)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    async def send(self, role: str, rank: int, header: CallHeader, parts: Parts) -> Parts:
        """Fails with `Raised` alone."""
        try:
            return await self._sender.send(role, rank, header, parts)
        except asyncio.CancelledError:
            raise Raised("ended", "This instance is ending, so it takes no more calls.") from None
        except Exception as error:  # the edge to the user's threads: each error becomes one that can travel
            raise as_raised(error) from error

    def serve(self, answer: Callable[[CallHeader, Parts], Parts]) -> None:
        self._answer = answer

    async def answer(self, header: CallHeader, parts: Parts) -> Parts:
        """A call to this instance. Raises `Raised`."""
        if self._answer is None:
            raise as_raised(CallRefused("This instance takes no calls."))
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._answer, header, parts)

    def num_ranks(self, role: str) -> int:
        if role not in self._num_ranks:
            raise ConfigError(f"The job has no role {role!r}. It has: {', '.join(self._num_ranks)}.")
        return self._num_ranks[role]

    def roles(self) -> Mapping[str, int]:
        return self._num_ranks

    def end(self) -> None:
        """Threads of the user that wait for an answer go on, with `Ending`."""
        self._is_ending = True
        for future in list(self._pending):
            future.cancel()


def as_ray_part(part: Any) -> Any:
    """Ray moves arrays without a copy, and bytes with one."""
    return _as_array(part) if isinstance(part, memoryview) else part


def _as_array(view: memoryview) -> Any:
    try:
        import numpy
    except ImportError:
        return bytes(view)
    return numpy.frombuffer(view, dtype=numpy.uint8)


def start(work: Coroutine[Any, Any, Any], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[Any]:
    """A task that is held until it ends."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
