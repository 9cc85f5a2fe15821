"""
What other roles may call here: functions and methods marked with `@rpc`, by name.

A method with `retry=True` may be sent again to the next life of its instance. An instance that gets the same call again, because the answer was
lost on its way, gives the answer of the first time.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, overload

from msgspec import Struct

from dlrover.unified.runtime.wire import CallHeader, CallRefused, Parts, Raised, freeze, raised, thaw

KEPT_ANSWERS = 256
"""Of repeatable calls. An answer of 1 MB costs as much for each of them, so large ones are not kept."""
MARK = "__dlrover_rpc__"
F = TypeVar("F", bound=Callable[..., Any])


class RpcMark(Struct, frozen=True):
    name: str
    retry: bool = False


def mark_of(function: object) -> RpcMark | None:
    return getattr(function, MARK, None)


@overload
def rpc(name: F) -> F: ...
@overload
def rpc(name: str | None = None, *, export: bool = False, retry: bool = False) -> Callable[[F], F]: ...
def rpc(name: Any = None, *, export: bool = False, retry: bool = False) -> Any:
    """
    Let other roles call this function or method. `name`: another name, or a stub function with the name.

    `retry`: it may run twice, so a call to an instance that died is sent again to the next one. `export`: register it now, also if its module is
    not the entry point's.
    """

    def mark(function: F) -> F:
        chosen = name if isinstance(name, str) else getattr(name, "__name__", "") if name is not None else ""
        setattr(function, MARK, RpcMark(chosen or function.__name__, retry))
        if export:
            METHODS.export(chosen or function.__name__, function)
        return function

    if callable(name) and not isinstance(name, str) and mark_of(name) is None and not _is_stub(name):
        function, name = name, None
        return mark(function)
    return mark


class Methods:
    """Of one process."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._answers: OrderedDict[str, Future[Parts]] = OrderedDict()
        self._lock = threading.Lock()  # guards both: calls come in threads of the wire
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_change: Callable[[], object] = lambda: None
        """After an export, in the thread of it."""

    def export(self, name: str, function: Callable[..., Any]) -> None:
        """Raises ValueError if another function has the name."""
        with self._lock:
            known = self._functions.get(name)
            if known is not None and known != function:
                raise ValueError(
                    f"Two functions are exported as {name!r}. Give one of them another name: @rpc(name=…)."
                )
            self._functions[name] = function
        self.on_change()

    def repeatable(self) -> list[str]:
        """Names of methods that may run twice."""
        with self._lock:
            found = list(self._functions.items())
        return sorted(name for name, function in found if (mark := mark_of(function)) is not None and mark.retry)

    def export_module(self, module: object) -> None:
        """All its functions that carry the mark."""
        for value in list(vars(module).values()):
            if inspect.isfunction(value) and (mark := mark_of(value)) is not None:
                self.export(mark.name, value)

    def export_object(self, instance: object, namespace: str = "") -> None:
        for name in dir(type(instance)):
            mark = mark_of(inspect.getattr_static(type(instance), name, None)) or mark_of(
                getattr(type(instance), name, None)
            )
            if mark is not None:
                self.export(f"{namespace}.{mark.name}" if namespace else mark.name, getattr(instance, name))

    def names(self) -> list[str]:
        return sorted(self._functions)

    def clear(self) -> None:
        """For tests and for another life in the same process."""
        with self._lock:
            self._functions.clear()
            self._answers.clear()
            self.on_change = lambda: None

    def answer(self, header: CallHeader, parts: Parts, name: str) -> Parts:
        """Raises `Raised`. Blocks as long as the method runs."""
        if not header.is_repeatable:
            return self._run(header, parts, name)
        with self._lock:
            known = self._answers.get(header.id)
            if known is None:
                mine: Future[Parts] = Future()
                self._answers[header.id] = mine
        if known is not None:
            return known.result()
        try:
            result = self._run(header, parts, name)
        except Raised as error:
            mine.set_exception(error)
            raise
        mine.set_result(result)
        with self._lock:
            if len(result) > 1 or len(result[0]) > 1 << 20:
                self._answers.pop(header.id, None)
            while len(self._answers) > KEPT_ANSWERS and next(iter(self._answers.values())).done():
                self._answers.popitem(last=False)
        return result

    def _run(self, header: CallHeader, parts: Parts, name: str) -> Parts:
        function = self._functions.get(header.method)
        try:
            if function is None:
                known = ", ".join(self.names()) or "none"
                raise CallRefused(f"{name} has no @rpc method {header.method!r}. It has: {known}.")
            args, kwargs = thaw(parts)
            result = function(*args, **kwargs)
            if inspect.isawaitable(result):
                result = asyncio.run_coroutine_threadsafe(_awaited(result), self._user_loop()).result()
            return freeze(result)
        except Exception as error:  # the user's method may raise anything; the caller gets it
            raise raised(error, header.method, name) from error

    def _user_loop(self) -> asyncio.AbstractEventLoop:
        """Coroutines of the user run here: what blocks in them holds nothing of ours up."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="user_loop", daemon=True).start()
            return self._loop


METHODS = Methods()
"""Of this process: decorators run at import, before there is anything to hand them a registry."""


async def _awaited(result: Any) -> Any:
    return await result


def _is_stub(function: Callable[..., Any]) -> bool:
    """A function that only gives its name to another: its body is `...` or `pass`, or a docstring."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_code == _empty.__code__.co_code and not code.co_names


def _empty() -> None: ...
