"""
A restored model and its data: one rank tells the master which step all go on with, and what the manifest of its checkpoint says of the datasets.
The others go on at once; shards come to them when the master has heard that word.

The master's books know by themselves what a model of the running job had read. The manifest counts where they do not: for a checkpoint that is
older than what is final in the books, for a job that begins with another's checkpoint, and for a path that the user named.
"""

from __future__ import annotations

import logging
import sys

import msgspec
import torch.distributed as dist

from dlrover.protocol.messages.data import Claim
from dlrover.snapshot.storage.class_meta import ClassMeta
from dlrover.snapshot.storage.commit import committed_checkpoints, read_global_manifest
from dlrover.snapshot.storage.storage import full_path, parent_of
from dlrover.snapshot.storage.user_storage import storage_of
from dlrover.trainer import environment
from dlrover.trainer.data import data_steps
from dlrover.trainer.torch.flash_checkpoint.restoring.newest_common import Restored
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import Agreement

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

MAX_CLAIM_BYTES = 256 * 1024
"""Of all ranks: they have some shards ahead of the master, never many. The same for a state of the data that is kept with a snapshot."""


_CLAIMS_DECODER = msgspec.msgpack.Decoder(dict[str, tuple[Claim, ...]])


def uses_shards() -> bool:
    """Whether the script reads shards on demand: asking the master would cost a restart some milliseconds for nothing."""
    return "dlrover.trainer.data.shard_feed" in sys.modules


def unconfirmed(agreement: Agreement, step: int, *, is_storage: bool) -> dict[str, tuple[Claim, ...]] | None:
    """
    What the ranks have read for this step and the master has not confirmed, of all ranks together and the same on all of them. None: it is
    too much to be kept with a snapshot.
    """
    if not uses_shards():
        return {}
    patience = data_steps.STORAGE_FLUSH if is_storage else data_steps.FLUSH
    if agreement.have_all(data_steps.confirm(patience)):
        return {}
    own = msgspec.msgpack.encode(data_steps.unconfirmed(step))
    gathered: list[bytes] = [own]
    if agreement.group is not None:
        gathered = [b""] * agreement.ranks.world_size
        dist.all_gather_object(gathered, own, group=agreement.group)
    if sum(map(len, gathered)) > MAX_CLAIM_BYTES:
        return None
    found: dict[str, tuple[Claim, ...]] = {}
    for each in gathered:
        for name, claims in _CLAIMS_DECODER.decode(each).items():
            found[name] = (*found.get(name, ()), *claims)
    return found


def rest_of_data(agreement: Agreement, step: int) -> str:
    """What a model of this step has still to read, for a checkpoint that may have to be committed without the master; empty: unknown."""
    is_shared = (
        environment.current() is not None or agreement.ranks.world_size == 1
    )  # else each rank reads all by itself
    state = data_steps.rest_of_data(step) if is_shared and uses_shards() else ""
    return state if len(state) <= MAX_CLAIM_BYTES else ""


def tell_restored(
    agreement: Agreement, restored: Restored | None, directory: str, user_storage: ClassMeta | None
) -> None:
    if not uses_shards():
        if restored is not None:
            restored = msgspec.structs.replace(restored, parts={})  # the state itself must not live on for this
        data_steps.postpone(lambda: tell_restored(agreement, restored, directory, user_storage))
        return
    if agreement.ranks.global_rank != 0:
        data_steps.loaded()
        return
    if restored is None:
        data_steps.restored(None)
        return
    step, state = restored.step, ""
    if not (restored.is_from_memory and data_steps.is_known(step)):
        stored = committed_checkpoints(storage_of(directory, user_storage), directory)
        known = [each.manifest for each in stored if each.manifest.step <= step and each.manifest.data_state]
        newest = known[-1] if known else None
        # An older one counts only for a model from memory whose books were lost: what was read since then is read again.
        state = newest.data_state if newest is not None and (restored.is_from_memory or newest.step == step) else ""
    data_steps.restored(step, claims=restored.claims, data_state=state)


def tell_resumed(agreement: Agreement, path: str, user_storage: ClassMeta | None) -> None:
    """Of a file or a directory that the user named. Files of others say nothing of data."""
    if not uses_shards():
        data_steps.postpone(lambda: tell_resumed(agreement, path, user_storage))
        return
    storage = storage_of(path, user_storage)
    full = full_path(path)
    manifest = read_global_manifest(storage, full) or read_global_manifest(storage, parent_of(full))
    if manifest is None:
        log.warning(
            "%s has no manifest, so DLRover does not know which data its model has read. The datasets continue "
            "from their present position.",
            path,
        )
    elif agreement.ranks.global_rank != 0:
        data_steps.loaded()
    else:
        data_steps.restored(manifest.step, data_state=manifest.data_state, is_explicit=True)
