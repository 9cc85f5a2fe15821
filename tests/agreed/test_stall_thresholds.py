"""When a worker that stays in its phase is worth a look: pure, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dlrover.agreed.stall_thresholds import (
    PhaseBook,
    SeenPage,
    StallPatience,
    StallWatch,
    bucket_of,
    percentile_99,
    upper_seconds,
)
from dlrover.protocol.messages.watch import Phase
from dlrover.protocol.progress_page import NUM_BUCKETS


def histogram(*durations: float) -> tuple[int, ...]:
    counts = [0] * NUM_BUCKETS
    for duration in durations:
        counts[bucket_of(int(duration * 1e9))] += 1
    return tuple(counts)


def seen(
    phase: Phase = Phase.BACKWARD,
    *,
    since: float,
    changes: int = 1,
    has_stepped: bool = True,
    counts: tuple[int, ...] = (),
) -> SeenPage:
    return SeenPage(
        phase=phase, since=since, num_changes=changes, has_stepped=has_stepped, counts=counts or histogram()
    )


@given(st.integers(min_value=0, max_value=int(3600e9)))
def test_a_duration_is_below_the_end_of_its_bucket_and_within_a_quarter_of_it(ns: int) -> None:
    end = upper_seconds(bucket_of(ns)) * 1e9
    assert ns <= end
    assert bucket_of(ns) < NUM_BUCKETS
    if ns >= 512:
        assert end <= ns * 1.25 + 1


def test_the_one_slow_beginning_does_not_count() -> None:
    assert percentile_99(histogram(30.0, *[0.05] * 50)) == pytest.approx(0.05, rel=0.25)
    assert percentile_99(histogram(*[0.05] * 985, *[1.0] * 15)) == pytest.approx(1.0, rel=0.25)
    assert percentile_99(()) == 0.0


def test_a_look_comes_after_two_seconds_or_twenty_times_the_usual() -> None:
    book = PhaseBook()
    assert book.look_after(Phase.BACKWARD, histogram(*[0.02] * 100), has_stepped=True) == 2.0
    assert book.look_after(Phase.BACKWARD, histogram(*[1.0] * 100), has_stepped=True) == pytest.approx(20, rel=0.25)
    # Not for ever: a phase of a minute is looked at after three.
    assert 180 <= book.look_after(Phase.FORWARD, histogram(*[60.0] * 100), has_stepped=True) <= 240


def test_what_is_known_to_take_long_gets_its_time() -> None:
    book, patience = PhaseBook(), StallPatience()
    fast = histogram(*[0.01] * 100)
    assert book.look_after(Phase.START, histogram(), has_stepped=False) == patience.start
    assert book.look_after(Phase.COMPILE, histogram(), has_stepped=True) == patience.compile
    assert book.look_after(Phase.EVALUATION, fast, has_stepped=True) == patience.evaluation
    assert book.look_after(Phase.CHECKPOINT, fast, has_stepped=True) == patience.checkpoint
    assert book.look_after(Phase.FORWARD, fast, has_stepped=False) == patience.first_step
    assert book.look_after(Phase.DATA, histogram(0.01), has_stepped=True) == patience.unlearned


def test_a_new_round_need_not_learn_again_and_forgets_slowly() -> None:
    book = PhaseBook()
    book.close_round([{Phase.DATA: histogram(*[0.01] * 50), Phase.START: histogram(*[9.0] * 9)}])
    assert book.look_after(Phase.DATA, histogram(), has_stepped=True) == 2.0
    assert book.look_after(Phase.START, histogram(), has_stepped=False) == StallPatience().start  # never learned from
    book.close_round([{Phase.DATA: histogram(*[1.0] * 50)}])
    assert book.look_after(Phase.DATA, histogram(), has_stepped=True) == pytest.approx(20, rel=0.25)


def test_a_worker_that_stays_becomes_stalled_once_and_moves_again_once() -> None:
    watch = StallWatch(PhaseBook())
    fast = histogram(*[0.02] * 100)
    moving = seen(since=100.0, counts=fast)
    assert watch.see({0: moving, 1: moving}, now=100.5) == (False, pytest.approx(1.5))
    # Rank 1 goes on, rank 0 does not.
    further = seen(since=101.9, changes=9, counts=fast)
    changed, wait = watch.see({0: moving, 1: further}, now=102.0)
    assert changed
    assert watch.stalled == (0,)
    assert wait == pytest.approx(0.5)
    assert watch.see({0: moving, 1: further}, now=102.4)[0] is False
    changed, _ = watch.see({0: seen(since=102.5, changes=2, counts=fast), 1: further}, now=102.6)
    assert changed
    assert watch.stalled == ()


def test_a_worker_that_is_stopped_is_looked_at_soon_even_in_a_phase_that_takes_long() -> None:
    watch = StallWatch(PhaseBook())
    starting = seen(Phase.START, since=0.0, has_stepped=False)
    assert watch.see({0: starting}, now=5.0)[0] is False
    assert watch.see({0: replace(starting, is_stopped=True)}, now=5.1)[0] is True
    assert watch.stalled == (0,)


def test_a_worker_that_is_gone_is_not_stalled() -> None:
    watch = StallWatch(PhaseBook())
    stuck = seen(since=0.0, counts=histogram(*[0.02] * 100))
    assert watch.see({0: stuck}, now=50.0)[0]
    assert watch.see({}, now=51.0) == (True, 0.5)
    assert watch.stalled == ()


def test_the_next_look_is_as_near_as_a_stall_could_be_in_a_phase_that_begins_now() -> None:
    _, wait = StallWatch(PhaseBook()).see({0: seen(Phase.START, since=0.0, has_stepped=False)}, now=1.0)
    assert wait == pytest.approx(StallPatience().least)
