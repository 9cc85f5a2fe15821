"""
The way to the database: one writer that gathers, and a few readers.

Each change is a function of a connection. The writer's thread takes what gathers within a moment and commits it together, so a thousand jobs cost a few commits a second. A change is
answered when it is durable. If a commit fails, the writer tries each of its changes alone, so one bad change spoils no other.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from dlrover.brain.store.database import unreachable
from dlrover.protocol.errors import Rejected, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
Change = Callable[[Connection], T]
"""It refuses (Rejected, Unavailable) before it writes, or not at all."""

NUM_READERS = 4
MOST_AT_ONCE = 512
"""Changes of one commit."""
MOST_WAITING = 10_000
"""Changes that may wait for the writer; further ones are sent away for a while."""
BUSY_PAUSE = 5.0
TROUBLE_PAUSE = 10.0
_Waiting = tuple[Change[Any], "Future[Any]"]


class BrainStore:
    """Open it with `start`, and close it in the end: what waits is written before."""

    def __init__(self, engine: Engine, *, gather: float = 0.02, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.engine = engine
        self._gather = gather
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(max_workers=NUM_READERS, thread_name_prefix="brain-reader")
        self._writer = threading.Thread(target=self._write_all, name="brain-writer", daemon=True)
        self._is_closed = False
        self.num_commits = 0

    def start(self) -> None:
        self._writer.start()

    def close(self) -> None:
        """Blocks until everything is written."""
        if not self._is_closed:
            self._is_closed = True
            self._waiting.put(None)
            if self._writer.is_alive():
                self._writer.join()
            self._readers.shutdown()
            self.engine.dispose()

    async def read(self, look: Callable[[Connection], T]) -> T:
        """Raises Unavailable, and what `look` raises."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._look, look)

    async def write(self, change: Change[T]) -> T:
        """When it is durable. Raises Unavailable, and what `change` raises."""
        return await asyncio.wrap_future(self.put(change))

    def put(self, change: Change[T]) -> Future[T]:
        """The same for those who do not wait. Changes are made in the order in which they come."""
        if self._is_closed or self._waiting.qsize() >= MOST_WAITING:
            raise Unavailable("Brain's store is overloaded. Try again later.", BUSY_PAUSE)
        future: Future[T] = Future()
        self._waiting.put((change, future))
        return future

    def _look(self, look: Callable[[Connection], T]) -> T:
        try:
            with self.engine.connect() as connection:
                return look(connection)
        except SQLAlchemyError as error:
            log.warning("the store cannot be read reason=%s", type(error).__name__)
            raise self._trouble(error) from error

    def _trouble(self, error: SQLAlchemyError) -> Unavailable:
        trouble = unreachable(self.engine.url, error)
        return Unavailable(str(trouble), TROUBLE_PAUSE)

    # The writer's thread.

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            first = self._waiting.get()
            if first is None:
                return
            batch, is_open = self._gathered(first)
            batch = [each for each in batch if each[1].set_running_or_notify_cancel()]
            if batch:
                self._commit(batch)

    def _gathered(self, first: _Waiting) -> tuple[list[_Waiting], bool]:
        batch, until = [first], time.monotonic() + self._gather
        while len(batch) < MOST_AT_ONCE:
            try:
                each = self._waiting.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return batch, True
            if each is None:
                return batch, False
            batch.append(each)
        return batch, True

    def _commit(self, batch: list[_Waiting]) -> None:
        try:
            results = self._make([change for change, _ in batch])
        except SQLAlchemyError as error:
            if len(batch) > 1:
                for each in batch:
                    self._commit([each])
                return
            log.warning("a change cannot be stored reason=%s", type(error).__name__)
            batch[0][1].set_exception(self._trouble(error))
            return
        for (_, future), result in zip(batch, results, strict=True):
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _make(self, changes: list[Change[Any]]) -> list[Any]:
        results: list[Any] = []
        with self.engine.connect().execution_options(writes=True) as connection, connection.begin():
            for change in changes:
                try:
                    results.append(change(connection))
                except (Rejected, Unavailable) as error:
                    results.append(error)
        self.num_commits += 1
        return results
