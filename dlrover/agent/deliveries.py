"""
What an agent tells its master: each command in a task of its own, until the master has answered it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.job import AgentCommand, Reply, ReportFailure, ReportFinished

log = logging.getLogger("dlrover.agent")


class CallMaster(Protocol):
    async def __call__(self, command: AgentCommand, *, timeout: float) -> Reply: ...


class Deliveries:
    """Of one agent."""

    def __init__(
        self,
        call: CallMaster,
        *,
        start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        on_refused: Callable[[AgentCommand, str], None],
        timeout: float,
    ) -> None:
        self._call = call
        self._start = start
        self._on_refused = on_refused
        self._timeout = timeout
        self._reports: set[asyncio.Task[None]] = set()
        """On how workers ended."""

    def tell(self, command: AgentCommand) -> None:
        delivery = self._deliver(command)
        try:
            task = self._start(delivery, type(command).__name__)
        except RuntimeError:  # the tasks are being taken down, by a bug elsewhere: nothing can be told any more
            delivery.close()
            return
        if isinstance(command, ReportFailure | ReportFinished):
            self._keep(task)

    def ask(self, asking: Coroutine[Any, Any, None]) -> None:
        """An extension of the user, on which a report waits."""
        self._keep(self._start(asking, "failover"))

    async def wait_for_reports(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._reports:
                    await asyncio.wait(self._reports)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _deliver(self, command: AgentCommand) -> None:
        try:
            await self._call(command, timeout=self._timeout)
        except Rejected as error:
            # Told too late: the world has moved on, and the master's wish says where to.
            log.info("the master rejected %s: %s", type(command).__name__, error)
            self._on_refused(command, error.code)
        except Unavailable as error:
            log.info("%s did not reach the master: %s", type(command).__name__, error)
