"""
Which checkpoints may go.

A strategy only chooses; what it chooses is deleted here, after a newer checkpoint was committed, and never the one that the tracker names nor the newest
complete one. The choice is made from what lies in the storage, not from memory, so a restarted agent goes on where its predecessor stopped.
Directories without our manifest are not ours and stay, and so does a checkpoint in which a person has put a file `.dlrover/keep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from dlrover.snapshot.storage.commit import Committed, committed_checkpoints, delete_checkpoint, latest_step
from dlrover.snapshot.storage.manifest import DIRECTORY
from dlrover.snapshot.storage.storage import Storage, join

KEEP = "keep"
"""Name of the file, beside the manifest, that pins a checkpoint. Its content is for people."""


class Retention(Protocol):
    def expendable(self, steps: Sequence[int]) -> list[int]:
        """Of the committed steps, in ascending order, those that may be deleted."""


class KeepLatest(Struct, frozen=True):
    """The newest N."""

    max_to_keep: int

    def expendable(self, steps: Sequence[int]) -> list[int]:
        return list(steps[: -max(1, self.max_to_keep)])


class KeepInterval(Struct, frozen=True):
    """Multiples of an interval, and the newest."""

    keep_interval: int

    def expendable(self, steps: Sequence[int]) -> list[int]:
        return [step for step in steps[:-1] if step % max(1, self.keep_interval)]


class KeepBest(Struct, frozen=True, tag=True):
    """The N with the best metric, as `save_checkpoint(..., metric=)` gave it. Those without one count as worst."""

    max_to_keep: int
    is_higher_better: bool = True

    def choose(self, checkpoints: Sequence[Committed]) -> list[int]:
        sign = 1 if self.is_higher_better else -1

        def worth(each: Committed) -> tuple[bool, float, int]:
            metric = each.manifest.metric
            return (metric is not None, sign * (metric or 0.0), each.manifest.step)

        ordered = sorted(checkpoints, key=worth, reverse=True)
        return [each.manifest.step for each in ordered[max(1, self.max_to_keep) :]]


class KeepBytes(Struct, frozen=True, tag=True):
    """The newest whose files are together at most so large; the newest of all in any case."""

    max_bytes: int

    def choose(self, checkpoints: Sequence[Committed]) -> list[int]:
        room, going = self.max_bytes, []
        for each in reversed(checkpoints):
            room -= each.manifest.size_bytes
            if room < 0:
                going.append(each.manifest.step)
        return going


class KeepFor(Struct, frozen=True, tag=True):
    """Those saved within so many seconds before the newest. No clock counts: a job that stood still for a week loses nothing by it."""

    seconds: float

    def choose(self, checkpoints: Sequence[Committed]) -> list[int]:
        newest = max((each.manifest.saved_at for each in checkpoints), default=0.0)
        return [each.manifest.step for each in checkpoints if each.manifest.saved_at < newest - self.seconds]


class KeepTotal(Struct, frozen=True, tag=True):
    """At most so many in all: the newest, the one of this name, and then the newest of the others. As `save_total_limit` of transformers."""

    max_to_keep: int
    best: str = ""
    """Name of a checkpoint's directory; it is kept also where only one may be."""

    def choose(self, checkpoints: Sequence[Committed]) -> list[int]:
        others = [each for each in checkpoints[:-1] if each.path.rsplit("/", 1)[-1] != self.best]
        num_room = max(0, self.max_to_keep - (len(checkpoints) - len(others)))
        return [each.manifest.step for each in others[: len(others) - num_room]]


MoreRules = KeepBest | KeepBytes | KeepFor | KeepTotal
"""Rules that look at more than steps; a save request carries them as they are."""


def apply_retention(storage: Storage, directory: str, strategy: Retention | MoreRules) -> list[int]:
    """
    Delete what the strategy gives up; return the steps that are gone.

    What cannot be deleted keeps nothing else from being deleted; the first such error is raised at the end.
    """
    checkpoints = {each.manifest.step: each for each in committed_checkpoints(storage, directory)}
    steps = sorted(checkpoints)
    if not steps:
        return []
    protected = {steps[-1], latest_step(storage, directory)}
    gone: list[int] = []
    failed: OSError | None = None
    ordered = [checkpoints[step] for step in steps]
    going = strategy.choose(ordered) if isinstance(strategy, MoreRules) else strategy.expendable(steps)
    for step in going:
        if step not in checkpoints or step in protected or is_kept(storage, checkpoints[step]):
            continue
        try:
            delete_checkpoint(storage, checkpoints[step].path)
            gone.append(step)
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return gone


def is_kept(storage: Storage, checkpoint: Committed) -> bool:
    """Whether a person has pinned it by a file."""
    return any(entry.name == KEEP for entry in storage.list(join(checkpoint.path, DIRECTORY)))
