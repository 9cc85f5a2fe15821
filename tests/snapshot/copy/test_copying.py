"""Copying: every byte arrives, whatever the sizes and the alignment, with and without the streaming loop."""

from __future__ import annotations

import mmap
import platform
import random
import threading

import pytest

from dlrover.snapshot.copy.copying import PIECE_BYTES, STREAMING_FROM_BYTES, Copier, CopySpan, address_of, prefault
from dlrover.snapshot.copy.streaming import load_streaming_copy

EDGES = [1, 7, 63, 64, 65, STREAMING_FROM_BYTES - 1, STREAMING_FROM_BYTES, STREAMING_FROM_BYTES + 1, PIECE_BYTES + 777]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_blocks_of_all_sizes_arrive_and_nothing_else_changes(streaming: bool, num_threads: int) -> None:
    dice = random.Random(num_threads)
    sizes = EDGES + [dice.randrange(1, 3000) for _ in range(300)]
    gaps = [dice.randrange(1, 100) for _ in sizes]
    total = sum(sizes) + sum(gaps)
    source, target = bytearray(dice.randbytes(total)), bytearray(b"\xaa" * total)
    wanted = bytearray(b"\xaa" * total)
    spans = []
    at = 0
    for size, gap in zip(sizes, gaps, strict=True):
        at += gap
        start = total - at - size  # from elsewhere, so that both alignments differ
        wanted[at : at + size] = source[start : start + size]
        spans.append(CopySpan(address_of(memoryview(target), at), address_of(memoryview(source), start), size))
        at += size
    copier = Copier(num_threads, streaming=streaming)
    copier.copy(spans)
    copier.close()
    assert target == wanted


def test_a_copy_in_the_background_ends_with_finish() -> None:
    source, target = bytearray(random.Random(1).randbytes(3 * PIECE_BYTES)), bytearray(3 * PIECE_BYTES)
    copier = Copier(2)
    copy = copier.start([CopySpan(address_of(memoryview(target)), address_of(memoryview(source)), len(source))])
    copy.finish()
    assert copy.is_done()
    assert target == source
    copier.start([]).finish()
    copier.close()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the loop is for x86-64; elsewhere memmove is used")
def test_the_streaming_loop_runs_here() -> None:
    loop = load_streaming_copy()
    assert loop is not None, "this machine forbids executable memory: saves are slower"
    assert Copier(1).is_streaming


def test_prefaulting_changes_nothing_and_can_be_stopped() -> None:
    content = random.Random(2).randbytes(1 << 20)
    area = mmap.mmap(-1, 1 << 20)
    area[:] = content
    assert prefault(memoryview(area)) is True
    assert area[:] == content
    stop = threading.Event()
    stop.set()
    assert prefault(memoryview(area), stop) is False
    assert prefault(memoryview(area)[:0]) is True
