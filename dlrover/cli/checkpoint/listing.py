"""
What lies in a directory of checkpoints, no matter which tool wrote it, and how far it can be trusted.

With our manifest a directory is a checkpoint. Directories of the original DLRover and of the frameworks have none: they are recognised by
their names and files, and whether they are complete only their own tracker can say. Everything here only looks.
"""

from __future__ import annotations

import enum
import io
import os
import posixpath
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from msgspec import Struct
from msgspec.structs import replace

from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.storage.commit import TRACKER
from dlrover.snapshot.storage.manifest import (
    DIRECTORY,
    GLOBAL_NAME,
    GlobalManifest,
    ManifestInvalid,
    decode_global_manifest,
)
from dlrover.snapshot.storage.storage import Storage, StoredName, join, parent_of, storage_for

TRACKERS = (TRACKER, "latest_checkpointed_iteration.txt", "latest")
"""Ours, Megatron's, DeepSpeed's. They hold a step or the name of a directory."""
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_SUFFIX = ".safetensors"
DCP_METADATA = ".metadata"
_STEP_NAMES = re.compile(r"(?:iter_|checkpoint-|global_step|step[-_]?|epoch[-_]?)?0*(\d+)")
_ASIDE = re.compile(r"(?P<target>.+)\.(?P<kind>tmp|old)-(?P<attempt>[^/]+)")
_WRITE_ASIDE = re.compile(r".+\.new-[0-9a-f]{8}")
_MAX_DEPTH = 6
"""Of directories below a checkpoint; Megatron's distributed ones have four."""


class State(enum.StrEnum):
    COMPLETE = "complete"
    FOREIGN = "no manifest"
    """Written by other software: it cannot be known whether it is complete."""
    INCOMPLETE = "incomplete"
    """Ours, without its global manifest: given up, half deleted, or just being written to an object store."""
    DAMAGED = "damaged"
    """There is a global manifest, and it cannot be read."""
    STAGED = "staged"
    """TARGET.tmp-ATTEMPT: being written, or left by an attempt that died."""
    SET_ASIDE = "set aside"
    """TARGET.old-ATTEMPT: was replaced, and should be gone."""
    FILE = "file"
    """A single file with a state in it."""
    LEFTOVER = "left over"
    """A small file that was to replace another."""


class Found(Struct, frozen=True, kw_only=True):
    """One checkpoint, or what might be one."""

    name: str
    path: str
    state: State
    step: int | None = None
    size_bytes: int = 0
    num_files: int = 0
    num_shards: int | None = None
    """How many ranks wrote it; None where it is unknown."""
    saved_at: float | None = None
    """Seconds since 1970, of the youngest file in it; None where the storage does not tell."""
    trackers: tuple[str, ...] = ()
    """Tracker files that name it."""
    is_whole: bool = False
    """It has a readable global manifest, under whatever name it lies there."""


class Listing(Struct, frozen=True, kw_only=True):
    directory: str
    checkpoints: tuple[Found, ...]
    trackers: dict[str, str] = {}
    """File name to content."""
    dangling: tuple[str, ...] = ()
    """Trackers that name what is not there."""
    untracked: int | None = None
    """Our tracker is missing: the newest complete step, which a restore takes then. None: it is there, or there is nothing to track."""


