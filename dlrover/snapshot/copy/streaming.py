"""
Copying past the cache: stores that do not first read the line they overwrite.

A snapshot is written once and read much later, so it has no business in the cache. The C library knows that and copies
*very* large blocks with non-temporal stores, but here only from 192 MiB on (it derives the limit from the size of a cache that
virtual machines report wrongly), while tensors have a few megabytes. Below the limit every line is read before it is
overwritten, half as much traffic again: 1 GiB took 0.108 s in pieces of 16 MiB, 0.069 s in one block, and 0.050 s with the loop
below in two threads (2-core EPYC). With eight other programs on the machine, tensors of 4 MiB: 0.36 s with the library's copy in two threads,
0.20 s with the loop in one or two.

It takes its work itself: threads that share a list of blocks and a counter fetch the next block without the interpreter, whose lock they would
otherwise need between any two tensors, and which the training thread, busy with Python, may keep for 5 ms each time.

No library that Python can call offers this, so the loop is C source beside this module, `streaming.c`. The package's build compiles it, where there is
a compiler, into a library that needs no header and no version of Python (`tools/build_hook.py`); `python -m tools.build_hook` does so by hand. Where no
library was built or it does not fit this machine, or does not copy what it should in a trial, `ctypes.memmove` takes its place: same result, slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

Stream = Callable[[int, int, int], int]
"""
Address of blocks (target, source, number of bytes: 64 bits each), how many, and address of the counter (64 bits, 0 at first). Copies blocks until none is
left, without the interpreter lock, and says how many this call has copied.
"""

LINE_BYTES = 64

BUILT_LIBRARY = Path(__file__).with_name("libstreaming.so.1")
"""Where the build puts it; it need not be there."""


def load_streaming_copy(library: Path = BUILT_LIBRARY) -> Stream | None:
    """The loop, tried out, or None where it cannot run. A block of no bytes is not allowed."""
    try:
        loop = ctypes.CDLL(str(library)).dlrover_stream_blocks
    except (OSError, AttributeError):  # none was built, or one for another machine
        return None
    loop.argtypes, loop.restype = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p), ctypes.c_uint64
    return loop if _copies_right(loop) else None


def _copies_right(loop: Stream) -> bool:
    """Three lines and seven bytes, of three blocks of which another thread has taken the first."""
    given = bytearray(bytes(range(256)))
    taken = bytearray(b"\xee" * 512)
    source = ctypes.addressof(ctypes.c_char.from_buffer(given)) + 1
    start = ctypes.addressof(ctypes.c_char.from_buffer(taken))
    skip = -start % LINE_BYTES
    length = 3 * LINE_BYTES
    blocks = [start + 400, source, 7, start + skip, source, length, start + skip + length, source + length, 7]
    table, counter = (ctypes.c_uint64 * len(blocks))(*blocks), ctypes.c_uint64(1)
    num_copied = loop(ctypes.addressof(table), 3, ctypes.addressof(counter))
    end = skip + length + 7
    wanted = b"\xee" * skip + bytes(given[1 : 1 + length + 7]) + b"\xee" * (512 - end)
    return (
        bytes(taken) == wanted and num_copied == 2 and loop(ctypes.addressof(table), 3, ctypes.addressof(counter)) == 0
    )
