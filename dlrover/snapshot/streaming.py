"""
Copying past the cache: stores that do not first read the line they overwrite.

A snapshot is written once and read much later, so it has no business in the cache. The C library knows that and copies
*very* large blocks with non-temporal stores, but here only from 192 MiB on (it derives the limit from the size of a cache that
virtual machines report wrongly), while tensors have a few megabytes. Below the limit every line is read before it is
overwritten, half as much traffic again: 1 GiB took 0.108 s in pieces of 16 MiB, 0.069 s in one block, and 0.050 s with the loop
below in two threads (2-core EPYC). With eight other programs on the machine, tensors of 4 MiB: 0.36 s with the library's copy in two threads,
0.20 s with the loop in one or two.

No library that Python can call offers this, so the loop is given as machine code: 64 bytes per turn, instructions that every x86-64
processor has, in a page that nobody can write to any more once it holds them. Where it cannot run (another processor, a kernel that forbids
executable memory), or does not copy what it should in a trial, `ctypes.memmove` takes its place: same result, slower.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable

Copy = Callable[[int, int, int], object]
"""destination address, source address, number of bytes; without the interpreter lock."""

LINE_BYTES = 64

_LOOP = bytes.fromhex(
    "4889d1"  # mov rcx, rdx              number of bytes, a multiple of 64, not 0
    "0f188600020000"  # prefetchnta [rsi+512]
    "0f1006"  # movups xmm0, [rsi]
    "0f104e10"  # movups xmm1, [rsi+16]
    "0f105620"  # movups xmm2, [rsi+32]
    "0f105e30"  # movups xmm3, [rsi+48]
    "660fe707"  # movntdq [rdi], xmm0     the destination is aligned to 64 bytes
    "660fe74f10"  # movntdq [rdi+16], xmm1
    "660fe75720"  # movntdq [rdi+32], xmm2
    "660fe75f30"  # movntdq [rdi+48], xmm3
    "4883c640"  # add rsi, 64
    "4883c740"  # add rdi, 64
    "4883e940"  # sub rcx, 64
    "75c9"  # jnz to the prefetch, 55 bytes back
    "0faef8"  # sfence                    what follows (the state word) is seen after all of this
    "c3"  # ret
)


def load_streaming_copy() -> Copy | None:
    """The loop, tried out, or None where it cannot run. It wants whole lines and an aligned destination."""
    if platform.machine() != "x86_64":
        return None
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return None
    code.write(_LOOP)
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    protection = mmap.PROT_READ | mmap.PROT_EXEC
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), protection) != 0:
        return None
    loop = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(address)
    loop.code = code  # type: ignore[attr-defined]  # the mapping lives as long as the function
    return loop if _copies_right(loop) else None


def _copies_right(loop: Copy) -> bool:
    length = 3 * LINE_BYTES
    given = bytearray(bytes(range(256)))
    taken = bytearray(b"\xee" * 512)
    source = ctypes.addressof(ctypes.c_char.from_buffer(given)) + 1
    start = ctypes.addressof(ctypes.c_char.from_buffer(taken))
    skip = -start % LINE_BYTES
    loop(start + skip, source, length)
    wanted = b"\xee" * skip + bytes(given[1 : 1 + length]) + b"\xee" * (512 - skip - length)
    return bytes(taken) == wanted
