"""
Parity of equal blocks: of k blocks and m parities any k are enough to compute the others.

The first parity is the plain XOR of the blocks; further ones are sums over GF(256) with coefficients of a Cauchy matrix whose columns
were scaled so that its first row is all ones. Every square part of such a matrix can be inverted, which is what "any" above rests on.

The arithmetic itself can be given from outside (`Add`): what is here needs only the standard library, where a product with a constant is
`bytes.translate` with a table of 256, and a sum is an XOR of two long integers.

A node's share of parity: in a group of n = k + m nodes every node cuts its image into k pieces and is data in k stripes and parity in m, so
all have the same work and the same memory. In stripe t the nodes t, t+1, ... t+m-1 hold the parities, the others are the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

from msgspec import Struct

_SLOW_BLOCK_BYTES = 16 * 1024
"""Longer integers take longer per byte, and keep other threads waiting."""
MOST_NODES = 128
"""x and y of the Cauchy matrix are different bytes."""

_POLYNOMIAL = 0x11D


def _make_tables() -> tuple[list[int], list[int]]:
    powers, logs = [0] * 510, [0] * 256
    value = 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logs[value] = exponent
        value <<= 1
        if value & 0x100:
            value ^= _POLYNOMIAL
    return powers, logs


_POWERS, _LOGS = _make_tables()


def multiply(a: int, b: int) -> int:
    return 0 if not a or not b else _POWERS[_LOGS[a] + _LOGS[b]]


def inverse(a: int) -> int:
    assert a, "zero has no inverse"
    return _POWERS[255 - _LOGS[a]]


def coefficient(row: int, column: int) -> int:
    """Of a column's block in a parity; row 0 is the XOR."""
    assert 0 <= row < MOST_NODES, f"row {row}"
    assert 0 <= column < MOST_NODES, f"column {column}"
    return multiply(
        inverse(row ^ (MOST_NODES + column)), MOST_NODES + column
    )  # the first row would be 1 / (128 + column)


@cache
def table(factor: int) -> bytes:
    return bytes(multiply(factor, value) for value in range(256))


class Add(Protocol):
    """`total += factor * block`, in place; a block that is shorter counts as filled up with zeros."""

    def __call__(
        self, total: bytearray | memoryview, block: bytes | bytearray | memoryview, factor: int = 1
    ) -> None: ...


def add_slowly(total: bytearray | memoryview, block: bytes | bytearray | memoryview, factor: int = 1) -> None:
    """With nothing but the standard library; an array library is about forty times faster."""
    view = memoryview(total)
    for start in range(0, len(block), _SLOW_BLOCK_BYTES):
        part = bytes(block[start : start + _SLOW_BLOCK_BYTES])
        scaled = part if factor == 1 else part.translate(table(factor))
        with view[start : start + len(part)] as here:
            number = int.from_bytes(here, "little") ^ int.from_bytes(scaled, "little")
            here[:] = number.to_bytes(len(part), "little")


def solve(missing: Sequence[int], rows: Sequence[int], wanted: int) -> list[int]:
    """
    Factors for computing one missing column: with parities from which all known columns were subtracted, in the order of `rows`.

    There must be as many rows as missing columns.
    """
    count = len(missing)
    assert len(rows) == count, f"{len(rows)} parities for {count} missing columns"
    matrix = [[coefficient(row, column) for column in missing] for row in rows]
    unit = [[int(i == j) for j in range(count)] for i in range(count)]
    for pivot in range(count):
        at = next(index for index in range(pivot, count) if matrix[index][pivot])
        for table in (matrix, unit):
            table[pivot], table[at] = table[at], table[pivot]
        factor = inverse(matrix[pivot][pivot])
        for table in (matrix, unit):
            table[pivot] = [multiply(factor, value) for value in table[pivot]]
        for other in range(count):
            if other != pivot and (factor := matrix[other][pivot]):
                for table in (matrix, unit):
                    table[other] = [
                        value ^ multiply(factor, above) for value, above in zip(table[other], table[pivot], strict=True)
                    ]
    return unit[missing.index(wanted)]


def rebuild(
    length: int,
    known: Mapping[int, bytes | bytearray],
    parities: Mapping[int, bytes | bytearray],
    missing: Sequence[int],
    wanted: int,
    *,
    add: Add = add_slowly,
) -> bytearray:
    """The block of a missing column, from the known columns and as many parities as columns are missing."""
    rows = sorted(parities)[: len(missing)]
    result = bytearray(length)
    for row, factor in zip(rows, solve(missing, rows, wanted), strict=True):
        if factor:
            rest = bytearray(length)
            add(rest, parities[row])
            for column, block in known.items():
                add(rest, block, coefficient(row, column))
            add(result, rest, factor)
    return result


class Stripe(Struct, frozen=True):
    """Where one piece of a node goes."""

    piece: int
    """Which piece of the node's image, and its column in the stripe."""
    stripe: int
    holders: tuple[int, ...]
    """Positions in the group that hold the stripe's parities, by row."""


def stripes_of(position: int, num_nodes: int, num_parity: int) -> list[Stripe]:
    """For a node of the group: where each of its pieces goes."""
    found = []
    for piece in range(num_nodes - num_parity):
        stripe = (position - num_parity - piece) % num_nodes
        found.append(Stripe(piece, stripe, holders_of(stripe, num_nodes, num_parity)))
    return found


def holders_of(stripe: int, num_nodes: int, num_parity: int) -> tuple[int, ...]:
    return tuple((stripe + row) % num_nodes for row in range(num_parity))


def piece_range(image_bytes: int, num_data: int, piece: int) -> tuple[int, int]:
    """Begin and end of a piece; the last ones may be shorter, or empty."""
    size = -(-image_bytes // num_data)
    return min(piece * size, image_bytes), min((piece + 1) * size, image_bytes)
