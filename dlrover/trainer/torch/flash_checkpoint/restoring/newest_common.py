"""
Finding a state again: the newest step that every rank can have, from the memory of its node or from storage.

Each rank says which steps it could have, all take the newest that all of them can, and when a piece turns out to be damaged, or gone meanwhile, they go
on to the next older step together. So there is one decision per step, taken by all, and no rank ever trains on
another step than the others.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.data import Claim
from dlrover.snapshot.copy.copying import Copier
from dlrover.snapshot.memory.checksum import Corrupt
from dlrover.snapshot.memory.contents import TORCH, decode_extra
from dlrover.snapshot.memory.segment import Segment, SlotName, segment_paths
from dlrover.snapshot.memory.segment_format import SegmentInvalid
from dlrover.snapshot.storage.class_meta import ClassMeta
from dlrover.snapshot.storage.commit import (
    TRACKER,
    Committed,
    committed_checkpoints,
    read_global_manifest,
)
from dlrover.snapshot.storage.manifest import DIRECTORY, FileRecord, ManifestInvalid
from dlrover.snapshot.storage.newest import complete_up_to, newest_step
from dlrover.snapshot.storage.persist import SaveRequest, of_present_history, request_in
from dlrover.snapshot.storage.storage import LocalStorage, join, read_bytes
from dlrover.snapshot.storage.user_storage import storage_of
from dlrover.trainer.data import data_steps
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import load_state
from dlrover.trainer.torch.flash_checkpoint.restoring.early_look import EarlyLook, check, close_behind
from dlrover.trainer.torch.flash_checkpoint.restoring.reading import check_content, read_content, read_file, read_raw
from dlrover.trainer.torch.flash_checkpoint.restoring.stored_files import told_by_first
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import Agreement, Share

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

DEFAULT_PART = "model_states"
"""What the original DLRover calls the one part of its files."""
_REMEDY = "Repair the directory, give the checkpoint to restore as `path`, or start from scratch in another directory."


class Restored(Struct, frozen=True):
    step: int
    is_from_memory: bool
    parts: dict[str, Any]
    claims: dict[str, tuple[Claim, ...]] = {}
    """What the model contains of datasets, as far as it was not confirmed."""


class Restorer:
    """Made for one restore; all ranks make it together."""

    def __init__(
        self,
        directory: str,
        home: Path,
        agreement: Agreement,
        copier: Copier,
        *,
        storage: ClassMeta | None = None,
        look: EarlyLook | None = None,
    ) -> None:
        """`storage` is one of the user's own, in place of what the directory says; `look` has perhaps checked the memory already."""
        self._directory, self._home, self._agreement, self._copier = directory, home, agreement, copier
        self._storage = storage
        self._look = look
        self._requests: dict[SlotName, SaveRequest] = {}
        """Of what was found in memory. A slot that is overwritten meanwhile cannot be pinned by its name."""

    def load(self, names: Sequence[str] | None, into: Mapping[str, object] | None) -> Restored | None:
        """
        The named parts, or all of them, of the newest step that every rank can have. None: there is none anywhere.

        Tensors of `into` that fit are filled in place; what was in them is lost also if this raises.
        """
        offers = self._offers()
        in_memory = self._agreement.common(list(offers))
        present = self._of_present_history(offers)
        in_storage, trouble = self._stored_steps()
        found = [(step in present, step, 1) for step in in_memory] + [(True, step, 0) for step in in_storage]
        candidates = sorted(found, reverse=True)
        for is_present, step, is_memory in candidates:
            if is_memory and not self._agreement.common([self._save_number(offers[step])]):
                log.warning("Ranks hold different saves of step %d; the next older step is tried.", step)
                continue
            if is_memory:
                parts = self._from_memory(offers[step], names, into)
            else:
                parts = self._from_storage(step, names, into)
            if self._agreement.have_all(parts is not None):
                assert parts is not None, "all ranks have it"
                if not is_present:
                    log.warning(
                        "Only step %d can be restored on all ranks. The job went back to an older step before, "
                        "so some data may be read twice.",
                        step,
                    )
                claims = self._claims_of(offers[step]) if is_memory else {}
                return Restored(step, bool(is_memory), parts, claims)
            log.warning("Step %d cannot be restored on all ranks; the next older step is tried.", step)
        if trouble:
            raise ManifestInvalid(f"The checkpoints in {self._directory} cannot be used: {trouble} {_REMEDY}")
        if candidates:
            raise ManifestInvalid(
                f"None of the checkpoints in {self._directory} can be restored on all ranks. The warnings above "
                f"say why. {_REMEDY}"
            )
        return None

    # From memory.

    def _offers(self) -> dict[int, SlotName]:
        """Steps of our shard in this node's memory that belong to this directory and are cut as we are."""
        found: list[SlotName] = []
        for path in segment_paths(self._home, self._agreement.share.shard):
            try:
                with Segment(path) as segment:
                    for name in segment.complete_slots():
                        request = self._request_of(segment, name)
                        if request is not None:
                            self._requests[name] = request
                            found.append(name)
            except (SegmentInvalid, FileNotFoundError):
                continue
        return {name.step: name for name in of_present_history(found)}

    def _of_present_history(self, offers: Mapping[int, Any]) -> set[int]:
        """
        The steps that every rank can have without going back to what others have given up: books of data know nothing of such a model any more. It
        is better than none, but worse than a checkpoint.
        """
        if not data_steps.has_turns():
            return set(offers)
        return self._agreement.common([at for at, each in offers.items() if not data_steps.is_given_up(at, each.round)])

    def _save_number(self, name: SlotName) -> int:
        """Equal on all ranks for one save: a step that was trained twice is two states."""
        return int.from_bytes(hashlib.blake2b(self._requests[name].attempt.encode(), digest_size=6).digest())

    def _claims_of(self, name: SlotName) -> dict[str, tuple[Claim, ...]]:
        return self._requests[name].claims

    def _request_of(self, segment: Segment, name: SlotName) -> SaveRequest | None:
        """None: it is not of this directory, or cut otherwise than we are."""
        pinned = segment.pin(name.slot, name.generation)
        if pinned is None:
            return None
        try:
            request = request_in(decode_extra(pinned.sections()))
        except DLRoverError as error:
            log.warning("The snapshot of step %d is not used for restoring: %s", name.step, error)
            return None
        finally:
            pinned.close()
        num_shards = self._agreement.share.num_shards
        is_ours = request is not None and (request.directory, request.num_shards) == (self._directory, num_shards)
        return request if is_ours else None

    def _from_memory(
        self, name: SlotName, names: Sequence[str] | None, into: Mapping[str, object] | None
    ) -> dict[str, Any] | None:
        """None, with a warning, when it is not there any more or damaged."""
        try:
            checked = None if self._look is None else self._look.take(name)
            segment = checked or Segment(name.path, private=True)
            try:
                pinned = segment.pin(name.slot, name.generation)
                if pinned is None:
                    return None
                with pinned:
                    if checked is None:
                        check(pinned)
                    parts = load_state(pinned, self._copier, names=names, into=into)
            finally:
                close_behind(segment)
        except (OSError, Corrupt, SegmentInvalid) as error:
            log.warning("%s", error)
            return None
        return _complete(parts, names, name.step)

    # From storage.

    def _stored_steps(self) -> tuple[list[int], str]:
        """What rank 0 finds in the storage, newest first, and what is wrong there; the same on all ranks."""
        try:
            return told_by_first(self._agreement, self._find_stored), ""
        except ManifestInvalid as error:
            return [], str(error)

    def _find_stored(self) -> list[int]:
        storage = storage_of(self._directory, self._storage)
        newest = newest_step(storage, self._directory)
        stored = [each.manifest.step for each in committed_checkpoints(storage, self._directory)]
        if newest is None:
            self._warn_of_foreign([entry.name for entry in storage.list(self._directory)])
            return []
        if newest not in stored and self._is_foreign(newest):
            return [newest, *(step for step in reversed(stored) if step < newest)]
        found = [each.manifest.step for each in complete_up_to(storage, self._directory, newest)]
        if not found:
            raise ManifestInvalid(
                f"The tracker in {self._directory} names step {newest}, but that checkpoint does not exist "
                f"(complete steps: {stored})."
            )
        return found

    def _warn_of_foreign(self, names: Sequence[str]) -> None:
        """Without a tracker it is not known which of them is complete."""
        foreign = [int(name) for name in names if name.isdigit() and self._is_foreign(int(name))]
        if foreign:
            log.warning(
                "%s has no %s, so steps %s, which other software wrote, are not restored. To restore one of "
                "them, write its step into that file.",
                self._directory,
                TRACKER,
                sorted(foreign),
            )

    def _is_foreign(self, step: int) -> bool:
        """Written by software that knows no manifests, such as the original DLRover: its tracker has to be believed."""
        is_ours = os.path.isdir(join(self._directory, str(step), DIRECTORY))
        return not is_ours and os.path.isfile(self._foreign_file(step))

    def _foreign_file(self, step: int) -> str:
        return join(self._directory, str(step), f"rank_{self._agreement.share.shard}.pt")

    def _from_storage(
        self, step: int, names: Sequence[str] | None, into: Mapping[str, object] | None
    ) -> dict[str, Any] | None:
        """None, with a warning, when this rank's piece cannot be read."""
        try:
            return _complete(self._read_checkpoint(step, names, into or {}), names, step)
        except (OSError, DLRoverError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            log.warning("The checkpoint of step %d cannot be read: %s", step, error)
            return None

    def _read_checkpoint(self, step: int, names: Sequence[str] | None, into: Mapping[str, object]) -> dict[str, Any]:
        storage = storage_of(self._directory, self._storage)
        found = [each for each in committed_checkpoints(storage, self._directory) if each.manifest.step == step]
        if not found:
            name = names[0] if names else DEFAULT_PART
            return {name: read_file(self._foreign_file(step), into=into.get(name))}
        parts = {}
        for name, file in self._own_files(found[0], names).items():
            path = join(found[0].path, file.path)
            if not isinstance(storage, LocalStorage):
                content = storage.load(path, read_bytes)
                is_torch = file.kind == TORCH
                parts[name] = (
                    read_content(content, path, file, into=into.get(name))
                    if is_torch
                    else check_content(content, path, file)
                )
            elif file.kind == TORCH:
                parts[name] = read_file(path, file, into=into.get(name))
            else:
                parts[name] = read_raw(path, file)
        return parts

    def _own_files(self, checkpoint: Committed, names: Sequence[str] | None) -> dict[str, FileRecord]:
        """By the name of the part."""
        manifest = checkpoint.manifest
        num_shards = self._agreement.share.num_shards
        if len(manifest.ranks) != num_shards:
            raise ManifestInvalid(
                f"Step {manifest.step} was saved in {len(manifest.ranks)} shards, but this job has "
                f"{num_shards}. Use a checkpointer that can reshard (FSDP, DCP), or start as many shards as "
                "before."
            )
        own = [rank for rank in manifest.ranks if rank.global_rank == self._agreement.share.shard]
        if not own:
            raise ManifestInvalid(f"The checkpoint of step {manifest.step} has no shard {self._agreement.share.shard}.")
        [rank] = own
        if len(rank.files) == 1 and not rank.files[0].part:  # of a version that did not write the part's name
            return {names[0] if names else DEFAULT_PART: rank.files[0]}
        files = {file.part or file.path: file for file in rank.files}
        return {name: file for name, file in files.items() if names is None or name in names}


def own_file_in(checkpoint: str, share: Share) -> tuple[str, FileRecord | None]:
    """Which file of a checkpoint's directory is this rank's, and what its manifest says of it; None: it has none, as those of others."""
    manifest = read_global_manifest(LocalStorage(), checkpoint)
    if manifest is None:
        return join(checkpoint, f"rank_{share.shard}.pt"), None
    own = [file for rank in manifest.ranks if rank.global_rank == share.shard for file in rank.files]
    if len(manifest.ranks) != share.num_shards or len(own) != 1:
        raise ManifestInvalid(
            f"{checkpoint} was saved in {len(manifest.ranks)} shards, but this job has {share.num_shards}. "
            f"{len(own)} of its files belong to shard {share.shard}. Give the path of the file to restore."
        )
    return join(checkpoint, own[0].path), own[0]


def _complete(parts: dict[str, Any], names: Sequence[str] | None, step: int) -> dict[str, Any] | None:
    missing = sorted(set(names or ()) - set(parts))
    if missing:
        log.warning(
            "Step %d is not restored, because it has no part %s; it has %s.",
            step,
            ", ".join(missing),
            ", ".join(parts) or "none",
        )
        return None
    return parts
