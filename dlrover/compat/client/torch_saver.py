"""
The saver's names of the original, on top of our snapshots.

In this software the agent writes checkpoints by itself, from what stands in the segments; scripts need no saver. What scripts and tests of the
original do with one by name works here on the same segments: write the newest snapshot now, write a certain step, ask
whether something is being written. A subclass is honoured where the script calls it, not by the agent: a script that wants
files to go elsewhere gives a `storage=`.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from dlrover.host.ownership import make_private
from dlrover.protocol.errors import ConfigError, DLRoverError
from dlrover.snapshot.copy.copying import Copier
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.memory.segment import Segment, SegmentWriter, SlotName, remove_segment, segment_paths
from dlrover.snapshot.memory.segment_format import Owner, SegmentInvalid
from dlrover.snapshot.storage.class_meta import ClassMeta
from dlrover.snapshot.storage.commit import TRACKER
from dlrover.snapshot.storage.persist import (
    SaveRequest,
    finish,
    is_complete,
    of_present_history,
    persist,
    pin_newest,
    release,
)
from dlrover.snapshot.storage.persist import read_request as request_of
from dlrover.snapshot.storage.storage import LocalStorage, Storage, full_path, join, parent_of
from dlrover.snapshot.storage.user_storage import UserStorage, announce, storage_of
from dlrover.trainer import environment
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import StateWriter, load_state

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

DLROVER_CKPT_CONFIG_KEY = "_DLORVER_CKPT_CONFIG"
_STATE = "state"
_LOOK_FOR_FILES = 0.5
"""Seconds: files of other nodes come without a word."""


class CheckpointEventType(enum.Enum):
    UPDATE_SHARD = 1
    SAVE = 2
    EXIT = 3


@dataclass
class CheckpointEvent:
    type: CheckpointEventType
    step: int = 0
    global_shard_num: int = 0


@dataclass
class CheckpointConfig:
    rank: int = 0
    group_rank: int = 0
    world_size: int = 0
    step: int = 0
    writing_shm: bool = False
    paths: dict[str, str] = field(default_factory=dict)


@dataclass
class TensorMeta:
    shape: tuple[int, ...] = ()
    dtype: Any = None
    element_size: int = 0
    numel: int = 0
    offset: int = 0


class SharedMemoryHandler:
    """The memory of one local shard: a segment of ours with the state and its `CheckpointConfig`."""

    def __init__(self, local_rank: int, host: bool = True) -> None:
        self._local_rank, self._is_host = local_rank, host
        run = os.environ.get("TORCHELASTIC_RUN_ID", "") or "no-run"
        self._home = environment.snapshot_dir() / f"dlrover-handlers-{os.getuid()}" / run.replace("/", "_")
        self._copier = Copier()
        self._segments: SegmentWriter | None = None
        self._writer: StateWriter | None = None

    def save_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The whole state, with its config under the reserved key. Raises DLRoverError when there is no room."""
        state = {key: value for key, value in state_dict.items() if key != DLROVER_CKPT_CONFIG_KEY}
        config = state_dict.get(DLROVER_CKPT_CONFIG_KEY, CheckpointConfig())
        extra = {DLROVER_CKPT_CONFIG_KEY: msgspec.msgpack.encode(config)}
        if self._open().save({_STATE: state}, step=config.step, extra=extra) is None:
            raise BlockingIOError("all slots of this shard's memory are being read")

    def load_state_dict(self) -> dict[str, Any]:
        """{} when there is none; the tensors are copies."""
        name = self._newest()
        if name is None:
            return {}
        with Segment(name.path, private=True) as segment:
            pinned = segment.pin(name.slot, name.generation)
            if pinned is None:
                return {}
            with pinned:
                state: dict[str, Any] = load_state(pinned, self._copier)[_STATE]
                state[DLROVER_CKPT_CONFIG_KEY] = _config_in(decode_contents(pinned.sections()).extra)
        return state

    def get_checkpoint_config(self, default_config: CheckpointConfig) -> CheckpointConfig:
        name = self._newest()
        pinned = None if name is None else pin_newest(name.path, name.slot, name.generation)
        if pinned is None:
            return default_config
        try:
            return _config_in(decode_contents(pinned.sections()).extra)
        finally:
            release(pinned)

    def no_checkpint_state(self) -> bool:
        return self._newest() is None

    def init_shared_memory(self, create: bool = False, size: int = 0) -> None:
        """With `create` room is reserved; otherwise there is nothing to do, the memory is found when it is read."""
        if create and size > 0:
            self._open()
            assert self._segments is not None, "opened above"
            self._segments.reserve(size).release()

    def reset(self) -> None:
        """What is read is always looked up anew."""

    def close(self) -> None:
        if self._segments is not None:
            self._segments.close()
        self._segments, self._writer = None, None

    def unlink(self) -> None:
        self.close()
        for path in segment_paths(self._home, self._local_rank):
            remove_segment(path)

    def _open(self) -> StateWriter:
        if self._writer is None:
            make_private(self._home.parent)
            make_private(self._home)
            owner = Owner(
                job=self._home.name,
                launch="handler",
                node_rank=0,
                global_rank=self._local_rank,
                local_rank=self._local_rank,
                pid=os.getpid(),
            )
            self._segments = SegmentWriter(self._home, owner)
            self._writer = StateWriter(self._segments, self._copier)
        return self._writer

    def _newest(self) -> SlotName | None:
        return max(_slots(self._home, self._local_rank), default=None)


