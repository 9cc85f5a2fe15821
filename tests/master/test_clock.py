"""The master's clock never goes back."""

from __future__ import annotations

from dlrover.master.clock import MasterClock
from dlrover.protocol.messages.job import Micros


def test_it_begins_at_the_wall_clock_and_counts_elapsed_time_only() -> None:
    wall, elapsed = [1_000_000_000], [5_000]
    clock = MasterClock(wall=lambda: wall[0], monotonic=lambda: elapsed[0])
    assert clock.now() == 1_000_000
    wall[0] = 0  # somebody sets the wall clock back
    elapsed[0] += 7_000
    assert clock.now() == 1_000_007


def test_it_never_begins_before_what_was_journalled() -> None:
    clock = MasterClock(Micros(2_000_000), wall=lambda: 1_000_000_000, monotonic=lambda: 0)
    assert clock.now() == 2_000_000


def test_the_real_one_moves() -> None:
    clock = MasterClock()
    first = clock.now()
    assert first > 1_600_000_000_000_000
    assert clock.now() >= first


def test_stopped_it_stands_still_and_goes_on_from_there() -> None:
    elapsed = [0]
    clock = MasterClock(wall=lambda: 0, monotonic=lambda: elapsed[0])
    elapsed[0] += 5_000
    clock.stop()
    elapsed[0] += 7_000
    clock.stop()
    assert (clock.now(), clock.elapsed(), clock.stood_still) == (5, 12, 0)
    clock.go_on()
    clock.go_on()
    assert (clock.now(), clock.elapsed(), clock.stood_still) == (5, 12, 7)
    elapsed[0] += 1_000
    assert (clock.now(), clock.elapsed(), clock.stood_still) == (6, 13, 7)
