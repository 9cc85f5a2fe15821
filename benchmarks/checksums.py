"""
What the checksums cost that snapshots could use, each with the licence of its package.

    python benchmarks/checksums.py            # those that are installed here

A snapshot is summed in pieces of 16 MiB while the training goes on. So two things count: the processor's time for a GiB, and whether other
threads run meanwhile, which they do only if the function gives up the interpreter lock. The time of the processor is compared and not
that of the clock: on a busy machine the clock counts the neighbours, too.
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import statistics
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

CHUNK_BYTES = 16 * 1024 * 1024
GIB = 1 << 30

Checksum = Callable[[memoryview], int]

CANDIDATES: dict[str, tuple[str, str, Callable[[Any], Checksum]]] = {
    "zlib": ("zlib", "Zlib, part of Python", lambda module: zlib.crc32),
    "isal": ("isal.isal_zlib", "PSF-2.0", lambda module: module.crc32),
    "zlib-ng": ("zlib_ng.zlib_ng", "PSF-2.0", lambda module: module.crc32),
    "crc32c": ("crc32c", "LGPL-2.1-or-later", lambda module: module.crc32c),
    "google-crc32c": (
        "google_crc32c",
        "Apache-2.0",
        lambda module: lambda data: module.extend(0, data.toreadonly()),
    ),
    "awscrt": ("awscrt.checksums", "Apache-2.0", lambda module: module.crc32c),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the checksums cost that snapshots could use.")
    parser.add_argument("--times", type=int, default=7, help="rounds; the median counts")
    rounds = parser.parse_args().times
    memory = mmap.mmap(-1, GIB)
    memory[:] = bytes(range(256)) * (GIB // 256)
    data = memoryview(memory)
    took: dict[str, list[float]] = {}
    functions: dict[str, Checksum] = {}
    for name, (module, _licence, choose) in CANDIDATES.items():
        try:
            function = choose(importlib.import_module(module))
            function(data[:CHUNK_BYTES])
        except (ImportError, TypeError) as error:
            print(f"{name}: left out, {error}")
            continue
        functions[name] = function
    for _ in range(rounds):  # interleaved: what disturbs the machine disturbs all
        for name, function in functions.items():
            begun_at = time.thread_time()
            for start in range(0, GIB, CHUNK_BYTES):
                function(data[start : start + CHUNK_BYTES])
            took.setdefault(name, []).append(time.thread_time() - begun_at)
    print(f"{'':<16}{'s per GiB':>10}{'least':>8}  {'others run':<12}licence    (processor time, median of {rounds})")
    for name, function in functions.items():
        lets_others = "yes" if gives_up_the_lock(function, data) else "no"
        figures = f"{statistics.median(took[name]):>10.3f}{min(took[name]):>8.3f}"
        print(f"{name:<16}{figures}  {lets_others:<12}{CANDIDATES[name][1]}")


def gives_up_the_lock(function: Checksum, data: memoryview) -> bool:
    """Whether this thread gets anything done while another is inside of one call for all bytes."""
    is_inside, is_done = threading.Event(), threading.Event()

    def work() -> None:
        is_inside.set()
        function(data)
        is_done.set()

    thread = threading.Thread(target=work)
    num_turns = 0
    thread.start()
    is_inside.wait()
    while not is_done.is_set():
        num_turns += 1
    thread.join()
    return num_turns > 10_000


if __name__ == "__main__":
    main()
