"""
Long polls: questions whose answer does not exist yet.

A question that is willing to wait sits here under the topics it waits for and costs nothing until durable changes have
touched each of them; then it goes back to the loop and is looked at once more. Waiting is no state of the job: a master that restarts
has none of them, and agents ask again when they attach.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import TypeVar

from dlrover.master.loop.request import Work
from dlrover.master.loop.streams import AgentLine
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected

Key = TypeVar("Key", str, AgentLine)

MAX_WAITING = 16_384
"""Questions. Every thread of every worker that uses the store may have one; a job of 64 nodes has room for 256 on each."""


class LongPolls:
    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._by_topic: dict[str, dict[Work, None]] = {}
        self._by_line: dict[AgentLine, dict[Work, None]] = {}
        self._topics: dict[Work, dict[str, None]] = {}
        """Those that were not touched yet; never none."""
        self._deadlines: list[tuple[int, int, Work]] = []
        """A heap. Entries of questions that have left are skipped, and swept out when they are the majority."""
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._topics)

    def __contains__(self, work: Work) -> bool:
        return work in self._topics

    def sit(self, work: Work, topics: Iterable[str]) -> None:
        """Until `work.waits_until`, in the same microseconds as the `now` of the others."""
        assert work not in self._topics, f"waits for {next(iter(self._topics[work]))} already"
        if len(self._topics) >= self._max_waiting:
            raise Rejected(
                f"{self._max_waiting} questions already wait for an answer of the master. Use fewer waiting "
                "threads, or shorter timeouts.",
                code=ErrorCode.TOO_MANY_WAITING,
            )
        self._topics[work] = dict.fromkeys(topics)
        for topic in self._topics[work]:
            self._by_topic.setdefault(topic, {})[work] = None
        if work.line is not None:
            self._by_line.setdefault(work.line, {})[work] = None
        heapq.heappush(self._deadlines, (work.waits_until, next(self._count), work))

    def touched(self, topics: Iterable[str]) -> list[Work]:
        """Those that waited for nothing else any more; they leave the room."""
        found = []
        for topic in topics:
            for work in self._by_topic.pop(topic, ()):
                untouched = self._topics[work]
                del untouched[topic]
                if not untouched:
                    self._leave(work)
                    found.append(work)
        return found

    def expired(self, now: int) -> list[Work]:
        """Those that have waited long enough; they leave the room."""
        found = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2] not in self._topics):
            work = heapq.heappop(self._deadlines)[2]
            if work in self._topics:
                self._leave(work)
                found.append(work)
        return found

    def next_deadline(self) -> int | None:
        return self._deadlines[0][0] if self._topics else None

    def drop(self, line: AgentLine) -> None:
        """The stream is gone: no client hears an answer."""
        for work in list(self._by_line.get(line, ())):
            self._leave(work)

    def clear(self) -> list[Work]:
        """All of them leave, in the order in which they came."""
        found = list(self._topics)
        for work in found:
            self._leave(work)
        return found

    def _leave(self, work: Work) -> None:
        for topic in self._topics.pop(work):
            _remove(self._by_topic, topic, work)
        if work.line is not None:
            _remove(self._by_line, work.line, work)
        if len(self._deadlines) > 2 * len(self._topics) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._topics]
            heapq.heapify(self._deadlines)


def _remove(table: dict[Key, dict[Work, None]], key: Key, work: Work) -> None:
    del table[key][work]
    if not table[key]:
        del table[key]