class AsyncCheckpointSaver:
    """Writes snapshots of this node to storage when it is called; no script has to call it."""

    trackers: ClassVar[tuple[str, ...]] = ()
    """Files of the framework that name the newest step, beside ours."""
    _instance: ClassVar[AsyncCheckpointSaver | None] = None

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        storage_meta: ClassMeta | None = None,
        local_shard_num: int = 1,
        global_shard_num: int = 1,
        save_timeout: float = 600,
        *,
        home: str | os.PathLike[str] | None = None,
    ) -> None:
        self.checkpoint_dir = full_path(checkpoint_dir)
        self.local_shard_num, self.global_shard_num = local_shard_num, global_shard_num
        self.save_timeout = save_timeout
        self._storage_meta = storage_meta
        self._home = None if home is None else Path(home)
        self._writing = threading.Lock()
        """Held while files are written: one call after the other."""
        self._is_reset = threading.Event()
        """The workers start anew: who waits for their files waits in vain."""
        AsyncCheckpointSaver._instance = self

    @classmethod
    def start_async_saving_ckpt(cls) -> None:
        """Nothing has to be started: the agent, or a thread of the trainer, listens already."""

    @classmethod
    def get_ckpt_saver(cls) -> AsyncCheckpointSaver | None:
        return AsyncCheckpointSaver._instance

    @classmethod
    def reset(cls) -> None:
        """Memory is looked up anew at each save; a commit that waits gives up."""
        if AsyncCheckpointSaver._instance is not None:
            AsyncCheckpointSaver._instance._is_reset.set()

    def save_shm_to_storage(self, timeout: float = 60, master_client: object = None) -> bool:
        """Write the newest step that all shards of this node hold. False: there is none, or it is written already."""
        shards = self._shards()
        steps = [{name.step for name, _request in slots} for slots in shards.values()]
        common = set.intersection(*steps) if steps else set()
        return self.save_step_checkpoint(max(common)) if common else False

    def save_step_checkpoint(self, step: int) -> bool:
        """Write this node's shards of a step, and commit it if that makes it complete."""
        with self._writing:
            newest: SaveRequest | None = None
            for slots in self._shards().values():
                for name, request in slots:
                    if name.step == step and request.is_writer:
                        newest = self._persist(name, request)
            if newest is None or not is_complete(newest):
                return False
            finish(msgspec.structs.replace(newest, trackers=self._trackers_of(newest)))
            return True

    def wait_saving_checkpoint(self) -> bool:
        """True while a call of this process writes."""
        return self._writing.locked()

    def commit_checkpoint(self, step: int, step_done_dir: str, timeout: float = 600) -> bool:
        """
        For a saver that writes by itself: wait until every shard of the job has put a file into this directory, then
        name the step in the trackers. False: the time is over, or the workers start anew; the shards' files stay.
        """
        return self._commit(step, step_done_dir, timeout)

    def _commit(self, step: int, done_dir: str, timeout: float, staged: str = "", target: str = "") -> bool:
        storage = storage_of(self.checkpoint_dir, self._storage_meta)
        is_complete = self._await_done_files(storage, done_dir, timeout)
        if is_complete:
            if staged:
                storage.remove_tree(target)
                _move(storage, staged, target)
            self.update_tracker_file(step)
        elif staged:
            storage.remove_tree(staged)
        storage.remove_tree(done_dir)
        announce(storage, step, is_committed=is_complete)
        return is_complete

    def _await_done_files(self, storage: Storage, done_dir: str, timeout: float) -> bool:
        self._is_reset.clear()
        end_at = time.monotonic() + timeout
        while (num_done := len(storage.list(done_dir))) < self.global_shard_num:
            left = end_at - time.monotonic()
            if left <= 0 or self._is_reset.wait(min(left, _LOOK_FOR_FILES)):
                log.error("%s: %d of %d shards are saved; not committed", done_dir, num_done, self.global_shard_num)
                return False
        return True

    def update_tracker_file(self, step: int) -> None:
        storage = storage_of(self.checkpoint_dir, self._storage_meta)
        for name in (TRACKER, *self.trackers):
            storage.write_atomic(join(self.checkpoint_dir, name), str(step).encode())

    def close(self) -> None:
        if AsyncCheckpointSaver._instance is self:
            AsyncCheckpointSaver._instance = None

    def _persist(self, name: SlotName, request: SaveRequest) -> SaveRequest | None:
        pinned = pin_newest(name.path, name.slot, name.generation)
        if pinned is None:
            return None
        try:
            persist(pinned, request)
        finally:
            release(pinned)
        return request

    def _trackers_of(self, request: SaveRequest) -> dict[str, str]:
        return {**dict.fromkeys(self.trackers, str(request.step)), **request.trackers}

    def _shards(self) -> dict[int, list[tuple[SlotName, SaveRequest]]]:
        """By shard, what this node's memory holds for our directory."""
        requests: dict[SlotName, SaveRequest] = {}
        by_shard: dict[int, list[SlotName]] = {}
        for name in (name for home in self._homes() for name in _slots(home, None)):
            request = _request_of(name)
            if request is not None and request.directory == self.checkpoint_dir:
                requests[name] = request
                by_shard.setdefault(request.shard, []).append(name)
        return {
            shard: [(name, requests[name]) for name in of_present_history(names)] for shard, names in by_shard.items()
        }

    def _homes(self) -> list[Path]:
        where = environment.current()
        if self._home is not None:
            return [self._home]
        if where is not None and where.snapshot_home:
            return [Path(where.snapshot_home)]
        root = environment.snapshot_dir() / f"dlrover-snapshots-{os.getuid()}"
        return sorted(root.glob(f"no-launcher.{os.getpid()}-*"))


