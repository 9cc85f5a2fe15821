"""
The tensors of a checkpoint, by name, whatever form it has: for comparing two of them, and for writing one in another form.

Only here the tools need torch, and they import it when they get here. Files are unpickled with torch's restriction to plain data, unless the user says that
he trusts the file.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import posixpath
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from dlrover.cli.checkpoint.listing import (
    DCP_METADATA,
    SAFETENSORS_SUFFIX,
    TORCH_SUFFIXES,
    CheckpointPlace,
    open_place,
    read_all,
    read_manifest,
    read_trackers,
)
from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.storage.commit import locate
from dlrover.snapshot.storage.manifest import DIRECTORY, ManifestInvalid
from dlrover.snapshot.storage.newest import newest_complete
from dlrover.snapshot.storage.storage import join

TRUST = "--trust-pickle"


def has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def checkpoint_path(place: CheckpointPlace, step: int | None = None) -> str:
    """One checkpoint: the location itself, or in a directory of checkpoints the step's, or the one that the tracker names."""
    directory = place.location
    if not place.is_directory(directory) or _is_one(place, directory):
        if step is not None:
            raise ConfigError(
                f"{directory} is a single checkpoint. Give a step only for a directory of several checkpoints."
            )
        return directory
    try:
        found = newest_complete(place.storage, directory) if step is None else locate(place.storage, directory, step)
    except ManifestInvalid as error:
        if foreign := _foreign(place, directory, step):
            return foreign
        raise ConfigError(str(error)) from error
    if found is None:
        raise ConfigError(
            f"{directory} has neither a tracker nor a complete DLRover checkpoint. Give the path of one "
            "checkpoint in it."
        )
    return found.path


def load_flat(location: str, *, trusts_pickle: bool = False, step: int | None = None) -> dict[str, Any]:
    """Every leaf of the state by its path in it, with the file in front where the checkpoint has several."""
    place = open_place(location)
    path = checkpoint_path(place, step)
    if not place.is_directory(path):
        return flatten(load_file(place, path, trusts_pickle=trusts_pickle))
    if place.is_file(join(path, DCP_METADATA)):
        return flatten(load_dcp(place, path, trusts_pickle=trusts_pickle))
    names = state_files(place, path)
    if len(names) == 1:
        return flatten(load_file(place, join(path, names[0]), trusts_pickle=trusts_pickle))
    leaves = {}
    for name in names:
        state = load_file(place, join(path, name), trusts_pickle=trusts_pickle)
        leaves.update({f"{name}:{leaf}": value for leaf, value in flatten(state).items()})
    return leaves


def load_state(location: str, *, trusts_pickle: bool = False, step: int | None = None) -> Any:
    """The state of a checkpoint that is one file, or one DCP directory."""
    place = open_place(location)
    path = checkpoint_path(place, step)
    if not place.is_directory(path):
        return load_file(place, path, trusts_pickle=trusts_pickle)
    if place.is_file(join(path, DCP_METADATA)):
        return load_dcp(place, path, trusts_pickle=trusts_pickle)
    names = state_files(place, path)
    if len(names) != 1:
        raise ConfigError(f"{path} has {len(names)} files with states: {', '.join(names[:8])}. Name one of them.")
    return load_file(place, join(path, names[0]), trusts_pickle=trusts_pickle)


def state_files(place: CheckpointPlace, path: str) -> list[str]:
    """Relative paths of what holds tensors in one checkpoint."""
    manifest = read_manifest(place, path)
    names = [file.path for file in manifest.files] if manifest else [name for name, _ in place.files_below(path)]
    found = sorted(name for name in names if name.endswith((*TORCH_SUFFIXES, SAFETENSORS_SUFFIX)))
    if not found:
        raise ConfigError(f"{path} holds no torch file, no safetensors file and no DCP checkpoint.")
    return found


def load_file(place: CheckpointPlace, path: str, *, trusts_pickle: bool = False) -> Any:
    if path.endswith(SAFETENSORS_SUFFIX):
        return _load_safetensors(place, path)
    if not path.endswith(TORCH_SUFFIXES) and place.beginning_of(path, 2) not in (b"PK", b"\x80\x02"):
        raise ConfigError(f"{path} is neither a torch file nor a safetensors file.")
    import torch

    with _torch_quiet():
        try:
            source = path if place.is_local else read_all(place, path)
            return torch.load(source, map_location="cpu", weights_only=not trusts_pickle)
        except pickle.UnpicklingError as error:
            if trusts_pickle:
                raise ConfigError(f"{path} cannot be read: {_first_line(error)}") from error
            raise ConfigError(
                f"{path} holds more than tensors and plain values. Reading the rest could run code that the author of the file put there. "
                f"If you trust the file, give {TRUST}. torch says: {_first_line(error)}"
            ) from error
        except (RuntimeError, EOFError, ValueError, AttributeError, ImportError) as error:
            raise ConfigError(f"{path} cannot be read: {_first_line(error)}") from error


def load_dcp(place: CheckpointPlace, path: str, *, trusts_pickle: bool = False) -> Any:
    """Through torch's own converter. It always unpickles `.metadata`, which cannot be restricted."""
    if not place.is_local:
        raise ConfigError(f"{path}: copy a DCP checkpoint to a local directory first; torch reads it from there.")
    if not trusts_pickle:
        raise ConfigError(
            f"{path} is a DCP checkpoint. torch unpickles its {DCP_METADATA} without restriction, which could run code of "
            f"its author. If you trust it, give {TRUST}."
        )
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory(prefix="dlrover-convert-") as folder, _torch_quiet():
        file = os.path.join(folder, "state.pt")
        try:
            dcp_to_torch_save(path, file)
        except Exception as error:  # whatever torch raises for files of somebody else is said to the user
            raise ConfigError(f"{path} cannot be read as a DCP checkpoint: {_first_line(error)}") from error
        return torch.load(file, map_location="cpu", weights_only=False)


def flatten(state: Any) -> dict[str, Any]:
    """Leaves by name, in order; containers are mappings, lists and tuples."""
    return dict(_leaves(state, ""))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(below, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and value:
        for number, below in enumerate(value):
            yield from _leaves(below, f"{name}.{number}" if name else str(number))
    else:
        yield name, value


def _foreign(place: CheckpointPlace, directory: str, step: int | None) -> str | None:
    """Of software that knows no manifests: the directory that is named after the step."""
    for name in (str(step),) if step is not None else read_trackers(place, directory).values():
        if place.is_directory(join(directory, name)) and not place.is_directory(join(directory, name, DIRECTORY)):
            return join(directory, name)
    return None


def _is_one(place: CheckpointPlace, path: str) -> bool:
    """The directory of one checkpoint: with a manifest, with DCP metadata, or with files and no tracker."""
    if read_manifest(place, path) is not None or place.is_file(join(path, DCP_METADATA)):
        return True
    names = [entry.name for entry in place.storage.list(path) if not entry.is_directory]
    return "dlrover_latest.txt" not in names and any(
        posixpath.splitext(name)[1] in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX) for name in names
    )


def _load_safetensors(place: CheckpointPlace, path: str) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load, load_file
    except ImportError as error:
        raise ConfigError(f"{path} needs the safetensors package. Install it with: pip install safetensors") from error
    try:
        found: dict[str, Any] = load_file(path) if place.is_local else load(read_all(place, path).getvalue())
    except SafetensorError as error:
        raise ConfigError(f"{path} cannot be read: {_first_line(error)}") from error
    return found


@contextlib.contextmanager
def _torch_quiet() -> Iterator[None]:
    """torch warns of internals that the user cannot change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300] or type(error).__name__
