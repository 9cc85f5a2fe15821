"""
Which iteration in storage Megatron shall read: the one that its tracker names if every byte of it is as it was written, else an older one.

Without a tracker Megatron would begin from scratch, so the newest complete checkpoint takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlrover.snapshot.storage.manifest import DIRECTORY, ManifestInvalid
from dlrover.snapshot.storage.newest import complete_up_to, newest_complete
from dlrover.snapshot.storage.storage import LocalStorage, Storage, join
from dlrover.trainer.torch.flash_checkpoint.restoring.stored_files import newest_whole, refuse_damaged, told_by_first
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import Agreement, own_ranks

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's own: names the iteration to load."""
RELEASE = "release"
"""What its tracker names in place of an iteration, for weights to begin with."""


def iteration_directory(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def restorable(storage: Storage, directory: str) -> str:
    """
    What a restore begins with: the iteration that Megatron's tracker names, or `release`. If the tracker is missing or unreadable, or what it
    names is gone, an iteration of ours that is complete, with a warning.

    Empty: there is none. Raises ManifestInvalid when there are only damaged ones.
    """
    said = named_iteration(storage, directory)
    if said == RELEASE or (said.isdigit() and storage.list(join(directory, iteration_directory(int(said))))):
        return said
    if said.isdigit():
        complete = complete_up_to(storage, directory, int(said))
        if not complete:
            raise ManifestInvalid(
                f"{join(directory, TRACKER)} names iteration {said}, but {directory} has neither that iteration "
                "nor an older complete one. Restore the files, or start from scratch in another directory."
            )
        return str(complete[0].manifest.step)
    newest = newest_complete(storage, directory)
    if newest is None and said:
        raise ManifestInvalid(
            f"{join(directory, TRACKER)} must contain the number of an iteration (found {said[:40]!r}). Write "
            "the iteration to load into it."
        )
    if newest is None:
        return ""
    what = f"holds {said[:40]!r}" if said else "is missing or empty"
    log.warning(
        "%s %s. The newest complete checkpoint is used: iteration %d.",
        join(directory, TRACKER),
        what,
        newest.manifest.step,
    )
    return str(newest.manifest.step)


def whole_iteration(agreement: Agreement, storage: Storage, directory: str, named: int) -> int:
    """
    The iteration that is named, or the newest before it that is whole; one that Megatron wrote itself is taken as it is. All ranks call this.

    Raises ManifestInvalid when all are damaged.
    """
    is_ours = bool(storage.list(join(directory, iteration_directory(named), DIRECTORY)))
    if agreement.tell_all([int(is_ours)]) != [1]:
        return named
    found = newest_whole(agreement, storage, directory, named)
    if found is None:
        raise ManifestInvalid(
            f"Iteration {named} in {directory} has no manifest, and no older iteration is complete. Restore its "
            "manifest, or start from scratch in another directory."
        )
    return found.manifest.step


def named_iteration(storage: Storage, directory: str) -> str:
    """As the tracker says: a number or a word; empty without one."""
    try:
        return storage.read(join(directory, TRACKER)).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def whole_directory(args: Any, load_arg: str, agreement: Agreement | None) -> Iterator[None]:
    """
    While this lasts, `args.load` names a directory whose tracker names a whole iteration. Without an agreement the user has named what to
    load, and it is refused if it is damaged. All ranks call this.
    """
    load = getattr(args, load_arg, None)
    if load is None:
        yield
        return
    storage, load = LocalStorage(), str(load)
    if agreement is None:
        wanted = str(getattr(args, "ckpt_step", None) or named_iteration(storage, load))
        if wanted:
            folder = iteration_directory(int(wanted)) if wanted.isdigit() else wanted
            refuse_damaged(Agreement(own_ranks(), 1, 1), storage, os.path.join(load, folder))
        yield
        return
    told = told_by_first(agreement, lambda: _iteration_and_whether_named(storage, load))
    iteration = whole_iteration(agreement, storage, load, told[0]) if told else -1
    if not told or [iteration, 1] == told:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="dlrover-megatron-") as root:
        folder = iteration_directory(iteration)
        os.symlink(os.path.join(os.path.abspath(load), folder), os.path.join(root, folder))
        Path(root, TRACKER).write_text(str(iteration))
        setattr(args, load_arg, root)
        try:
            yield
        finally:
            setattr(args, load_arg, load)


def _iteration_and_whether_named(storage: Storage, directory: str) -> list[int]:
    """The iteration to load, and 1 if Megatron finds it by itself. Empty: there is none, or a release."""
    found = restorable(storage, directory)
    return [int(found), int(found == named_iteration(storage, directory))] if found.isdigit() else []