class CheckpointPlace:
    """A path or URL that the user gave, and how to look at it."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/") or location
        self.storage: Storage = storage_for(self.location)
        self._files: Any = None
        if "://" in self.location:
            import fsspec

            self._files = fsspec.url_to_fs(self.location)[0]

    @property
    def is_local(self) -> bool:
        return self._files is None

    def is_directory(self, path: str) -> bool:
        if self._files is None:
            return os.path.isdir(path)
        return bool(self._files.isdir(path))

    def is_file(self, path: str) -> bool:
        if self._files is None:
            return os.path.isfile(path)
        return bool(self._files.isfile(path))

    def size_of(self, path: str) -> int:
        return os.path.getsize(path) if self._files is None else int(self._files.size(path) or 0)

    def modified_at(self, path: str) -> float | None:
        try:
            if self._files is None:
                return os.stat(path).st_mtime
            return float(self._files.modified(path).timestamp())
        except (OSError, NotImplementedError, KeyError):
            return None

    def open(self, path: str) -> BinaryIO:
        if self._files is None:
            return open(path, "rb")
        return cast(BinaryIO, self._files.open(path, "rb"))

    def beginning_of(self, path: str, num_bytes: int) -> bytes:
        with self.open(path) as file:
            return file.read(num_bytes)

    def files_below(self, path: str, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, StoredName]]:
        """Every file with its path relative to this directory."""
        for entry in self.storage.list(path):
            if not entry.is_directory:
                yield entry.name, entry
            elif depth > 0:
                for name, below in self.files_below(join(path, entry.name), depth - 1):
                    yield join(entry.name, name), below


def open_place(location: str) -> CheckpointPlace:
    """Raises ConfigError when there is nothing, or nothing that this user may read."""
    place = CheckpointPlace(location)
    try:
        is_there = place.is_directory(place.location) or place.is_file(place.location)
        if is_there and place.is_local and not os.access(place.location, os.R_OK):
            raise PermissionError
    except PermissionError as error:
        raise ConfigError(
            f"You may not read {location}. Ask its owner for the right, or use another account."
        ) from error
    except OSError as error:
        raise ConfigError(f"{location} cannot be listed: {error.strerror or error}.") from error
    if not is_there:
        raise ConfigError(f"{location} does not exist. Give a checkpoint, or a directory of checkpoints.")
    return place


def list_checkpoints(place: CheckpointPlace) -> Listing:
    """
    Everything in the directory that is a checkpoint, was one or shall become one, by step.

    A location that is itself one checkpoint is a listing of one. Raises ConfigError when nothing of that kind is there.
    """
    directory = place.location
    if not place.is_directory(directory):
        return Listing(directory=parent_of(directory), checkpoints=(_file(place, directory),))
    own = _look_at(place, directory, posixpath.basename(directory))
    if own is not None and own.state in (State.COMPLETE, State.DAMAGED, State.INCOMPLETE):
        return Listing(directory=parent_of(directory), checkpoints=(own,))
    trackers = read_trackers(place, directory)
    found = []
    for entry in place.storage.list(directory):
        path = join(directory, entry.name)
        each = _look_at(place, path, entry.name) if entry.is_directory else _look_at_file(place, path, entry)
        if each is not None:
            found.append(each)
    complete = {each.step for each in found if each.state is State.COMPLETE}
    found = [_with_trackers(each, trackers, complete) for each in found]
    is_one = own is not None and own.step is not None and not trackers and all(each.step is None for each in found)
    if own is not None and (is_one or not found or place.is_file(join(directory, DCP_METADATA))):
        return Listing(directory=parent_of(directory), checkpoints=(own,))
    if not found and not trackers:
        raise ConfigError(
            f"{directory} holds no checkpoints. It has no DLRover manifest, no directory named after a step, no "
            "tracker, no torch file and no safetensors file. Give the directory in which your job saves its "
            "checkpoints."
        )
    found.sort(key=lambda each: (each.step is None, each.step or 0, each.name))
    named = {name for each in found for name in each.trackers}
    dangling = tuple(
        name
        for name, content in trackers.items()
        if name not in named and not (content and place.is_directory(join(directory, content)))
    )
    untracked = max((step for step in complete if step is not None), default=None) if TRACKER not in trackers else None
    return Listing(
        directory=directory, checkpoints=tuple(found), trackers=trackers, dangling=dangling, untracked=untracked
    )


def read_manifest(place: CheckpointPlace, path: str) -> GlobalManifest | None:
    """None without one; raises ManifestInvalid when it cannot be read."""
    name = join(path, GLOBAL_NAME)
    try:
        return decode_global_manifest(place.storage.read(name))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ManifestInvalid as error:
        raise ManifestInvalid(f"{name}: {error}") from error


def is_torch_zip(place: CheckpointPlace, path: str) -> bool:
    return place.beginning_of(path, 4) == b"PK\x03\x04"


def step_of_name(name: str) -> int | None:
    match = _STEP_NAMES.fullmatch(name)
    return int(match.group(1)) if match else None


def aside_target(name: str) -> str | None:
    """Of which checkpoint this is a version that was set aside or is being written."""
    match = _ASIDE.fullmatch(name)
    return match["target"] if match else None


def _look_at(place: CheckpointPlace, path: str, name: str) -> Found | None:
    """A directory; None when it is no checkpoint of any kind."""
    aside = _ASIDE.fullmatch(name)
    try:
        manifest = read_manifest(place, path)
        is_damaged = False
    except ManifestInvalid:
        manifest, is_damaged = None, True
    step = manifest.step if manifest is not None else step_of_name(aside["target"] if aside else name)
    names = {entry.name for entry in place.storage.list(path)}
    if aside is not None:
        state = State.STAGED if aside["kind"] == "tmp" else State.SET_ASIDE
    elif manifest is not None:
        state = State.COMPLETE
    elif is_damaged:
        state = State.DAMAGED
    elif DIRECTORY in names:
        state = State.INCOMPLETE
    else:
        state = State.FOREIGN
    if state is State.FOREIGN and step is None and not any(_holds_state(each) for each in names):
        return None
    files = list(place.files_below(path))
    if state is State.FOREIGN and not any(_holds_state(below) for below, _ in files):
        return None  # named after a number, and something else
    times = [place.modified_at(join(path, below)) for below, _ in files]
    num_shards = len(manifest.ranks) if manifest is not None else _foreign_shards([below for below, _ in files])
    return Found(
        name=name,
        path=path,
        state=state,
        step=step,
        size_bytes=sum(entry.size_bytes for _, entry in files),
        num_files=sum(not below.startswith(f"{DIRECTORY}/") for below, _ in files),
        num_shards=num_shards,
        saved_at=max((at for at in times if at is not None), default=place.modified_at(path)),
        is_whole=manifest is not None,
    )


def _foreign_shards(names: list[str]) -> int | None:
    """The original's `rank_N.pt`, and DCP's `__N_0.distcp`."""
    ranks = [name for name in names if re.fullmatch(r"(?:.*/)?(?:rank_\d+\.pt|__\d+_\d+\.distcp)", name)]
    return len(ranks) or None


def _look_at_file(place: CheckpointPlace, path: str, entry: StoredName) -> Found | None:
    if _WRITE_ASIDE.fullmatch(entry.name):
        state = State.LEFTOVER
    elif _has_state_suffix(entry.name):
        state = State.FILE
    else:
        return None
    return Found(
        name=entry.name,
        path=path,
        state=state,
        step=step_of_name(posixpath.splitext(entry.name)[0]),
        size_bytes=entry.size_bytes,
        num_files=1,
        saved_at=place.modified_at(path),
    )


def _file(place: CheckpointPlace, path: str) -> Found:
    size = place.size_of(path)
    name = posixpath.basename(path)
    return Found(name=name, path=path, state=State.FILE, size_bytes=size, num_files=1, saved_at=place.modified_at(path))


def _holds_state(name: str) -> bool:
    return _has_state_suffix(name) or name.endswith((DCP_METADATA, ".distcp"))


def _has_state_suffix(name: str) -> bool:
    return name.endswith((*TORCH_SUFFIXES, SAFETENSORS_SUFFIX))


def read_trackers(place: CheckpointPlace, directory: str) -> dict[str, str]:
    found = {}
    for name in TRACKERS:
        try:
            found[name] = place.storage.read(join(directory, name)).decode(errors="replace").strip()
        except (FileNotFoundError, IsADirectoryError):
            continue
    return found


def _with_trackers(found: Found, trackers: dict[str, str], complete: set[int | None]) -> Found:
    """A whole checkpoint under a passing name is meant, too, if there is no other of its step."""
    is_stand_in = found.is_whole and found.state is not State.COMPLETE and found.step not in complete
    if found.state not in (State.COMPLETE, State.FOREIGN) and not is_stand_in:
        return found
    names = tuple(name for name, content in trackers.items() if content in (found.name, str(found.step)))
    return replace(found, trackers=names)


def read_all(place: CheckpointPlace, path: str) -> io.BytesIO:
    """The whole file in memory, for readers that want to seek in it."""
    with place.open(path) as file:
        return io.BytesIO(file.read())
