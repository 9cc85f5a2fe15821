"""
One instance of a simple role: an actor that runs the user's entry point in a thread, and serves its `@rpc` methods beside it.

The class is made in the same thread that later runs it, before any call is taken. The actor follows its raylet: when that dies, Ray starts
the instance elsewhere, and this one must not go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import queue
import runpy
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from msgspec import structs

from dlrover.platforms.ray.access import namespace_of
from dlrover.platforms.ray.raylet import on_raylet_end
from dlrover.platforms.ray.store import ClusterKeyValues
from dlrover.protocol.errors import ConfigError
from dlrover.unified.entry import EntryPointKind
from dlrover.unified.runtime.current import Current, enter
from dlrover.unified.runtime.methods import METHODS
from dlrover.unified.runtime.wire import HEADER, Ending
from dlrover.unified.shell.actor_wire import ActorWire, as_ray_part
from dlrover.unified.shell.book import Place
from dlrover.unified.shell.messages import ORDER, InstanceEnd, InstanceOrder, pack
from dlrover.unified.shell.printed_lines import PrintedLines
from dlrover.unified.shell.process_group import historical_variables, joined
from dlrover.unified.shell.told_events import WORKER, ToldEvents

USER_THREAD = "user_main_thread"
LEAVE_TIMEOUT = 1.0
"""Seconds for answers that are under way when the instance ends."""


class InstanceActor:
    """Made without arguments: Ray would keep them. What to be comes by `begin`."""

    exit_process = staticmethod(os._exit)

    def __init__(self) -> None:
        self._order: InstanceOrder | None = None
        self._wire: ActorWire | None = None
        self._current: Current | None = None
        self._place: Place | None = None
        self._user = _UserThread()
        self._events = ToldEvents(WORKER, is_told=False)
        self._main: Callable[[], Any] | None = None
        self._ready: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._over: asyncio.Future[bytes] | None = None
        self._store = ClusterKeyValues()
        self._printed = PrintedLines()
        self._num_answers = 0
        self._is_idle = asyncio.Event()
        self._is_ending = asyncio.Event()
        on_raylet_end(lambda: self.exit_process(1))

    # What the conductor asks for. Each may come twice.

    async def begin(self, data: bytes) -> bytes:
        """Until the entry point is imported and calls are taken: an `InstanceEnd` whose cause is empty if that went well."""
        if self._order is None:
            self._order = ORDER.decode(data)
            end = await self._make(self._order)
            self._ready.set_result(pack(structs.replace(end, machine=_machine_id())))
        return await asyncio.shield(self._ready)

    async def run(self) -> bytes:
        """Until the entry point has returned: `InstanceEnd`."""
        if self._over is None:
            self._over = asyncio.ensure_future(self._run())
        return await asyncio.shield(self._over)

    async def wait(self) -> None:
        """Never returns: the call fails when this process dies."""
        await asyncio.Event().wait()

    async def end(self) -> None:
        """Give the entry point time to return, then leave."""
        if self._current is not None:
            self._current.ending.set()
        self._is_ending.set()
        if self._wire is not None:
            self._wire.end()
        if self._over is not None:
            await asyncio.wait([self._over])
        self._is_idle.clear()
        if self._num_answers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT):
                    await self._is_idle.wait()
        self._leave()
        self.exit_process(0)

    async def output(self) -> bytes:
        """The next lines that the user's code has printed; waits for them. One question at a time."""
        return await self._printed.take()

    async def describe(self) -> int:
        return os.getpid()

    # What other instances ask for.

    async def answer(self, header: bytes, target: object, *parts: Any) -> Any:
        """A call to an `@rpc` method. Raises `Raised`."""
        assert self._wire is not None
        self._num_answers += 1
        try:
            result = await self._wire.answer(HEADER.decode(header), parts)
        finally:
            self._num_answers -= 1
            if not self._num_answers:
                self._is_idle.set()
        return result[0] if len(result) == 1 else tuple(as_ray_part(part) for part in result)

    # The user's code.

    async def _make(self, order: InstanceOrder) -> InstanceEnd:
        loop = asyncio.get_running_loop()
        self._wire = ActorWire(order.job_uid, order.num_ranks, loop, silent_roles=order.silent_roles)
        self._current = Current(
            job=order.job,
            job_uid=order.job_uid,
            role=order.role,
            rank=order.rank,
            world_size=order.num_ranks[order.role],
            incarnation=order.incarnation,
            local_rank=order.rank % order.local_world_size,
            local_world_size=order.local_world_size,
            config_data=order.config,
            wire=self._wire,
        )
        enter(self._current)
        end = await self._user.do(self._prepare)
        if not end.cause:
            name = self._current.name
            self._wire.serve(lambda header, parts: METHODS.answer(header, parts, name))
            METHODS.on_change = lambda: loop.call_soon_threadsafe(self._announce)
            self._announce()
        return end

    def _prepare(self) -> None:
        order = self._order
        assert order is not None
        os.environ.update(historical_variables(order) if order.is_named_as_of_old else {})
        os.environ.update(order.environ)
        self._events = ToldEvents(WORKER, is_told=order.is_named_as_of_old)
        if order.batch:
            from dlrover.unified.runtime.stream_server import StreamServer

            METHODS.export_object(StreamServer(batch=order.batch, lease=order.lease))
        elif order.entry.kind is EntryPointKind.COMMAND:
            self._main = lambda: _run_script(order.entry.words)
        else:
            with self._events.span("#import_user_entrypoint", entrypoint=order.entry.text):
                module = importlib.import_module(order.entry.module)
            METHODS.export_module(module)
            target = getattr(module, order.entry.attribute)
            if not isinstance(target, type):
                self._main = target
                return
            with self._events.span("#instantiate_user_class", entrypoint=order.entry.text):
                instance = target()
            METHODS.export_object(instance)
            self._main = getattr(instance, "run", None)
            if order.is_driver and self._main is None:
                raise ConfigError(
                    f"{order.entry.text} has no method run(), but role {order.role} is a driver, so the job "
                    "would never end. Add run(), or define the role without driver."
                )

    async def _run(self) -> bytes:
        if self._main is None:  # it serves calls until the job ends: its death is a failure, whenever it comes
            await self._is_ending.wait()
            return pack(InstanceEnd())
        return pack(await self._user.do(self._run_entry))

    def _run_entry(self) -> None:
        order = self._order
        assert order is not None
        assert self._main is not None
        with joined(order, self._store) if order.process_group is not None else contextlib.nullcontext():
            with self._events.span("#running"):
                result = self._main()
                if inspect.isawaitable(result):
                    asyncio.run(_awaited(result))

    def _announce(self) -> None:
        order = self._order
        assert order is not None
        assert self._wire is not None
        self._place = Place(
            role=order.role,
            rank=order.rank,
            incarnation=order.incarnation,
            namespace=namespace_of(order.job_uid),
            actor=order.actor,
            repeatable=tuple(METHODS.repeatable()),
        )
        self._wire.book.enter(self._place)

    def _leave(self) -> None:
        if self._wire is not None and self._place is not None:
            self._wire.book.leave(self._place)


