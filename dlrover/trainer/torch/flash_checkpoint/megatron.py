"""
Flash Checkpoint for Megatron-LM's own checkpoint functions: the same calls, imported from here.

    from dlrover.trainer.torch.flash_checkpoint.megatron import load_checkpoint, save_checkpoint, StorageType

    save_checkpoint(iteration, model, optimizer, opt_param_scheduler, storage_type=StorageType.MEMORY)

Megatron's functions do the work. While they run, this thread's `torch.save` collects the files instead of writing them, and
Megatron's `args.save` points to an empty directory, so neither its tracker nor its directories touch the real one; the agent writes all of
that at the commit. For a restore from memory `args.load` points to a directory that looks like a checkpoint, and `torch.load` answers from memory.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from dlrover.agreed.cadence import BUDGET
from dlrover.protocol.errors import ConfigError
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType as StorageType
from dlrover.trainer.torch.flash_checkpoint.megatron_engine import MegatronCheckpointEngine, Memory
from dlrover.trainer.torch.flash_checkpoint.restoring.megatron_stored import (
    TRACKER,
    iteration_directory,
    whole_directory,
)
from dlrover.trainer.torch.flash_checkpoint.saving.cadence import AUTO, Interval, SaveCadence

_LAYOUTS = (
    ("megatron.training.checkpointing", "megatron.training.global_vars"),
    ("megatron.checkpointing", "megatron.global_vars"),
)

_OF_CHECKPOINTER = ("storage", "comm_backend", "save_timeout", "replica_count", "deletion_strategy")
"""Options of a save that are for the checkpointer, which its first call makes."""


class MegatronCheckpointer:
    """One per process: what the first call says about directory and storage counts, later ones are ignored."""

    _instance: ClassVar[MegatronCheckpointer | None] = None
    cadence: SaveCadence | None = None
    """Of `save_checkpoint_if_due`, once that was called."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        storage: object = None,
        comm_backend: str = "",
        save_timeout: float = 600,
        replica_count: int = 0,
        *,
        deletion_strategy: object = None,
    ) -> None:
        self.engine = MegatronCheckpointEngine(
            checkpoint_dir, storage, comm_backend, save_timeout, replica_count, deletion_strategy=deletion_strategy
        )
        self.checkpoint_dir, self.storage = os.fspath(checkpoint_dir), self.engine.storage
        self._is_checked = False

    def check_first(self, written: list[str]) -> None:
        """
        At the first save the ranks tell each other what Megatron wrote past us, so that all of them raise and none waits for the rest.
        """
        if self._is_checked:
            return
        found = sorted({name for names in self.engine.gather(written) for name in names})
        if found:
            raise ConfigError(
                f"Megatron wrote {', '.join(found[:3])} itself instead of using torch.save, so these files "
                "would be lost. Save this kind of checkpoint with Megatron's own function."
            )
        self._is_checked = True

    @classmethod
    def singleton_instance(
        cls, checkpoint_dir: str | os.PathLike[str], *args: Any, **options: Any
    ) -> MegatronCheckpointer:
        if MegatronCheckpointer._instance is None:
            MegatronCheckpointer._instance = cls(checkpoint_dir, *args, **options)
        return MegatronCheckpointer._instance

    def update_tracer_file(self, iteration: int) -> None:
        """
        For a script that calls Megatron's own function and keeps the iteration in memory only: remove the directory that Megatron made, and let
        Megatron's tracker name the newest committed iteration again. A committed iteration stays.
        """
        self.engine.forget_directory(iteration)

    def wait_latest_checkpoint(self, timeout: float = 1800) -> bool:
        return self.engine.wait_latest_checkpoint(timeout)

    def close(self) -> None:
        self.engine.close()
        if MegatronCheckpointer._instance is self:
            MegatronCheckpointer._instance = None


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float = 0,
    storage_type: StorageType = StorageType.DISK,
    storage: object = None,
    comm_backend: str = "",
    save_timeout: float = 600,
    replica_count: int = 0,
    *,
    deletion_strategy: object = None,
    on_busy: str = "skip",
    metric: float | None = None,
) -> SaveResult:
    """Megatron's `save_checkpoint` into memory; with DISK the agent writes `args.save` afterwards. All ranks call it."""
    if not isinstance(storage_type, StorageType):
        raise ValueError(f"storage_type must be StorageType.MEMORY or StorageType.DISK (got {storage_type!r}).")
    megatron = find_megatron()
    args = megatron.get_args()
    check_format(args)
    checkpointer = MegatronCheckpointer.singleton_instance(
        args.save, storage, comm_backend, save_timeout, replica_count
    )
    if deletion_strategy is not None:
        checkpointer.engine.delete_by(deletion_strategy)
    options = {"num_floating_point_operations_so_far": num_floating_point_operations_so_far}
    with collected_saves(args, iteration) as (files, written):
        _call(megatron.save_checkpoint, iteration, model, optimizer, opt_param_scheduler, **options)
    checkpointer.check_first(written)
    is_storage = storage_type is StorageType.DISK
    return checkpointer.engine.save(iteration, files, is_storage=is_storage, on_busy=on_busy, metric=metric)


