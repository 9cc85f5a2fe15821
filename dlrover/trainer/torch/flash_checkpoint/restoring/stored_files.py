"""
Checkpoints that a framework reads by itself: before it does, the ranks compare every byte with the manifests.

DeepSpeed, transformers and Megatron open their files with functions that compare nothing, so a flipped bit would become a weight. The ranks share the work, and
what one of them finds all of them know: a damaged checkpoint gives way to the next older one, unless the user has named it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.memory.checksum import Corrupt
from dlrover.snapshot.storage.commit import (
    Committed,
    committed_checkpoints,
    find_damage,
    has_damaged_manifest,
    read_global_manifest,
)
from dlrover.snapshot.storage.manifest import ManifestInvalid
from dlrover.snapshot.storage.newest import complete_up_to
from dlrover.snapshot.storage.storage import Storage
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import Agreement, Ranks

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

_MOST = 8
"""Checkpoints that are looked at, newest first. Ranks tell each other no more than 16 numbers."""
_TURN = 10.0
"""Seconds after which the ranks tell each other that they are still reading: a large file must not try the patience of their group."""


def told_by_first(agreement: Agreement, find: Callable[[], Sequence[int]]) -> list[int]:
    """
    What global rank 0 finds in the storage, the first 8 numbers. All ranks call this. Raises ManifestInvalid on all of them when it cannot find out.
    """
    found: Sequence[int] = ()
    trouble = ""
    if agreement.ranks.global_rank == 0 or not agreement.is_joint:
        try:
            found = find()[:_MOST]
        except (OSError, DLRoverError) as error:
            trouble = str(error) or type(error).__name__
    told = agreement.tell_all([int(bool(trouble)), *found])
    if told[0]:
        raise ManifestInvalid(trouble or "Global rank 0 could not read the storage. Its log says why.")
    return told[1:]


def newest_whole(agreement: Agreement, storage: Storage, directory: str, at_most: int) -> Committed | None:
    """
    The newest checkpoint up to that step of which every byte is as it was written. None: there is none of ours. All ranks call this.

    Raises ManifestInvalid when all are damaged, or when the storage cannot be read.
    """
    steps = told_by_first(
        agreement, lambda: [each.manifest.step for each in complete_up_to(storage, directory, at_most)]
    )
    for step in steps:
        found = _find(storage, directory, step)
        damage = _damage(agreement, storage, found)
        if not damage and found is not None:
            return found
        log.warning("The checkpoint of step %d is damaged; the next older one is tried: %s", step, damage)
    if steps:
        raise ManifestInvalid(
            f"All checkpoints in {directory} are damaged. The warnings above say how. Restore their files, or "
            "start from scratch in another directory."
        )
    return None


def refuse_damaged(agreement: Agreement, storage: Storage, path: str) -> None:
    """
    Raises Corrupt, on all ranks, when the checkpoint that the user named is not as it was written; one without our manifest cannot be judged.
    """
    manifest = read_global_manifest(storage, path)
    found = None if manifest is None else Committed(path, manifest)
    is_foreign = found is None and not has_damaged_manifest(storage, path)
    if not agreement.have_all(is_foreign) and (damage := _damage(agreement, storage, found)):
        raise Corrupt(f"{path} is damaged: {damage}. Restore another checkpoint.")


def _find(storage: Storage, directory: str, step: int) -> Committed | None:
    try:
        stored = committed_checkpoints(storage, directory)
    except OSError as error:
        log.warning("The checkpoints in %s cannot be listed: %s", directory, error)
        return None
    return next((each for each in stored if each.manifest.step == step), None)


def _damage(agreement: Agreement, storage: Storage, found: Committed | None) -> str:
    """What is wrong with it on any rank; empty: nothing."""
    with ThreadPoolExecutor(1, thread_name_prefix="dlrover-verify") as pool:
        work = pool.submit(_own_damage, storage, found, agreement.ranks)
        while not agreement.have_all(not wait([work], _TURN).not_done):
            pass
    damage = work.result()
    if agreement.have_all(not damage):
        return ""
    return damage or "another rank found it damaged"


def _own_damage(storage: Storage, found: Committed | None, ranks: Ranks) -> str:
    """Of this rank's part of the files."""
    if found is None:
        return "its manifest cannot be read"
    try:
        own = [each for each in found.manifest.ranks if each.global_rank % ranks.world_size == ranks.global_rank]
        return "; ".join(find_damage(storage, found, own))
    except (OSError, DLRoverError) as error:
        return str(error)
