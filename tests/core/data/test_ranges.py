"""Ranges of places against plain sets of places."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dlrover.core.data.ranges import Places, Range, subtract, united

PLACES = st.integers(0, 30)


@st.composite
def any_ranges(draw: st.DrawFn) -> list[Range]:
    """They may share places."""
    cuts = draw(st.lists(st.tuples(st.integers(0, 1), PLACES, PLACES), max_size=8))
    return [Range(epoch, min(one, two), max(one, two)) for epoch, one, two in cuts if one != two]


@st.composite
def apart(draw: st.DrawFn) -> list[Range]:
    """They share none, and stand in any order."""
    cuts = sorted(draw(st.sets(PLACES, max_size=12)))
    pieces = [Range(draw(st.integers(0, 1)), start, end) for start, end in pairwise(cuts)]
    kept = [each for each in pieces if draw(st.booleans())]
    return draw(st.permutations(kept))


def places_of(ranges: Iterable[Range]) -> set[tuple[int, int]]:
    return {(each.epoch, place) for each in ranges for place in range(each.start, each.end)}


@given(apart(), any_ranges())
def test_what_is_taken_out_is_missing_and_nothing_else(ranges: list[Range], cuts: list[Range]) -> None:
    places = Places(ranges)
    left = places_of(ranges)
    for cut in cuts:
        within, without = places.within(cut), places.without(cut)
        assert places_of(within) == left & places_of([cut])
        assert places_of(without) == places_of([cut]) - left
        assert without == sorted(without, key=lambda each: each.start)
        for part in within:
            places.remove(part)
        left -= places_of([cut])
    assert places_of(places.ranges()) == left
    assert sum(each.size for each in places.ranges()) == len(left)


@given(apart(), any_ranges())
def test_ranges_keep_their_order_and_a_cut_one_gives_its_last_part_first(
    ranges: list[Range], cuts: list[Range]
) -> None:
    places = Places(ranges)
    for cut in cuts:
        for part in places.within(cut):
            places.remove(part)
    order = {place: (number, -place[1]) for number, each in enumerate(ranges) for place in places_of([each])}
    kept = [order[each.epoch, each.start] for each in places.ranges()]
    assert kept == sorted(kept)


@given(apart(), any_ranges())
def test_what_is_added_is_found(ranges: list[Range], others: list[Range]) -> None:
    places = Places(ranges)
    for other in others:
        for part in places.without(other):
            places.add(part)
    assert places_of(places.ranges()) == places_of([*ranges, *others])


@given(any_ranges(), any_ranges())
def test_places_are_united_and_subtracted(one: list[Range], two: list[Range]) -> None:
    whole = united(one)
    assert places_of(whole) == places_of(one)
    assert sum(each.size for each in whole) == len(places_of(one))
    assert places_of(subtract(one, two)) == places_of(one) - places_of(two)
