"""
What the machine can do at best: copy so many bytes in memory, and write them to the disk. The limits of the checkpoint benchmark.

    python benchmarks/checkpoint_limits.py --bytes 64000000 --dir DIR --out LIMITS.json

The copy is the C library's, from private memory into a file in shared memory, all pages touched before, one contiguous block per thread: the best
that a save could be. The disk is written by `dd` with direct I/O from shared memory, in order, and synced.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

THREADS = (1, 2)
"""As many as our copier uses on two cores, and one."""
BLOCK = 4096
NOISE_BYTES = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="on the disk that checkpoints go to")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    num_bytes = -(-args.bytes // BLOCK) * BLOCK
    samples: dict[str, list[float]] = {}
    descriptor, name = tempfile.mkstemp(prefix="checkpoint-limits-", dir="/dev/shm")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        with mmap.mmap(descriptor, num_bytes) as shared, mmap.mmap(-1, num_bytes) as private:
            fill_with_noise(private)
            for repeat in range(args.repeats + 1):
                for num_threads in THREADS:
                    took = copy(shared, private, num_threads)
                    if repeat:  # the first touches the pages
                        samples.setdefault(f"memcpy_{num_threads}", []).append(took)
        for _ in range(max(2, args.repeats // 2)):
            samples.setdefault("dd", []).append(write_to_disk(name, args.dir / "limits.bin"))
    finally:
        os.close(descriptor)
        os.unlink(name)
    args.out.write_text(json.dumps({"samples": samples}))
    return 0


def fill_with_noise(buffer: mmap.mmap) -> None:
    """Zeros could be stored as nothing."""
    noise = os.urandom(NOISE_BYTES)
    for start in range(0, len(buffer), NOISE_BYTES):
        end = min(start + NOISE_BYTES, len(buffer))
        buffer[start:end] = noise[: end - start]


def copy(target: mmap.mmap, source: mmap.mmap, num_threads: int) -> float:
    """Seconds for all bytes, each thread one contiguous part."""
    to, from_ = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (target, source))
    part = len(target) // num_threads // BLOCK * BLOCK
    bounds = [(number * part, part) for number in range(num_threads - 1)]
    bounds.append(((num_threads - 1) * part, len(target) - (num_threads - 1) * part))
    threads = [
        threading.Thread(target=ctypes.memmove, args=(to + start, from_ + start, length))
        for start, length in bounds[1:]
    ]
    began_at = time.perf_counter()
    for thread in threads:
        thread.start()
    ctypes.memmove(to + bounds[0][0], from_ + bounds[0][0], bounds[0][1])
    for thread in threads:
        thread.join()
    return time.perf_counter() - began_at


def write_to_disk(source: str, target: Path) -> float:
    dd = shutil.which("dd")
    if dd is None:
        raise SystemExit("dd is not installed, so the speed of the disk cannot be measured")
    command = [dd, f"if={source}", f"of={target}", "bs=8M", "oflag=direct", "conv=fsync", "status=none"]
    began_at = time.perf_counter()
    try:
        subprocess.run(command, check=True, timeout=600)
        return time.perf_counter() - began_at
    finally:
        target.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
