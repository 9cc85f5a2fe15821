"""Checksums: the same by whatever way they are computed, and different after any flip."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dlrover.snapshot.memory.checksum import (
    CHUNK_BYTES,
    Algorithm,
    Corrupt,
    algorithm_of,
    best_algorithm,
    checksum_function,
    chunk_checksums,
    combine_crc32,
    find_corrupt_chunks,
    joint_checksum,
)
from dlrover.snapshot.memory.segment_format import Sums, decode_sums, encode_sums


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


@given(some.binary(max_size=2000), some.integers(0, 2**32 - 1))
def test_the_fast_sum_is_that_of_zlib(data: bytes, begin: int) -> None:
    """So a node without the wheel checks what another has summed."""
    function: Callable[..., int] = checksum_function(Algorithm.CRC32)
    assert function(memoryview(data)) == zlib.crc32(data)
    assert function(memoryview(bytearray(data)), begin) == zlib.crc32(data, begin)


def test_without_the_wheel_zlib_takes_over() -> None:
    code = (
        "import sys; sys.modules['isal'] = None; import zlib\n"
        "from dlrover.snapshot.memory.checksum import Algorithm, checksum_function\n"
        "assert checksum_function(Algorithm.CRC32) is zlib.crc32"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_sums_of_an_algorithm_that_we_do_not_know_are_none() -> None:
    encoded = bytearray(encode_sums(7, Sums(Algorithm.CRC32, (1, 2))))
    assert decode_sums(bytes(encoded), 7) == Sums(Algorithm.CRC32, (1, 2))
    encoded[8] = 2  # CRC32C, which earlier versions used
    encoded[-4:] = zlib.crc32(encoded[:-4]).to_bytes(4, "little")
    assert decode_sums(bytes(encoded), 7) is None
    with pytest.raises(Corrupt, match="algorithm 2, which this version does not know"):
        algorithm_of(2)
