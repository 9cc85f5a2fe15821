"""
How files become a checkpoint, so that a cut at any instant leaves either the old one or the new one, whole.

    every rank      1  writes its files into  TARGET.tmp-ATTEMPT/
                    2  writes its manifest there under another name, syncs all that with the directories, gives it its name, and syncs that
    the committer   3  compares the set of manifests with the set of ranks, and the files with the manifests
                    4  writes the global manifest there, and the tracker files under other names, syncs all that
                    5  renames the directory to TARGET, syncs the parent
                    6  gives the tracker files their names, ours first, then the framework's, and syncs the parent after each
                    7  removes what TARGET was before

A sync lasts as long for many files as for one, so they are waited for five or six times and not once for each file.

A step that is saved again changes places with the old directory in one system call; where the file system cannot do that, the old one is
set aside first, and `locate` finds whichever of the two is whole. Attempts have ids, so what a former one left behind is never taken
for the present one's.

Storages without rename get the files at TARGET at once; there the global manifest is the commit, and a step that has one is not
written again.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence

from msgspec import Struct

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import digest_of_shards
from dlrover.snapshot.storage.manifest import (
    DIRECTORY,
    GLOBAL_NAME,
    GlobalManifest,
    ManifestInvalid,
    RankManifest,
    RankSummary,
    decode_global_manifest,
    decode_rank_manifest,
    digest_of,
    encode_manifest,
    join_manifests,
    rank_manifest_name,
)
from dlrover.snapshot.storage.storage import PREPARED, UNKNOWN_SIZE, LocalStorage, Renaming, Storage, join, parent_of

TRACKER = "dlrover_latest.txt"
"""Names the newest committed step, in decimal. Written before the frameworks' own trackers."""
DEAD_AFTER = 900.0
"""Seconds without a change after which an attempt that is not ours is dead: a commit waits for its ranks for 600."""
_LONGEST_STEP = 18
"""Digits of a step: ranks tell each other numbers of 64 bits."""
_STAGED = ".tmp-"
_SET_ASIDE = ".old-"


class Attempt(Struct, frozen=True, kw_only=True):
    """One try to save one step."""

    directory: str
    """Where the job's checkpoints are."""
    target: str
    """Name of this one in there, such as `100` or `iter_0000100`."""
    step: int
    attempt: str

    def __post_init__(self) -> None:
        for name in (self.target, self.attempt):
            if name in ("", ".", "..") or "/" in name or _STAGED in name or _SET_ASIDE in name:
                raise ValueError(f"{name!r} cannot name a checkpoint or an attempt: give a plain file name")

    @property
    def target_path(self) -> str:
        return join(self.directory, self.target)

    def staging_path(self, storage: Storage) -> str:
        """Where the ranks write."""
        return self.target_path + _STAGED + self.attempt if isinstance(storage, Renaming) else self.target_path


class Tracker(Struct, frozen=True):
    name: str
    content: str


class Committed(Struct, frozen=True):
    """A checkpoint that counts, and where it is found."""

    path: str
    manifest: GlobalManifest


def stage(storage: Storage, attempt: Attempt) -> str:
    """The directory for this attempt's files; every rank may call it."""
    path = attempt.staging_path(storage)
    if not isinstance(storage, Renaming) and read_global_manifest(storage, path) is not None:
        raise Rejected(
            f"Step {attempt.step} is already committed in {path}, and this storage cannot replace a checkpoint "
            "in one act. Save another step, or remove that checkpoint first.",
            code=ErrorCode.ALREADY_COMMITTED,
        )
    storage.make_directory(join(path, DIRECTORY))
    return path


