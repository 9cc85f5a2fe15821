"""
What becomes of a call when its callee dies: nothing is sent twice unless the method allows it, and no call waits for a role that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

import msgspec

from dlrover.unified.runtime.wire import CallHeader, CallRefused, InstanceLost, Parts
from dlrover.unified.shell.book import Book, Place

AGAIN = 0.05
"""Seconds before a repeatable call is sent again to an instance that may live."""


class CalleeGone(Exception):
    """The process is not there any more. `was_sent`: the call may have reached it."""

    def __init__(self, was_sent: bool) -> None:
        super().__init__(was_sent)
        self.was_sent = was_sent


class CalleeUnsure(Exception):
    """The connection broke. The callee may live, and may have the call."""


class Transport(Protocol):
    async def deliver(self, place: Place, header: CallHeader, parts: Parts) -> Parts:
        """Until the method has returned. Raises `CalleeGone`, `CalleeUnsure` or `Raised`."""


class CallSender:
    def __init__(
        self, book: Book, transport: Transport, *, silent_roles: Collection[str] = (), again: float = AGAIN
    ) -> None:
        """`silent_roles`: calls to them are refused at once."""
        self._again = again
        self._silent_roles = frozenset(silent_roles)
        self._book = book
        self._transport = transport
        self._known: dict[tuple[str, int], Place] = {}

    async def send(self, role: str, rank: int, header: CallHeader, parts: Parts) -> Parts:
        """Raises `Raised`, `InstanceLost`, `RoleGone`, `CallRefused` or `CallTimeout`."""
        if role in self._silent_roles:
            raise CallRefused(
                f"{header.method}: role {role} is a script that takes no calls. Give Role.elastic({role!r}, …, takes_calls=True), and call "
                "serve(…) in the script."
            )
        loop = asyncio.get_running_loop()
        newer_than = 0
        while True:
            place = self._known.get((role, rank))
            if place is None or place.incarnation <= newer_than:
                deadline = loop.time() + header.timeout
                place = await self._book.find(role, rank, newer_than=newer_than, deadline=deadline)
                self._known[role, rank] = place
            may_repeat = header.is_repeatable or header.method in place.repeatable
            try:
                own = msgspec.structs.replace(header, is_repeatable=may_repeat)
                return await self._transport.deliver(place, own, parts)
            except CalleeGone as gone:
                if gone.was_sent and not may_repeat:
                    raise InstanceLost(role, rank, place.incarnation) from gone
                newer_than = place.incarnation
            except CalleeUnsure as unsure:
                self._known.pop((role, rank), None)
                if not may_repeat:
                    raise InstanceLost(role, rank, place.incarnation) from unsure
                await asyncio.sleep(self._again)
