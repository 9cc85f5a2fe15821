"""
The floors below three budgets of checkpoints: what the machine itself takes, in the same process and in turn with ours.

    python benchmarks/checkpoint_floors.py                       all three, about a minute on a quiet machine
    python benchmarks/checkpoint_floors.py --parts pages --gb 4  how long the host takes to give so many pages

`lazy`: the processor time of a lazy save's call, beside one question (`data_ptr`) to each tensor. Before each, other data fills the caches, as a step does.
`pages`: fresh shared memory, first and second touch. `cold`: a file that is not in the page cache: ours with its sums, without them, and `torch.load`.
Processor times are those of the calling thread (`lazy`) or the process (`cold`): they bear a busy machine better than the time of day.
"""

from __future__ import annotations

import argparse
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from checkpoint_state import build, shape_for, tensors_of
from figures import summarise, table
from rounds import measuring

from dlrover.snapshot.files.direct_io import file_crc32
from dlrover.snapshot.storage.manifest import FileRecord
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover.trainer.torch.flash_checkpoint.restoring.reading import read_file

PARTS = ("lazy", "pages", "cold")
PAGE = mmap.PAGESIZE
CACHE_BYTES = 64 * 2**20
"""More than the caches of a processor hold."""
Timed = tuple[float, float]
"""Seconds of the day and of the processor."""


def timed(work: Callable[[], object], clock: Callable[[], float]) -> Timed:
    began_at, used = time.perf_counter(), clock()
    work()
    return time.perf_counter() - began_at, clock() - used


def row(name: str, samples: Sequence[Timed]) -> tuple[str, str, str, str]:
    wall, used = summarise([each for each, _ in samples]), summarise([each for _, each in samples])
    assert wall is not None
    assert used is not None
    return (
        name,
        f"{1e3 * wall.median:.2f}",
        f"{1e3 * used.median:.2f}",
        f"{1e3 * used.lowest:.2f}-{1e3 * used.highest:.2f}",
    )


def lazy(folder: Path, num_bytes: int, num_saves: int) -> list[tuple[str, str, str, str]]:
    training = build(shape_for(num_bytes), seed=1, num_threads=2, is_distributed=False)
    checkpointer = DdpCheckpointer(str(folder), lazy=True)
    calls: list[Timed] = []
    looks: list[Timed] = []
    num_tensors = 0
    try:
        for number in range(num_saves + 2):
            training.forward_and_backward(number)
            training.optimizer.step()
            state = training.state(number)
            tensors = list(tensors_of(state))
            num_tensors = len(tensors)
            fill_caches(number)
            look = timed(lambda tensors=tensors: [each.data_ptr() for each in tensors], time.thread_time)
            fill_caches(number)
            call = timed(
                lambda number=number, state=state: checkpointer.save_checkpoint(
                    number + 1, state, storage_type=StorageType.MEMORY
                ),
                time.thread_time,
            )
            if number >= 2:  # the first ones make the segment and the plan
                looks.append(look)
                calls.append(call)
    finally:
        checkpointer.close()
    return [row(f"lazy save, {num_tensors} tensors", calls), row("one question to each of them", looks)]


def fill_caches(number: int) -> None:
    torch.empty(CACHE_BYTES, dtype=torch.uint8).fill_(number % 251)


def pages(num_bytes: int) -> list[tuple[str, str, str, str]]:
    fd = os.memfd_create("floor")
    try:
        os.ftruncate(fd, num_bytes)
        with mmap.mmap(fd, num_bytes) as memory:

            def touch() -> None:
                memory[::PAGE] = bytes(num_bytes // PAGE)

            first, second = timed(touch, time.process_time), timed(touch, time.process_time)
    finally:
        os.close(fd)
    return [row("first touch of each page", [first]), row("second touch", [second])]


def cold(folder: Path, num_bytes: int, num_rounds: int) -> list[tuple[str, str, str, str]]:
    path = str(folder / "state.pt")
    state = {str(number): torch.randn(num_bytes // 160) for number in range(40)}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    torch.save(state, path)
    written = file_crc32(path)
    record = FileRecord(path="state.pt", size_bytes=written.size_bytes, crc32=written.crc32)
    ways: dict[str, Callable[[], object]] = {
        "ours, summed": lambda: read_file(path, record, into=into),
        "ours, without sums": lambda: read_file(path, into=into),
        "torch.load": lambda: torch.load(path, weights_only=True),
    }
    samples: dict[str, list[Timed]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, read in ways.items():
            forget(path)
            samples[name].append(timed(read, time.process_time))
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items()), "other bytes than were written"
    return [row(name, found) for name, found in samples.items()]


def forget(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"(default {','.join(PARTS)})")
    parser.add_argument("--gb", type=float, default=0.25, help="of the state (default 0.25)")
    parser.add_argument("--times", type=int, default=7, help="(default 7)")
    options = parser.parse_args()
    num_bytes = int(options.gb * 2**30) // PAGE * PAGE
    torch.set_num_threads(2)
    with measuring("dlrover-floors-") as folder:
        work = {
            "lazy": lambda: lazy(folder / "lazy", num_bytes, options.times),
            "pages": lambda: pages(num_bytes),
            "cold": lambda: cold(folder, num_bytes, options.times),
        }
        for part in options.parts.split(","):
            head = (f"{part}, {options.gb:g} GiB", "ms, median", "processor ms, median", "min-max")
            print(f"{table(head, work[part]())}\n", flush=True)


if __name__ == "__main__":
    main()