def finish_rank(storage: Storage, attempt: Attempt, manifest: RankManifest, *, is_synced: bool = True) -> str:
    """
    The rank's files are written: say so. Their names become durable here, and they themselves where they were not `is_synced`. Gives the manifest's
    digest.

    The manifest's own name is durable before the committer gives the global one its name: both lie in one directory, and a cut may keep
    the later of two names and lose the earlier.
    """
    assert (manifest.step, manifest.attempt) == (attempt.step, attempt.attempt), "a manifest of another attempt"
    path = attempt.staging_path(storage)
    name = join(path, rank_manifest_name(manifest.global_rank))
    content = encode_manifest(manifest)
    if not isinstance(storage, Renaming):
        storage.write_atomic(name, content)
        return digest_of(content)
    files = [file.path for file in manifest.files]
    prepared = storage.prepare(name, content)
    unsynced = [] if is_synced else [join(path, file) for file in files]
    storage.sync([*unsynced, prepared, *_directories_of(path, files)])
    storage.replace(prepared, name)  # not earlier: whoever sees it may take the files for durable
    storage.sync([parent_of(name)])
    return digest_of(content)


def staged_manifests(storage: Storage, attempt: Attempt) -> list[RankManifest]:
    """What the ranks have finished so far in this attempt. Those of other attempts do not count."""
    path = join(attempt.staging_path(storage), DIRECTORY)
    found = []
    for entry in storage.list(path):
        if entry.name.startswith("rank-") and entry.name.endswith(".json"):
            manifest = decode_rank_manifest(storage.read(join(path, entry.name)))
            if manifest.attempt == attempt.attempt:
                found.append(manifest)
    return found


def commit(
    storage: Storage,
    attempt: Attempt,
    expected_ranks: Iterable[int],
    trackers: Sequence[Tracker] = (),
    data_state: str = "",
    *,
    digest: str = "",
    is_newest: bool = True,
) -> Committed:
    """
    Make the staged files a checkpoint. Raises ManifestInvalid when anything is missing, and then nothing has changed.

    Committing twice is harmless, also at the same time: a committer that died half-way, or was only slow, is followed by another that does
    the rest. `digest` is that of all manifests as their writers reported them; empty: none did. Without `is_newest` the trackers stay
    as they are; they do, too, if they name a later save of the same process.
    """
    target = attempt.target_path
    tracking = _Tracking(storage, attempt, trackers)
    manifest = committed_manifest(storage, attempt)
    try:
        if manifest is None:
            prepared = tracking.prepare() if is_newest else []
            try:
                manifest = _commit_staged(storage, attempt, set(expected_ranks), data_state, digest, prepared)
            except (ManifestInvalid, FileNotFoundError):
                manifest = committed_manifest(
                    storage, attempt
                )  # another committer was quicker: the staged files are gone
                if manifest is None:
                    raise
        if is_newest and not _is_newer_tracked(storage, attempt):
            tracking.write()
    finally:
        tracking.clear()
    with contextlib.suppress(OSError):  # it counts already: what cannot be removed now is left to the next commit
        tracking.clear_of_the_dead()
        _remove_leftovers(storage, attempt)
    return Committed(target, manifest)


class _Tracking:
    """The tracker files of a commit: written beside the old ones before it, and named after it."""

    def __init__(self, storage: Storage, attempt: Attempt, trackers: Sequence[Tracker]) -> None:
        self._storage, self._directory = storage, attempt.directory
        self._contents = {
            join(attempt.directory, each.name): each.content.encode()
            for each in (Tracker(TRACKER, str(attempt.step)), *trackers)
        }
        self._prepared: dict[str, str] = {}

    def prepare(self) -> list[str]:
        """What has to be synced before `write`."""
        if isinstance(self._storage, Renaming):
            for path, content in self._contents.items():
                self._prepared[path] = self._storage.prepare(path, content)
        return list(self._prepared.values())

    def write(self) -> None:
        """Ours first and durable, then the framework's. The checkpoint that they name is durable."""
        storage = self._storage
        if not isinstance(storage, Renaming):
            for path, content in self._contents.items():
                storage.write_atomic(path, content)
            return
        if not self._prepared:
            storage.sync(self.prepare())
        ours, *others = self._contents
        for group in filter(None, ([ours], others)):
            for path in group:
                storage.replace(self._prepared.pop(path), path)
            storage.sync([self._directory])

    def clear(self) -> None:
        """What was not needed."""
        for prepared in self._prepared.values():
            with contextlib.suppress(OSError):
                self._storage.remove_file(prepared)

    def clear_of_the_dead(self) -> None:
        """What committers prepared that were killed then. Others may just be about to name theirs."""
        storage = self._storage
        if not isinstance(storage, LocalStorage):
            return
        begins = tuple(path.rsplit("/", 1)[1] + PREPARED for path in self._contents)
        for entry in storage.list(self._directory):
            path = join(self._directory, entry.name)
            with contextlib.suppress(OSError):
                if entry.name.startswith(begins) and storage.untouched_for(path) >= DEAD_AFTER:
                    storage.remove_file(path)


