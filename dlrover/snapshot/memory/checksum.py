"""
Checksums of snapshots, per piece, so that checking goes in parallel and a flipped bit is found where it is.

It is the CRC-32 of zip files. The `isal` wheel counts it with the processor's instructions: 0.14 s of a processor per GiB here, where zlib takes
0.56 s. It takes views of memory as they are and gives up the interpreter lock while it counts. `benchmarks/checksums.py` compares others.
Where it is not installed zlib counts the same sum. The algorithm is stored beside the sums all the same, so that another can follow.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import cache, lru_cache

from dlrover.protocol.errors import DLRoverError

CHUNK_BYTES = 16 * 1024 * 1024


class Algorithm(enum.IntEnum):
    CRC32 = 1
    """zlib's, as in zip files."""


class Corrupt(DLRoverError):
    """Stored bytes are not the ones that were written."""


Checksum = Callable[[memoryview], int]


def algorithm_of(number: int) -> Algorithm:
    """Of what another process says. Raises Corrupt."""
    try:
        return Algorithm(number)
    except ValueError as error:
        raise Corrupt(
            f"The snapshot uses the checksum algorithm {number}, which this version does not know. Use the "
            "dlrover that made the snapshot."
        ) from error


def best_algorithm() -> Algorithm:
    return Algorithm.CRC32


@cache
def checksum_function(algorithm: Algorithm) -> Checksum:
    """The fastest that is installed."""
    assert algorithm is Algorithm.CRC32, f"there is no implementation of {algorithm}"
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        return zlib.crc32
    return crc32


def crc32(data: memoryview | bytes | bytearray, before: int = 0) -> int:
    """The sum of zip files, counted on from that of what stands before."""
    function: Callable[..., int] = checksum_function(Algorithm.CRC32)
    return function(data, before)


def chunk_checksums(data: memoryview, algorithm: Algorithm, pool: Executor | None = None) -> list[int]:
    """One sum per chunk of the buffer; with a pool several chunks at a time."""
    function = checksum_function(algorithm)
    data = data.cast("B")
    chunks = [data[start : start + CHUNK_BYTES] for start in range(0, data.nbytes, CHUNK_BYTES)]
    return list(pool.map(function, chunks) if pool is not None else map(function, chunks))


def joint_checksum(parts: Iterable[memoryview], algorithm: Algorithm) -> int:
    """Of several buffers as if they were one."""
    function: Callable[..., int] = checksum_function(algorithm)
    total = 0
    for part in parts:
        total = function(part, total)  # both count on from a sum that is given
    return total


def find_corrupt_chunks(
    data: memoryview, sums: Sequence[int], algorithm: Algorithm, pool: Executor | None = None
) -> list[int]:
    """Numbers of the chunks that differ; a buffer of another length differs in all of them."""
    found = chunk_checksums(data, algorithm, pool)
    if len(found) != len(sums):
        return list(range(max(len(found), len(sums))))
    return [number for number, (is_now, was) in enumerate(zip(found, sums, strict=True)) if is_now != was]


def combine_crc32(first: int, second: int, second_length: int) -> int:
    """
    CRC-32 of two blocks that follow each other, from the sums of each.

    Shifting a sum past n bytes is a multiplication by x^(8n) modulo the polynomial. zlib can do it, Python does not pass it on.
    """
    return _multiply(_power_of_x(8 * second_length), first) ^ second


_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000  # bit-reversed: the highest bit is x^0


def _multiply(a: int, b: int) -> int:
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=1024)
def _power_of_x(exponent: int) -> int:
    power, square = _ONE, _ONE >> 1  # x^0 and x^1
    while exponent:
        if exponent & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        exponent >>= 1
    return power
