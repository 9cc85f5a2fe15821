"""
Single records for the worker processes of a DataLoader, in an order that is known beforehand.

A DataLoader gives out positions batch by batch, to its processes in turn, and brings the batches back in that order. So records are handed out in the
order of the positions, whichever process is quicker: then the oldest records that are not reported are those of the batch that the
training loop has, and a report needs no more than a number. If the processes just took what comes next, a report would name records of
another batch.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec import Struct

from dlrover.host.edges import attempt
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.data import NO_STEP
from dlrover.trainer.data.loader_service import LoaderClient, LoaderService
from dlrover.trainer.sharding_client import ShardingClient

_LOOK = 1.0
"""Seconds that a part of a batch waits for the rest. Others may hold that, and wait for what is here."""
_ADVICE = (
    "ElasticDataset decides the order of its records itself, so it must be read at the positions 0, 1, 2... "
    "Give the DataLoader no sampler, no shuffle=True and no start position. For a shuffled order, give "
    "shuffle=True to ElasticDataset."
)


@dataclass
class _Handed:
    """Records that went out together, as a batch or one by one."""

    size: int
    is_batch: bool


class OrderedRecords:
    """In the process that trains."""

    def __init__(self, client: ShardingClient, batch_size: int) -> None:
        self._client, self._batch_size = client, batch_size
        self._ready: deque[int] = deque()
        self._out: deque[int] = deque()
        """Handed out and not reported."""
        self._handed: deque[_Handed] = deque()
        """The same by batch."""
        self._lock = threading.Lock()
        """Guards all above: the training thread reports while another hands out."""
        self._taking = threading.Lock()
        """Only one takes at a time, so that shards are fetched and handed out in one order; apart, because it is held while waiting."""

    def take(self, count: int, *, is_batch: bool, timeout: float | None = None) -> list[int]:
        """So many, or fewer if the rest would have to be waited for; none at the end of the data. Raises TimeoutError if none came."""
        with self._taking:
            while len(self._ready) < count:
                try:
                    task = self._client.get_task(_LOOK if self._ready else timeout)
                except TimeoutError:
                    if not self._ready:
                        raise
                    break
                if task is None:
                    break
                with self._lock:
                    self._ready.extend(task.shard.record_indices)
            with self._lock:
                return self._hand_out(count, is_batch)

    def offer_again(self) -> None:
        """A new pass begins: what an earlier one read ahead and did not report comes first."""
        with self._lock:
            self._ready.extendleft(reversed(self._out))
            self._out.clear()
            self._handed.clear()

    def used(self, count: int | None, step: int = NO_STEP) -> None:
        """The oldest so many are in the model of this step; None: the oldest batch. Never more than were handed out."""
        with self._lock:
            if not self._handed:
                return
            oldest = self._handed[0]
            if count is None:
                count = oldest.size if oldest.is_batch else min(self._batch_size, oldest.size)
            left = count = min(count, len(self._out))
            while left:
                part = min(left, self._handed[0].size)
                self._handed[0].size -= part
                left -= part
                if not self._handed[0].size:
                    self._handed.popleft()
            for _ in range(count):
                self._out.popleft()
        if count:
            self._client.report_batch_done(count, step=step)

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """For a change of the books, as of the client."""
        with self._taking:
            with self._client.going_back():
                yield
            with self._lock:
                self._ready.clear()
                self._out.clear()
                self._handed.clear()

    def _hand_out(self, count: int, is_batch: bool) -> list[int]:
        records = [self._ready.popleft() for _ in range(min(count, len(self._ready)))]
        self._out.extend(records)
        if records and not is_batch and self._handed and not self._handed[-1].is_batch:
            self._handed[-1].size += len(records)
        elif records:
            self._handed.append(_Handed(len(records), is_batch))
        return records


class RecordsAsked(Struct, frozen=True):
    pass_id: int
    """The same for all worker processes that were started together."""
    num_workers: int
    first: int
    """Of the positions that are asked for; those after it follow."""
    count: int
    is_batch: bool


class RecordsAnswer(Struct, frozen=True):
    records: tuple[int, ...] = ()
    trouble: str = ""


class RecordService(LoaderService[RecordsAsked]):
    def __init__(self, records: OrderedRecords) -> None:
        self._records = records
        self._pass_id: int | None = None
        self._pass_number = 0
        self._passes: dict[socket.socket, int] = {}
        """Which pass each connection is of. Processes of an earlier one may still ask, and must not get anything."""
        self._is_over = False
        """The newest pass: its processes end, or the data went back in the middle of it."""
        self._next = 0
        """The position whose turn it is."""
        self._waiting: dict[socket.socket, RecordsAsked] = {}
        """At most one per worker process, which waits for its answer."""
        super().__init__(RecordsAsked)

    def end_pass(self) -> None:
        """
        The data went back: what the processes have read ahead is of the past, and the next batches come by a new pass. Called by the
        training thread, while no consumer takes.
        """
        self._is_over = self._next > 0

    @property
    def _is_busy(self) -> bool:
        return self._turn() is not None

    def _turn(self) -> tuple[socket.socket, str] | None:
        """Who is served now, and why not with records."""
        current = []
        for connection, ask in self._waiting.items():
            if self._is_over or self._passes[connection] != self._pass_number:
                return (
                    connection,
                    "This iterator has ended: another one was started, or a state was loaded. Make a new iterator.",
                )
            if ask.first == self._next:
                return connection, ""
            current.append((ask.first, connection, ask.num_workers))
        if current and len(current) >= current[0][2]:
            # Who has the next position would be among them: each works on its oldest batch.
            first, connection, _ = current[0]
            return connection, f"The DataLoader asked for position {first}, but {self._next} is next. {_ADVICE}"
        return None

    def _left(self, connection: socket.socket) -> None:
        self._waiting.pop(connection, None)
        # Processes end together: one that waits for its turn behind this one would wait in vain.
        self._is_over = self._is_over or self._passes.pop(connection, None) == self._pass_number

    def _heard(self, connection: socket.socket, ask: RecordsAsked) -> None:
        known = self._passes.get(connection)
        is_again = ask.first < self._next
        if known is None:
            if is_again or ask.pass_id != self._pass_id or self._is_over:
                self._pass_number += 1
                self._begin_pass(ask)
            self._passes[connection] = self._pass_number
        elif known == self._pass_number and is_again:
            self._begin_pass(ask)  # of the same processes, which live on
        self._waiting[connection] = ask

    def _begin_pass(self, ask: RecordsAsked) -> None:
        self._pass_id, self._next, self._is_over = ask.pass_id, 0, False
        self._records.offer_again()

    def _serve(self) -> None:
        turn = self._turn()
        assert turn is not None, "no caller was to be served"
        connection, trouble = turn
        ask = self._waiting[connection]
        answer = RecordsAnswer(trouble=trouble)
        if not trouble:
            # The worker process raises it, and the DataLoader brings it to the training loop.
            taken = attempt(
                lambda: self._take(ask), lambda error: RecordsAnswer(trouble=f"{type(error).__name__}: {error}")
            )
            if taken is None:
                return
            answer = taken
            self._next += ask.count
        del self._waiting[connection]
        self._send(connection, answer)

    def _take(self, ask: RecordsAsked) -> RecordsAnswer | None:
        """None: there is nothing yet."""
        try:
            return RecordsAnswer(tuple(self._records.take(ask.count, is_batch=ask.is_batch, timeout=_LOOK)))
        except TimeoutError:
            return None


class RecordClient(LoaderClient[RecordsAnswer]):
    def __init__(self, address: str, pass_id: int, num_workers: int) -> None:
        super().__init__(address, RecordsAnswer)
        self.pid = os.getpid()
        self._pass_id, self._num_workers = pass_id, num_workers

    def take(self, positions: Sequence[int], *, is_batch: bool) -> tuple[int, ...]:
        """The records for these positions; fewer towards the end of the data, none after it."""
        first = positions[0]
        if list(positions) != list(range(first, first + len(positions))):
            raise ConfigError(f"The positions {list(positions)[:8]} are not in order. {_ADVICE}")
        return self._ask(RecordsAsked(self._pass_id, self._num_workers, first, len(positions), is_batch)).records
