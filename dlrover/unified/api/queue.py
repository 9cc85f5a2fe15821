"""
`DataQueue`: items from any worker to any worker, through the memory of the one that owns the queue.

Items are bytes on their way. An owner that starts again has an empty queue; calls that were under way at its death raise `InstanceLost`. What must
not be lost goes through a `Stream`.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from dlrover.host.edges import contained
from dlrover.protocol.errors import ConfigError
from dlrover.unified.runtime.calls import CallFuture, RoleActor
from dlrover.unified.runtime.current import current
from dlrover.unified.runtime.methods import METHODS, rpc
from dlrover.unified.runtime.wire import CallTimeout

T = TypeVar("T")
ROUND = 5.0
"""Seconds that one question waits at the owner, so that a caller that died holds no thread for long."""
OWNER_TIMEOUT = 600.0
PAUSE = 0.05


class QueueServer:
    """At the owner."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[bytes] = deque()
        self._turns: deque[object] = deque()  # consumers in the order of their coming
        self._changed = threading.Condition()

    @rpc()
    def put(self, items: list[bytes], wait: float) -> int:
        """How many of them were taken."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._size, wait)
            taken = items[: max(0, self._size - len(self._items))]
            self._items.extend(taken)
            self._changed.notify_all()
            return len(taken)

    @rpc()
    def get(self, most: int, least: int, wait: float) -> list[bytes]:
        """Empty: not so many within the time."""
        turn = object()
        with self._changed:
            self._turns.append(turn)
            try:
                self._changed.wait_for(lambda: self._turns[0] is turn and len(self._items) >= least, wait)
                if self._turns[0] is not turn or len(self._items) < least:
                    return []
                found = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            finally:
                self._turns.remove(turn)
                self._changed.notify_all()
            return found

    @rpc()
    def qsize(self) -> int:
        with self._changed:
            return len(self._items)


class DataQueue(Generic[T]):
    def __init__(self, name: str, is_master: bool = False, size: int = 1000) -> None:
        """`is_master`: this worker owns the queue; the others wait for it. Raises `ConfigError`."""
        if size < 1:
            raise ConfigError(f"Queue {name}: size must be at least 1 (got {size}).")
        self.name = name
        key = f"{current().job_uid}/queue/{name}"
        if is_master:
            METHODS.export_object(QueueServer(size), f"queue.{name}")
            _store().put(key, f"{current().role} {current().rank}".encode())
        self._owner = _find_owner(key, name)

    def put(self, *objs: T) -> None:
        """Blocks while the queue is full."""
        left = [pickle.dumps(each) for each in objs]
        while left:
            number: int = self._call("put", left, ROUND).result()
            left = left[number:]

    def put_async(self, *objs: T) -> Future[None]:
        future: Future[None] = Future()

        def work() -> None:
            with contained(future.set_exception):  # raised where it is waited for
                self.put(*objs)
                future.set_result(None)

        threading.Thread(target=work, name=f"put {self.name}", daemon=True).start()
        return future

    def get(self, batch_size: int = 1, *, exactly: bool = False, timeout: float | None = None) -> list[T]:
        """At least one item and at most `batch_size`; `exactly`: so many. Raises `CallTimeout`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = ROUND if deadline is None else max(0.0, min(ROUND, deadline - time.monotonic()))
            found = self._call("get", batch_size, batch_size if exactly else 1, wait).result()
            if found:
                return [pickle.loads(each) for each in found]
            if deadline is not None and time.monotonic() >= deadline:
                raise CallTimeout(f"Queue {self.name} received no item within {timeout:g} s.")

    def get_nowait(self, max: int = 1) -> list[T]:  # noqa: A002  # the name in scripts
        """Possibly none."""
        return [pickle.loads(each) for each in self._call("get", max, 1, 0.0).result()]

    def qsize(self) -> int:
        size: int = self._call("qsize").result()
        return size

    def _call(self, method: str, *args: Any) -> CallFuture:
        return self._owner.call(f"queue.{self.name}.{method}", *args)


def _find_owner(key: str, name: str) -> RoleActor:
    deadline = time.monotonic() + OWNER_TIMEOUT
    while (data := _store().get(key)) is None:
        if time.monotonic() > deadline:
            raise CallTimeout(
                f"Queue {name}: no worker opened it as its owner within {OWNER_TIMEOUT:.0f} s. One worker must open "
                "it with is_master=True."
            )
        time.sleep(PAUSE)  # the store tells nobody of a new key
    role, _, rank = data.decode().rpartition(" ")
    return RoleActor(role, int(rank))


def _store() -> Any:
    from dlrover.platforms.ray.store import ClusterKeyValues

    try:
        import ray

        is_connected = ray.is_initialized()
    except ImportError:
        is_connected = False
    if not is_connected:
        raise ConfigError("DataQueue works only in a worker that is an actor. In forked workers use Stream.")
    return ClusterKeyValues()
