"""Parity: whatever is lost, up to the number of parities, is computed from the rest, bit for bit."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.agent.replicas.gf256_numpy import fastest_add
from dlrover.snapshot import parity


def encode(blocks: list[bytes], num_parity: int) -> list[bytes]:
    length = max(map(len, blocks))
    parities = []
    for row in range(num_parity):
        total = bytearray(length)
        for column, block in enumerate(blocks):
            parity.add_slowly(total, block, parity.coefficient(row, column))
        parities.append(bytes(total))
    return parities


def test_the_first_parity_is_the_xor():
    assert [parity.coefficient(0, column) for column in range(128)] == [1] * 128
    assert encode([b"\x01\x02", b"\x04\x08", b"\x10"], 1) == [b"\x15\x0a"]


@given(st.integers(1, 255), st.integers(1, 255), st.integers(1, 255))
def test_the_field_is_one(a, b, c):
    assert parity.multiply(a, parity.inverse(a)) == 1
    assert parity.multiply(a, parity.multiply(b, c)) == parity.multiply(parity.multiply(a, b), c)
    assert parity.multiply(a, b ^ c) == parity.multiply(a, b) ^ parity.multiply(a, c)


@settings(deadline=None)  # the first one imports numpy
@given(st.binary(max_size=100_000), st.binary(max_size=100_000), st.integers(0, 255))
def test_the_fast_sum_is_the_slow_one(one, other, factor):
    total, block = sorted((one, other), key=len, reverse=True)
    slow, fast = bytearray(total), bytearray(total)
    parity.add_slowly(slow, block, factor)
    fastest_add()(fast, block, factor)
    assert slow == fast


@pytest.mark.parametrize(("num_data", "num_parity"), [(1, 1), (2, 1), (4, 1), (3, 2), (4, 3)])
def test_any_loss_of_as_many_as_there_are_parities_is_made_good(num_data, num_parity):
    """All combinations of lost columns and lost parities; columns of different lengths."""
    source = random.Random(7)
    blocks = [source.randbytes(50 - 7 * column) for column in range(num_data)]
    parities = encode(blocks, num_parity)
    length = len(parities[0])
    places = range(num_data + num_parity)
    for lost in itertools.combinations(places, num_parity):
        missing = [column for column in range(num_data) if column in lost]
        known = {column: blocks[column] for column in range(num_data) if column not in lost}
        left = {row: parities[row] for row in range(num_parity) if num_data + row not in lost}
        for column in missing:
            found = parity.rebuild(length, known, left, missing, column)
            assert found[: len(blocks[column])] == blocks[column]
            assert not any(found[len(blocks[column]) :]), "what was never there is zero"


@settings(max_examples=50)
@given(st.integers(2, 16), st.integers(1, 4), st.data())
def test_every_node_holds_as_much_as_every_other_and_no_stripe_has_two_parts_on_one_node(size, num_parity, data):
    num_parity = min(num_parity, size - 1)
    num_data = size - num_parity
    columns: dict[int, dict[int, int]] = {}
    for position in range(size):
        own = parity.stripes_of(position, size, num_parity)
        assert [each.piece for each in own] == list(range(num_data))
        for each in own:
            assert position not in each.holders
            assert each.piece not in columns.setdefault(each.stripe, {}), "two nodes in one column"
            columns[each.stripe][each.piece] = position
    assert all(len(stripe) == num_data for stripe in columns.values())
    held = [holder for stripe in range(size) for holder in parity.holders_of(stripe, size, num_parity)]
    assert all(held.count(position) == num_parity for position in range(size))


@given(st.integers(0, 10_000), st.integers(1, 8))
def test_pieces_cover_the_image(image_bytes, num_data):
    ranges = [parity.piece_range(image_bytes, num_data, piece) for piece in range(num_data)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == image_bytes
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
    assert all(end - begin <= ranges[0][1] for begin, end in ranges)
