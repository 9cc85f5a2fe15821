"""The master notices that it stood still, and gives the time back; but not for ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from dlrover.master.loop.stalls import LATE, LONGEST_GRACE, NEVER, PULSE, Grace, LoopWatch
from dlrover.protocol.messages.job import Micros


async def a_few_rounds() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_loop_that_stood_still_is_measured_once() -> None:
    now = 100.0
    watch = LoopWatch(lambda: now)
    watch.start()
    assert watch.take() == 0
    now += PULSE + 2 * LATE
    assert watch.take() == pytest.approx(2 * LATE * 1e6)  # before the pulse had a chance to run
    assert watch.take() == 0
    now += PULSE + LATE / 2
    assert watch.take() == 0, "so late may anybody be"
    watch.stop()


async def test_the_pulse_measures_when_nobody_asks_by_the_time_of_the_loop() -> None:
    watch = LoopWatch()
    watch.start()
    time.sleep(PULSE + 2 * LATE)  # noqa: ASYNC251 - nothing runs meanwhile
    await a_few_rounds()  # the pulse that was due
    watch.stop()
    assert watch.take() > LATE * 1e6


def test_nothing_passes_before_the_beginning() -> None:
    grace = Grace()
    grace.extend(Micros(5), 10)
    assert not grace.is_over(Micros(NEVER - 1))
    grace.begin(Micros(7))
    assert grace.is_over(Micros(7))


def test_a_hold_lasts_as_long_as_the_loss_and_a_short_one_does_not_cut_a_long_one() -> None:
    grace = Grace()
    grace.begin(Micros(0))
    grace.extend(Micros(100), 50)
    grace.extend(Micros(101), 1)
    assert not grace.is_over(Micros(149))
    assert grace.is_over(Micros(150))


def test_a_master_that_is_always_late_gives_somebody_up_in_the_end() -> None:
    grace = Grace()
    grace.begin(Micros(0))
    now, step = 0, 2_000_000
    while not grace.is_over(Micros(now)):
        grace.extend(Micros(now), step)
        now += step // 2
    for _ in range(100):
        grace.extend(Micros(now), step)  # each turn is late before the hold of the last one is over
        if grace.is_over(Micros(now)):
            break
        now += step // 2
    assert now <= 2 * LONGEST_GRACE
    grace.extend(Micros(now), step)
    assert not grace.is_over(Micros(now)), "after a moment of trust it begins anew"


def test_a_long_stop_after_a_short_one_is_given_back_too() -> None:
    grace = Grace()
    grace.begin(Micros(0))
    grace.extend(Micros(0), 10_000_000)
    grace.extend(Micros(90_000_000), 80_000_000)
    assert not grace.is_over(Micros(90_000_000 + 29_000_000))
