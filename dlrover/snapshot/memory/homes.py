"""
The segments of a node: where they are, whose they are, and when they may go.

Each launch of a job on a node has a private directory (0700) with the segments of its ranks and an owner's record. As long as the
agent lives it holds a lock on that record; the kernel drops the lock with the agent, so being orphaned is a fact and not a guess about process
numbers. A restarted agent takes the lock and finds everything as it was: that is all there is to adopting.

Orphans are removed ten minutes after the last sign of life (a save, or `Home.touch`), because an agent between two lives looks like an
orphan too; or at once when a person asks for it. Segments from before the machine's last start are always garbage.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from dlrover.host.ownership import make_private
from dlrover.protocol.errors import Unavailable
from dlrover.snapshot.memory.locks import ByteLocks
from dlrover.snapshot.memory.segment import Segment, SlotName, boot_id, remove_segment, segment_paths
from dlrover.snapshot.memory.segment_format import SegmentInvalid

OWNER_FILE = "owner.json"
ORPHAN_GRACE = 600.0
"""Seconds without a sign of life after which a dead owner's segments are removed."""
_OWNER_BYTE = 0
_TRY_AGAIN_AFTER = 0.01


class HomeOwner(Struct, frozen=True, kw_only=True):
    """Who holds a directory of segments."""

    job: str
    launch: str
    node_rank: int
    pid: int
    boot_id: str


class RankSnapshots(Struct, frozen=True):
    global_rank: int
    slots: tuple[SlotName, ...]
    """Complete ones, oldest first."""


class Home:
    """The directory of one launch on this node, held by its agent."""

    def __init__(
        self, root: str | os.PathLike[str], job: str, launch: str, node_rank: int, *, patience: float = 1.0
    ) -> None:
        """`patience`: seconds until a held lock is taken for another agent's. A reaper holds it for milliseconds."""
        self.path = home_path(root, job, launch, node_rank)
        make_private(Path(root))
        owner = HomeOwner(job=job, launch=launch, node_rank=node_rank, pid=os.getpid(), boot_id=boot_id().hex())
        self._locks = self._take(time.monotonic() + patience)
        (self.path / OWNER_FILE).write_bytes(msgspec.json.encode(owner))
        for path in segment_paths(self.path):
            if not _is_usable(path):
                remove_segment(path)

    def _take(self, deadline: float) -> ByteLocks:
        """Lock the owner's record. Another process may be reaping the directory just now: then it is made again."""
        record = self.path / OWNER_FILE
        while True:
            try:
                make_private(self.path)
                record.touch(mode=0o600)
                locks = ByteLocks(record)
            except FileNotFoundError:
                continue  # reaped between two of our steps
            except FileExistsError:
                if self.path.exists():
                    raise  # something else has the name
                continue  # reaped between the two steps of `mkdir`
            is_ours = locks.try_own(_OWNER_BYTE)
            if is_ours and locks.is_at(record):
                return locks
            locks.close()
            if not is_ours and time.monotonic() >= deadline:
                raise Unavailable(
                    f"Another running agent uses the snapshots in {self.path}. Two agents of one launch cannot "
                    "have the same node rank. Stop one of them, or give it another --node-rank."
                )
            if not is_ours:
                time.sleep(_TRY_AGAIN_AFTER)  # the kernel tells when a lock is free, but not with a deadline

    def snapshots(self) -> list[RankSnapshots]:
        """What can be restored or persisted from memory, by rank."""
        by_rank: dict[int, list[SlotName]] = {}
        for path in segment_paths(self.path):
            try:
                with Segment(path) as segment:
                    by_rank.setdefault(segment.owner.global_rank, []).extend(segment.complete_slots())
            except (SegmentInvalid, FileNotFoundError):
                continue  # replaced by its trainer meanwhile
        return [RankSnapshots(rank, tuple(sorted(by_rank[rank]))) for rank in sorted(by_rank)]

    def touch(self) -> None:
        """A sign of life; it counts when the next start on this host decides what to reap."""
        os.utime(self.path / OWNER_FILE)

    def close(self) -> None:
        """Let go; the segments stay for the next agent."""
        self._locks.close()

    def remove(self) -> None:
        """The job is over: nothing of it stays."""
        _remove_home(self.path)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def home_path(root: str | os.PathLike[str], job: str, launch: str, node_rank: int) -> Path:
    """Where trainers and agent of a launch meet."""
    return Path(root) / f"{_safe(job)}.{_safe(launch)}.node-{node_rank}"


