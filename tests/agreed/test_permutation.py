"""The order without memory: a bijection, the same for ever, and without an obvious pattern."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.agreed.permutation import Permutation


@given(st.integers(1, 2000), st.integers(0, 2**64 - 1), st.integers(0, 100))
def test_every_number_stands_at_exactly_one_place(size: int, seed: int, tweak: int) -> None:
    order = Permutation(size, seed, tweak)
    numbers = [order.at(place) for place in range(size)]
    assert sorted(numbers) == list(range(size))
    assert [order.place_of(number) for number in numbers] == list(range(size))


@given(st.integers(1, 10**12), st.integers(0, 2**64 - 1), st.data())
def test_places_are_found_again_in_any_size(size: int, seed: int, data: st.DataObject) -> None:
    order = Permutation(size, seed)
    place = data.draw(st.integers(0, size - 1))
    assert order.place_of(order.at(place)) == place


def test_the_order_never_changes() -> None:
    # A checkpoint of today must mean the same samples tomorrow: these numbers are for ever.
    order = Permutation(1000, seed=7, tweak=3)
    assert [order.at(place) for place in range(8)] == [823, 693, 287, 878, 851, 643, 898, 586]


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [[Permutation(100, seed, tweak).at(place) for place in range(100)] for seed in (1, 2) for tweak in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("size", [100, 1000, 4096, 10_001])
def test_neighbours_do_not_stay_neighbours(size: int) -> None:
    order = Permutation(size, seed=11)
    numbers = [order.at(place) for place in range(size)]
    close = sum(abs(one - two) == 1 for one, two in itertools.pairwise(numbers))
    assert close < 12, "of a random order two are expected, whatever its length"
    average = sum(abs(number - place) for place, number in enumerate(numbers)) / size
    assert size / 4 < average < size / 2.4, "a third of the length in a random order"


def test_places_outside_are_refused() -> None:
    order = Permutation(10, seed=0)
    for wrong in (-1, 10):
        with pytest.raises(IndexError):
            order.at(wrong)
        with pytest.raises(IndexError):
            order.place_of(wrong)
