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

No library that Python can call offers this, so the loop is given as machine code: 64 bytes per turn, instructions that every x86-64
processor has, in a page that is read-only once it holds them. Where it cannot run (another processor, a kernel that forbids
executable memory), or does not copy what it should in a trial, `ctypes.memmove` takes its place: same result, slower.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable

Stream = Callable[[int, int, int], int]
"""
Address of blocks (target, source, number of bytes: 64 bits each), how many, and address of the counter (64 bits, 0 at first). Copies blocks until none is
left, without the interpreter lock, and says how many this call has copied.
"""

LINE_BYTES = 64

_LOOP = bytes.fromhex(
    "4989f8"  # mov r8, rdi               the blocks
    "4989f1"  # mov r9, rsi               how many
    "4531d2"  # xor r10d, r10d            how many of them by us
    # next:
    "b801000000"  # mov eax, 1
    "f0480fc102"  # lock xadd [rdx], rax  the number of our next block; no other thread gets it
    "4c39c8"  # cmp rax, r9
    "735d"  # jae done
    "488d0440"  # lea rax, [rax+rax*2]
    "498d04c0"  # lea rax, [r8+rax*8]     a block has 24 bytes
    "488b38"  # mov rdi, [rax]
    "488b7008"  # mov rsi, [rax+8]
    "488b4810"  # mov rcx, [rax+16]
    "49ffc2"  # inc r10
    "4889f8"  # mov rax, rdi
    "4809c8"  # or rax, rcx
    "a83f"  # test al, 63                 whole lines to an aligned place? There is at least one, then
    "7539"  # jnz bytes
    # line:
    "0f188600020000"  # prefetchnta [rsi+512]
    "0f1006"  # movups xmm0, [rsi]
    "0f104e10"  # movups xmm1, [rsi+16]
    "0f105620"  # movups xmm2, [rsi+32]
    "0f105e30"  # movups xmm3, [rsi+48]
    "660fe707"  # movntdq [rdi], xmm0
    "660fe74f10"  # movntdq [rdi+16], xmm1
    "660fe75720"  # movntdq [rdi+32], xmm2
    "660fe75f30"  # movntdq [rdi+48], xmm3
    "4883c640"  # add rsi, 64
    "4883c740"  # add rdi, 64
    "4883e940"  # sub rcx, 64
    "75c9"  # jnz line
    "eb98"  # jmp next
    # bytes:
    "f3a4"  # rep movsb                   anything else: small, and through the cache
    "eb94"  # jmp next
    # done:
    "0faef8"  # sfence                    what follows (the state word) is seen after all of this
    "4c89d0"  # mov rax, r10
    "c3"  # ret
)


def load_streaming_copy() -> Stream | None:
    """The loop, tried out, or None where it cannot run. A block of no bytes is not allowed."""
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
    loop = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)(address)
    loop.code = code  # type: ignore[attr-defined]  # the mapping lives as long as the function
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
