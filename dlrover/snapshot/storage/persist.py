"""
From a slot in memory to a checkpoint in storage: what to write, writing it, and making it count.

A trainer leaves in every slot what it would take to persist it (`SaveRequest`), so a later holder of the slot needs nothing
else: not the trainer, and not a message that may have been lost with an agent. The agent persists under `dlrover-run`, a
thread of the trainer elsewhere; both use the functions here.

The commit is the one by files: every writer leaves a manifest in the staging directory, and the committer waits until
all are there. A shared file system cannot tell when a file appears, so it has to look, in growing steps and with a deadline.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import DLRoverError, Rejected
from dlrover.protocol.messages.data import Claim
from dlrover.snapshot.files.direct_io import WriteOptions, WriteStopped
from dlrover.snapshot.memory.checksum import best_algorithm, chunk_checksums
from dlrover.snapshot.memory.contents import Contents, decode_contents
from dlrover.snapshot.memory.segment import PinnedSlot, Segment, SlotName
from dlrover.snapshot.memory.segment_format import SegmentInvalid, Sums, encode_sums
from dlrover.snapshot.storage.class_meta import ClassMeta
from dlrover.snapshot.storage.commit import (
    Attempt,
    Committed,
    Tracker,
    abandon,
    commit,
    committed_manifest,
    finish_rank,
    read_global_manifest,
    stage,
    staged_manifests,
)
from dlrover.snapshot.storage.file_kinds import write_kind
from dlrover.snapshot.storage.manifest import FileRecord, GlobalManifest, RankManifest, TensorRecord, Topology
from dlrover.snapshot.storage.retention import KeepInterval, KeepLatest, MoreRules, apply_retention
from dlrover.snapshot.storage.storage import LocalStorage, Renaming, Storage, join, parent_of
from dlrover.snapshot.storage.user_deletion import UserDeletion
from dlrover.snapshot.storage.user_storage import announce, storage_of

log = logging.getLogger("dlrover.snapshot")

REQUEST = "save"
"""Name of the extra part of a slot that holds the request."""
_FIRST_LOOK_AFTER = 0.02
_LONGEST_PAUSE = 1.0


class SaveRequest(Struct, frozen=True, kw_only=True):
    """What a trainer says about one of its snapshots."""

    directory: str
    """The job's checkpoints: an absolute path or a URL."""
    target: str
    step: int
    attempt: str
    """Equal on all ranks of one save, and never used again."""
    shard: int
    """Which piece of the state this is; 0 where the state is the same everywhere."""
    num_shards: int
    world_size: int
    is_storage: bool
    """The caller asked for a checkpoint, not only for a snapshot."""
    is_writer: bool
    """Of several equal copies this is the one to write."""
    is_committer: bool
    links: dict[str, str] = {}
    """By path in the checkpoint: where else the caller wants to find that file."""
    trackers: dict[str, str] = {}
    """The framework's own trackers, file name to content; written last."""
    replica_count: int = 0
    """Copies in other nodes' memory that the trainer asks for."""
    keep_latest: int = 0
    keep_interval: int = 0
    keep: MoreRules | None = None
    """Rules that look at more than steps."""
    metric: float | None = None
    """How good the state is, for the rule that keeps the best."""
    deletion: ClassMeta | None = None
    """A deletion strategy of the user's own."""
    storage: ClassMeta | None = None
    """A storage of the user's own, in place of what the directory says."""
    save_timeout: float = 600.0
    claims: dict[str, tuple[Claim, ...]] = {}
    """By dataset: records that the model contains and that the master had not confirmed when the snapshot was taken."""
    data_state: str = ""
    """What the model has still to read, as the master said when the snapshot was taken; only the committer of a storage save asks for it."""

    def open_storage(self) -> Storage:
        """Raises ConfigError when the user's own cannot be built here."""
        return storage_of(self.directory, self.storage)

    def as_attempt(self) -> Attempt:
        """Raises ValueError when the target cannot be the name of a checkpoint."""
        return Attempt(directory=self.directory, target=self.target, step=self.step, attempt=self.attempt)


_DECODER = msgspec.msgpack.Decoder(SaveRequest)
"""Made at the import, as all decoders of structs here: msgspec dies of two threads of which one uses a struct that the other is just learning."""


def encode_request(request: SaveRequest) -> bytes:
    return msgspec.msgpack.encode(request)


def read_request(contents: Contents) -> SaveRequest | None:
    """None: the snapshot says nothing of storage."""
    return request_in(contents.extra)


def request_in(extra: Mapping[str, bytes]) -> SaveRequest | None:
    """The same, where only that was read."""
    content = extra.get(REQUEST)
    if content is None:
        return None
    try:
        return _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise SegmentInvalid(
            f"The snapshot is damaged: the request that says where to write it cannot be read: {error}"
        ) from error


