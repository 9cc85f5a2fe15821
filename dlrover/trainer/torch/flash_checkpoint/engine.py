"""
The engine in the training process: copies the state into memory, and finds it again.

A save blocks training for the copy alone. Nothing here waits for the agent or for storage: the agent is told, and what it
needs stands in the segment. All saving ranks take the same decision, so that they always hold a step in common: either all of
them overwrite their older slot or none does.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from dlrover.protocol.errors import ConfigError, Unavailable
from dlrover.snapshot.copy.copying import Copier
from dlrover.snapshot.memory.segment import SlotName, segment_paths
from dlrover.snapshot.memory.segment_format import Owner
from dlrover.snapshot.storage.persist import REQUEST, SaveRequest, encode_request
from dlrover.snapshot.storage.places import SavePlace
from dlrover.snapshot.storage.storage import full_path
from dlrover.snapshot.storage.user_deletion import rule_for
from dlrover.snapshot.storage.user_storage import meta_for, shown_storage
from dlrover.trainer import environment, phases
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveReason, SaveResult
from dlrover.trainer.torch.flash_checkpoint.encoding.lazy import Memory
from dlrover.trainer.torch.flash_checkpoint.encoding.staleness import StalenessWatch
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import PendingSave, StateWriter, room_for_names
from dlrover.trainer.torch.flash_checkpoint.restoring import data_return
from dlrover.trainer.torch.flash_checkpoint.restoring.early_look import EarlyLook
from dlrover.trainer.torch.flash_checkpoint.restoring.newest_common import Restored, Restorer, own_file_in
from dlrover.trainer.torch.flash_checkpoint.restoring.reading import read_file
from dlrover.trainer.torch.flash_checkpoint.saving.agreed_segments import AgreedSegments
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import Agreement, own_ranks
from dlrover.trainer.torch.flash_checkpoint.saving.lazy_saves import LazySaves
from dlrover.trainer.torch.flash_checkpoint.saving.old_names import check_all_rank_ready as check_all_rank_ready
from dlrover.trainer.torch.flash_checkpoint.saving.old_names import start_saver_process as start_saver_process
from dlrover.trainer.torch.flash_checkpoint.saving.old_names import (
    verify_all_rank_step_consistent as verify_all_rank_step_consistent,
)
from dlrover.trainer.torch.flash_checkpoint.saving.old_names import wait_socket_server as wait_socket_server
from dlrover.trainer.torch.flash_checkpoint.saving.outlets import AgentOutlet, SaveOutlet, ThreadOutlet
from dlrover.trainer.torch.flash_checkpoint.saving.preparing import Preparation
from dlrover.trainer.torch.flash_checkpoint.saving.storage_saves import StorageSaves
from dlrover.trainer.torch.flash_checkpoint.saving.waiting_state import WaitingState, copy_aside
from dlrover.trainer.torch.resilience.saves import KnownSave, save_log

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

ON_BUSY = ("skip", "block", "latest")
_ONLY_IN_MEMORY = (
    "The master has not confirmed which data the model has read, so this save stays in memory. The next save "
    "goes to storage."
)
_LOOK_AGAIN_AFTER = 0.02
_ALONE_PATIENCE = 1.0
"""
Seconds for a slot when a worker is lost, half of what the agent waits. The agent may be reading one, and one that died while it wrote keeps
the lock of its slot until the kernel has freed its memory.
"""


class CheckpointEngine:
    """One per process and home: a rank has one set of segments."""

    keeps_claims = True
    """Whether a snapshot may hold records whose reading the master has not confirmed: who restores it tells of them."""

    notes_saves = True
    """Whether a guard learns from each save how the state is built. Else the code that builds it says so."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        local_shard_num: int = 1,
        global_shard_num: int = 1,
        deletion_strategy: object = None,
        save_timeout: float = 600.0,
        replica_count: int = 0,
        num_slots: int = 2,
        storage: object = None,
        lazy: bool | str = False,
        outlet: SaveOutlet | None = None,
        is_group_private: bool = False,
    ) -> None:
        """
        `lazy` is how saves are made that do not say: see `save`. `is_group_private`: ranks agree in a group of their own, so that saves
        may come from another thread than the training's.
        """
        if local_shard_num < 1 or global_shard_num < 1:
            raise ConfigError(
                f"local_shard_num and global_shard_num must be at least 1 (got {local_shard_num} and {global_shard_num})."
            )
        if global_shard_num < local_shard_num:
            log.warning("global_shard_num %d is raised to local_shard_num %d", global_shard_num, local_shard_num)
            global_shard_num = local_shard_num
        self.checkpoint_dir = full_path(checkpoint_dir)
        self.storage = shown_storage(self.checkpoint_dir, storage, deletion_strategy)
        """For scripts that read and write beside the checkpoints. None: the directory is a URL, which no `CheckpointStorage` knows."""
        self._storage, brought_along = meta_for(storage)
        self._deletion = rule_for(deletion_strategy or brought_along)
        self._save_timeout = save_timeout
        self._replica_count = replica_count
        self._num_slots = num_slots
        self._shard_nums = (local_shard_num, global_shard_num)
        self._is_group_private = is_group_private
        self._agreement = Agreement(own_ranks(), *self._shard_nums, is_group_private=is_group_private)
        where = environment.current()
        self._round = 0 if where is None else int(where.round)
        if outlet is not None:
            self.outlet = outlet
        elif where is not None and where.snapshot_home:
            self.outlet = AgentOutlet(where)
        else:
            self.outlet = ThreadOutlet()
        self._open_place()
        self._copier = Copier()
        self._segments: AgreedSegments | None = None
        self._writer: StateWriter | None = None
        self._writing = threading.Lock()
        """
        Guards the segments' writer and the outlet: the thread that prepares memory may still be reserving it at the first save, and
        the one that ends a lazy save publishes it.
        """
        self._num_saves = 0
        self._has_saved = False
        """Whether a snapshot of this process counts."""
        self._honoured_request = 0
        """Number of the newest wish for a storage save that was fulfilled."""
        self._is_storage_owed = False
        """A storage save was asked for and could only be made in memory. The same on all ranks."""
        self._asked = StorageSaves(self.outlet, self._writing)
        self.restored_step: int | None = None
        self._is_error_told = False
        self._lazily = LazySaves(lazy, self._publish)
        self._unjudged: SlotName | None = None
        """Slot of the last save, if the ranks have still to tell each other whether they all got it done."""
        self._is_judgement_due = False
        self._staleness = StalenessWatch()
        self._waiting: WaitingState | None = None
        """The newest state that found every slot busy and waits for one."""
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        self._look = EarlyLook(self.outlet.home, self.shard)
        self._preparation: Preparation | None = None
        if self._agreement.share.is_saving:
            has_segments = bool(segment_paths(self.outlet.home, self.shard))
            self._preparation = Preparation(self._reserve_in_turn, has_segments=has_segments)

    def delete_by(self, strategy: object) -> None:
        """From the next commit on."""
        rule = rule_for(strategy)
        if rule != self._deletion:
            self._deletion = rule
            with self._writing:
                self._open_place()

    def _open_place(self) -> None:
        self.outlet.open(SavePlace(directory=self.checkpoint_dir, storage=self._storage, deletion=self._deletion))

    @property
    def agreement(self) -> Agreement:
        """Of the ranks as they are now."""
        return self._agreement

    @property
    def is_saving_rank(self) -> bool:
        return self._agreement.share.is_saving

    @property
    def shard(self) -> int:
        return self._agreement.share.shard

    @phases.span(phases.CHECKPOINT)
    def save(
        self,
        step: int,
        parts: Mapping[str, object],
        paths: Mapping[str, str],
        *,
        is_storage: bool,
        on_busy: str = "skip",
        target: str = "",
        links: Mapping[str, str] | None = None,
        trackers: Mapping[str, str] | None = None,
        lazy: bool | str | None = None,
        metric: float | None = None,
    ) -> SaveResult:
        """
        Copy the named parts into a free slot. `paths` says which file each part becomes, inside of the checkpoint `target` (the
        step by default); `links` where else a file shall be found, by that path; `trackers` which files of the framework shall
        name the checkpoint once it counts, and with which words; `metric` how good the state is, for rules that keep the best.

        With `lazy` (True or "auto"; None: as the engine was made) parameters and optimizer state are copied while training goes on, where that is
        safe; otherwise everything may change again as soon as this returns.

        If every slot is busy, `on_busy` says what happens: "skip" this save, "block" until one is free, or copy the state aside and let the
        "latest" such state have the slot that gets free, at the next save or `poll`.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"`step` must be a whole number of at least 0 (got {step!r}).")
        if on_busy not in ON_BUSY:
            raise ValueError(f"on_busy must be one of {', '.join(ON_BUSY)} (got {on_busy!r}).")
        wanted_lazy = self._lazily.wish(lazy)
        phases.tell_step(step)
        if self.notes_saves:
            save_log().saved(lambda: KnownSave(self, step, parts, paths))
        self._agree_late()
        begun_at = time.perf_counter()
        claims = data_return.unconfirmed(self._agreement, step, is_storage=is_storage or self._is_storage_owed)
        if claims is None or (claims and not self.keeps_claims):
            unsure = Unavailable(
                "the master has not confirmed which data the model has read; the next save starts as usual"
            )
            return self._failed(step, unsure, time.perf_counter() - begun_at)
        confirmed_in = time.perf_counter() - begun_at
        if claims and is_storage:
            # Storage may be read by another job, whose master knows nothing of this step: the next save has to do.
            self._owe_storage(step)
            is_storage = False
        share = self._agreement.share
        if not share.is_saving:
            self._is_storage_owed = self._is_storage_owed and bool(claims)
            return SaveResult(reason=SaveReason.NOT_A_SAVING_RANK, step=step)
        self.wait_for_staging()  # a save that still copies comes first; the wait is counted there
        begun_at = time.perf_counter() - confirmed_in
        self.outlet.poll()
        is_inherited = self._waiting is not None and self._waiting.request.is_storage
        is_wanted = is_inherited or self.is_save_requested or self._is_storage_owed
        is_storage = is_storage or (not claims and is_wanted)
        request_number = self._agreement.agreed_request
        self._num_saves += 1
        is_committer = share.is_writer and share.shard == 0
        request = SaveRequest(
            directory=self.checkpoint_dir,
            target=target or str(step),
            step=step,
            attempt=f"{self._agreement.token}-{self._num_saves}",
            shard=share.shard,
            num_shards=share.num_shards,
            world_size=self._agreement.ranks.world_size,
            is_storage=is_storage,
            is_writer=share.is_writer,
            is_committer=is_committer,
            links=dict(links or {}),
            trackers=dict(trackers or {}),
            keep_latest=self._deletion.keep_latest,
            keep_interval=self._deletion.keep_interval,
            keep=self._deletion.keep,
            metric=metric,
            deletion=self._deletion.custom,
            storage=self._storage,
            replica_count=self._replica_count,
            save_timeout=self._save_timeout,
            claims=claims,
            data_state=data_return.rest_of_data(self._agreement, step) if is_committer and is_storage else "",
        )
        request.as_attempt()  # a name that the agent could not use is an error here, where somebody can correct it
        result = self._save_now(parts, paths, request, on_busy=on_busy, lazy=wanted_lazy)
        if result and is_storage:
            self._honoured_request, self._is_storage_owed = request_number, False
        elif result and self._is_storage_owed:
            result.message = _ONLY_IN_MEMORY
        if result:
            self._give_way()
        elif result.reason is SaveReason.SKIPPED_BUSY and on_busy == "latest":
            self._wait_aside(parts, paths, request, result)
        result.blocking = time.perf_counter() - begun_at
        return result

    @property
    def is_save_requested(self) -> bool:
        """
        Whether a storage save is wanted that was not made yet. As the saving ranks knew at their newest save, and the same on all of
        them: one that comes later is known from the next save on.
        """
        request = getattr(self.outlet, "save_request", None)
        if request is not None:
            self._agreement.heard_request = request.number
        if not self._agreement.is_joint:
            self._agreement.agreed_request = self._agreement.heard_request
        return self._agreement.agreed_request > self._honoured_request

    def agree(self, values: Sequence[int]) -> list[int]:
        """What global rank 0 says, at most 16 numbers that are not negative. All ranks call this at the same step."""
        self._agree_late()
        return self._agreement.tell_all(values)

    def poll(self) -> bool:
        """
        Whether the newest save is in memory, without waiting. Lets go of what the agent has taken, and gives a slot that is free to a
        state that waits for one: all saving ranks call this at the same place, if they use `on_busy="latest"`.
        """
        with self._writing:
            self.outlet.poll()
        if self._waiting is not None:
            self._end_waiting("skip")
        return self._waiting is None and not self._lazily.is_under_way

    def wait_for_staging(self) -> bool:
        """Until the newest save is in memory; helps with its copy. False: it was discarded, its result says why."""
        return self._lazily.wait()

    def load(self, part: str, *, into: object = None) -> Any:
        """The part of that name in the newest state that every rank can have. None: there is none anywhere."""
        parts = self.load_parts([part], into=None if into is None else {part: into})
        return None if parts is None else parts[part]

    @phases.span(phases.RESTORE)
    def load_parts(
        self, names: Sequence[str] | None = None, *, into: Mapping[str, object] | None = None
    ) -> dict[str, Any] | None:
        """
        The parts by those names, or all, of the newest state that every rank can have; `restored_step` says which that is. None: there
        is none anywhere. All ranks call this.

        `into` are parts like those that were saved: their tensors are filled where they are, if they look the same.
        """
        self._agree_late()
        self.wait_for_staging()
        restored = Restorer(
            self.checkpoint_dir, self.outlet.home, self._agreement, self._copier, storage=self._storage, look=self._look
        ).load(names, into)
        self.tell_data(restored)
        if restored is None:
            return None
        log.info(
            "restored step %d from %s", restored.step, "memory" if restored.is_from_memory else self.checkpoint_dir
        )
        self.restored_step = restored.step
        phases.tell_step(restored.step)
        if len(restored.parts) == 1:  # of others nobody remembers the files
            paths = dict.fromkeys(restored.parts, f"rank_{self.shard}.pt")
            save_log().restored(KnownSave(self, restored.step, restored.parts, paths))
        return restored.parts

    def load_file(self, resume_path: str | os.PathLike[str], *, into: object = None) -> Any:
        """A file, or the directory of one checkpoint. Raises FileNotFoundError."""
        resume_path = os.fspath(resume_path)
        if not os.path.isdir(resume_path):
            state = read_file(resume_path, into=into)
        else:
            path, record = own_file_in(resume_path, self._agreement.share)
            state = read_file(path, record, into=into)
        self.tell_data_of(resume_path)
        return state

    def tell_data(self, restored: Restored | None) -> None:
        """The datasets go on with the model that all ranks have now."""
        data_return.tell_restored(self._agreement, restored, self.checkpoint_dir, self._storage)

    def tell_data_of(self, resume_path: str) -> None:
        """The same for a checkpoint that the user named."""
        data_return.tell_resumed(self._agreement, resume_path, self._storage)

    def wait_for_storage(self, timeout: float) -> bool:
        """
        Whether the newest checkpoint that this rank asked for is committed; False as soon as it is known to have failed.

        The agent tells. Where none does (a shard of another process without an agent), the tracker can only be looked at.
        """
        self.wait_for_staging()
        if self._waiting is not None and self._waiting.request.is_storage:
            self._end_waiting("skip" if self._agreement.is_joint else "block")
        if self._is_storage_owed and self.is_saving_rank:
            return False  # told when it was asked for
        return not self.is_saving_rank or self._asked.wait_for_newest(timeout)

    def wait_until_settled(self, timeout: float) -> bool:
        """
        Until the end of every storage save is known that this rank commits, also of older ones than the newest. What they made expendable
        is deleted then.
        """
        self.wait_for_staging()
        return self._asked.wait_for_all(timeout)

    def release(self) -> None:
        """Let another process write to the segment: this one is about to end."""
        self.wait_for_staging()
        with self._writing:
            if self._segments is not None:
                self._segments.close()
            self._segments, self._writer = None, None

    def save_alone(self, step: int, parts: Mapping[str, object], paths: Mapping[str, str], attempt: str) -> None:
        """
        Save to memory for all ranks of this node that have the same state, also in place of the one that usually does it. Other ranks are not asked:
        they may be gone. Who restores compares the attempts. Raises OSError, ConfigError or Unavailable.
        """
        if self._agreement.share.num_shards != 1:
            raise Unavailable("the state is divided into shards, and a shard of the lost worker may be missing")
        self._write_alone(step, parts, paths, attempt)

    def _write_alone(self, step: int, parts: Mapping[str, object], paths: Mapping[str, str], attempt: str) -> None:
        share = self._agreement.share
        if data_return.uses_shards():
            raise Unavailable("not all ranks know which data were read since the newest snapshot")
        request = SaveRequest(
            directory=self.checkpoint_dir,
            target=str(step),
            step=step,
            attempt=attempt,
            shard=share.shard,
            num_shards=share.num_shards,
            world_size=self._agreement.ranks.world_size,
            is_storage=False,
            is_writer=share.is_writer,
            is_committer=share.is_writer and share.shard == 0,
            deletion=self._deletion.custom,
            keep_latest=self._deletion.keep_latest,
            keep_interval=self._deletion.keep_interval,
            keep=self._deletion.keep,
            storage=self._storage,
            replica_count=self._replica_count,
            save_timeout=self._save_timeout,
        )
        with self._writing:
            writer = self._open()
            assert self._segments is not None, "opened above"
            deadline = time.monotonic() + _ALONE_PATIENCE
            while True:
                self._segments.begin_alone()
                pending = writer.begin(
                    parts, step=step, round_=self._round, paths=paths, extra={REQUEST: encode_request(request)}
                )
                if pending is not None or time.monotonic() >= deadline:
                    break
                time.sleep(_LOOK_AGAIN_AFTER)
            if pending is None:
                raise Unavailable(
                    "earlier saves, which are being written to storage, still use all memory for snapshots"
                )
            self.outlet.saved(pending.finish(), request)

    def close(self) -> None:
        """Give up saving. Without an agent this waits for what is being written, and the memory goes."""
        atexit.unregister(self._at_exit)
        self.wait_for_staging()
        self._end_waiting("skip" if self._agreement.is_joint else "block")
        self._lazily.close()
        self._look.close()
        if self._preparation is not None:
            self._preparation.close()
        with self._writing:
            if self._segments is not None:
                self._segments.close()
            self._segments, self._writer = None, None
        self.outlet.close()
        self._copier.close()

    # Saving.

    def reserve(self, num_bytes: int, num_tensors: int = 0) -> memoryview:
        """Room for a state of that size and what is to be said about it; called by the thread that prepares memory."""
        with self._writing:
            self._open()
            assert self._segments is not None, "opened above"
            if self._lazily.is_under_way:
                return memoryview(b"")  # a copy is under way, so there is room, and it must not be replaced now
            if self._has_saved:
                num_bytes = num_tensors = 0  # there is room, as large as the state is and not as it was guessed to be
            return self._segments.reserve(num_bytes, room_for_names(num_tensors))

    def _reserve_in_turn(self, num_bytes: int, num_tensors: int) -> Iterator[memoryview]:
        """Not before the look at a former life: that is waited for sooner. A save may come between two of them."""
        self._look.wait()
        yield self.reserve(num_bytes, num_tensors)
        for slot in range(1, self._num_slots):
            with self._writing:
                room = None if self._segments is None else self._segments.room_of(slot)
            if room is not None:
                yield room.take()

    def _open(self) -> StateWriter:
        if self._writer is None:
            ranks = self._agreement.ranks
            where = environment.current()
            owner = Owner(
                job=where.job_name if where is not None else "no-launcher",
                launch=self.outlet.home.name,
                node_rank=where.node_rank if where is not None else 0,
                global_rank=self.shard,
                local_rank=ranks.local_rank,
                pid=os.getpid(),
            )
            self._segments = AgreedSegments(
                self.outlet.home, owner, num_slots=self._num_slots, fallback=self.outlet.fallback
            )
            self._segments.agreement = self._agreement
            self._writer = StateWriter(self._segments, self._copier)
        return self._writer

    def _save_now(
        self,
        parts: Mapping[str, object],
        paths: Mapping[str, str],
        request: SaveRequest,
        *,
        on_busy: str,
        lazy: bool | str,
    ) -> SaveResult:
        stepped = self._lazily.watch.optimizers()
        try:
            with self._writing:
                self._judge()
                lazy_memory = self._lazily.memory(lazy)
                try:
                    pending = self._copy(parts, paths, request, on_busy, lazy_memory)
                finally:
                    is_agreed = self._segments is not None and self._segments.is_agreed
                    self._is_judgement_due = is_agreed and lazy is not False
                if pending is None:
                    return SaveResult(reason=SaveReason.SKIPPED_BUSY, step=request.step)
                if not pending.is_lazy:
                    self._saved(pending.finish(), request)
                assert self._segments is not None, "a save has been made with it"
                result = SaveResult(reason=SaveReason.SAVED, step=request.step, num_bytes=self._segments.num_bytes)
                self._lazily.after_save()
                if pending.is_lazy:  # known to be under way before anybody else may touch the segments
                    self._lazily.stage(pending, request, result)
        except (OSError, ConfigError, Unavailable) as error:
            return self._failed(request.step, error, 0.0)
        if not pending.is_lazy and self._staleness.is_stale(
            request.step, pending.digest, pending.layout, pending.storages, stepped
        ):
            result.is_stale = True
            if self._staleness.is_to_be_told():
                log.warning(
                    "The save of step %d has the same bytes as the previous save, although an optimizer has "
                    "stepped. If your script builds or copies the state once before the loop, build it anew "
                    "for each save.",
                    result.step,
                )
        return result

    def _wait_aside(
        self, parts: Mapping[str, object], paths: Mapping[str, str], request: SaveRequest, result: SaveResult
    ) -> None:
        copied = copy_aside(parts, self._copier)
        if copied is None:
            result.message = "The save was skipped: a state of this kind cannot be copied and wait for free memory."
            return
        self._give_way()
        result.reason, result.is_done = SaveReason.QUEUED, False
        self._waiting = WaitingState(copied, paths, request, result)

    def _give_way(self) -> None:
        """A newer state is saved or waits, and writes to storage if this one was to: the one that waits is given up."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.result.reason, waiting.result.is_done = SaveReason.SKIPPED_BUSY, True
            waiting.result.message = "A newer state replaced this one."

    def _end_waiting(self, on_busy: str) -> None:
        """Give the state that waits a slot, if there is one now."""
        waiting = self._waiting
        if waiting is None:
            return
        self.wait_for_staging()
        done = self._save_now(waiting.parts, waiting.paths, waiting.request, on_busy=on_busy, lazy=False)
        if done.reason is not SaveReason.SKIPPED_BUSY:
            self._waiting = None
            result = waiting.result
            result.reason, result.num_bytes, result.message = done.reason, done.num_bytes, done.message
            result.is_done = True

    def _copy(
        self,
        parts: Mapping[str, object],
        paths: Mapping[str, str],
        request: SaveRequest,
        on_busy: str,
        lazy_memory: Collection[Memory],
    ) -> PendingSave | None:
        try:
            writer = self._open()
        except (OSError, ConfigError, Unavailable):
            self._agreement.decide(is_ready=False, is_giving_up=True)
            raise
        assert self._segments is not None, "opened above"
        deadline = time.monotonic() + (self._save_timeout if on_busy == "block" else 0.0)
        while True:
            self._segments.begin_save(is_last_try=time.monotonic() >= deadline)
            pending = writer.begin(
                parts,
                step=request.step,
                round_=self._round,
                paths=paths,
                extra={REQUEST: encode_request(request)},
                lazy_memory=lazy_memory,
            )
            if pending is not None or self._segments.has_given_up:
                return pending
            time.sleep(_LOOK_AGAIN_AFTER)  # the kernel has no wait with a deadline for a slot's lock
            self.outlet.poll()

    def _saved(self, name: SlotName, request: SaveRequest) -> None:
        """The snapshot counts from here on. Called with the lock: the outlet is not made for two threads."""
        self.outlet.saved(name, request)
        self._has_saved = True
        self._unjudged = name
        if request.is_storage:
            self._asked.add(request)
        self._is_error_told = False
        self._look.close()  # nobody restores any more, and a file that was outgrown shall go
        if self._preparation is not None:
            self._preparation.after_save(name)

    def _publish(self, pending: PendingSave, request: SaveRequest) -> None:
        """The end of a lazy save, in the thread that brought it there."""
        with self._writing:
            self._saved(pending.finish(), request)

    def _judge(self) -> None:
        """
        Did every rank bring its lazy save to its end? If one did not, the others give it up as well, before any of them gives
        up an older one: so they always hold a step in common.
        """
        is_due, self._is_judgement_due = self._is_judgement_due, False
        name, self._unjudged = self._unjudged, None
        if not is_due:
            return
        try:
            is_whole, _ = self._agreement.decide(is_ready=name is not None)
        except RuntimeError as error:  # what torch raises when a rank is gone
            raise Unavailable(f"The ranks could not agree whether the previous save is complete: {error}") from error
        if not is_whole and name is not None and self._segments is not None and self._segments.discard(name):
            log.warning(
                "The snapshot of step %d is discarded, because another rank could not finish its part.", name.step
            )

    def _at_exit(self) -> None:
        """What was begun shall count; not for a forked child, which has a copy of this and no threads."""
        if os.getpid() == self._pid:
            self.wait_for_staging()

    def _failed(self, step: int, error: Exception, blocking: float) -> SaveResult:
        """Training goes on without this snapshot; told once until a save succeeds."""
        if not self._is_error_told:
            self._is_error_told = True
            log.error("step %d was not saved: %s", step, error)
            if isinstance(self.outlet, AgentOutlet):
                self.outlet.failed(self.checkpoint_dir, step, str(error))
        return SaveResult(reason=SaveReason.ERROR, step=step, blocking=blocking, message=str(error))

    def _owe_storage(self, step: int) -> None:
        if not self._is_storage_owed:
            self._is_storage_owed = True
            log.warning("Step %d is not written to storage. %s", step, _ONLY_IN_MEMORY)

    def _agree_late(self) -> None:
        """The process group may have been made after us."""
        is_grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        if is_grouped and not self._agreement.is_joint and torch.distributed.get_world_size() > 1:
            self._agreement = Agreement(own_ranks(), *self._shard_nums, is_group_private=self._is_group_private)
            if self._segments is not None:
                self._segments.agreement = self._agreement
