"""
Before the survivors of a failure are stopped: have one of them save the newest step that is whole.

Only workers with a guard take part (`dlrover.resilient`, `dlrover.steps`, `ElasticTrainer`). All of them are asked for the step that they have; one of
those that have the newest saves it to the segment of this node, and all end with an exit code of their own. With any doubt nobody saves. Nodes need not
talk to each other: the name of such a save contains the step and the digest of its content, and a restart takes only what all nodes have under one name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlrover.agent.workers.process_tree import Exit
from dlrover.agreed.last_breath import LIMIT, Offer, Plan, plan_breath
from dlrover.host.processes import look_up
from dlrover.host.shared_page.breath_page import BreathAnswer, BreathOrder, BreathPage

_log = logging.getLogger(__name__)

_LEAVE = 0.3
"""Seconds for workers to end after their last word. Who does not is stopped as any other."""


@dataclass
class Survivor:
    local_rank: int
    pid: int
    exit: asyncio.Future[Exit]
    page: BreathPage

    @property
    def is_alive(self) -> bool:
        return not self.exit.done()

    @property
    def is_stopped(self) -> bool:
        process = look_up(self.pid)
        return process is None or process.state in ("T", "t")


async def take_last_breath(survivors: Sequence[Survivor], *, limit: float = LIMIT) -> Plan | None:
    """None: not all of them have a guard, so nothing was asked. Afterwards nobody waits at the pages any more."""
    live = [survivor for survivor in survivors if survivor.is_alive and not survivor.is_stopped]
    if not live or not all(survivor.page.is_guarded for survivor in live):
        return None
    began_at = time.monotonic()
    for survivor in live:
        survivor.page.order = BreathOrder.OFFER
    answers = await asyncio.gather(*(_answer(survivor, BreathAnswer.NONE, limit) for survivor in live))
    offers = [
        Offer(survivor.local_rank, *survivor.page.offer)
        for survivor, answer in zip(live, answers, strict=True)
        if answer is BreathAnswer.OFFERED and survivor.is_alive
    ]
    num_silent = sum(
        answer is BreathAnswer.REFUSED or (answer is BreathAnswer.NONE and survivor.is_alive)
        for survivor, answer in zip(live, answers, strict=True)
    )
    plan = plan_breath(offers, num_silent)
    is_saved = await _save(plan, {survivor.local_rank: survivor for survivor in live}, limit)
    for survivor in live:
        if survivor.page.order is not BreathOrder.SAVE or not is_saved:
            survivor.page.order = BreathOrder.LEAVE
    seconds = time.monotonic() - began_at
    if is_saved:
        _log.info("last step saved step=%d seconds=%.3f", plan.step, seconds)
    else:
        doubt = plan.doubt or "no survivor could save it"
        _log.warning("The last step is not saved (%s): the job goes back to its newest snapshot.", doubt)
    await asyncio.wait([survivor.exit for survivor in live], timeout=_LEAVE)
    return plan if is_saved else Plan(plan.step, (), plan.doubt or "no survivor could save it")


async def _save(plan: Plan, survivors: dict[int, Survivor], limit: float) -> bool:
    """All at once, if each has a piece; else one after the other, if one dies over it."""
    until = time.monotonic() + limit
    if plan.is_cut:
        writers = [survivors[local_rank] for local_rank in plan.holders]
        for writer in writers:
            writer.page.order = BreathOrder.SAVE
        words = await asyncio.gather(*(_answer(each, BreathAnswer.OFFERED, limit) for each in writers))
        return bool(words) and all(word is BreathAnswer.SAVED for word in words)
    for local_rank in plan.holders:
        writer = survivors[local_rank]
        if not writer.is_alive:
            continue
        writer.page.order = BreathOrder.SAVE
        answer = await _answer(writer, BreathAnswer.OFFERED, until - time.monotonic())
        if answer is BreathAnswer.SAVED:
            return True
        if writer.is_alive:
            return False  # it refuses, or is still at it: nobody else may write there
    return False


async def _answer(survivor: Survivor, than: BreathAnswer, timeout: float) -> BreathAnswer | None:
    """Its next word; the one before if it takes too long, None if it dies without a word."""
    waiting = asyncio.ensure_future(asyncio.to_thread(survivor.page.wait_for_answer, than, max(0.0, timeout)))
    futures: list[asyncio.Future[Any]] = [waiting, survivor.exit]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    is_untold = not waiting.done() and survivor.page.answer is than
    if is_untold:
        survivor.page.answer = BreathAnswer.REFUSED  # wakes the thread
    answer = await waiting
    return None if is_untold else answer