def pin_newest(path: str | os.PathLike[str], slot: int, generation: int) -> PinnedSlot | None:
    """Open a segment for one slot of it. None: it was overwritten or replaced meanwhile. `release` both afterwards."""
    try:
        segment = Segment(path)
    except (SegmentInvalid, FileNotFoundError):
        return None
    pinned = segment.pin(slot, generation)
    if pinned is None:
        segment.close()
    return pinned


def release(pinned: PinnedSlot) -> None:
    pinned.close()
    pinned.segment.close()


def of_present_history(slots: Iterable[SlotName]) -> list[SlotName]:
    """
    Without those that training has gone back behind: a slot that was written earlier and holds a later step belongs to a past that was
    given up.
    """
    ordered = sorted(slots)
    return [name for name in ordered if name.step <= ordered[-1].step]


def sum_slot(name: SlotName, segment: Segment | None = None) -> bool:
    """
    Compute and store the checksums of a slot without holding it; False when it was overwritten meanwhile. A `segment` that the caller has open
    already is used and stays open.

    No thread may have to wait for a checksum, so it is counted without a lock. A generation never comes back: if the slot
    still has it afterwards, the bytes were the right ones all the time.
    """
    if segment is None:
        try:
            with Segment(name.path) as opened:
                return sum_slot(name, opened)
        except (SegmentInvalid, FileNotFoundError):
            return False
    first = segment.pin(name.slot, name.generation)
    if first is None:
        return False
    record = first.record
    has_sums = first.sums() is not None
    first.close()
    if has_sums:
        return True
    start = segment.geometry.data_at(name.slot)
    algorithm = best_algorithm()
    with segment.view[start : start + record.data_length] as data:
        sums = Sums(algorithm, tuple(chunk_checksums(data, algorithm)))
    again = segment.pin(name.slot, name.generation)
    if again is None:
        return False
    try:
        _store_sums(segment, name, sums)
    finally:
        again.close()
    return True


def persist(
    pinned: PinnedSlot,
    request: SaveRequest,
    *,
    options: WriteOptions | None = None,
    stop: threading.Event | None = None,
    is_foreign: bool = False,
) -> str:
    """
    Write this shard's files into the staging directory of its attempt, and its manifest, whose digest is returned. A snapshot that
    `is_foreign` came from another node: it replaces nothing but checkpoints.

    What was summed before is compared with the sums once more, after it was read: a bit that flipped in memory meanwhile must not become a
    file whose manifest calls it right.

    Raises OSError and our own errors.
    """
    contents = decode_contents(pinned.sections())
    has_sums = pinned.sums() is not None
    storage = request.open_storage()
    attempt = request.as_attempt()
    _check_paths(contents)
    before = read_global_manifest(storage, attempt.target_path)
    if is_foreign and before is None and isinstance(storage, Renaming):
        _check_free(storage, attempt)
    staging = stage(storage, attempt)
    is_synced = not isinstance(storage, LocalStorage)
    options = replace(options or WriteOptions(), is_synced=is_synced)  # all files together, at the end
    try:
        files = []
        for entry in contents.files:
            if not entry.path:
                continue  # a copy for the restore from memory; another rank writes the file
            path = join(staging, entry.path)
            storage.make_directory(parent_of(path))
            written = write_kind(storage, path, contents, entry, pinned.data, options=options, stop=stop)
            files.append(FileRecord(entry.path, written.size_bytes, written.crc32, part=entry.name, kind=entry.kind))
        if has_sums:
            pinned.verify()
        manifest = _manifest(pinned, request, contents, files, before)
        return finish_rank(storage, attempt, manifest, is_synced=is_synced)
    except BaseException:
        _forget_shard(storage, attempt, request)
        raise


def is_complete(request: SaveRequest) -> bool:
    """Whether every shard of the attempt has been written, or it is committed already."""
    storage, attempt = request.open_storage(), request.as_attempt()
    found = {manifest.global_rank for manifest in staged_manifests(storage, attempt)}
    return found >= set(range(request.num_shards)) or committed_manifest(storage, attempt) is not None


def finish(request: SaveRequest, *, digest: str = "", is_newest: bool = True, data_state: str = "") -> Committed:
    """Commit, link the files where the caller wants them, delete what the retention gives up. See `commit` for the rest."""
    storage = request.open_storage()
    trackers = [Tracker(name, content) for name, content in request.trackers.items()]
    committed = commit(
        storage,
        request.as_attempt(),
        range(request.num_shards),
        trackers=trackers,
        data_state=data_state,
        digest=digest,
        is_newest=is_newest,
    )
    announce(storage, request.step, is_committed=True)
    if isinstance(storage, LocalStorage):
        for path, link in request.links.items():
            _link(join(committed.path, path), link)
    try:
        _apply_retention(storage, request)
    except (
        OSError,
        DLRoverError,
    ) as error:  # the checkpoint is there, and the next one deletes what this one could not
        log.warning(
            "step %d is committed; older checkpoints could not be deleted, and the next save tries again: %s",
            request.step,
            error,
        )
    return committed


