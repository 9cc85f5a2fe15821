"""
The saver's line to the master: tells it what was written, and hears what to do about it.

One question waits at the master all the time; its answer says what this node shall commit or write and what became of saves under way. If
the master cannot be reached for long, or does not know such questions, every rank that waits for an outcome is told that there is none:
they go on without it, by the files.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable
from typing import Protocol

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.checkpoint import (
    AnyCheckpointCommand,
    AwaitSaveDuties,
    CheckpointSettled,
    SaveDuties,
    ShardWritten,
)
from dlrover.protocol.messages.job import Reply

log = logging.getLogger("dlrover.agent")

WAIT = 50.0
"""Seconds that the question waits at the master. Long, because ten thousand agents may ask."""
MARGIN = 10.0
"""Seconds on top, for a master that is just being restarted. After both it counts as away."""
REPORT = 30.0
"""Seconds for a report to be heard."""
_PAUSE = 1.0


class DutyRelay(Protocol):
    async def __call__(self, request: AnyCheckpointCommand | AwaitSaveDuties, *, timeout: float) -> Reply:
        """Raises Rejected or Unavailable."""


class DutyLine:
    def __init__(self, relay: DutyRelay, on_duties: Callable[[SaveDuties], None], on_lost: Callable[[], None]) -> None:
        """`on_duties` hears of everything new, after those who wait for an outcome; `on_lost` that nothing is to be heard."""
        self._relay = relay
        self._on_duties = on_duties
        self._on_lost = on_lost
        self._since = 0
        self._outcomes: dict[tuple[str, str], list[asyncio.Future[CheckpointSettled | None]]] = {}
        """By directory and attempt: a future for each shard of it that was written here."""
        self.is_up = True
        """Whether the master was heard last time. Assumed at first: a launcher has started us in its name."""

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                try:
                    answer = await self._relay(AwaitSaveDuties(since=self._since, wait=WAIT), timeout=WAIT + MARGIN)
                except (Rejected, Unavailable) as error:
                    self._lose(str(error))
                    await asyncio.sleep(_PAUSE * random.uniform(1.0, 2.0))
                    continue
                assert isinstance(answer, SaveDuties), "the answer to that question"
                self.is_up = True
                if answer.number < self._since:
                    self._forget()  # a master that lost its journal knows nothing of what was reported
                self._since = answer.number
                self._take(answer)
        finally:
            self._lose("this agent ends")

    async def tell(self, command: AnyCheckpointCommand, *, timeout: float = REPORT) -> bool:
        """Whether the master has taken it in."""
        try:
            await self._relay(command, timeout=timeout)
        except (Rejected, Unavailable) as error:
            log.info("the master did not accept %s: %s", type(command).__name__, error)
            return False
        return True

    async def report(self, written: ShardWritten, *, patience: float) -> CheckpointSettled | None:
        """Tell of a shard, and wait for what becomes of its attempt. None: no master can say."""
        key = (written.directory, written.attempt)
        outcome: asyncio.Future[CheckpointSettled | None] = asyncio.get_running_loop().create_future()
        self._outcomes.setdefault(key, []).append(outcome)
        try:
            await self._relay(written, timeout=REPORT)
            async with asyncio.timeout(patience):
                return await outcome
        except Rejected as error:
            if error.code in (ErrorCode.ATTEMPT_OVER, ErrorCode.ATTEMPT_COMMITTED):
                is_committed = error.code == ErrorCode.ATTEMPT_COMMITTED
                return CheckpointSettled(
                    step=written.step,
                    attempt=written.attempt,
                    directory=written.directory,
                    is_committed=is_committed,
                    reason="" if is_committed else str(error),
                )
            log.info("the master rejected the report that step %d was written: %s", written.step, error)
            return None
        except (Unavailable, TimeoutError) as error:
            log.info("the master did not answer the report that step %d was written: %s", written.step, error)
            return None
        finally:
            self._outcomes[key].remove(outcome)
            if not self._outcomes[key]:
                del self._outcomes[key]

    def _take(self, duties: SaveDuties) -> None:
        for settled in duties.settled:
            for outcome in self._outcomes.get((settled.directory, settled.attempt), ()):
                if not outcome.done():
                    outcome.set_result(settled)
        self._on_duties(duties)

    def _lose(self, why: str) -> None:
        if self.is_up:
            log.info("the connection to the master for checkpoints failed; this node connects again: %s", why)
        self.is_up = False
        self._forget()
        self._on_lost()

    def _forget(self) -> None:
        """The master will not say what became of what was reported."""
        for outcome in itertools.chain.from_iterable(self._outcomes.values()):
            if not outcome.done():
                outcome.set_result(None)