def committed_manifest(storage: Storage, attempt: Attempt) -> GlobalManifest | None:
    """Of exactly this attempt, if it counts already."""
    found = read_global_manifest(storage, attempt.target_path)
    return found if found is not None and found.attempt == attempt.attempt else None


def _commit_staged(
    storage: Storage,
    attempt: Attempt,
    expected_ranks: set[int],
    data_state: str,
    digest: str,
    to_sync: Sequence[str] = (),
) -> GlobalManifest:
    """`to_sync` is synced on the way."""
    staged = staged_manifests(storage, attempt)
    manifest = join_manifests(staged, expected_ranks, data_state)
    _refuse_another_job(storage, attempt, staged)
    found = digest_of_shards({rank.global_rank: rank.digest for rank in manifest.ranks})
    if digest and found != digest:
        raise ManifestInvalid(
            f"Step {attempt.step} is not committed: the manifests in {attempt.directory} differ from those that "
            "the nodes reported. If another job writes there, give each job its own directory."
        )
    staging = attempt.staging_path(storage)
    check_sizes(storage, staging, manifest)
    name = join(staging, GLOBAL_NAME)
    if not isinstance(storage, Renaming):
        storage.write_atomic(name, encode_manifest(manifest))
        return manifest
    storage.replace(storage.prepare(name, encode_manifest(manifest)), name)  # torn by a cut it would count for nothing
    storage.sync([name, parent_of(name), *to_sync])
    _put_in_place(storage, staging, attempt.target_path, attempt, is_there=_exists(storage, attempt.target_path))
    storage.sync([attempt.directory])
    return manifest


def _is_newer_tracked(storage: Storage, attempt: Attempt) -> bool:
    """
    Whether our tracker names a later save of the same trainers.

    Their attempts are called alike but for a number that grows. Steps say nothing here: a training may have been taken back on purpose.
    """
    life, _, number = attempt.attempt.rpartition("-")
    try:
        step = latest_step(storage, attempt.directory)
    except ManifestInvalid:
        return False
    if step is None or not life or not number.isdecimal():
        return False
    tracked = read_global_manifest(storage, join(attempt.directory, str(step)))
    if tracked is None or tracked.step != step:  # it has another name
        checkpoints = committed_checkpoints(storage, attempt.directory)
        tracked = next((each.manifest for each in checkpoints if each.manifest.step == step), None)
    if tracked is None:
        return False
    its_life, _, its_number = tracked.attempt.rpartition("-")
    return its_life == life and its_number.isdecimal() and int(its_number) > int(number)


def _refuse_another_job(storage: Storage, attempt: Attempt, staged: list[RankManifest]) -> None:
    """Two jobs with one directory: the job that commits a step first has it, and the other one is told."""
    there = read_global_manifest(storage, attempt.target_path)
    known = {manifest.replaces for manifest in staged}
    if there is None or None in known or there.attempt in known:
        return
    if there.attempt.rpartition("-")[0] == attempt.attempt.rpartition("-")[0]:
        return  # an earlier save of the same trainers, which was committed late
    with contextlib.suppress(OSError):
        abandon(storage, attempt)
    raise Rejected(
        f"another job writes to the same directory. It committed step {attempt.step} first, so this save was "
        "given up. Give each job a directory of its own",
        code=ErrorCode.ANOTHER_JOB,
    )


