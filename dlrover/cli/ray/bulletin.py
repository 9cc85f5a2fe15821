"""
What a host tells the drivers of its job: lines of output, changes of nodes, its own words, in the order of arrival.

A driver asks for what comes after the last item that it has. The newest items are kept for drivers that come later. A driver that cannot keep up holds the
nodes' output up, as a slow terminal does; one that is gone does not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dlrover.cli.ray.messages import HostNews, JobOver, Said, ShownLine
from dlrover.protocol.messages.fleet import NodeChanged

Item = ShownLine | Said | NodeChanged

KEPT_BYTES = 4 << 20
HOLD_BYTES = 1 << 20
"""So much that a driver has not taken holds the output up."""
POLL_WAIT = 10.0
"""Seconds after which a question is answered without news."""
GONE_AFTER = 2 * POLL_WAIT
"""Seconds without a question after which a driver is taken for gone."""
MAX_ANSWER = 512
"""Items in one answer."""


@dataclass
class _Follower:
    next: int
    asked_at: float
    is_asking: bool = False
    has_end: bool = False


def _nothing() -> None:
    """The nodes are not there yet."""


class Bulletin:
    def __init__(self, host_epoch: int, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._host_epoch = host_epoch
        self._items: deque[tuple[Item, int]] = deque()
        self._first = 0
        self._bytes = 0
        self._news = asyncio.Event()
        self._followers: dict[str, _Follower] = {}
        self._is_holding = False
        self.over: JobOver | None = None
        self.address = ""
        self.hold: Callable[[], None] = _nothing
        self.release: Callable[[], None] = _nothing

    def line(self, node: str, line: bytes, is_error: bool) -> None:
        self._add(ShownLine(node, line, is_error), len(line) + 64)

    def change(self, change: NodeChanged) -> None:
        self._add(change, 256)

    def say(self, text: str) -> None:
        self._add(Said(text), len(text) + 64)

    def close(self, over: JobOver) -> None:
        self.over = over
        self._news.set()

    async def news(self, follower: str, host_epoch: int, after: int, wait: float) -> HostNews:
        loop = asyncio.get_running_loop()
        at = after if host_epoch == self._host_epoch else 0
        me = self._followers.setdefault(follower, _Follower(at, loop.time()))
        me.next, me.asked_at, me.is_asking = at, loop.time(), True
        self._settle()
        try:
            async with asyncio.timeout(min(wait, POLL_WAIT)):
                while at >= self._end and self.over is None:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        finally:
            me.is_asking, me.asked_at = False, loop.time()
        start = max(at, self._first)
        items = tuple(item for item, _ in list(self._items)[start - self._first :][:MAX_ANSWER])
        following = start + len(items)
        is_end = following >= self._end
        return HostNews(
            host_epoch=self._host_epoch,
            next=following,
            items=items,
            num_lost=start - at,
            over=self.over if is_end else None,
            address=self.address,
        )

    def taken(self, follower: str) -> None:
        """The driver has the end."""
        if follower in self._followers:
            self._followers[follower].has_end = True

    def is_followed(self) -> bool:
        """A driver is there."""
        now = asyncio.get_running_loop().time()
        return any(each.is_asking or now - each.asked_at < GONE_AFTER for each in self._followers.values())

    async def delivered(self, patience: float) -> bool:
        """Whether a driver has taken the end; waits for those that are there."""
        deadline = asyncio.get_running_loop().time() + patience
        while self.is_followed() and not any(each.has_end for each in self._followers.values()):
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(0.05)  # drivers ask; there is nothing else to wait for
        return any(each.has_end for each in self._followers.values())

    @property
    def _end(self) -> int:
        return self._first + len(self._items)

    def _add(self, item: Item, size: int) -> None:
        self._items.append((item, size))
        self._bytes += size
        while self._bytes > self._kept_bytes:
            self._bytes -= self._items.popleft()[1]
            self._first += 1
        self._news.set()
        self._settle()

    def _settle(self) -> None:
        """Hold the output while a living driver is far behind."""
        now = asyncio.get_running_loop().time()
        living = [each.next for each in self._followers.values() if each.is_asking or now - each.asked_at < GONE_AFTER]
        behind = 0
        if living:
            start = max(0, min(living) - self._first)
            behind = sum(size for _, size in list(self._items)[start:]) if self._bytes > HOLD_BYTES else 0
        if behind > HOLD_BYTES and not self._is_holding:
            self._is_holding = True
            self.hold()
        elif behind <= HOLD_BYTES // 2 and self._is_holding:
            self._is_holding = False
            self.release()