class CommonDirCheckpointSaver(AsyncCheckpointSaver): ...


class TempDirCheckpointSaver(AsyncCheckpointSaver):
    """Every save of ours is staged and renamed."""

    def commit_checkpoint(  # type: ignore[override]  # the original's, too
        self, step: int, step_done_dir: str, tmp_path: str, target_path: str, timeout: float = 600
    ) -> bool:
        """The same, and the staged directory takes the place of the target; without success it is removed."""
        return self._commit(step, step_done_dir, timeout, tmp_path, target_path)


class DdpCheckpointSaver(CommonDirCheckpointSaver): ...


class FsdpDcpSaver(CommonDirCheckpointSaver): ...


class MegatronCheckpointSaver(CommonDirCheckpointSaver):
    TRACER_FILE = "latest_checkpointed_iteration.txt"
    trackers: ClassVar[tuple[str, ...]] = (TRACER_FILE,)


class DeepSpeedCheckpointSaver(CommonDirCheckpointSaver):
    TRACER_FILE = "latest"
    trackers: ClassVar[tuple[str, ...]] = (TRACER_FILE,)


def _move(storage: Storage, source: str, target: str) -> None:
    if isinstance(storage, UserStorage):
        storage.move(source, target)
    elif isinstance(storage, LocalStorage):
        storage.make_directory(parent_of(target))
        storage.rename(source, target)
    else:
        raise ConfigError(
            f"{target}: an object store cannot move a directory. Write the files directly to the target, and commit "
            "there."
        )


def _slots(home: Path, rank: int | None) -> list[SlotName]:
    """Complete slots of a rank, or of all."""
    found: list[SlotName] = []
    for path in segment_paths(home, rank):
        try:
            with Segment(path) as segment:
                found += segment.complete_slots()
        except (SegmentInvalid, FileNotFoundError):
            continue
    return found


def _request_of(name: SlotName) -> SaveRequest | None:
    pinned = pin_newest(name.path, name.slot, name.generation)
    if pinned is None:
        return None
    try:
        return request_of(decode_contents(pinned.sections()))
    except DLRoverError as error:
        log.warning("a snapshot of step %d is left out: %s", name.step, error)
        return None
    finally:
        release(pinned)


_CONFIG_DECODER = msgspec.msgpack.Decoder(CheckpointConfig)


def _config_in(extra: dict[str, bytes]) -> CheckpointConfig:
    return _CONFIG_DECODER.decode(extra[DLROVER_CKPT_CONFIG_KEY])
