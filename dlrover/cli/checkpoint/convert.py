"""
A checkpoint in another form: torch file, safetensors, DCP directory. Nothing that exists is ever overwritten.

The reading and writing is torch's and safetensors' own. The result is written aside and gets its name when it is whole.
"""

from __future__ import annotations

import enum
import os
import shutil
import tempfile
import warnings
from typing import Any

from dlrover.cli.checkpoint.listing import SAFETENSORS_SUFFIX, TORCH_SUFFIXES
from dlrover.cli.checkpoint.tensors import flatten, load_state
from dlrover.protocol.errors import ConfigError


class Form(enum.StrEnum):
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    DCP = "dcp"


def form_of(target: str) -> Form:
    """By the name of what shall be written: a name without a suffix becomes a DCP directory."""
    suffix = os.path.splitext(target)[1]
    if suffix in TORCH_SUFFIXES:
        return Form.TORCH
    if suffix == SAFETENSORS_SUFFIX:
        return Form.SAFETENSORS
    if not suffix or target.endswith("/"):
        return Form.DCP
    known = ", ".join((*TORCH_SUFFIXES, SAFETENSORS_SUFFIX))
    raise ConfigError(
        f"The form of {target} is unknown. Its name must end in one of {known}, or have no ending for DCP. Or give "
        "--to."
    )


def convert(
    source: str,
    target: str,
    form: Form,
    *,
    step: int | None = None,
    trusts_pickle: bool = False,
    is_tensors_only: bool = False,
) -> int:
    """Returns the bytes that were written."""
    if "://" in target:
        raise ConfigError(
            f"{target} is a URL. This command writes to a local path only. Give a local path and copy the result "
            "from there."
        )
    target = os.path.abspath(target.rstrip("/"))
    if os.path.lexists(target):
        raise ConfigError(
            f"{target} exists already, and this command overwrites nothing. Choose another target, or remove this one."
        )
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        raise ConfigError(f"{parent} is not a directory. Create it first.")
    state = load_state(source, trusts_pickle=trusts_pickle, step=step)
    if is_tensors_only or form is Form.SAFETENSORS:
        state = _tensors_of(state, source, is_tensors_only=is_tensors_only)
    try:
        folder = tempfile.mkdtemp(prefix=f".{os.path.basename(target)}.", dir=parent)
    except OSError as error:
        raise ConfigError(f"{parent} cannot be written to: {error.strerror}.") from error
    try:
        aside = os.path.join(folder, os.path.basename(target))
        _write(state, aside, form)
        _give_name(aside, target)
        return _size(target)
    except OSError as error:
        raise ConfigError(f"{target} could not be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tensors_of(state: Any, source: str, *, is_tensors_only: bool) -> dict[str, Any]:
    import torch

    leaves = flatten(state)
    others = [name for name, value in leaves.items() if not torch.is_tensor(value)]
    if others and not is_tensors_only:
        raise ConfigError(
            f"{source} holds {len(others)} values that are not tensors, and a safetensors file can hold only "
            f"tensors: {', '.join(others[:8])}{(', ...' if len(others) > 8 else '')}. Give --tensors-only to "
            "leave them out."
        )
    if len(others) == len(leaves):
        raise ConfigError(f"{source} holds no tensors.")
    return {name: value for name, value in leaves.items() if torch.is_tensor(value)}


def _write(state: Any, path: str, form: Form) -> None:
    import torch

    if form is Form.TORCH:
        torch.save(state, path)
    elif form is Form.SAFETENSORS:
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise ConfigError("safetensors is not installed. Install it with: pip install safetensors") from error
        # Names that share memory are refused there, and strides are not kept: each gets its own bytes.
        save_file({name: tensor.detach().clone().contiguous() for name, tensor in state.items()}, path)
    else:
        if not isinstance(state, dict):
            raise ConfigError(
                f"A DCP checkpoint must be a dict with names as keys. The source holds a {type(state).__name__}."
            )
        from torch.distributed import checkpoint

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group exists is what we want
            checkpoint.save(state, checkpoint_id=path)


def _give_name(aside: str, target: str) -> None:
    """At once, and only if no other process has taken the name meanwhile."""
    if os.path.isdir(aside):
        os.rename(aside, target)  # fails on a file and on a directory with anything in it
    else:
        os.link(aside, target)


def _size(path: str) -> int:
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(parent, name)) for parent, _, names in os.walk(path) for name in names)
