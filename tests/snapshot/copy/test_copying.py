"""Copying: every byte arrives, whatever the sizes and the alignment, with and without the streaming loop."""

from __future__ import annotations

import ctypes
import mmap
import platform
import random
import threading
from pathlib import Path

import pytest

from dlrover.snapshot.copy.copying import PIECE_BYTES, STREAMING_FROM_BYTES, Copier, CopySpan, address_of, prefault
from dlrover.snapshot.copy.streaming import load_streaming_copy
from tools.build_hook import ROOT, SOURCE, compile_loop

EDGES = [1, 7, 63, 64, 65, STREAMING_FROM_BYTES - 1, STREAMING_FROM_BYTES, STREAMING_FROM_BYTES + 1, PIECE_BYTES + 777]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build with a compiler makes of the source."""
    if platform.machine() != "x86_64":
        pytest.skip("the loop is for x86-64; elsewhere memmove is used")
    made = tmp_path_factory.mktemp("built") / "libstreaming.so.1"
    if not compile_loop(ROOT, made):
        pytest.skip("no C compiler here (install gcc)")
    return made


@pytest.fixture(params=["with the extension", "without it"])
def chosen(request: pytest.FixtureRequest) -> Path | None:
    return request.getfixturevalue("library") if request.param == "with the extension" else None


@pytest.mark.parametrize("num_threads", [1, 3])
def test_blocks_of_all_sizes_arrive_and_nothing_else_changes(chosen: Path | None, num_threads: int) -> None:
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
    copier = Copier(num_threads, library=chosen)
    assert copier.is_streaming is (chosen is not None)
    copier.copy(spans)
    copier.close()
    assert target == wanted


def test_a_copy_in_the_background_ends_with_finish(chosen: Path | None) -> None:
    source, target = bytearray(random.Random(1).randbytes(3 * PIECE_BYTES)), bytearray(3 * PIECE_BYTES)
    copier = Copier(2, library=chosen)
    copy = copier.start([CopySpan(address_of(memoryview(target)), address_of(memoryview(source)), len(source))])
    copy.finish()
    assert copy.is_done()
    assert target == source
    copier.start([]).finish()
    copier.close()


def test_threads_that_share_the_blocks_copy_each_of_them_once(library: Path) -> None:
    loop = load_streaming_copy(library)
    assert loop is not None
    source, target = bytearray(range(256)) * 256, bytearray(1 << 16)
    blocks = [
        (address_of(memoryview(target), at), address_of(memoryview(source), at), 16) for at in range(0, 1 << 16, 16)
    ]
    table = (ctypes.c_uint64 * (3 * len(blocks)))(*(number for block in blocks for number in block))
    counter = ctypes.c_uint64(0)
    copied: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: copied.append(loop(ctypes.addressof(table), len(blocks), ctypes.addressof(counter)))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sum(copied) == len(blocks)
    assert target == source


@pytest.mark.parametrize("content", [None, b"", b"not a library", b"\x7fELF of another machine"])
def test_a_library_that_is_missing_or_cannot_be_loaded_leaves_the_copy_to_memmove(
    content: bytes | None, tmp_path: Path
) -> None:
    built = tmp_path / "libstreaming.so.1"
    if content is not None:
        built.write_bytes(content)
    assert load_streaming_copy(built) is None
    assert not Copier(1, library=built).is_streaming


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("source + 16)", "source + 15)"),  # not what stands there
        ("memcpy(target, source, block->num_bytes)", "(void)0"),  # not the ends
        ("atomic_fetch_add(next, 1)", "num_copied"),  # every thread from the first
    ],
)
def test_a_library_that_does_not_copy_what_it_should_is_not_used(
    library: Path, right: str, wrong: str, tmp_path: Path
) -> None:
    assert load_streaming_copy(library) is not None
    source = (ROOT / SOURCE).read_text()
    assert right in source
    (tmp_path / SOURCE).parent.mkdir(parents=True)
    (tmp_path / SOURCE).write_text(source.replace(right, wrong))
    assert compile_loop(tmp_path, tmp_path / "wrong.so")
    assert load_streaming_copy(tmp_path / "wrong.so") is None


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