def _put_in_place(storage: Renaming, staging: str, target: str, attempt: Attempt, *, is_there: bool) -> None:
    if not is_there:
        try:
            storage.rename(staging, target)
            return
        except OSError as error:  # somebody has taken the name since we looked
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    if not storage.exchange(staging, target):
        storage.rename(target, target + _SET_ASIDE + attempt.attempt)
        storage.rename(staging, target)


def _remove_leftovers(storage: Storage, attempt: Attempt) -> None:
    """What was replaced, and what dead attempts left."""
    for entry in storage.list(attempt.directory):
        if entry.is_directory and (_STAGED in entry.name or _SET_ASIDE in entry.name):
            is_own = entry.name.endswith((_STAGED + attempt.attempt, _SET_ASIDE + attempt.attempt))
            with contextlib.suppress(OSError):
                if is_own or _is_dead(storage, attempt, entry.name):
                    delete_checkpoint(storage, join(attempt.directory, entry.name))


def _is_dead(storage: Storage, attempt: Attempt, name: str) -> bool:
    """Another job may be writing to the same directory, so on a real disk others' attempts are dead when they are not touched."""
    path = join(attempt.directory, name)
    if not isinstance(storage, LocalStorage):
        return name.startswith((attempt.target + _STAGED, attempt.target + _SET_ASIDE))
    if not os.path.isdir(join(path, DIRECTORY)) or storage.untouched_for(path) < DEAD_AFTER:
        return False
    target = name.split(_STAGED)[0].split(_SET_ASIDE)[0]
    is_only_copy = read_global_manifest(storage, join(attempt.directory, target)) is None
    return not is_only_copy or read_global_manifest(storage, path) is None


def delete_checkpoint(storage: Storage, path: str) -> None:
    """
    The manifest first, durably: a checkpoint that is half deleted must not look like one. Another commit may be deleting the same: then
    both see it gone.
    """
    if read_global_manifest(storage, path) is not None:
        manifest = join(path, GLOBAL_NAME)
        storage.remove_file(manifest)
        if isinstance(storage, Renaming):
            with contextlib.suppress(FileNotFoundError):
                storage.sync([parent_of(manifest)])
    storage.remove_tree(path)


def abandon(storage: Storage, attempt: Attempt) -> None:
    """The attempt failed: remove what was staged, never what is committed."""
    path = attempt.staging_path(storage)
    manifest = read_global_manifest(storage, path)
    if manifest is None:
        storage.remove_tree(path)


def latest_step(storage: Storage, directory: str) -> int | None:
    """What our tracker says; None without one."""
    try:
        content = storage.read(join(directory, TRACKER))
    except FileNotFoundError:
        return None
    if not content.strip().isdigit() or len(content) > _LONGEST_STEP:
        raise ManifestInvalid(
            f"{join(directory, TRACKER)} must contain the number of a step (found {content[:40]!r}). Write the "
            "step to restore into it."
        )
    return int(content)


def committed_checkpoints(storage: Storage, directory: str) -> list[Committed]:
    """Every complete checkpoint, by step; of a step that lies there twice, the one under its own name."""
    found: dict[int, Committed] = {}
    for entry in storage.list(directory):
        if not entry.is_directory:
            continue
        path = join(directory, entry.name)
        manifest = read_global_manifest(storage, path)
        if manifest is None:
            continue
        is_aside = _STAGED in entry.name or _SET_ASIDE in entry.name
        if not is_aside or manifest.step not in found:
            found[manifest.step] = Committed(path, manifest)
    return [found[step] for step in sorted(found)]


