"""
Is a checkpoint what was written? Every byte is read and compared with whatever was kept to compare it with.

Our manifests hold the size and the CRC-32 of each file, the global one a digest of each rank's. A torch file holds a CRC-32 for
each of its entries, so files of other software can be checked, too, but for what lies between the entries. A safetensors file holds only lengths.
"""

from __future__ import annotations

import posixpath
import zipfile
import zlib
from collections.abc import Callable

import msgspec
from msgspec import Struct

from dlrover.cli.checkpoint.listing import (
    SAFETENSORS_SUFFIX,
    TORCH_SUFFIXES,
    CheckpointPlace,
    Found,
    Listing,
    State,
    is_torch_zip,
    read_manifest,
)
from dlrover.snapshot.storage.manifest import (
    GLOBAL_NAME,
    GlobalManifest,
    ManifestInvalid,
    decode_rank_manifest,
    digest_of,
    encode_manifest,
    rank_manifest_name,
)
from dlrover.snapshot.storage.storage import join

CHUNK_BYTES = 4 * 1024 * 1024
_MAX_HEADER_BYTES = 100 * 1024 * 1024

Progress = Callable[[int], None]
"""Told how many more bytes were read."""


class CheckpointVerdict(Struct, frozen=True, kw_only=True):
    """What was found out about one checkpoint."""

    name: str
    path: str
    damage: tuple[str, ...] = ()
    """A sentence for each thing that is wrong; each begins with the file."""
    num_checked: int = 0
    """Files whose content was compared with a checksum."""
    unchecked: tuple[str, ...] = ()
    """Files that hold no checksum and have no manifest: they could be read, no more."""
    note: str = ""

    @property
    def is_good(self) -> bool:
        return not self.damage


def bytes_to_read(place: CheckpointPlace, found: Found, *, is_quick: bool) -> int:
    """For the progress bar: the files once for their sum, torch files once more for their entries."""
    if is_quick:
        return 0
    if found.state is State.FILE:
        return found.size_bytes
    is_ours = found.is_whole
    total = 0
    for name, entry in place.files_below(found.path):
        total += entry.size_bytes * (2 if is_ours and name.endswith(TORCH_SUFFIXES) else 1)
    return total


def verify(
    place: CheckpointPlace, found: Found, *, is_quick: bool = False, on_bytes: Progress = lambda count: None
) -> CheckpointVerdict:
    """`is_quick` compares sizes and manifests and reads no data."""
    if found.state is State.FILE:
        return _verify_files(place, found, posixpath.dirname(found.path), [found.name], is_quick, on_bytes)
    if found.state is State.LEFTOVER:
        return CheckpointVerdict(
            name=found.name,
            path=found.path,
            note="an unfinished file that a save left; `dlrover checkpoint gc` removes it",
        )
    if not found.is_whole and found.state in (State.STAGED, State.SET_ASIDE, State.INCOMPLETE):
        return CheckpointVerdict(
            name=found.name, path=found.path, note="not a checkpoint: the save was never committed"
        )
    try:
        manifest = read_manifest(place, found.path)
    except ManifestInvalid as error:
        return CheckpointVerdict(name=found.name, path=found.path, damage=(str(error),))
    if manifest is None:
        names = [name for name, _ in place.files_below(found.path)]
        return _verify_files(place, found, found.path, names, is_quick, on_bytes)
    damage = [*_manifest_damage(place, found.path, manifest)]
    num_checked = 0
    for file in manifest.files:
        name = join(found.path, file.path)
        try:
            size = place.size_of(name)
            if size != file.size_bytes:
                damage.append(f"{name} has {size} bytes instead of {file.size_bytes}")
                continue
            if is_quick:
                continue
            crc = _sum(place, name, on_bytes)
            num_checked += 1
            if crc != file.crc32:
                damage.append(f"{name} is damaged: its CRC is {crc:08x}, and its manifest says {file.crc32:08x}")
            elif name.endswith(TORCH_SUFFIXES):
                damage += _file_damage(place, name, on_bytes)
        except FileNotFoundError:
            damage.append(f"{name} is missing")
        except OSError as error:
            damage.append(f"{name} cannot be read: {error.strerror or error}")
    if damage and _has_moved(place, found.path, manifest):
        return CheckpointVerdict(
            name=found.name,
            path=found.path,
            note="it was replaced or deleted while this command read it; run the command again",
        )
    return CheckpointVerdict(name=found.name, path=found.path, damage=tuple(damage), num_checked=num_checked)


