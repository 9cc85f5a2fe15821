"""The master's clock never goes back."""

from __future__ import annotations

from dlrover.master.clock import MasterClock
from dlrover.protocol.messages import Micros


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
