"""
What people at the console of a node read when workers had to stop: one paragraph.

It says what was lost and why, what was done, from which step training went on and after how many seconds. The master knows the cause,
often only after a while, because those who lost a peer report first. So the paragraph is written when training goes on, or after
`TELL_AFTER` without its end, which follows when it is known. The consequences (who else failed, and how) are in the events of the
job, and in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from dlrover.agent.monitor.progress import FirstStep
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.goodput import AskFault, FaultTold
from dlrover.protocol.messages.job import NodeRank, Reply, Round, WorldSpec

log = logging.getLogger("dlrover.agent")

TELL_AFTER = 8.0
"""Seconds: longer than most recoveries last, and than the master needs to give up a node whose stream broke (5 s)."""
ASK_TIMEOUT = 5.0
_LOOK = 0.1
"""
Seconds between two looks for the first step; ten times as many after `TELL_AFTER`. Workers write it into memory, which announces
nothing, and the agent looks only while a job recovers.
"""


class AskOfFault(Protocol):
    async def __call__(self, command: AskFault, *, timeout: float) -> Reply: ...


@dataclass
class _Loss:
    """The workers of a round had to stop."""

    round: Round
    reason: str
    """As this node heard it; the master may know better."""
    at: float
    group_rank: int
    """In that round."""
    world: WorldSpec | None = None
    """That runs now instead; None: none yet."""
    world_after: float = 0.0
    resumed: FirstStep | None = None
    resumed_after: float = 0.0
    fault: FaultTold | None = None
    """None: the master was not asked yet."""
    is_answered: bool = True
    """False: the master was asked, and did not say. It is away, or older than we are."""
    is_cause_told: bool = False
    is_start_told: bool = False


class Recovery:
    """Of one agent, which tells it what happens. The newest loss is the last one; older ones wait to be told."""

    def __init__(
        self,
        ask: AskOfFault,
        *,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        first_step: Callable[[Round], FirstStep | None],
        is_over: Callable[[Round], bool],
        settle_output: Callable[[Callable[[int], bool]], None],
        shares_console_as: Callable[[], NodeRank] | None = None,
        tell_after: float = TELL_AFTER,
    ) -> None:
        """
        `shares_console_as`: all nodes of the job are read at one place, where one speaks for all; gives our rank among them.
        `is_over`: no worker of that round is left. `settle_output`: says whose traceback the console may have, by global rank
        (`WorkerOutput.settle_held`).
        """
        self._ask = ask
        self._start = start
        self._first_step = first_step
        self._is_over = is_over
        self._settle_output = settle_output
        self._shares_console_as = shares_console_as
        self._group_rank = 0
        """Of the newest world: how many nodes come before us."""
        self._tell_after = tell_after
        self._losses: list[_Loss] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def is_cause_untold(self) -> bool:
        """Workers failed, and who was the first is not decided yet."""
        return any(not loss.is_cause_told for loss in self._losses)

    def began(self, round_: Round, reason: str) -> None:
        """The workers of this round failed, or have to stop."""
        if self._losses and self._losses[-1].round >= round_:
            return
        self._losses.append(_Loss(round_, reason, time.monotonic(), self._group_rank))
        if self._task is None or self._task.done():
            self._task = self._start(self._tell_all())

    def running(self, world: WorldSpec) -> None:
        self._group_rank = world.group_rank
        if self._losses and self._losses[-1].world is None:
            self._losses[-1].world = world

    def look(self) -> None:
        """Whether training goes on. Also to be called before the workers that do it are forgotten."""
        for loss in self._losses[-1:]:
            if loss.world is not None and not loss.world_after and self._is_over(loss.round):
                loss.world_after = time.monotonic() - loss.at
            if loss.resumed is None and (found := self._first_step(loss.round)) is not None:
                loss.resumed, loss.resumed_after = found, time.monotonic() - loss.at

    async def finish(self, but: Round | None = None) -> None:
        """The job ends: what is not told yet is told now, but for the end of the round that the final report is about."""
        self.close()
        self.look()
        for loss in self._losses:
            if loss.round != but:
                await self._tell(loss)
        self._losses = []

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _tell_all(self) -> None:
        while self._losses:
            self.look()
            loss, waited = self._losses[0], time.monotonic() - self._losses[0].at
            is_closed = loss.resumed is not None or len(self._losses) > 1
            if is_closed or self._is_due(loss, waited):
                await self._tell(loss)
            if is_closed:
                self._losses.remove(loss)
            else:
                await asyncio.sleep(_LOOK if waited < self._tell_after else 10 * _LOOK)

    def _is_due(self, loss: _Loss, waited: float) -> bool:
        """No caller should wait longer for what is known by now."""
        if not loss.is_cause_told:
            return waited >= self._tell_after and self._is_over(loss.round)
        return loss.world is not None and not loss.is_start_told and waited >= loss.world_after + self._tell_after

    async def _tell(self, loss: _Loss) -> None:
        if loss.fault is None:
            loss.fault = await self._find_fault(loss)
            first = loss.fault.global_rank if loss.fault.kind else None
            is_known = bool(loss.fault.kind)
            self._settle_output(lambda rank: rank == first or not is_known)  # unknown: nothing may be lost
        news = [] if loss.is_cause_told else [_cause(loss, loss.fault)]
        if loss.world is not None:
            news += _what_followed(loss, loss.world)
            loss.is_start_told = True
        elif not loss.is_cause_told:
            news.append("The workers start again when enough nodes have joined.")
        loss.is_cause_told = True
        if news:
            log.log(logging.WARNING if self._speaks(loss, loss.fault) else logging.INFO, "%s", " ".join(news))

    async def _find_fault(self, loss: _Loss) -> FaultTold:
        try:
            fault = await self._ask(AskFault(round=loss.round), timeout=ASK_TIMEOUT)
        except (Rejected, Unavailable) as error:
            log.info("the agent could not find out what stopped round %d: %s", loss.round, error)
            loss.is_answered = False
            return FaultTold()
        assert isinstance(fault, FaultTold), f"the master answered AskFault with {type(fault).__name__}"
        return fault

    def _speaks(self, loss: _Loss, fault: FaultTold) -> bool:
        """
        Whether it is for us to tell: the first of those that were in the round and are still there does. If the master did not say who is
        gone, each tells: twice is better than never.
        """
        if self._shares_console_as is None or not loss.is_answered:
            return True
        is_first_gone = (
            fault.kind == "node" and fault.node_rank is not None and fault.node_rank < self._shares_console_as()
        )
        return loss.group_rank == (1 if is_first_gone else 0)


def _cause(loss: _Loss, fault: FaultTold) -> str:
    text = fault.cause or loss.reason
    if fault.kind == "hang":
        text = text.split(". ")[0]  # the diagnosis has said more
    return f"{text[:1].upper()}{text[1:].rstrip('. ')}."


def _what_followed(loss: _Loss, world: WorldSpec) -> list[str]:
    nodes = f" on {world.group_world_size} nodes" if world.group_world_size > 1 else ""
    workers = f"All {world.world_size} workers were" if world.world_size > 1 else "The worker was"
    done = f"{workers} started again{nodes}"
    if loss.resumed is None:
        after = f" after {loss.world_after:.1f} s" if loss.world_after else ""
        return [] if loss.is_start_told else [f"{done}{after}."]
    step = "" if loss.resumed.step is None else f" with step {loss.resumed.step}"
    went_on = f"Training went on{step}, {loss.resumed_after:.1f} s after the workers stopped."
    return [went_on] if loss.is_start_told else [f"{done}.", went_on]
