"""
The engine in the training process: copies the state into memory, and finds it again.

A save blocks training for the copy alone. Nothing here waits for the agent or for storage: the agent is told, and what it
needs stands in the segment. All saving ranks take the same decision, so that they always hold a step in common: either all of
them overwrite their older slot or none does.

A restore asks every rank which steps it could have, from memory and from storage, and takes the newest that all of
them can; when a piece turns out to be damaged all go on to the next older one together.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dlrover.protocol.errors import ConfigError, DLRoverError, Unavailable
from dlrover.snapshot.checksum import Corrupt
from dlrover.snapshot.commit import committed_checkpoints, latest_step
from dlrover.snapshot.contents import decode_contents
from dlrover.snapshot.copying import Copier, prefault
from dlrover.snapshot.manifest import DIRECTORY, ManifestInvalid
from dlrover.snapshot.persist import REQUEST, SaveRequest, encode_request, of_present_history, read_request
from dlrover.snapshot.retention import KeepInterval, KeepLatest, Retention
from dlrover.snapshot.segment import Segment, SegmentWriter, SlotInWriting, SlotName, segment_paths
from dlrover.snapshot.segment_format import Owner, SegmentInvalid
from dlrover.snapshot.storage import LocalStorage, join, storage_for
from dlrover.trainer import environment
from dlrover.trainer.torch.flash_checkpoint.agreement import Agreement, own_ranks
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveReason, SaveResult
from dlrover.trainer.torch.flash_checkpoint.copying import StateWriter, load_state
from dlrover.trainer.torch.flash_checkpoint.outlets import AgentOutlet, Outlet, ThreadOutlet

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

ON_BUSY = ("skip", "block")
_LOOK_AGAIN_AFTER = 0.02
_TRACKER_LOOK_AFTER = 0.1
_REMEDY = "Mend the directory, or give a resume_path, or begin anew in another directory."
_UNREADABLE = 1
"""What rank 0 tells the others in place of steps, when the storage cannot be read."""


class CheckpointEngine:
    """One per process and home: a rank has one set of segments."""

    def __init__(
        self,
        checkpoint_dir: str,
        *,
        local_shard_num: int = 1,
        global_shard_num: int = 1,
        deletion_strategy: Retention | None = None,
        save_timeout: float = 600.0,
        num_slots: int = 2,
        outlet: Outlet | None = None,
    ) -> None:
        if local_shard_num < 1 or global_shard_num < 1:
            raise ConfigError(f"Shard numbers must be at least 1, not {local_shard_num} and {global_shard_num}.")
        if global_shard_num < local_shard_num:
            log.warning("global_shard_num %d is raised to local_shard_num %d", global_shard_num, local_shard_num)
            global_shard_num = local_shard_num
        self.checkpoint_dir = checkpoint_dir if "://" in checkpoint_dir else os.path.abspath(checkpoint_dir)
        self._keep_latest, self._keep_interval = _retention_numbers(deletion_strategy)
        self._save_timeout = save_timeout
        self._num_slots = num_slots
        self._shard_nums = (local_shard_num, global_shard_num)
        self._agreement = Agreement(own_ranks(), local_shard_num, global_shard_num)
        where = environment.current()
        self._round = 0 if where is None else int(where.round)
        if outlet is not None:
            self.outlet = outlet
        elif where is not None and where.snapshot_home:
            self.outlet = AgentOutlet(where)
        else:
            self.outlet = ThreadOutlet()
        self._copier = Copier()
        self._segments: _AgreedSegments | None = None
        self._writer: StateWriter | None = None
        self._writing = threading.Lock()
        """Guards the segments' writer: the thread that prepares memory may still be reserving it at the first save."""
        self._num_saves = 0
        self._storage_step: int | None = None
        """Newest step that this rank asked to be written."""
        self.restored_step: int | None = None
        self._preparation = _Preparation(self) if self._agreement.share.is_saving else None
        self._is_error_told = False

    @property
    def is_saving_rank(self) -> bool:
        return self._agreement.share.is_saving

    @property
    def shard(self) -> int:
        return self._agreement.share.shard

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
    ) -> SaveResult:
        """
        Copy the named parts into a free slot. `paths` says which file each part becomes, inside of the checkpoint `target` (the
        step by default); `links` where else a file shall be found, by that path; `trackers` which files of the framework shall
        name the checkpoint once it counts, and with which words.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"A step is a number from 0 on, not {step!r}.")
        if on_busy not in ON_BUSY:
            raise ValueError(f"on_busy is one of {', '.join(ON_BUSY)}, not {on_busy!r}.")
        begun_at = time.perf_counter()
        self._agree_late()
        share = self._agreement.share
        if not share.is_saving:
            return SaveResult(reason=SaveReason.NOT_A_SAVING_RANK, step=step)
        self._num_saves += 1
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
            is_committer=share.is_writer and share.shard == 0,
            links=dict(links or {}),
            trackers=dict(trackers or {}),
            keep_latest=self._keep_latest,
            keep_interval=self._keep_interval,
            save_timeout=self._save_timeout,
        )
        request.as_attempt()  # a name that the agent could not use is an error here, where somebody can correct it
        self.outlet.poll()
        try:
            with self._writing:
                name = self._copy(parts, paths, request, on_busy)
        except (OSError, ConfigError, Unavailable) as error:
            return self._failed(step, error, time.perf_counter() - begun_at)
        if name is None:
            return SaveResult(reason=SaveReason.SKIPPED_BUSY, step=step, blocking=time.perf_counter() - begun_at)
        self.outlet.saved(name, request)
        if is_storage:
            self._storage_step = step
        self._is_error_told = False
        assert self._segments is not None, "a save has been made with it"
        num_bytes = self._segments.num_bytes
        if self._preparation is not None:
            self._preparation.after_save(name)
        return SaveResult(
            reason=SaveReason.SAVED, step=step, blocking=time.perf_counter() - begun_at, num_bytes=num_bytes
        )

    def load(self, part: str) -> Any:
        """The newest state that every rank can have. None: there is none anywhere."""
        self._agree_late()
        offers = self._offers()
        in_memory = self._agreement.common(list(offers))
        in_storage, trouble = self._stored_steps()
        candidates = sorted([(step, 1) for step in in_memory] + [(step, 0) for step in in_storage], reverse=True)
        for step, is_memory in candidates:
            state = self._from_memory(offers[step], part) if is_memory else self._from_storage(step, part)
            if self._agreement.have_all(state is not None):
                where = "memory" if is_memory else self.checkpoint_dir
                log.info("restored step %d from %s", step, where)
                self.restored_step = step
                return state
            log.warning("step %d cannot be restored on all ranks; trying the next older one", step)
        if trouble:
            raise ManifestInvalid(f"The checkpoints in {self.checkpoint_dir} cannot be used: {trouble} {_REMEDY}")
        if candidates:
            raise ManifestInvalid(
                f"There are checkpoints in {self.checkpoint_dir}, but none can be restored on all ranks; the warnings above say why. "
                f"{_REMEDY}"
            )
        return None

    def load_file(self, resume_path: str) -> Any:
        """A file, or the directory of one checkpoint. Raises FileNotFoundError."""
        path = resume_path
        if os.path.isdir(path):
            path = os.path.join(path, f"rank_{self.shard}.pt")
        return _read_file(path)

    def wait_for_storage(self, timeout: float) -> bool:
        """Whether the newest checkpoint that this rank asked for is committed. Others' disks can only be looked at."""
        wanted = self._storage_step
        if wanted is None or not self.is_saving_rank:
            return True
        storage = storage_for(self.checkpoint_dir)
        deadline = time.monotonic() + timeout
        while True:
            try:
                if latest_step(storage, self.checkpoint_dir) == wanted:
                    return True
            except (OSError, ManifestInvalid) as error:
                log.info("the tracker in %s cannot be read: %s", self.checkpoint_dir, error)
            if time.monotonic() >= deadline:
                log.warning("step %d was not committed within %g s", wanted, timeout)
                return False
            time.sleep(_TRACKER_LOOK_AFTER)

    def close(self) -> None:
        """Give up saving. Without an agent this waits for what is being written, and the memory goes."""
        if self._preparation is not None:
            self._preparation.close()
        with self._writing:
            if self._segments is not None:
                self._segments.close()
            self._segments, self._writer = None, None
        self.outlet.close()
        self._copier.close()

    # Saving.

    def reserve(self, num_bytes: int) -> memoryview:
        """Room for a state of that size; called by the thread that prepares memory."""
        with self._writing:
            self._open()
            assert self._segments is not None, "opened above"
            return self._segments.reserve(num_bytes)

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
            self._segments = _AgreedSegments(
                self.outlet.home, owner, num_slots=self._num_slots, fallback=self.outlet.fallback
            )
            self._segments.agreement = self._agreement
            self._writer = StateWriter(self._segments, self._copier)
        return self._writer

    def _copy(
        self, parts: Mapping[str, object], paths: Mapping[str, str], request: SaveRequest, on_busy: str
    ) -> SlotName | None:
        try:
            writer = self._open()
        except (OSError, ConfigError, Unavailable):
            self._agreement.decide(is_ready=False, is_giving_up=True)
            raise
        assert self._segments is not None, "opened above"
        deadline = time.monotonic() + (self._save_timeout if on_busy == "block" else 0.0)
        while True:
            self._segments.begin_save(is_last_try=time.monotonic() >= deadline)
            name = writer.save(
                parts, step=request.step, round_=self._round, paths=paths, extra={REQUEST: encode_request(request)}
            )
            if name is not None or self._segments.has_given_up:
                return name
            time.sleep(_LOOK_AGAIN_AFTER)  # the kernel has no wait with a deadline for a slot's lock
            self.outlet.poll()

    def _failed(self, step: int, error: Exception, blocking: float) -> SaveResult:
        """Training goes on without this snapshot; told once until a save succeeds."""
        if not self._is_error_told:
            self._is_error_told = True
            log.error("step %d was not saved: %s", step, error)
        return SaveResult(reason=SaveReason.ERROR, step=step, blocking=blocking, message=str(error))

    def _agree_late(self) -> None:
        """The process group may have been made after us."""
        is_grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        if is_grouped and not self._agreement.is_joint and torch.distributed.get_world_size() > 1:
            self._agreement = Agreement(own_ranks(), *self._shard_nums)
            if self._segments is not None:
                self._segments.agreement = self._agreement

    # Restoring.

    def _offers(self) -> dict[int, SlotName]:
        """Steps of our shard in this node's memory that belong to this directory and are cut as we are."""
        found: list[SlotName] = []
        for path in segment_paths(self.outlet.home, self.shard):
            try:
                with Segment(path) as segment:
                    found += [name for name in segment.complete_slots() if self._is_ours(segment, name)]
            except (SegmentInvalid, FileNotFoundError):
                continue
        return {name.step: name for name in of_present_history(found)}

    def _is_ours(self, segment: Segment, name: SlotName) -> bool:
        pinned = segment.pin(name.slot, name.generation)
        if pinned is None:
            return False
        try:
            request = read_request(decode_contents(pinned.sections()))
        except DLRoverError as error:
            log.warning("a snapshot of step %d is left out: %s", name.step, error)
            return False
        finally:
            pinned.close()
        num_shards = self._agreement.share.num_shards
        return request is not None and (request.directory, request.num_shards) == (self.checkpoint_dir, num_shards)

    def _from_memory(self, name: SlotName, part: str) -> Any:
        """None, with a warning, when it is not there any more or damaged."""
        try:
            with Segment(name.path, private=True) as segment:
                pinned = segment.pin(name.slot, name.generation)
                if pinned is None:
                    return None
                with pinned:
                    pinned.verify()
                    return load_state(pinned, self._copier, names=[part])[part]
        except (OSError, Corrupt, SegmentInvalid) as error:
            log.warning("%s", error)
            return None

    def _stored_steps(self) -> tuple[list[int], str]:
        """What rank 0 finds in the storage, newest first, and what is wrong there; the same on all ranks."""
        steps: list[int] = []
        trouble = ""
        if self._agreement.ranks.global_rank == 0 or not self._agreement.is_joint:
            try:
                steps = self._find_stored()
            except (OSError, DLRoverError) as error:
                trouble = str(error)
        told = self._agreement.tell_all([_UNREADABLE if trouble else 0, *steps[:8]])
        if told[0] == _UNREADABLE:
            return [], trouble or "Global rank 0 could not read the storage."
        return told[1:], ""

    def _find_stored(self) -> list[int]:
        storage = storage_for(self.checkpoint_dir)
        newest = latest_step(storage, self.checkpoint_dir)
        if newest is None:
            return []
        steps = [each.manifest.step for each in committed_checkpoints(storage, self.checkpoint_dir)]
        found = sorted((step for step in steps if step <= newest), reverse=True)
        if newest not in found and self._is_foreign(newest):
            return [newest, *found]
        if newest not in found:
            raise ManifestInvalid(
                f"The tracker in {self.checkpoint_dir} names step {newest}, which is not complete there (complete: {found})."
            )
        return found

    def _is_foreign(self, step: int) -> bool:
        """Written by software that knows no manifests, such as the original DLRover: its tracker has to be believed."""
        target = join(self.checkpoint_dir, str(step))
        is_ours = os.path.isdir(join(target, DIRECTORY))
        return not is_ours and os.path.isfile(join(target, f"rank_{self.shard}.pt"))

    def _from_storage(self, step: int, part: str) -> Any:
        """None, with a warning, when this rank's piece cannot be read."""
        try:
            storage = storage_for(self.checkpoint_dir)
            path = join(self.checkpoint_dir, str(step), f"rank_{self.shard}.pt")
            for each in committed_checkpoints(storage, self.checkpoint_dir):
                if each.manifest.step == step:
                    path = join(each.path, self._own_file(each.manifest.ranks, step))
            if isinstance(storage, LocalStorage):
                return _read_file(path)
            import io

            return torch.load(io.BytesIO(storage.read(path)), map_location="cpu", weights_only=False)
        except (OSError, DLRoverError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            log.warning("the checkpoint of step %d cannot be read: %s", step, error)
            return None

    def _own_file(self, ranks: Any, step: int) -> str:
        num_shards = self._agreement.share.num_shards
        if len(ranks) != num_shards:
            raise ManifestInvalid(
                f"Step {step} was saved in {len(ranks)} shards, this job has {num_shards}; restoring it would need resharding."
            )
        found: str = next(rank for rank in ranks if rank.global_rank == self.shard).files[0].path
        return found


class _AgreedSegments(SegmentWriter):
    """Gives a slot only if every saving rank has got one. Asked once per save, also where the room is found in several tries."""

    agreement: Agreement
    num_bytes = 0
    """Of the newest slot in writing."""
    has_given_up = False
    _is_decided = False
    _is_last_try = True

    def begin_save(self, *, is_last_try: bool) -> None:
        self._is_decided, self._is_last_try = False, is_last_try

    def begin(self, data_bytes: int, meta_bytes: int) -> SlotInWriting | None:
        slot = None
        try:
            slot = super().begin(data_bytes, meta_bytes)
        except BaseException:
            if not self._is_decided:
                self.agreement.decide(is_ready=False, is_giving_up=True)  # the others must not wait for us
            raise
        if not self._is_decided:
            self._is_decided = True
            try:
                is_go, self.has_given_up = self.agreement.decide(
                    is_ready=slot is not None, is_giving_up=slot is None and self._is_last_try
                )
            except RuntimeError as error:  # what torch raises when a rank is gone
                if slot is not None:
                    slot.abandon()
                raise Unavailable(f"The saving ranks could not agree on this save: {error}") from error
            if not is_go and slot is not None:
                slot.abandon()
                return None
        self.num_bytes = data_bytes
        return slot


class _Preparation:
    """
    Has the memory ready before the first save: pages that were never touched cost several times the copy.

    After the first step of an optimizer its parameters and state are known, and with them nearly the size of what will be saved.
    One thread then reserves the slots and touches their pages. Later it does the same for a file that had to grow.
    """

    SLACK = 1.05
    """Buffers, schedulers, what the caller adds."""
    SLACK_BYTES = 1024 * 1024

    def __init__(self, engine: CheckpointEngine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._path = ""
        self._hook: Any = register_optimizer_step_post_hook(self._after_step)
        if segment_paths(engine.outlet.home, engine.shard):
            self._start(0)  # of a former life: there already, and only to be mapped

    def after_save(self, name: SlotName) -> None:
        self._unhook()
        if name.path != self._path:
            self._path = name.path
            self._start(0)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self._unhook()
        self._stop.set()
        self.wait()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._unhook()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*params, *state))
        self._start(int(num_bytes * self.SLACK) + self.SLACK_BYTES)

    def _start(self, num_bytes: int) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, args=(num_bytes,), name="dlrover-prefault", daemon=True)
            self._thread.start()

    def _run(self, num_bytes: int) -> None:
        try:
            view = self._engine.reserve(num_bytes)
        except (OSError, DLRoverError) as error:
            log.info("memory for snapshots could not be prepared: %s", error)  # the save itself will say it aloud
            return
        with view:
            prefault(view, self._stop)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _read_file(path: str) -> Any:
    """In full, not only weights: the file is what the training itself saved, optimizer arguments and all."""
    return torch.load(path, map_location="cpu", weights_only=False)


def _retention_numbers(strategy: Retention | None) -> tuple[int, int]:
    """How many to keep, and which interval; 0: no such rule."""
    if strategy is None:
        return 0, 0
    if isinstance(strategy, KeepLatest):
        return max(1, strategy.max_to_keep), 0
    if isinstance(strategy, KeepInterval):
        return 0, max(1, strategy.keep_interval)
    raise ConfigError(
        f"deletion_strategy {type(strategy).__name__} cannot be used: the agent deletes, and knows KeepLatest(max_to_keep) and "
        "KeepInterval(keep_interval) of dlrover.snapshot.retention."
    )
