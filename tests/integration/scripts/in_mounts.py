"""
Becomes dlrover-run in a mount namespace of its own, with small file systems in memory where faults shall happen.

    in_mounts.py PATH=SIZE [PATH=SIZE ...] -- ARGUMENTS OF DLROVER-RUN
"""

import ctypes
import os
import sys

CLONE_NEWNS, MS_PRIVATE, MS_REC = 0x20000, 1 << 18, 1 << 14
libc = ctypes.CDLL(None, use_errno=True)


def do(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


split = sys.argv.index("--")
do(libc.unshare(CLONE_NEWNS))
do(libc.mount(b"none", b"/", None, MS_PRIVATE | MS_REC, None))
for argument in sys.argv[1:split]:
    path, size = argument.split("=")
    do(libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, f"size={size},mode=0755".encode()))
os.execv(sys.executable, [sys.executable, "-m", "dlrover.trainer.torch.main", *sys.argv[split + 1 :]])