def reap_orphans(
    root: str | os.PathLike[str], now: float, *, grace: float = ORPHAN_GRACE, job: str | None = None
) -> list[Path]:
    """
    Remove the directories of dead owners; return what was removed. Grace 0 means at once.

    `job` restricts it to one job's. What belongs to another user, or is in use, is left alone.
    """
    removed = []
    for home in sorted(Path(root).glob("*.node-*")):
        if job is not None and not home.name.startswith(f"{_safe(job)}."):
            continue
        try:
            if home.is_symlink() or home.stat().st_uid != os.geteuid():
                continue
            if _reap(home, now, grace):
                removed.append(home)
        except FileNotFoundError:
            continue  # somebody else was faster
    return removed


def remove_launch(root: str | os.PathLike[str], job: str, launch: str) -> list[Path]:
    """The launch is over and its processes are gone: nothing of it stays. Returns what was removed."""
    prefix = home_path(root, job, launch, 0).name.rsplit("-", 1)[0]
    homes = sorted(Path(root).glob(f"{prefix}-*"))
    for home in homes:
        _remove_home(home)
    remove_empty_root(root)
    return homes


def remove_empty_root(root: str | os.PathLike[str]) -> None:
    """The directory above the homes goes with the last of them."""
    with contextlib.suppress(OSError):  # not empty, or not there
        os.rmdir(root)


def _reap(home: Path, now: float, grace: float) -> bool:
    """
    The owner's lock is held until the directory is gone, so that no agent can move in meanwhile.

    A directory without a record may be an agent's that is about to write it. So the reaper writes one itself and competes for its lock like
    every other process; the age is looked at before, because a new record is young.
    """
    record = home / OWNER_FILE
    had_record = record.exists()
    if not _is_abandoned(home, record, now, grace):
        return False
    os.close(os.open(record, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    locks = ByteLocks(record)
    try:
        if not locks.try_own(_OWNER_BYTE) or not locks.is_at(record):
            return False  # an agent lives there, or has just moved in
        if had_record and not _is_abandoned(home, record, now, grace):
            return False
        _remove_home(home)
        return True
    finally:
        locks.close()


def _is_abandoned(home: Path, record: Path, now: float, grace: float) -> bool:
    if any(_has_live_writer(path) for path in segment_paths(home)):
        return False
    if _boot_of(record) not in (None, boot_id().hex()):
        return True
    signs = [path.stat().st_mtime for path in (home, record, *segment_paths(home)) if path.exists()]
    return now - max(signs) >= grace


_OWNER_DECODER = msgspec.json.Decoder(HomeOwner)


def _boot_of(record: Path) -> str | None:
    try:
        return _OWNER_DECODER.decode(record.read_bytes()).boot_id
    except (OSError, msgspec.MsgspecError):
        return None


def _has_live_writer(path: Path) -> bool:
    try:
        with Segment(path) as segment:
            return segment.has_live_writer()
    except (SegmentInvalid, FileNotFoundError):
        return False


def _is_usable(path: Path) -> bool:
    try:
        Segment(path).close()
    except (SegmentInvalid, FileNotFoundError):
        return False
    return True


def _remove_home(home: Path) -> None:
    for path in segment_paths(home):
        remove_segment(path)
    shutil.rmtree(home, ignore_errors=True)


def _safe(name: str) -> str:
    """Part of a file name; dots separate the parts."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:80]