def _apply_retention(storage: Storage, request: SaveRequest) -> None:
    if request.keep_latest:
        apply_retention(storage, request.directory, KeepLatest(request.keep_latest))
    if request.keep_interval:
        apply_retention(storage, request.directory, KeepInterval(request.keep_interval))
    if request.keep is not None:
        apply_retention(storage, request.directory, request.keep)
    if request.deletion is not None:
        apply_retention(storage, request.directory, UserDeletion(request.deletion, request.directory))


def wait_until_complete(
    request: SaveRequest,
    *,
    wait: Callable[[float], bool],
    patience: float | None = None,
) -> None:
    """
    The committer's wait for the other shards. `wait` sleeps and says whether to give up.

    Raises TimeoutError after the request's `save_timeout`, and WriteStopped when `wait` says so.
    """
    limit = request.save_timeout if patience is None else patience
    deadline = time.monotonic() + limit
    pause = _FIRST_LOOK_AFTER
    while not is_complete(request):
        if time.monotonic() >= deadline:
            found = sorted(each.global_rank for each in staged_manifests(request.open_storage(), request.as_attempt()))
            raise TimeoutError(
                f"Step {request.step} was not committed: within {limit:g} s only {len(found)} of "
                f"{request.num_shards} shards were written (by ranks {found[:8]}). The logs of the other ranks "
                "say why."
            )
        if wait(pause):
            raise WriteStopped(f"The save of step {request.step} was given up before all shards were written.")
        pause = min(2 * pause, _LONGEST_PAUSE)


def give_up(request: SaveRequest) -> None:
    """The attempt failed: remove what was staged. A writer that cannot even do that leaves it to the next commit of the step."""
    try:
        storage = request.open_storage()
        abandon(storage, request.as_attempt())
        announce(storage, request.step, is_committed=False)
    except (OSError, DLRoverError):
        return


def _manifest(
    pinned: PinnedSlot,
    request: SaveRequest,
    contents: Contents,
    files: list[FileRecord],
    before: GlobalManifest | None,
) -> RankManifest:
    path_of = {entry.name: entry.path for entry in contents.files}
    tensors = tuple(
        TensorRecord(
            name=".".join(map(str, tensor.path[1:])),
            dtype=tensor.dtype,
            shape=tensor.shape,
            part=path_of.get(str(tensor.path[0]), ""),
            global_shape=tensor.global_shape,
            global_offset=tensor.global_offset,
        )
        for tensor in contents.layout.tensors
    )
    return RankManifest(
        step=request.step,
        round=pinned.record.round,
        attempt=request.attempt,
        topology=Topology(request.world_size, request.shard),
        files=tuple(files),
        tensors=tensors,
        saved_at=pinned.record.saved_at,
        metric=request.metric,
        replaces="" if before is None else before.attempt,
    )


def _check_paths(contents: Contents) -> None:
    """Every file stays inside the checkpoint, no matter which program wrote its name."""
    for entry in contents.files:
        if entry.path.startswith("/") or ".." in entry.path.split("/"):
            raise SegmentInvalid(
                f"The snapshot names the file {entry.path!r}, but this path lies outside its checkpoint."
            )


def _check_free(storage: Storage, attempt: Attempt) -> None:
    if any(entry.name == attempt.target for entry in storage.list(attempt.directory)):
        raise Rejected(
            f"{attempt.target_path} exists and is not a checkpoint, so the snapshot of another node is not "
            "written there. Move it away, or save to another path.",
            code=ErrorCode.NOT_A_CHECKPOINT,
        )


def _forget_shard(storage: Storage, attempt: Attempt, request: SaveRequest) -> None:
    """A single writer cleans up behind itself; one of several does not know what the others still do."""
    if request.num_shards == 1:
        try:
            abandon(storage, attempt)
        except OSError:
            return  # the error that is on its way says more


def _link(source: str, link: str) -> None:
    """A second name for a file, replaced at once. What a process left here that died meanwhile is removed."""
    temporary = f"{link}.new-{os.getpid()}"
    os.makedirs(os.path.dirname(link), exist_ok=True)
    for left in glob.glob(f"{glob.escape(link)}.new-*"):
        _unlink(left)
    try:
        os.link(source, temporary)
        try:
            os.replace(temporary, link)
        finally:
            _unlink(temporary)  # it is still there if this failed, and if both were the same file already
    except OSError as error:
        raise OSError(
            error.errno,
            f"the checkpoint is complete in {source}, but the link {link} to it could not be made "
            f"({error.strerror}). Give a path on the same file system",
        ) from error


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _store_sums(segment: Segment, name: SlotName, sums: Sums) -> None:
    descriptor = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, encode_sums(name.generation, sums), segment.geometry.sums_at(name.slot))
    finally:
        os.close(descriptor)
