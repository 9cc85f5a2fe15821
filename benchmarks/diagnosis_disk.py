"""
A file system of one file, served by this process: `python benchmarks/diagnosis_disk.py MOUNT_POINT`.

It speaks to the kernel directly (`/dev/fuse`), answers every read with zeros, and says `ready` when it is mounted. Stopping this process is what a disk
that hangs looks like: whoever reads waits inside the kernel and cannot even be interrupted. Continuing it lets them go on; ending it unmounts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys

FILE = b"data"
SIZE = 1 << 20
_ROOT, _FILE = 1, 2
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE, _FLUSH, _INIT, _OPENDIR, _RELEASEDIR = (
    1,
    2,
    3,
    14,
    15,
    18,
    25,
    26,
    27,
    29,
)
_INTERRUPT, _BATCH_FORGET = 36, 42
_SILENT = (_FORGET, _INTERRUPT, _BATCH_FORGET)
_DIRECT = 1
"""Nothing is kept in the kernel's cache, so each read comes here."""


def main() -> None:
    place = sys.argv[1]
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    if libc.mount(b"corpus", place.encode(), b"fuse.corpus", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount at {place}")
    print("ready", flush=True)
    try:
        while True:
            request = os.read(device, 1 << 20)
            answer = _answer(request)
            if answer is not None:
                os.write(device, answer)
    except OSError as error:
        if error.errno != errno.ENODEV:  # unmounted
            raise


def _answer(request: bytes) -> bytes | None:
    """None: this kind of request wants none."""
    _size, kind, number, node, *_rest = _IN.unpack_from(request)
    body = request[_IN.size :]
    if kind in _SILENT:
        return None
    error, data = 0, b""
    if kind == _INIT:
        # Protocol 7.31: what any kernel of the last years speaks.
        data = struct.pack("<IIIIHHIIHHIII", 7, 31, 0, 0, 16, 12, 1 << 16, 1, 16, 0, 0, 0, 0).ljust(64, b"\0")
    elif kind == _LOOKUP and body.rstrip(b"\0") == FILE:
        data = struct.pack("<QQQQII", _FILE, 0, 1, 1, 0, 0) + _attributes(_FILE)
    elif kind == _LOOKUP:
        error = -errno.ENOENT
    elif kind == _GETATTR:
        data = struct.pack("<QII", 1, 0, 0) + _attributes(node)
    elif kind in (_OPEN, _OPENDIR):
        data = struct.pack("<QIi", 0, _DIRECT, 0)
    elif kind == _READ:
        offset, wanted = struct.unpack_from("<QI", body, 8)
        data = bytes(max(0, min(wanted, SIZE - offset)))
    elif kind not in (_RELEASE, _RELEASEDIR, _FLUSH):
        error = -errno.ENOSYS
    return _OUT.pack(_OUT.size + len(data), error, number) + data


def _attributes(node: int) -> bytes:
    mode, size = (stat.S_IFDIR | 0o755, 0) if node == _ROOT else (stat.S_IFREG | 0o644, SIZE)
    return _ATTR.pack(node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


if __name__ == "__main__":
    main()
