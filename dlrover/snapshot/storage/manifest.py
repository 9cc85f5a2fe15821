"""
What a checkpoint consists of, as data: the manifest that each rank writes, and the one that makes them a checkpoint.

A directory with a global manifest is a checkpoint; without one it is a heap of files, whatever they are called. All paths in manifests are relative to
the checkpoint's directory, so it can be moved.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.protocol.errors import DLRoverError

MANIFEST_VERSION = 1
DIRECTORY = ".dlrover"
"""Inside the checkpoint; a name that no framework reads."""
GLOBAL_NAME = f"{DIRECTORY}/manifest.json"


class ManifestInvalid(DLRoverError):
    """A manifest that cannot be read, or that does not fit what it describes."""


class FileRecord(Struct, frozen=True, omit_defaults=True):
    path: str
    size_bytes: int
    crc32: int
    part: str = ""
    """The caller's name of what it holds, such as `model_states`; empty: of a version that did not say."""
    kind: str = "torch"
    """How it is put together, as in the slot: a file for `torch.load`, or something else."""


class TensorRecord(Struct, frozen=True, omit_defaults=True):
    """Where a tensor (or this rank's piece of it) is: enough to give it to ranks that are cut differently."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: str = ""
    """Which file of the rank holds it, by the file's path."""
    global_shape: tuple[int, ...] | None = None
    global_offset: tuple[int, ...] | None = None


class Topology(Struct, frozen=True):
    """How the job was cut when the state was saved. A restore with another one has to reshard."""

    world_size: int
    global_rank: int
    parallel_sizes: dict[str, int] = {}
    """By dimension, such as `data`, `tensor`, `pipeline`."""


class RankManifest(Struct, frozen=True, kw_only=True):
    """What one rank wrote in one attempt."""

    version: int = MANIFEST_VERSION
    step: int
    round: int
    attempt: str
    topology: Topology
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...] = ()
    saved_at: float = 0.0
    metric: float | None = None
    replaces: str | None = None
    """Attempt of the checkpoint that was at the target when this rank began to write, empty without one; None: it was not looked at."""

    @property
    def global_rank(self) -> int:
        return self.topology.global_rank


class RankSummary(Struct, frozen=True, kw_only=True):
    global_rank: int
    digest: str
    """Of the rank's manifest as it is stored."""
    files: tuple[FileRecord, ...]


class GlobalManifest(Struct, frozen=True, kw_only=True):
    """The commit: what stands here is a checkpoint."""

    version: int = MANIFEST_VERSION
    step: int
    round: int
    attempt: str
    world_size: int
    ranks: tuple[RankSummary, ...]
    data_state: str = ""
    """Where the reading of the data was at this step, in the words of the part that keeps it; a restore goes back to it."""
    saved_at: float = 0.0
    """Wall clock of the save; 0: of a version that did not say."""
    metric: float | None = None
    """How good the state is, if its trainer said."""
    checksum: str = ""
    """Of everything else here: the ranks' manifests are guarded by this one, and this one only by itself."""

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return tuple(file for rank in self.ranks for file in rank.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


Manifest = TypeVar("Manifest", RankManifest, GlobalManifest)


def rank_manifest_name(global_rank: int) -> str:
    return f"{DIRECTORY}/rank-{global_rank:05d}.json"


def encode_manifest(manifest: RankManifest | GlobalManifest) -> bytes:
    """The global one gets the checksum of its own bytes, as they are without it."""
    if isinstance(manifest, GlobalManifest):
        content = _encode(replace(manifest, checksum=""))
        manifest = replace(manifest, checksum=digest_of(content))
    return _encode(manifest)


def decode_rank_manifest(content: bytes) -> RankManifest:
    return _checked(_decode(content, _RANK_DECODER))


def decode_global_manifest(content: bytes) -> GlobalManifest:
    manifest = _checked(_decode(content, _GLOBAL_DECODER))
    if manifest.checksum:  # the first versions wrote none
        bare = content.replace(f'"{manifest.checksum}"'.encode(), b'""', 1)
        if digest_of(bare) != manifest.checksum:
            raise ManifestInvalid("The manifest is damaged: its content does not match its checksum.")
    return manifest


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _encode(manifest: RankManifest | GlobalManifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def summarize(manifest: RankManifest) -> RankSummary:
    return RankSummary(
        global_rank=manifest.global_rank, digest=digest_of(encode_manifest(manifest)), files=manifest.files
    )


def join_manifests(manifests: list[RankManifest], expected_ranks: set[int], data_state: str = "") -> GlobalManifest:
    """
    The global manifest of exactly the expected ranks, all of one attempt at one step.

    The *set* is compared, not its size: a stale or doubled report cannot stand in for a missing one.
    """
    by_rank = {manifest.global_rank: manifest for manifest in manifests}
    if missing := sorted(expected_ranks - set(by_rank)):
        raise ManifestInvalid(f"The checkpoint is incomplete: no manifest from ranks {_few(missing)}.")
    if surplus := sorted(set(by_rank) - expected_ranks):
        raise ManifestInvalid(
            f"The checkpoint cannot be committed: its directory also has manifests from ranks {_few(surplus)}, which did not take part in "
            "this save. If another job writes there, give each job its own directory."
        )
    first = by_rank[min(by_rank)]
    for rank, manifest in sorted(by_rank.items()):
        if (manifest.step, manifest.attempt) != (first.step, first.attempt):
            raise ManifestInvalid(
                f"The manifests do not belong together: rank {rank} wrote step {manifest.step} in attempt "
                f"{manifest.attempt}, and rank {first.global_rank} wrote step {first.step} in attempt "
                f"{first.attempt}."
            )
    owner_of: dict[str, int] = {}
    for rank, manifest in sorted(by_rank.items()):
        for file in manifest.files:
            if owner_of.setdefault(file.path, rank) != rank:
                raise ManifestInvalid(
                    f"Ranks {owner_of[file.path]} and {rank} both wrote {file.path}; give each its own path."
                )
    return GlobalManifest(
        step=first.step,
        round=first.round,
        attempt=first.attempt,
        world_size=first.topology.world_size,
        ranks=tuple(summarize(manifest) for _, manifest in sorted(by_rank.items())),
        data_state=data_state,
        saved_at=first.saved_at,
        metric=first.metric,
    )


_RANK_DECODER = msgspec.json.Decoder(RankManifest)
_GLOBAL_DECODER = msgspec.json.Decoder(GlobalManifest)


def _decode(content: bytes, decoder: msgspec.json.Decoder[Manifest]) -> Manifest:
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ManifestInvalid(f"The file is not a manifest: {error}") from error


def _checked(manifest: Manifest) -> Manifest:
    if manifest.version != MANIFEST_VERSION:
        raise ManifestInvalid(
            f"The manifest has version {manifest.version}; this dlrover reads version {MANIFEST_VERSION}. Use the "
            "dlrover that wrote it."
        )
    for file in manifest.files:
        parts = file.path.split("/")
        if file.path.startswith("/") or ".." in parts or not file.path:
            raise ManifestInvalid(f"The manifest names {file.path!r}, but this path lies outside the checkpoint.")
    return manifest


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