def save_checkpoint_if_due(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    *,
    checkpoint_interval: Interval = AUTO,
    overhead_budget: float = BUDGET,
    **options: Any,
) -> SaveResult | None:
    """
    The same if it is time, to memory or to storage; all ranks call it after every iteration. None: it is not time. `options` are those of
    `save_checkpoint`; how often, the first call says.
    """
    args = find_megatron().get_args()
    checkpointer = MegatronCheckpointer.singleton_instance(
        args.save, **{name: options[name] for name in _OF_CHECKPOINTER if name in options}
    )
    if checkpointer.cadence is None:
        checkpointer.cadence = SaveCadence(checkpointer.engine.engine, checkpoint_interval, overhead_budget)
    return checkpointer.cadence.save_if_due(
        iteration,
        lambda storage_type: save_checkpoint(
            iteration, model, optimizer, opt_param_scheduler, storage_type=storage_type, **options
        ),
    )


def is_save_requested() -> bool:
    """Whether a checkpoint is wanted soon; the next save will be one to storage by itself. The same on all ranks."""
    found = MegatronCheckpointer._instance
    return found is not None and found.engine.engine.is_save_requested


def load_checkpoint(
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    storage: object = None,
    comm_backend: str = "",
    save_timeout: float = 600,
    replica_count: int = 0,
) -> Any:
    """
    What Megatron's `load_checkpoint` returns. All ranks call it.

    Memory is looked at where `args.load` is the directory of the saves or not set, and no iteration was asked for; all ranks then take the same
    iteration from it. Otherwise, and where the storage is newer, Megatron reads its files as always, after they were compared with their manifest.
    """
    megatron = find_megatron()
    args = megatron.get_args()
    memory = agreement = None
    if args.save and is_resuming(args, load_arg):
        checkpointer = MegatronCheckpointer.singleton_instance(
            args.save, storage, comm_backend, save_timeout, replica_count
        )
        memory = checkpointer.engine.restore_memory()
        agreement = checkpointer.engine.engine.agreement
    load = megatron.load_checkpoint
    if memory is None:
        with whole_directory(args, load_arg, agreement):
            return _call(load, model, optimizer, opt_param_scheduler, load_arg=load_arg, strict=strict)
    memory.fetch(own_model_file(megatron, memory.step))
    with memory_as_directory(args, load_arg, memory):
        return _call(load, model, optimizer, opt_param_scheduler, load_arg=load_arg, strict=strict)


def wait_latest_checkpoint(timeout: float = 1800) -> bool:
    """Until the newest DISK save of this rank is committed."""
    found = MegatronCheckpointer._instance
    return True if found is None else found.wait_latest_checkpoint(timeout)


class Megatron:
    """The functions of the Megatron that is installed."""

    def __init__(self, checkpointing: Any, global_vars: Any) -> None:
        self.save_checkpoint: Callable[..., Any] = checkpointing.save_checkpoint
        self.load_checkpoint: Callable[..., Any] = checkpointing.load_checkpoint
        self.get_checkpoint_name: Callable[..., str] = checkpointing.get_checkpoint_name
        self.checkpointing = checkpointing
        self._global_vars = global_vars

    def get_args(self) -> Any:
        return self._global_vars.get_args()


def find_megatron() -> Megatron:
    """Today's layout first, then that of before 2024. Raises ImportError."""
    for checkpointing, global_vars in _LAYOUTS:
        try:
            return Megatron(importlib.import_module(checkpointing), importlib.import_module(global_vars))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("megatron"):
                raise
    raise ImportError(
        "Megatron-LM cannot be imported: there is no module megatron.training.checkpointing. It is not on "
        "PyPI, and the package megatron-core does not contain it. Put a clone of Megatron-LM's repository into "
        "PYTHONPATH."
    )


