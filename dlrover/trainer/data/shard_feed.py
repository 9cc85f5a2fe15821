"""
Shards of a dataset, ahead of their use: one thread takes them from the master and tells what became of them.

The thread sends everything at once: what was consumed since its last message, and how many shards shall come. While an answer is on its way
more gathers, so a fast reader sends few large messages. How many shards are kept ahead follows from how fast they are
used: about half a second's worth. The training thread waits only when nothing is ahead.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dlrover.host.edges import contained
from dlrover.protocol.errors import DLRoverError, Rejected, Unavailable
from dlrover.protocol.messages.data import (
    NO_STEP,
    Claim,
    Consumption,
    DatasetSpec,
    ExchangeShards,
    LeasedShard,
    ShardError,
    Supply,
)
from dlrover.trainer import phases
from dlrover.trainer.agent_link import Link, current_link, pause_before_retry
from dlrover.trainer.data import data_steps
from dlrover.trainer.data.dataset_books import DatasetBooks
from dlrover.trainer.data.dataset_books import DataUnavailable as DataUnavailable

log = logging.getLogger("dlrover.trainer.data")

PATIENCE = 3600.0
"""Seconds that a master may be away before readers are told."""
FEWEST_AHEAD, MOST_AHEAD = 2, 512
_WORTH = 0.5
"""Seconds of reading that are kept ahead."""
_LONGEST_PAUSE = 5.0
_LAST_WORDS = 5.0
"""Seconds that the end of a process waits for the master to hear what was read."""


class _ReadAhead:
    """How many shards are kept ahead: as many as are used in half a second."""

    def __init__(self, fixed: int) -> None:
        """`fixed`: so many; 0: as fits the speed of reading."""
        self.num = float(fixed or FEWEST_AHEAD)
        self._is_fixed = fixed > 0
        self._num_used, self._used_since = 0, time.monotonic()

    def note_use(self) -> None:
        self._num_used += 1
        passed = time.monotonic() - self._used_since
        if self._is_fixed or (passed < _WORTH and self._num_used < self.num):
            return
        speed = self._num_used / max(passed, 1e-6)
        self.num = min(max(speed * _WORTH, FEWEST_AHEAD, self.num / 2), MOST_AHEAD)
        self._num_used, self._used_since = 0, time.monotonic()


class ShardFeed:
    """One per dataset and process. Methods may be called by any thread."""

    def __init__(
        self, spec: DatasetSpec, *, link: Link | None = None, ahead: int = 0, patience: float = PATIENCE
    ) -> None:
        """`ahead`: shards to keep ahead; 0: as fits the speed of reading."""
        self._fixed_ahead = ahead
        self.spec = spec
        self.books = DatasetBooks(spec, current_link() if link is None else link, patience)
        data_steps.tell_postponed()
        self.books.register()
        self._begin()
        data_steps.feeds.add(self)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._news = threading.Condition()
        """Guards all below. Told when shards came, or when there is something to send."""
        self._queue: deque[LeasedShard] = deque()
        self._taken: dict[int, LeasedShard] = {}
        """Handed to a reader and not reported in full."""
        self._consumed: list[Consumption] = []
        self._failed: list[ShardError] = []
        self._unused: list[int] = []
        self._waived = ""
        self._is_telling = False
        """News are on their way to the master: what it has not answered it may not know."""
        self._unanswered: list[Claim] = []
        """Consumption that the master has not confirmed."""
        self._done: dict[int, int] = {}
        """Records of a taken shard that are consumed."""
        self.is_late = False
        """Whether the master did not confirm in time, when it was last waited for."""
        self._is_ended = False
        self._is_closed = False
        self._is_closing = False
        """What comes now is not wanted any more."""
        self._is_stirred = False
        """There is more than when the master was asked last."""
        self._is_reading = False
        """A worker here has asked for a shard: others that only report must not hold any."""
        self._num_waiting = 0
        self._trouble: DLRoverError | None = None
        self._ahead = _ReadAhead(self._fixed_ahead)
        self._thread: threading.Thread | None = None
        self._listener: threading.Thread | None = None
        """Waits for the word about the model while shards are held back for it: meanwhile our own reports go on."""

    # Reading.

    def take(self, timeout: float | None = None) -> LeasedShard | None:
        """
        The next shard; None at the end of the data.

        Raises DataUnavailable when the master cannot be reached, and TimeoutError.
        """
        end_at = None if timeout is None else time.monotonic() + timeout
        with self._live():
            self._is_reading = True
            while not self._queue:
                if self._trouble is not None:
                    raise self._trouble
                if self._is_ended:
                    return None
                if self._is_closing:
                    raise DataUnavailable(
                        f"The client of dataset {self.spec.name!r} is closed. Make a new client to continue reading."
                    )
                self._num_waiting += 1
                self._news.notify_all()
                try:
                    left = None if end_at is None else end_at - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError(f"The master sent no shard of {self.spec.name!r} within {timeout:g} s.")
                    with phases.span(phases.DATA):
                        self._news.wait(left)
                finally:
                    self._num_waiting -= 1
            shard = self._queue.popleft()
            if (writer := phases.current()) is not None:
                writer.set_cursor(f"{self.spec.name} epoch {shard.epoch} records {shard.start} to {shard.end}")
            self._taken[shard.id] = shard
            self._ahead.note_use()
            self._news.notify_all()
            return shard

    def consumed(self, shard: LeasedShard, count: int, step: int = NO_STEP) -> None:
        """So many more records of the shard are in the model from this step on."""
        with self._live():
            start = shard.start + self._done.get(shard.id, 0)
            if shard.id not in self._taken or not 0 < count <= shard.end - start:
                raise ValueError(
                    f"{count} records of shard {shard.id} of {self.spec.name!r} cannot be reported, because it "
                    "has fewer unreported records. Report each batch once."
                )
            self._done[shard.id] = self._done.get(shard.id, 0) + count
            self._consumed.append(Consumption(shard.id, count, step))
            if step != NO_STEP:
                self._unanswered.append(Claim(shard.epoch, start, start + count, step, shard.partition, shard.listing))
            if start + count == shard.end:
                self._forget(shard)
            self._news.notify_all()

    def failed(self, shard: LeasedShard, message: str) -> None:
        with self._live():
            if shard.id in self._taken:
                self._failed.append(ShardError(shard.id, message))
                self._forget(shard)
                self._is_ended = False  # it will come again, perhaps to us
                self._news.notify_all()

    def unused(self, shards: Iterable[LeasedShard]) -> None:
        """Give them back: others may read them."""
        with self._live():
            for shard in shards:
                if shard.id in self._taken:
                    self._unused.append(shard.id)
                    self._forget(shard)
                    self._is_ended = False  # it will come again, perhaps to us
            self._news.notify_all()

    def waive(self, reason: str) -> None:
        """The rest is left unread on purpose: the job does not fail for it."""
        with self._live():
            self._waived = reason
            self._news.notify_all()

    def leave_rest(self, reason: str) -> None:
        """This worker takes no more: what is ahead here is for the others, and the job does not fail for what they leave."""
        with self._live():
            self._waived = reason
            self._is_reading = False
            self._unused += [shard.id for shard in self._queue]
            self._queue.clear()
            self._news.notify_all()

    def extend(self, ends: dict[str, int], *, is_over: bool = False) -> None:
        """Of a stream that grows: partitions reach this far now. Who waits here looks at once."""
        self.books.extend(ends, is_over=is_over)
        with self._live():
            self._is_stirred = True
            self._news.notify_all()

    # Around reading.

    def unanswered(self) -> list[Claim]:
        """What this worker consumed and the master may not know yet: belongs into the checkpoint of the model."""
        with self._live():
            return list(self._unanswered)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until the master knows all that was reported; whether it does."""
        end_at = time.monotonic() + timeout
        with self._live():
            while self._has_news or self._is_telling:
                left = end_at - time.monotonic()
                if left <= 0 or self._trouble is not None:
                    self.is_late = True
                    return False
                self._news.notify_all()
                self._news.wait(left)
            self.is_late = False
            return True

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """
        For a change of the books: within, nothing is taken or told. After it all that was held here belongs to the past and is dropped; but if it
        fails, reading goes on as if nothing had been.
        """
        self._stop()
        try:
            yield
        except BaseException:
            with self._news:
                self._is_closed = False
            self._live()  # others may wait for a shard
            raise
        self._begin()
        self._live()

    def start(self) -> None:
        """Have the thread run: a process that is forked while another thread starts one may die of it."""
        self._live()

    def at_exit(self) -> None:
        """The process ends: what was read but not told yet would be read again."""
        if self._pid == os.getpid() and self._thread is not None and not self._is_closed:
            self.flush(timeout=_LAST_WORDS)

    def close(self) -> None:
        """Tell what is to be told and give back what is not needed; a moment is given to that."""
        if self._pid != os.getpid() or self._is_closed:
            return
        with self._news:
            self._is_closing = True
            self._unused += [shard.id for shard in self._queue]
            self._unused += list(self._taken)
            self._queue.clear()
            self._taken.clear()
        self.flush(timeout=_LAST_WORDS)
        self._stop()

    # Inside.

    @property
    def _has_news(self) -> bool:
        return bool(self._consumed or self._failed or self._unused or self._waived)

    @property
    def _num_wanted(self) -> int:
        if self._is_ended or self._is_closing or not self._is_reading:
            return 0
        return max(0, round(self._ahead.num) - len(self._queue))

    def _live(self) -> threading.Condition:
        """The lock, with a thread behind it. A fork has none of ours: it begins anew, with nothing taken."""
        if self._pid != os.getpid():
            self._begin()
        if self._thread is None and not self._is_closed:
            with self._news:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="dlrover-shards", daemon=True)
                    self._thread.start()
        return self._news

    def _forget(self, shard: LeasedShard) -> None:
        del self._taken[shard.id]
        self._done.pop(shard.id, None)

    def _run(self) -> None:

        def tell(error: Exception) -> None:
            is_ours = isinstance(error, DLRoverError)
            if not is_ours:
                log.exception("this worker gets no more shards of %r because of a bug in DLRover", self.spec.name)
            with self._news:
                reason = f": {error}" if is_ours else f" because of a bug in dlrover: {error!r}"
                self._trouble = DataUnavailable(f"This worker gets no more shards of {self.spec.name!r}{reason}")
                self._trouble.__cause__ = error
                self._news.notify_all()

        with contained(tell):  # readers must not wait for this thread in vain
            while (message := self._next_message()) is not None:
                self._exchange(message)

    def _next_message(self) -> ExchangeShards | None:
        """Wait for something to say. None: closed."""
        with self._news:
            while not (self._has_news or self._is_closed or self._is_hungry):
                self._news.wait()
            if self._is_closed and not self._has_news:
                self._thread = None  # the next one to read starts another, if reading goes on
                return None
            message = ExchangeShards(
                dataset=self.spec.name,
                round=self.books.round,
                local_rank=self.books.local_rank,
                consumed=tuple(self._consumed),
                failed=tuple(self._failed),
                unused=tuple(self._unused),
                waived=self._waived,
                want=0 if self._is_closed else self._num_wanted,
                has_model=data_steps.model_loaded.is_set(),
            )
            self._is_telling = self._has_news
            self._consumed, self._failed, self._unused, self._waived = [], [], [], ""
            self._told = len(self._unanswered)
            return message

    @property
    def _is_hungry(self) -> bool:
        """Half of what is kept ahead is used up: one message for many shards, in time."""
        return self._num_wanted > 0 and len(self._queue) <= self._ahead.num / 2

    def _exchange(self, message: ExchangeShards) -> None:
        given = self.books.exchange(message)
        with self._news:
            self._is_telling = False
            del self._unanswered[: self._told]
            self.is_late = False  # it is there: the next save may wait for it again
            if self._is_closing or not self._is_reading:
                self._unused += [shard.id for shard in given.shards]
            else:
                self._queue.extend(given.shards)
            # A worker elsewhere has nothing to do: what we have not begun is theirs.
            recalled = frozenset(given.recalled)
            self._unused += [shard.id for shard in self._queue if shard.id in recalled]
            self._queue = deque(shard for shard in self._queue if shard.id not in recalled)
            # What was given back since we asked will come again, perhaps to us.
            has_given_back = bool(self._unused or self._failed)
            self._is_ended = self._is_ended or (given.supply is Supply.END and not has_given_back)
            self._news.notify_all()
            if given.supply is Supply.WAIT:
                # Others hold the rest, or have not said yet which model goes on. Meanwhile our own reports go on.
                if given.held_back_for > 0:
                    self._listen(given.held_back_for)
                    until = time.monotonic() + given.held_back_for
                else:
                    until = time.monotonic() + min(given.retry_after, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)
                while (
                    not (self._has_news or self._is_closed or self._is_stirred)
                    and (left := until - time.monotonic()) > 0
                ):
                    self._news.wait(left)
            self._is_stirred = False

    def _listen(self, wait: float) -> None:
        if self._listener is None or not self._listener.is_alive():
            self._listener = threading.Thread(
                target=self._hear_of_model, args=(wait,), name="dlrover-shards-held-back", daemon=True
            )
            self._listener.start()

    def _hear_of_model(self, wait: float) -> None:
        """Until the ranks have said which model they go on with, or so many seconds. One question: the master answers when it knows."""
        try:
            self.books.await_model(wait)
        except (Rejected, Unavailable) as error:
            log.info("the master did not answer; it is asked again for shards of %r: %s", self.spec.name, error)
            pause_before_retry(wait)
        with self._news:
            self._listener = None
            self._is_stirred = True
            self._news.notify_all()

    def _stop(self) -> None:
        with self._news:
            self._is_closed = True
            thread = self._thread
            self._news.notify_all()
        if thread is not None:
            thread.join(timeout=10.0)
