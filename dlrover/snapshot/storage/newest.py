"""
Which checkpoint a restore takes, also when files are missing or damaged.

Only an empty directory is a beginning. If the tracker is missing or unreadable, the newest complete checkpoint counts. If the checkpoint that the
tracker names is not complete, the next older one counts. Both are told by a warning. A directory with damaged checkpoints only is an error: a job
never starts from scratch without a word.
"""

from __future__ import annotations

import logging

from dlrover.snapshot.storage.commit import (
    TRACKER,
    Committed,
    committed_checkpoints,
    has_damaged_manifest,
    is_staged,
    latest_step,
    locate,
    read_global_manifest,
)
from dlrover.snapshot.storage.manifest import DIRECTORY, ManifestInvalid
from dlrover.snapshot.storage.storage import Renaming, Storage, join

log = logging.getLogger("dlrover.snapshot")


def newest_step(storage: Storage, directory: str) -> int | None:
    """
    The step that our tracker names; without a readable tracker that of the newest complete checkpoint, with a warning.

    None: no checkpoint was ever committed here. Raises ManifestInvalid when there are only damaged ones.
    """
    unreadable = None
    try:
        step = latest_step(storage, directory)
    except ManifestInvalid as error:
        step, unreadable = None, error
    if step is not None:
        return step
    complete = [each for each in committed_checkpoints(storage, directory) if not is_staged(each.path)]
    if not complete:
        refuse_remains(storage, directory)
        if unreadable is not None:
            raise unreadable
        return None
    step = complete[-1].manifest.step
    what = f"{join(directory, TRACKER)} is missing." if unreadable is None else str(unreadable)
    log.warning("%s The newest complete checkpoint is used: step %d.", what, step)
    return step


def complete_up_to(storage: Storage, directory: str, newest: int) -> list[Committed]:
    """
    The complete checkpoints up to this step, newest first. A warning says when the step itself is not among them.

    Empty: there are none, and no remains of ours either. Raises ManifestInvalid when there are only remains.
    """
    stored = committed_checkpoints(storage, directory)
    if not stored:
        refuse_remains(storage, directory)
    complete = [each for each in reversed(stored) if each.manifest.step <= newest]
    if complete and complete[0].manifest.step != newest:
        log.warning(
            "The checkpoint of step %d in %s is incomplete: its directory or its manifest is missing or "
            "damaged. The next older complete checkpoint is used: step %d.",
            newest,
            directory,
            complete[0].manifest.step,
        )
    return complete


def newest_complete(storage: Storage, directory: str) -> Committed | None:
    """What a restore takes. None: no checkpoint was ever committed here. Raises ManifestInvalid when none of them is complete."""
    newest = newest_step(storage, directory)
    if newest is None:
        return None
    complete = complete_up_to(storage, directory, newest)
    return complete[0] if complete else locate(storage, directory, newest)


def refuse_remains(storage: Storage, directory: str) -> None:
    """Raises ManifestInvalid when a directory in there was a checkpoint of ours. For callers that found no complete one."""
    remains = [
        entry.name
        for entry in storage.list(directory)
        if entry.is_directory and not is_staged(entry.name) and _is_remains(storage, join(directory, entry.name))
    ]
    if remains:
        raise ManifestInvalid(
            f"All checkpoints in {directory} are damaged. The manifest is missing or damaged in: "
            f"{', '.join(remains[:8])}. Restore the files of one of them, or start from scratch in another "
            "directory."
        )


def _is_remains(storage: Storage, path: str) -> bool:
    """
    Where directories can be renamed, one with its final name had a manifest. Elsewhere a first save that was cut off looks the same: only a
    damaged manifest is proof there.
    """
    if isinstance(storage, Renaming) and storage.list(join(path, DIRECTORY)):
        return read_global_manifest(storage, path) is None
    return has_damaged_manifest(storage, path)
