"""Which iteration in storage Megatron shall read: the one that its tracker names if every byte of it is as it was written, else an older one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlrover.snapshot.commit import has_damaged_manifest, read_global_manifest
from dlrover.snapshot.storage import LocalStorage, Storage
from dlrover.trainer.torch.flash_checkpoint.agreement import Agreement, own_ranks
from dlrover.trainer.torch.flash_checkpoint.megatron_engine import TRACKER, iteration_directory
from dlrover.trainer.torch.flash_checkpoint.stored_files import newest_whole, refuse_damaged


def whole_iteration(agreement: Agreement, storage: Storage, directory: str, named: int) -> int:
    """
    The iteration that is named, or the newest before it that is whole; one that Megatron wrote itself is taken as it is. All ranks call this.

    Raises ManifestInvalid when all are damaged.
    """
    path = os.path.join(directory, iteration_directory(named))
    is_ours = read_global_manifest(storage, path) is not None or has_damaged_manifest(storage, path)
    if agreement.tell_all([int(is_ours)]) != [1]:
        return named
    found = newest_whole(agreement, storage, directory, named)
    return named if found is None else found.manifest.step


def named_iteration(directory: str) -> str:
    """As the tracker says: a number or a word; empty without one."""
    try:
        return Path(directory, TRACKER).read_text().strip()
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def whole_directory(args: Any, load_arg: str, agreement: Agreement | None) -> Iterator[None]:
    """
    While this lasts, `args.load` names a directory whose tracker names a whole iteration. Without an agreement somebody has named what to
    load, and it is refused if it is damaged. All ranks call this.
    """
    load = getattr(args, load_arg, None)
    said = "" if load is None else named_iteration(load)
    if agreement is None:
        wanted = str(getattr(args, "ckpt_step", None) or said)
        if load is not None and wanted:
            folder = iteration_directory(int(wanted)) if wanted.isdigit() else wanted
            refuse_damaged(Agreement(own_ranks(), 1, 1), LocalStorage(), os.path.join(load, folder))
        yield
        return
    [told] = agreement.tell_all([1 + int(said) if said.isdigit() else 0])
    iteration = whole_iteration(agreement, LocalStorage(), str(load), told - 1) if told else -1
    if load is None or iteration == told - 1:
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