def check_format(args: Any) -> None:
    """Files that Megatron writes by itself, without torch.save, cannot be collected."""
    ckpt_format = getattr(args, "ckpt_format", "torch")
    if getattr(args, "use_dist_ckpt", False) or ckpt_format != "torch":
        raise ConfigError(
            f"Megatron writes checkpoints in the format {ckpt_format}, but these functions need the format "
            "torch. Start with --ckpt-format torch, or save with MegatronShardedCheckpointer of "
            "dlrover.trainer.torch.flash_checkpoint.megatron_sharded."
        )


def is_resuming(args: Any, load_arg: str) -> bool:
    """Whether this load continues the training of `args.save`, rather than starting from what another job has left."""
    load = getattr(args, load_arg, None)
    is_own = load is None or os.path.abspath(load) == os.path.abspath(args.save)
    return load_arg == "load" and is_own and not getattr(args, "ckpt_step", None)


def own_model_file(megatron: Megatron, iteration: int) -> str:
    """Path in the iteration's directory of the model file that this rank loads, by Megatron's own rules."""
    root = "/root-of-checkpoints"
    return os.path.relpath(megatron.get_checkpoint_name(root, iteration), f"{root}/{iteration_directory(iteration)}")


@contextlib.contextmanager
def collected_saves(args: Any, iteration: int) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """
    What this thread gives to `torch.save` for the iteration, by its path in the iteration's directory; and what was written there without
    it, known at the end.

    Other threads and other targets (open files, other directories) reach the real function, which is back in its place afterwards in any case.
    """
    files: dict[str, Any] = {}
    written: list[str] = []
    real, directory, thread = torch.save, args.save, threading.get_ident()
    with tempfile.TemporaryDirectory(prefix="dlrover-megatron-") as root:
        inside = os.path.join(root, iteration_directory(iteration)) + os.sep

        def save(obj: Any, f: Any, *rest: Any, **options: Any) -> Any:
            is_path = isinstance(f, (str, os.PathLike))
            if threading.get_ident() != thread or not is_path or not os.fspath(f).startswith(root + os.sep):
                return real(obj, f, *rest, **options)
            if not os.fspath(f).startswith(inside):
                raise ValueError(f"Megatron asked to save {f}, but this file does not belong to iteration {iteration}.")
            files[os.fspath(f).removeprefix(inside)] = obj
            return None

        torch.save, args.save = save, root
        try:
            yield files, written
        finally:
            torch.save, args.save = real, directory
        written += _files_in(inside)


@contextlib.contextmanager
def memory_as_directory(args: Any, load_arg: str, memory: Memory) -> Iterator[None]:
    """While this lasts, `args.load` names a directory that looks like the checkpoint, and this thread's `torch.load` reads from memory."""
    real, directory, thread = torch.load, getattr(args, load_arg, None), threading.get_ident()
    with tempfile.TemporaryDirectory(prefix="dlrover-megatron-") as root:
        inside = os.path.join(root, iteration_directory(memory.step)) + os.sep
        for name in memory.names:  # empty: Megatron looks which files there are before it reads one
            os.makedirs(os.path.dirname(inside + name), exist_ok=True)
            with open(inside + name, "wb"):
                pass
        with open(os.path.join(root, TRACKER), "w") as file:
            file.write(str(memory.step))

        def load(f: Any, *rest: Any, **options: Any) -> Any:
            is_path = isinstance(f, (str, os.PathLike))
            if threading.get_ident() != thread or not is_path or not os.fspath(f).startswith(inside):
                return real(f, *rest, **options)
            return memory.read(os.fspath(f).removeprefix(inside))

        torch.load = load
        setattr(args, load_arg, root)
        try:
            yield
        finally:
            torch.load = real
            setattr(args, load_arg, directory)


def _files_in(directory: str) -> list[str]:
    return [
        os.path.join(above, name).removeprefix(directory) for above, _, names in os.walk(directory) for name in names
    ]


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """With those options that this version of Megatron knows."""
    known = inspect.signature(function).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    return function(*args, **{name: value for name, value in options.items() if takes_any or name in known})