def locate(storage: Storage, directory: str, step: int | None = None) -> Committed | None:
    """
    The checkpoint of a step, or exactly the one that the tracker names; `newest_complete` is what a restore takes.

    None: there is no tracker. A tracker whose checkpoint is not there is an error.
    """
    wanted = latest_step(storage, directory) if step is None else step
    if wanted is None:
        return None
    checkpoints = committed_checkpoints(storage, directory)
    for checkpoint in checkpoints:
        if checkpoint.manifest.step == wanted:
            return checkpoint
    known = [checkpoint.manifest.step for checkpoint in checkpoints]
    raise ManifestInvalid(
        f"{directory} has no complete checkpoint of step {wanted}. Its complete steps are {known or 'none'}. "
        "Restore the missing files, or name one of those steps."
    )


def is_staged(path: str) -> bool:
    """Whether this is the directory of an attempt. It is not committed, also when its manifest is there already."""
    return _STAGED in path.rsplit("/", 1)[-1]


def read_global_manifest(storage: Storage, path: str) -> GlobalManifest | None:
    """None when this directory is no checkpoint: one whose manifest cannot be read is none either."""
    try:
        return decode_global_manifest(storage.read(join(path, GLOBAL_NAME)))
    except (FileNotFoundError, NotADirectoryError, ManifestInvalid):
        return None


def has_damaged_manifest(storage: Storage, path: str) -> bool:
    """Whether this directory was a checkpoint, whose manifest has suffered since."""
    names = [join(DIRECTORY, entry.name) for entry in storage.list(join(path, DIRECTORY))]
    return GLOBAL_NAME in names and read_global_manifest(storage, path) is None


def check_sizes(storage: Storage, path: str, manifest: GlobalManifest) -> None:
    """Every file that a manifest names is there and as long as it should be."""
    sizes: dict[str, int] = {}
    for directory in _directories_of(path, (file.path for file in manifest.files)):
        sizes.update({join(directory, entry.name): entry.size_bytes for entry in storage.list(directory)})
    for file in manifest.files:
        size = sizes.get(join(path, file.path))
        if size not in (file.size_bytes, UNKNOWN_SIZE):
            there = "is missing" if size is None else f"has {size} bytes"
            raise ManifestInvalid(f"{join(path, file.path)} {there}; its manifest says {file.size_bytes} bytes.")


def find_damage(storage: Storage, checkpoint: Committed, ranks: Iterable[RankSummary] | None = None) -> list[str]:
    """Read every byte, or what these ranks wrote, and compare it with the manifests: a sentence for each thing that is wrong."""
    damage = []
    examined = checkpoint.manifest.ranks if ranks is None else tuple(ranks)
    for rank in examined:
        name = join(checkpoint.path, rank_manifest_name(rank.global_rank))
        try:
            if digest_of(storage.read(name)) != rank.digest:
                damage.append(f"{name} is not the manifest that was committed")
        except FileNotFoundError:
            damage.append(f"{name} is missing")
    for file in (file for rank in examined for file in rank.files):
        name = join(checkpoint.path, file.path)
        try:
            found = storage.measure(name)
        except FileNotFoundError:
            damage.append(f"{name} is missing")
            continue
        if found.size_bytes != file.size_bytes:
            damage.append(f"{name} has {found.size_bytes} bytes instead of {file.size_bytes}")
        elif found.crc32 != file.crc32:
            damage.append(f"{name} is damaged: its CRC is {found.crc32:08x}, and its manifest says {file.crc32:08x}")
    return damage


def _directories_of(root: str, paths: Iterable[str]) -> list[str]:
    """The root and every directory below it that holds one of the paths, deepest first."""
    found = {root}
    for path in paths:
        above = parent_of(path)
        while above:
            found.add(join(root, above))
            above = parent_of(above)
    return sorted(found, key=lambda directory: (-directory.count("/"), directory))


def _exists(storage: Storage, path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return any(entry.name == name for entry in storage.list(parent_of(path)))
