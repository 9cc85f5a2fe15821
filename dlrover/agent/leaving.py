"""
Carries out how an agent goes (`Departure`): its workers stop, the master hears of it, and people read a result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dlrover.agent.config import AgentResult
from dlrover.agent.decisions.decisions import AgentDecisions, last_words
from dlrover.agent.decisions.departure import EXIT_BY_SIGNAL, EXIT_FAILED, Departure, Urgency
from dlrover.agent.deliveries import Deliveries
from dlrover.agent.recovery import Recovery
from dlrover.agent.seams import MasterChannel
from dlrover.agent.workers.driver import WorkerDriver
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.checkpoint import HeldSnapshot
from dlrover.protocol.messages.job import End, ExitReason, LeaveJob, LeaveReason

log = logging.getLogger("dlrover.agent")


class Leaving:
    """Of one agent, once."""

    def __init__(
        self,
        decisions: AgentDecisions,
        *,
        driver: WorkerDriver,
        channel: MasterChannel,
        deliveries: Deliveries,
        recovery: Recovery,
        farewell_timeout: float,
        promise: Callable[[], tuple[HeldSnapshot, ...]],
        on_leaving: Callable[[], None],
        on_break: Callable[[], None],
        settle_output: Callable[[Callable[[int], bool]], None],
    ) -> None:
        """The callables are those of `Agent`."""
        self._decisions = decisions
        self._driver = driver
        self._channel = channel
        self._deliveries = deliveries
        self._recovery = recovery
        self._farewell_timeout = farewell_timeout
        self._promise = promise
        self._on_leaving = on_leaving
        self._on_break = on_break
        self._settle_output = settle_output

    async def go(self, departure: Departure) -> AgentResult:
        if departure.urgency is not Urgency.SIGNAL and departure.end is None:
            log.warning("this node leaves the job: %s", departure.message)
        is_failed = self._recovery.is_cause_untold  # before the signal came: nothing of that may be lost
        parting = asyncio.ensure_future(self._part(departure)) if departure.is_farewell_first else None
        if parting is not None:
            await asyncio.sleep(0)  # the farewell is on its way before anything stops
        self._driver.want_none(departure.cause, departure.with_signal)
        await self._driver.settle()
        if parting is not None:
            await parting
            self._settle_output(lambda _rank: is_failed and departure.urgency is Urgency.SIGNAL)
        if departure.end is not None:
            return await self._end(departure, departure.end)
        if parting is None:
            await self._say_farewell(departure)
        if departure.is_break:
            self._on_break()
        return AgentResult(
            exit_code=departure.exit_code, message=departure.message, is_job_alive=departure.is_job_alive
        )

    async def _part(self, departure: Departure) -> None:
        """Say farewell, then close: a stream that broke while workers stop would be healed and bring us back."""
        await self._say_farewell(departure, self._promise())
        await self._channel.close()

    async def _end(self, departure: Departure, wish: End) -> AgentResult:
        if not self._channel.outage():
            # Of workers that were on their way out: the master may learn only now who failed first.
            await self._deliveries.wait_for_reports(self._farewell_timeout)
        await self._recovery.finish(but=None if wish.end.first_failure is None else wish.end.first_failure.round)
        await self._say_farewell(departure)
        desired = self._decisions.membership.desired
        end = desired.wish.end if desired is not None and isinstance(desired.wish, End) else wish.end
        first = end.first_failure
        is_told = end.reason in (ExitReason.COMPLETED, ExitReason.STOPPED_BY_USER)
        self._settle_output(lambda rank: rank == first.failure.global_rank if first is not None else not is_told)
        failure = None if first is None else first.failure
        return AgentResult(
            exit_code=end.exit_code,
            message=end.message,
            worker_exit_code=None if failure is None else _shell_code(failure.exit_code, failure.signal),
            first_failed_rank=None if failure is None else failure.global_rank,
            num_restarts=end.num_restarts,
            end=end,
        )

    async def _say_farewell(self, departure: Departure, held: tuple[HeldSnapshot, ...] = ()) -> None:
        said: LeaveJob | None = None
        if self._channel.outage():
            return
        while (command := last_words(self._decisions.membership, departure, said, held)) is not None:
            if said is None and departure.farewell not in (LeaveReason.STOPPED_BY_USER, LeaveReason.PREEMPTED):
                self._on_leaving()
            said = command
            try:
                await self._channel.call(command, timeout=self._farewell_timeout)
            except (Rejected, Unavailable) as error:
                log.info("the master did not answer the message that this node leaves: %s", error)


def _shell_code(exit_code: int | None, number: int | None) -> int:
    """The exit code a shell would show: that of the worker, or 128 + n for signal n."""
    if number is not None:
        return EXIT_BY_SIGNAL + number
    return exit_code if exit_code else EXIT_FAILED
