"""
How the job does, told to a platform that shows jobs to people: `kubectl get` has no other way to know the newest step.

A courtesy: whatever goes wrong here is logged once, and changes nothing about the job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dlrover.host.edges import contained
from dlrover.platforms.base import JobGlance, ShowsJobs
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.goodput import AskGoodput, GoodputStatus
from dlrover.protocol.messages.job import AskStatus, JobStatus, Reply

log = logging.getLogger(__name__)

Ask = Callable[[AskStatus | AskGoodput], Awaitable[Reply]]
SHOW_EVERY = 15.0
"""Seconds between two words: a thousand jobs then cost an API server 70 small writes a second."""
CALL = 10.0
"""Seconds for one of them."""


class JobGlances:
    """`run` is its task; `show` once more when the job is over."""

    def __init__(self, platform: ShowsJobs, ask: Ask, *, pause: float = SHOW_EVERY) -> None:
        """`ask`: the master's loop, whose answers are durable."""
        self._platform = platform
        self._ask = ask
        self._pause = pause
        self._shown: tuple[int, int | None] = (0, None)
        self._trouble = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            # No event says that the step is another one: agents report it with their heartbeats, each at its own time.
            await asyncio.sleep(self._pause)
            await self.show()

    async def show(self) -> None:
        """If round or step changed: goodput alone changes all the time."""
        with contained(self._note):  # an extension may raise anything
            async with asyncio.timeout(CALL):
                glance = await self._glance()
                if glance is None or (glance.round, glance.last_step) == self._shown:
                    return
                await self._platform.show(glance)
            self._shown = (glance.round, glance.last_step)
            self._trouble = ""

    async def _glance(self) -> JobGlance | None:
        """None: nothing has run yet."""
        status, goodput = await self._ask(AskStatus()), await self._ask(AskGoodput())
        assert isinstance(status, JobStatus), "the answer to AskStatus"
        assert isinstance(goodput, GoodputStatus), "the answer to AskGoodput"
        if not status.round:
            return None
        return JobGlance(round=status.round, goodput=goodput.goodput, last_step=goodput.highest_step)

    def _note(self, error: Exception) -> None:
        match error:
            case Unavailable():
                trouble = str(error)
            case TimeoutError():
                trouble = f"no answer within {CALL:g} s"
            case _:
                trouble = f"{type(error).__name__}: {error}"
        if trouble != self._trouble:
            log.warning("the platform cannot show the state of the job reason=%s", trouble)
        self._trouble = trouble
