"""Checksums: the same by whatever way they are computed, and different after any flip."""

from __future__ import annotations

import random
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dlrover.snapshot.checksum import (
    CHUNK_BYTES,
    Algorithm,
    Unverifiable,
    best_algorithm,
    checksum_function,
    chunk_checksums,
    combine_crc32,
    find_corrupt_chunks,
    joint_checksum,
)


@given(some.binary(max_size=300), some.binary(max_size=300))
def test_the_sum_of_two_blocks_is_the_combination_of_theirs(first: bytes, second: bytes) -> None:
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(some.lists(some.binary(max_size=100), max_size=4), some.sampled_from([Algorithm.CRC32, best_algorithm()]))
def test_the_sum_of_several_buffers_is_that_of_all_of_them_in_one(parts: list[bytes], algorithm: Algorithm) -> None:
    whole = checksum_function(algorithm)(memoryview(b"".join(parts)))
    assert joint_checksum(map(memoryview, parts), algorithm) == whole


def test_a_flip_is_found_in_its_chunk() -> None:
    data = bytearray(random.Random(3).randbytes(2 * CHUNK_BYTES + 100))
    algorithm = best_algorithm()
    with ThreadPoolExecutor(2) as pool:
        sums = chunk_checksums(memoryview(data), algorithm, pool)
        assert sums == chunk_checksums(memoryview(data), algorithm)
        data[CHUNK_BYTES + 5] ^= 1
        assert find_corrupt_chunks(memoryview(data), sums, algorithm, pool) == [1]
    assert find_corrupt_chunks(memoryview(data)[:CHUNK_BYTES], sums, algorithm) == [0, 1, 2]


def test_crc32c_has_its_known_value() -> None:
    pytest.importorskip("crc32c")
    assert checksum_function(Algorithm.CRC32C)(memoryview(b"123456789")) == 0xE3069283


def test_without_the_wheel_zlib_takes_over_and_old_sums_are_named_unverifiable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "crc32c", None)
    assert best_algorithm() is Algorithm.CRC32
    with pytest.raises(Unverifiable, match="pip install crc32c"):
        checksum_function(Algorithm.CRC32C)
