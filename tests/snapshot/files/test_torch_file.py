"""Files written past the page cache: right to the last byte, within limits, and clear when something is in the way."""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dlrover.snapshot.files.direct_io import (
    FilePiece,
    WriteOptions,
    WriteStopped,
    WrittenFile,
    file_crc32,
    image_chunks,
    write_file,
)
from dlrover.snapshot.files.torch_file import torch_file_chunks, write_torch_file


def on_a_page(content: bytes) -> memoryview:
    area = mmap.mmap(-1, max(1, len(content)))
    area[: len(content)] = content
    return memoryview(area)[: len(content)]


def check_archive(path: Path, pickled: bytes, storages: list[memoryview]) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data.pkl") == pickled
        for number, storage in enumerate(storages):
            name = f"archive/data/{number}"
            assert archive.read(name) == bytes(storage)
            where = archive.getinfo(name)
            with path.open("rb") as file:
                file.seek(where.header_offset + 26)
                lengths = file.read(4)
            start = (
                where.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            )
            assert start % (4096 if len(storage) >= 1 << 20 else 64) == 0


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_archives_of_all_sizes_are_read_by_any_unzip(tmp_path: Path, direct: bool, num_threads: int) -> None:
    dice = random.Random(7)
    sizes = [0, 1, 63, 64, 65, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, (17 << 20) + 4095, 100, 3 << 20]
    storages = [on_a_page(dice.randbytes(size)) for size in sizes]
    path = tmp_path / "state.pt"
    written = write_torch_file(
        path, b"a pickle", storages, options=WriteOptions(direct=direct, num_threads=num_threads, nice=1)
    )
    assert written == file_crc32(path) == WrittenFile(path.stat().st_size, zlib.crc32(path.read_bytes()))
    check_archive(path, b"a pickle", storages)


@settings(max_examples=25, deadline=None)
@given(
    some.lists(
        some.one_of(some.integers(0, 300), some.integers(4000, 4200), some.integers(1 << 20, 1 << 21)), max_size=12
    )
)
def test_stream_and_file_are_the_same_bytes(sizes: list[int]) -> None:
    storages = [on_a_page(random.Random(size).randbytes(size)) for size in sizes]
    path = Path(f"/dev/shm/dlrover-test-{os.getpid()}.pt")
    try:
        written = write_torch_file(path, b"p", storages)
        streamed, chunks = torch_file_chunks(b"p", storages)
        assert path.read_bytes() == b"".join(chunks)
        assert written == streamed
    finally:
        path.unlink(missing_ok=True)


def test_more_than_sixty_five_thousand_storages(tmp_path: Path) -> None:
    """The old directory of zip files counts in 16 bits; above that it needs the larger one."""
    path = tmp_path / "many.pt"
    write_torch_file(path, b"p", [memoryview(b"x")] * 65_600)
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == 65_603
        assert archive.read("archive/data/65599") == b"x"


def test_entries_behind_four_gibibytes_are_found(tmp_path: Path) -> None:
    """With holes instead of bytes: the sizes are real, the disk space is not."""
    large = mmap.mmap(-1, 5 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    view = memoryview(large)
    from dlrover.snapshot.files import torch_file

    pieces, late, total = torch_file.torch_image(b"p", [view, memoryview(b"end")])
    headers = late([0] * len(pieces))
    path = tmp_path / "huge.pt"
    with path.open("wb") as file:
        file.truncate(total)
        for offset, content in [*headers, pieces[0], pieces[-2], pieces[-1]]:
            os.pwrite(file.fileno(), content, offset)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == 5 << 30
        where = archive.getinfo("archive/data/1")
        assert where.header_offset > 5 << 30
    torch = pytest.importorskip("torch")
    reader = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record("data/1") == b"end"
    assert reader.get_record_offset("data/0") % 4096 == 0


def test_progress_is_told_up_to_the_end(tmp_path: Path) -> None:
    seen: list[int] = []
    written = write_torch_file(tmp_path / "f", b"p", [on_a_page(bytes(20 << 20))], on_progress=seen.append)
    assert max(seen) == written.size_bytes
    assert len(seen) >= 3


def test_a_passed_deadline_ends_the_writing(tmp_path: Path) -> None:
    storages = [on_a_page(bytes(1 << 20))] * 4
    with pytest.raises(WriteStopped, match="before the deadline"):
        write_torch_file(tmp_path / "late", b"", storages, options=WriteOptions(deadline_at=time.monotonic() - 1))


def test_a_limit_that_would_miss_the_deadline_is_told_at_once(tmp_path: Path) -> None:
    storages = [on_a_page(bytes(1 << 20))] * 4
    options = WriteOptions(bytes_per_second=10.0, deadline_at=time.monotonic() + 3600, num_threads=1)
    with pytest.raises(WriteStopped, match="before the deadline"):
        write_torch_file(tmp_path / "slow", b"", storages, options=options)


def test_in_a_hurry_no_limit_counts(tmp_path: Path) -> None:
    hurry = threading.Event()
    options = WriteOptions(bytes_per_second=1.0, hurry=hurry, num_threads=1)
    storages = [on_a_page(bytes(1 << 20))] * 2
    begun_at = time.monotonic()
    write_torch_file(tmp_path / "f", b"", storages, options=options, on_progress=lambda _: hurry.set())
    assert time.monotonic() - begun_at < 30  # by the limit it would take three weeks
    check_archive(tmp_path / "f", b"", storages)


def test_somebody_else_can_stop_the_writing(tmp_path: Path) -> None:
    stop = threading.Event()
    with pytest.raises(WriteStopped, match="was stopped"):
        write_torch_file(
            tmp_path / "f", b"", [on_a_page(bytes(1 << 20))] * 4, on_progress=lambda _: stop.set(), stop=stop
        )


def test_a_missing_directory_and_a_full_disk_are_the_systems_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_torch_file(tmp_path / "no" / "f", b"", [])
    with pytest.raises(OSError, match="No space left") as caught:
        write_file("/dev/full", [], lambda sums: [FilePiece(0, b"x")], 1, options=WriteOptions(direct=False))
    assert caught.value.errno == errno.ENOSPC


def test_pieces_with_gaps_are_padded_with_zeros(tmp_path: Path) -> None:
    pieces = [FilePiece(10, b"abc"), FilePiece(9000, b"xyz")]
    path = tmp_path / "f"
    written = write_file(path, pieces, lambda sums: [FilePiece(0, b"head")], 9003)
    wanted = b"head" + bytes(6) + b"abc" + bytes(9000 - 13) + b"xyz"
    assert path.read_bytes() == wanted
    streamed, chunks = image_chunks(pieces, lambda sums: [FilePiece(0, b"head")], 9003)
    assert b"".join(chunks) == wanted
    assert written == streamed


def test_a_file_can_be_written_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    """The last checkpoint of a training: its writer outlives the script."""
    script = """
import sys, threading
from dlrover.snapshot.files.direct_io import file_crc32
from dlrover.snapshot.files.torch_file import write_torch_file

def write():
    threading.main_thread().join()
    written = write_torch_file(sys.argv[1], b"pickle", [memoryview(bytes(range(256)) * 5000)])
    assert file_crc32(sys.argv[1]) == written

threading.Thread(target=write).start()
"""
    path = tmp_path / "file.pt"
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    check_archive(path, b"pickle", [memoryview(bytes(range(256)) * 5000)])
