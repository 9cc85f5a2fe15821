"""
Before the survivors of a failure are stopped: have one of them save the newest step that is whole.

Only workers with a guard take part (`dlrover.resilient`, `dlrover.steps`, `ElasticTrainer`). All of them are asked for the step that they have; one of
those that have the newest saves it to the segment of this node, and all end with an exit code of their own. With any doubt no worker saves. Nodes need not
talk to each other: the name of such a save contains the step and the digest of its content, and a restart takes only what all nodes have under one name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlrover.agent.decisions.last_breath import BreathTalk, Heard
from dlrover.agent.workers.process_tree import Exit
from dlrover.agreed.last_breath import LIMIT, Offer, Plan
from dlrover.host.processes import look_up
from dlrover.host.shared_page.breath_page import BreathPage
from dlrover.host.shared_page.breath_words import BreathAnswer, BreathOrder

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
    """None: not all of them have a guard, so nothing was asked. Afterwards no thread waits at the pages any more."""
    live = {each.local_rank: each for each in survivors if each.is_alive and not each.is_stopped}
    if not live or not all(survivor.page.is_guarded for survivor in live.values()):
        return None
    began_at = time.monotonic()
    until = began_at + 2 * limit
    talk = BreathTalk(list(live))
    while talk.orders:
        asked = [live[local_rank] for local_rank in talk.orders]
        words = [survivor.page.answer for survivor in asked]
        for survivor in asked:
            survivor.page.order = talk.orders[survivor.local_rank]
        seconds = min(limit, until - time.monotonic())
        heard = await asyncio.gather(*(_answer(*each, seconds) for each in zip(asked, words, strict=True)))
        talk.heard(dict(zip(talk.orders, heard, strict=True)))
    for survivor in live.values():
        if survivor.page.answer is not BreathAnswer.SAVED:
            survivor.page.order = BreathOrder.LEAVE
    if talk.is_saved:
        _log.info("last step saved step=%d seconds=%.3f", talk.plan.step, time.monotonic() - began_at)
    else:
        _log.warning("The last step was not saved (%s). The job restores its newest snapshot.", talk.doubt)
    await asyncio.wait([survivor.exit for survivor in live.values()], timeout=_LEAVE)
    return talk.plan if talk.is_saved else Plan(talk.plan.step, (), talk.doubt)


async def _answer(survivor: Survivor, before: BreathAnswer, timeout: float) -> Heard:
    """Its next word after `before`."""
    waiting = asyncio.ensure_future(asyncio.to_thread(survivor.page.wait_for_answer, before, max(0.0, timeout)))
    futures: list[asyncio.Future[Any]] = [waiting, survivor.exit]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    has_died_silently = not waiting.done() and survivor.page.answer is before
    if has_died_silently:
        survivor.page.answer = BreathAnswer.REFUSED  # wakes the thread
    answer = await waiting
    if has_died_silently:
        return None
    if answer is before:
        return BreathAnswer.NONE
    if answer in (BreathAnswer.OFFERED, BreathAnswer.FINISHED):
        return Offer(survivor.local_rank, *survivor.page.offer) if survivor.is_alive else None
    return answer
