"""
A Ray in one process: named actors as objects of the test's event loop, a key-value store, and placement groups that are always placed.

It stands in for the library, so that what we build on it runs without a cluster. What only a real cluster shows is in tests/ray/unified. A process
is one instance, so only one instance of a job may live here at a time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from dlrover.unified.runtime import current
from dlrover.unified.runtime.methods import METHODS

_ACTOR: ContextVar[tuple[str, str] | None] = ContextVar("actor", default=None)
"""Whose code runs."""


MACHINE = "machine-1"
"""On which all actors are."""


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class ActorUnavailableError(RayActorError):
    pass


class RuntimeEnvSetupError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Exit(Exception):
    """The process of the actor ended."""


class FakeActor:
    def __init__(self, ray: FakeRay, kind: type, key: tuple[str, str], args: tuple[Any, ...]) -> None:
        self.key = key
        self.is_dead = asyncio.Event()
        self._ray = ray
        mark = _ACTOR.set(key)
        self.object = _mortal(kind)(*args)
        _ACTOR.reset(mark)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(self._call(name, args)))

    async def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        if self.is_dead.is_set():
            raise RayActorError(f"{self.key} is dead")
        mark = _ACTOR.set(self.key)
        work = asyncio.ensure_future(getattr(self.object, name)(*args))
        _ACTOR.reset(mark)
        death = asyncio.ensure_future(self.is_dead.wait())
        await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if not work.done() or work.cancelled():
            work.cancel()
            raise RayActorError(f"{self.key} died")
        try:
            return work.result()
        except _Exit:
            self._ray.kill(self)
            raise RayActorError(f"{self.key} died") from None
        except Exception as error:
            raise RayTaskError(error) from error


class FakeRay:
    def __init__(self) -> None:
        self.actors: dict[tuple[str, str], FakeActor] = {}
        self.keys: dict[bytes, bytes] = {}
        self.machines = [{"NodeID": MACHINE, "Alive": True, "Labels": {}}]
        self.groups: dict[str, list[dict[str, float]]] = {}
        self.current_actor: FakeActor | None = None
        self.tasks: WeakKeyDictionary[asyncio.Task[Any], tuple[str, str]] = WeakKeyDictionary()
        """By actor: what ends with it."""

    def new_task(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **more)
        if (owner := _ACTOR.get()) is not None:
            self.tasks[task] = owner
        return task

    # What the library offers.

    def remote(self, kind: type) -> Any:
        def options(**given: Any) -> Any:
            def make(*args: Any) -> FakeActor:
                key = (given["namespace"], given["name"])
                assert key not in self.actors, f"{key} lives twice"
                self.actors[key] = actor = FakeActor(self, kind, key, args)
                return actor

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def get_actor(self, name: str, namespace: str) -> FakeActor:
        if (namespace, name) not in self.actors:
            raise ValueError(f"no actor {name} in {namespace}")
        return self.actors[namespace, name]

    def kill(self, actor: FakeActor, no_restart: bool = True) -> None:
        """Also what a test does to an instance."""
        if self.actors.pop(actor.key, None) is not None and actor.key[1] != "conductor":
            current.leave()
            METHODS.clear()
        actor.is_dead.set()
        for task, owner in list(self.tasks.items()):
            if owner == actor.key and task is not asyncio.current_task():
                task.cancel()

    def runtime_context(self) -> Any:
        return SimpleNamespace(current_actor=self.current_actor, get_node_id=lambda: MACHINE)

    def nodes(self) -> list[dict[str, Any]]:
        return self.machines

    def modules(self) -> dict[str, ModuleType]:
        def get_group(name: str) -> str:
            if name not in self.groups:
                raise ValueError(f"no group {name}")
            return name

        def make_group(bundles: list[dict[str, float]], *, strategy: str, name: str, lifetime: str) -> str:
            self.groups[name] = bundles
            return name

        exceptions = _module(
            "ray.exceptions",
            RayError=RayError,
            RayActorError=RayActorError,
            ActorUnavailableError=ActorUnavailableError,
            RuntimeEnvSetupError=RuntimeEnvSetupError,
            RayTaskError=RayTaskError,
        )
        strategies = _module("ray.util.scheduling_strategies", PlacementGroupSchedulingStrategy=lambda *a, **k: (a, k))
        util = _module(
            "ray.util",
            scheduling_strategies=strategies,
            get_placement_group=get_group,
            placement_group=make_group,
            placement_group_table=lambda group: {"state": "CREATED"},
            remove_placement_group=self.groups.pop,
            list_named_actors=lambda all_namespaces: [{"namespace": n, "name": a} for n, a in list(self.actors)],
        )
        kv = _module(
            "ray.experimental.internal_kv",
            _internal_kv_put=self._put,
            _internal_kv_get=lambda key, namespace: self.keys.get(key),
            _internal_kv_del=lambda key, namespace: self.keys.pop(key, None),
            _internal_kv_list=lambda prefix, namespace: [key for key in self.keys if key.startswith(prefix)],
        )
        ray = _module(
            "ray",
            remote=self.remote,
            get_actor=self.get_actor,
            kill=self.kill,
            get=_wait_in_loop,
            is_initialized=lambda: True,
            exceptions=exceptions,
            util=util,
            get_runtime_context=self.runtime_context,
            nodes=self.nodes,
        )
        experimental = _module("ray.experimental", internal_kv=kv)
        return {each.__name__: each for each in (ray, exceptions, util, strategies, experimental, kv)}

    def _put(self, key: bytes, value: bytes, *, overwrite: bool, namespace: bytes) -> bool:
        """Whether it was there."""
        was_there = key in self.keys
        if overwrite or not was_there:
            self.keys[key] = value
        return was_there


@contextmanager
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    ray = FakeRay()
    streams = sys.stdout, sys.stderr
    asyncio.get_running_loop().set_task_factory(ray.new_task)
    with monkeypatch.context() as patch:
        for name, module in ray.modules().items():
            patch.setitem(sys.modules, name, module)
        try:
            yield ray
        finally:
            current.leave()
            METHODS.clear()
            sys.stdout, sys.stderr = streams
            asyncio.get_running_loop().set_task_factory(None)


def _wait_in_loop(answer: Any, timeout: float) -> Any:
    raise AssertionError("Whoever waits for an answer here holds the loop in which the actors live.")


def _mortal(kind: type) -> type:
    """The same actor, whose end does not end the test."""
    if not hasattr(kind, "exit_process"):
        return kind

    def leave(code: int) -> None:
        raise _Exit(code)

    return type(kind.__name__, (kind,), {"exit_process": staticmethod(leave)})


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module
