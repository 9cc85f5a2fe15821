"""
Which checkpoints may go.

A strategy only chooses; what it chooses is deleted here, after a newer checkpoint was committed, and never the one that the tracker names nor the newest
complete one. The choice is made from what lies in the storage, not from memory, so a restarted agent goes on where its predecessor stopped.
Directories without our manifest are not ours and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from dlrover.snapshot.commit import committed_checkpoints, delete_checkpoint, latest_step
from dlrover.snapshot.storage import Storage


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


def apply_retention(storage: Storage, directory: str, strategy: Retention) -> list[int]:
    """Delete what the strategy gives up; return the steps that are gone."""
    checkpoints = {each.manifest.step: each for each in committed_checkpoints(storage, directory)}
    steps = sorted(checkpoints)
    if not steps:
        return []
    protected = {steps[-1], latest_step(storage, directory)}
    gone = []
    for step in strategy.expendable(steps):
        if step in checkpoints and step not in protected:
            delete_checkpoint(storage, checkpoints[step].path)
            gone.append(step)
    return gone
