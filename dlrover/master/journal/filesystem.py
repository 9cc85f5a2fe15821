"""
Which file system a path is on, as far as the journal must care.

SQLite's write-ahead log shares memory between processes and so does not work across hosts; network file systems also
lie about locks. The journal asks here before it chooses its mode.
"""

from __future__ import annotations

import os
from pathlib import Path

_NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.mergerfs"}


def network_filesystem(path: Path, mountinfo: str | None = None) -> str | None:
    """The type of the network file system that holds the path; None if it is a local one, or if that is unknown."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    kind = _type_at(os.path.realpath(path), mountinfo)
    if kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE):
        return kind
    return None


def _type_at(path: str, mountinfo: str) -> str:
    best, best_type = -1, ""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 5:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        # Of two mounts on one point the later one hides the earlier.
        if len(point) >= best and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, best_type = len(point), after.split()[0]
    return best_type