def tracker_damage(listing: Listing) -> list[str]:
    """Trackers that send a restore into the void."""
    return [
        f"the tracker {join(listing.directory, name)} names {listing.trackers[name]!r}, but no such checkpoint exists"
        for name in listing.dangling
    ]


def _has_moved(place: CheckpointPlace, path: str, manifest: GlobalManifest) -> bool:
    """A job may be saving and deleting meanwhile; that is no damage."""
    try:
        now = read_manifest(place, path)
    except ManifestInvalid:
        return False
    return now is None or now.attempt != manifest.attempt


def _manifest_damage(place: CheckpointPlace, path: str, manifest: GlobalManifest) -> list[str]:
    damage = []
    name = join(path, GLOBAL_NAME)
    if encode_manifest(manifest) != place.storage.read(name):
        damage.append(f"{name} was changed after the save: dlrover would have written other text")
    for rank in manifest.ranks:
        name = join(path, rank_manifest_name(rank.global_rank))
        try:
            content = place.storage.read(name)
        except FileNotFoundError:
            damage.append(f"{name} is missing")
            continue
        if digest_of(content) != rank.digest:
            damage.append(f"{name} is not the manifest that was committed")
            continue
        own = decode_rank_manifest(content)
        of_rank = (own.step, own.round, own.attempt, own.topology.world_size, own.files)
        if of_rank != (manifest.step, manifest.round, manifest.attempt, manifest.world_size, rank.files):
            damage.append(f"{join(path, GLOBAL_NAME)} differs from the manifest of rank {rank.global_rank}")
    return damage


def _verify_files(
    place: CheckpointPlace, found: Found, directory: str, names: list[str], is_quick: bool, on_bytes: Progress
) -> CheckpointVerdict:
    """Without a manifest: what the files themselves can tell."""
    damage: list[str] = []
    unchecked = []
    num_checked = 0
    for name in names:
        path = join(directory, name)
        try:
            if not name.endswith((*TORCH_SUFFIXES, SAFETENSORS_SUFFIX)):
                unchecked.append(name)
            elif name.endswith(SAFETENSORS_SUFFIX):
                damage += _safetensors_damage(place, path)
                unchecked.append(name)
            elif not is_torch_zip(place, path):
                if place.size_of(path) == 0:
                    damage.append(f"{path} is empty")
                unchecked.append(name)
            elif not is_quick:
                damage += _file_damage(place, path, on_bytes)
                num_checked += 1
        except OSError as error:
            damage.append(f"{path} cannot be read: {error.strerror or error}")
    note = (
        ""
        if is_quick or found.state is State.FILE
        else "no manifest: only the checks that the files themselves contain were made"
    )
    return CheckpointVerdict(
        name=found.name,
        path=found.path,
        damage=tuple(damage),
        num_checked=num_checked,
        unchecked=tuple(unchecked),
        note=note,
    )


def _sum(place: CheckpointPlace, path: str, on_bytes: Progress) -> int:
    crc = 0
    with place.open(path) as file:
        while content := file.read(CHUNK_BYTES):
            crc = zlib.crc32(content, crc)
            on_bytes(len(content))
    return crc


def _file_damage(place: CheckpointPlace, path: str, on_bytes: Progress) -> list[str]:
    """A torch file: each entry against its own CRC-32."""
    if not is_torch_zip(place, path):
        return [f"{path} does not begin like a torch file"]
    try:
        with place.open(path) as file, zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                try:
                    with archive.open(entry) as content:
                        while part := content.read(CHUNK_BYTES):
                            on_bytes(len(part))
                except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
                    return [f"{path}: entry {entry.filename} is damaged: {error}"]
    except (zipfile.BadZipFile, ValueError, UnicodeDecodeError) as error:
        return [f"{path} cannot be read as a torch file: {error}"]
    return []


def _safetensors_damage(place: CheckpointPlace, path: str) -> list[str]:
    """Eight bytes with the length of a JSON header, the header, and exactly as much data as it says."""
    size = place.size_of(path)
    length = int.from_bytes(place.beginning_of(path, 8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        return [f"{path} is cut off, or it is not a safetensors file"]
    try:
        header = msgspec.json.decode(place.beginning_of(path, 8 + length)[8:], type=dict[str, dict[str, object]])
        ends = [
            msgspec.convert(entry["data_offsets"], tuple[int, int])[1]
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (msgspec.MsgspecError, KeyError) as error:
        return [f"{path} has a header that cannot be read: {error}"]
    wanted = 8 + length + max(ends, default=0)
    return [] if size == wanted else [f"{path} has {size} bytes instead of the {wanted} that its header names"]
