"""
A shuffled order of any length that takes no memory: the place of each number is computed, not stored.

A billion records must be shuffled the same way by the master, by every worker and after every restart. So the order is a
keyed bijection: a Feistel network over the next even number of bits, walked until the result falls into the range (each
number is walked through four values at most on average). Both directions cost the same. It shuffles for training; it is no
means to hide anything.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 4
_MASK64 = (1 << 64) - 1


class Permutation:
    """Of the numbers from 0 to `size` - 1. The same seed and tweak always give the same one."""

    __slots__ = ("_half_bits", "_half_mask", "_keys", "size")

    def __init__(self, size: int, seed: int, tweak: int = 0) -> None:
        self.size = size
        self._half_bits = max(1, ((max(size - 1, 1)).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        digest = hashlib.blake2b(f"{seed}/{tweak}/{size}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))

    def at(self, place: int) -> int:
        """Which number stands at a place."""
        if not 0 <= place < self.size:
            raise IndexError(f"place {place} of {self.size}")
        value = place
        while True:
            left, right = value >> self._half_bits, value & self._half_mask
            for key in self._keys:
                left, right = right, left ^ self._mix(right, key)
            value = left << self._half_bits | right
            if value < self.size:
                return value

    def place_of(self, number: int) -> int:
        """Where a number stands: the inverse of `at`."""
        if not 0 <= number < self.size:
            raise IndexError(f"number {number} of {self.size}")
        value = number
        while True:
            left, right = value >> self._half_bits, value & self._half_mask
            for key in reversed(self._keys):
                left, right = right ^ self._mix(left, key), left
            value = left << self._half_bits | right
            if value < self.size:
                return value

    def _mix(self, half: int, key: int) -> int:
        """A few multiplications and shifts: enough for an order without pattern."""
        value = (half + key) & _MASK64
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK64
        return (value ^ value >> 31) & self._half_mask