def _machine_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


class _UserThread:
    """One thread for all that the entry point does, so that what it ties to a thread stays together."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=USER_THREAD, daemon=True).start()

    async def do(self, work: Callable[[], None]) -> InstanceEnd:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[InstanceEnd] = loop.create_future()

        def one() -> None:
            end = _outcome(work)
            loop.call_soon_threadsafe(_settle, done, end)

        self._work.put(one)
        return await done

    def _serve(self) -> None:
        while True:
            self._work.get()()


def _settle(done: asyncio.Future[InstanceEnd], end: InstanceEnd) -> None:
    if not done.done():
        done.set_result(end)


def _run_script(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")


async def _awaited(result: Any) -> None:
    await result


def _outcome(work: Callable[[], None]) -> InstanceEnd:
    try:
        work()
    except SystemExit as error:
        if error.code in (None, 0):
            return InstanceEnd()
        return InstanceEnd(cause=f"exit code {error.code}", traceback=f"exit {error.code}")
    except Ending:
        return InstanceEnd()
    except BaseException as error:  # the edge of the user's code: its end is told, whatever it was
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        return InstanceEnd(cause=f"{type(error).__name__}: {error}".splitlines()[0], traceback=_places(error))
    return InstanceEnd()


def _places(error: BaseException) -> str:
    """By which two failures are the same: where they were raised, without values that differ each time."""
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join([type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames)])
