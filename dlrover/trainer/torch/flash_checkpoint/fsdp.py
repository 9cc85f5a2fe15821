"""
Flash Checkpoint for FSDP, FSDP2, tensor parallelism and whatever else has its state in DTensors.

    from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer, StorageType

    checkpointer = FsdpShardCheckpointer("/shared/run7")
    extra = checkpointer.load_checkpoint(model, optimizer)      # {} at the very beginning
    ...
    checkpointer.save_checkpoint(step, model, optimizer, {"step": step}, storage_type=StorageType.MEMORY)

The files are those of torch's distributed checkpoint, so any number of ranks can load them, with us or without.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from dlrover.agreed.cadence import BUDGET
from dlrover.trainer.older_names import older_names
from dlrover.trainer.torch.flash_checkpoint.checkpointer import Checkpointer, SaveReason, SaveResult
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType as StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_reading import OPTIMIZER, PieceReader
from dlrover.trainer.torch.flash_checkpoint.frameworks.piece_engine import FsdpCheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import own_ranks
from dlrover.trainer.torch.flash_checkpoint.saving.cadence import AUTO, Interval, SaveCadence
from dlrover.trainer.torch.resilience.saves import KnownSave, save_log

MODEL = "model"
FULL_OPTIMIZER = "optimizer"


class FsdpShardCheckpointer:
    """Every rank saves its own pieces."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: float = 600,
        *,
        storage: Any = None,
        replica_count: int = 0,
        num_slots: int = 2,
        lazy: bool | str = False,
        checkpoint_interval: Interval = AUTO,
        overhead_budget: float = BUDGET,
    ) -> None:
        """
        All ranks make it together, after the process group.

        `comm_backend` is accepted and not needed: ranks agree over gloo. `replica_count` is how many copies other nodes keep in their
        memory, `num_slots` how many states are kept here, and `lazy` how saves are made that do not say. The last two are for
        `save_if_due`: how often, or "auto", and which part of the training time saves may take then.
        """
        self.engine = FsdpCheckpointEngine(
            checkpoint_dir,
            deletion_strategy=deletion_strategy,
            save_timeout=save_timeout,
            storage=storage,
            replica_count=replica_count,
            num_slots=num_slots,
            lazy=lazy,
        )
        self.checkpoint_dir, self.storage = os.fspath(checkpoint_dir), self.engine.storage
        self._cadence = SaveCadence(self.engine, checkpoint_interval, overhead_budget)

    @older_names(extra_sd="extra")
    def save_checkpoint(
        self,
        step: int,
        model: torch.nn.Module | Mapping[str, Any] | None = None,
        optimizer: torch.optim.Optimizer | str | os.PathLike[str] | None = None,
        extra: Mapping[str, Any] | StorageType | None = None,
        path: str | os.PathLike[str] = "",
        storage_type: StorageType = StorageType.DISK,
        *,
        state_dict: Mapping[str, Any] | None = None,
        on_busy: str = "skip",
        lazy: bool | str | None = None,
        metric: float | None = None,
    ) -> SaveResult:
        """
        Copy the state into memory; it may change again as soon as this returns. With DISK the agent writes the directory `path`
        afterwards, by default `{checkpoint_dir}/{step}`. `metric` is how good the state is, for `KeepBest`. All ranks call this.

        The older call `save_checkpoint(step, state_dict, path, storage_type)` works as well: then the caller made the state.
        """
        if state_dict is None and isinstance(model, Mapping):
            state_dict = model
        if state_dict is not None:
            if isinstance(optimizer, (str, os.PathLike)):
                path = optimizer
            if isinstance(extra, StorageType):
                storage_type = extra
            return self.engine.save_state(
                step, state_dict, path, storage_type, on_busy=on_busy, lazy=lazy, metric=metric
            )
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"The first argument of save_checkpoint must be a model or a state dict (got {type(model).__name__})."
            )
        if isinstance(optimizer, (str, os.PathLike)) or isinstance(extra, StorageType):
            raise TypeError("With a model, give path and storage_type by name: save_checkpoint(..., path=...).")
        is_new = _is_new(optimizer)
        state = {**self._state_of(model, optimizer), **_checked_extra(extra, (MODEL, OPTIMIZER))}
        if is_new:
            state[OPTIMIZER] = _made_new(optimizer, state[OPTIMIZER])
        beside = dict(extra or {})
        save_log().saved(lambda: KnownSave(self.engine, step, beside, {}, lambda: self._last_state(model, optimizer)))
        return self.engine.save_state(step, state, path, storage_type, on_busy=on_busy, lazy=lazy, metric=metric)

    @older_names(extra_sd="extra")
    def save_if_due(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> SaveResult | None:
        """Save this step if it is time, to memory or to storage. All ranks call this at every step. None: it is not time."""
        return self._cadence.save_if_due(
            step,
            lambda storage_type: self.save_checkpoint(step, model, optimizer, extra, storage_type=storage_type),
        )

    @older_names(resume_path="path")
    def load_checkpoint(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        path: str | os.PathLike[str] = "",
    ) -> dict[str, Any]:
        """
        Load the newest state that all ranks can have into the model and the optimizer, from memory or storage. Returns what was saved
        as `extra`, all of it; {} when there is no state.

        A `path` (the directory of a DCP checkpoint, no matter which program wrote it) wins over everything, and has to exist. All ranks call this.
        """
        is_new = _is_new(optimizer)
        wanted = self._state_of(model, optimizer)
        state = self.engine.load_state(wanted, path)
        if state is None:
            if is_new:
                _made_new(optimizer, wanted[OPTIMIZER])
            return {}
        if optimizer is None:
            set_model_state_dict(model, state[MODEL])
        else:
            has_state = "state" in state[OPTIMIZER]
            optimizer_state = {**wanted[OPTIMIZER], **state[OPTIMIZER]}
            set_state_dict(model, optimizer, model_state_dict=state[MODEL], optim_state_dict=optimizer_state)
            if not has_state:
                optimizer.state.clear()
        extra = {key: value for key, value in state.items() if key not in (MODEL, OPTIMIZER)}
        if self.engine.restored_step is not None:
            step = self.engine.restored_step
            save_log().restored(KnownSave(self.engine, step, extra, {}, lambda: self._last_state(model, optimizer)))
        return extra

    @older_names(resume_path="path")
    def get_storage_reader(self, path: str | os.PathLike[str] = "") -> PieceReader | None:
        """
        For scripts that call `torch.distributed.checkpoint.load` themselves: a reader of the newest state that all ranks can have; None
        when there is none. It is good until the next save. All ranks call this.
        """
        return self.engine.get_storage_reader(path)

    @property
    def restored_step(self) -> int | None:
        """The step of the last load; None: nothing was loaded, or a path that the user named."""
        return self.engine.restored_step

    def wait_for_staging(self) -> bool:
        """Until the newest lazy save is in memory. False: it was discarded; its result says why."""
        return self.engine.wait_for_staging()

    def poll(self) -> bool:
        """Whether the newest save is in memory, without waiting."""
        return self.engine.poll()

    def wait_latest_checkpoint(self, timeout: float = 1800) -> bool:
        """Until the newest DISK save of this rank is committed."""
        return self.engine.wait_for_storage(timeout)

    def is_save_requested(self) -> bool:
        """Whether a checkpoint is wanted soon; the next save will be one to storage by itself. The same on all ranks."""
        return self.engine.is_save_requested

    def close(self) -> None:
        """End the threads. Under `dlrover-run` what was saved stays; elsewhere this waits until it is written."""
        self.engine.close()

    def _last_state(self, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
        """After a step that broke: parameters may still be put together for it, and their pieces are what counts."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return self._state_of(model, optimizer)

    @staticmethod
    def _state_of(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
        if optimizer is None:
            return {MODEL: get_model_state_dict(model)}
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {MODEL: model_state, OPTIMIZER: optimizer_state}


FsdpCheckpointer = FsdpShardCheckpointer
"""Its name up to 0.3.5."""


class FsdpFullCheckpointer:
    """
    The whole state in one file that `torch.load` reads.

    It has to be put together on one rank of every node, so this is for models that fit there; `FsdpShardCheckpointer` needs no room for it.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: float = 600,
        *,
        storage: Any = None,
        replica_count: int = 0,
        num_slots: int = 2,
        checkpoint_interval: Interval = AUTO,
        overhead_budget: float = BUDGET,
    ) -> None:
        self._inner = DdpCheckpointer(
            checkpoint_dir,
            comm_backend=comm_backend,
            deletion_strategy=deletion_strategy,
            save_timeout=save_timeout,
            storage=storage,
            replica_count=replica_count,
            num_slots=num_slots,
            checkpoint_interval=checkpoint_interval,
            overhead_budget=overhead_budget,
        )
        self.checkpoint_dir, self.storage = self._inner.checkpoint_dir, self._inner.storage

    @older_names(extra_sd="extra")
    def save_checkpoint(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: Mapping[str, Any] | None = None,
        path: str | os.PathLike[str] = "",
        storage_type: StorageType = StorageType.DISK,
        *,
        on_busy: str = "skip",
        metric: float | None = None,
    ) -> SaveResult:
        """As for `FsdpShardCheckpointer`; `path` is a file, by default `{checkpoint_dir}/{step}/rank_0.pt`."""
        ranks = own_ranks()
        is_one_node = ranks.local_world_size >= ranks.world_size
        # On the devices of all ranks only if several nodes need it; else torch gives it to rank 0 alone, on the CPU.
        options = StateDictOptions(full_state_dict=True, cpu_offload=is_one_node and not _is_first_kind_on_cpu(model))
        is_new = _is_new(optimizer)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        if is_new:
            optimizer_state = _made_new(optimizer, optimizer_state)
        state = {
            MODEL: model_state,
            FULL_OPTIMIZER: optimizer_state,
            **_checked_extra(extra, (MODEL, FULL_OPTIMIZER)),
        }
        return self._inner.save_checkpoint(step, state, path, storage_type, on_busy=on_busy, metric=metric)

    @older_names(extra_sd="extra")
    def save_if_due(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: Mapping[str, Any] | None = None,
    ) -> SaveResult | None:
        """As for `FsdpShardCheckpointer`."""
        return self._inner.cadence.save_if_due(
            step,
            lambda storage_type: self.save_checkpoint(step, model, optimizer, extra, storage_type=storage_type),
        )

    def is_save_requested(self) -> bool:
        """As for `FsdpShardCheckpointer`, on the ranks that save."""
        return self._inner.is_save_requested()

    @older_names(resume_path="path")
    def load_checkpoint(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: str | os.PathLike[str] = ""
    ) -> dict[str, Any]:
        """As for `FsdpShardCheckpointer`; `path` is a file, or the directory of a checkpoint."""
        state = self._inner.load_checkpoint(path)
        if not state:
            return {}
        options = StateDictOptions(full_state_dict=True)
        if "state" in state[FULL_OPTIMIZER]:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state[MODEL],
                optim_state_dict=state[FULL_OPTIMIZER],
                options=options,
            )
        else:
            set_model_state_dict(model, state[MODEL], options=options)
            optimizer.state.clear()
        return {key: value for key, value in state.items() if key not in (MODEL, FULL_OPTIMIZER)}

    def wait_latest_checkpoint(self, timeout: float = 1800) -> bool:
        """Until the newest DISK save of this rank is committed. Ranks that do not save return at once."""
        return self._inner.wait_latest_checkpoint(timeout)

    def close(self) -> None:
        self._inner.close()


Checkpointer.register(FsdpShardCheckpointer)  # with calls of their own, but checkpointers to `isinstance`
Checkpointer.register(FsdpFullCheckpointer)


def _is_first_kind_on_cpu(model: torch.nn.Module) -> bool:
    """FSDP of the first generation with its parameters on the CPU: to move the whole state there ends in torch 2.13 by a segmentation fault."""
    is_first_kind = any(isinstance(each, FullyShardedDataParallel) for each in model.modules())
    return is_first_kind and all(parameter.device.type == "cpu" for parameter in model.parameters())


def _is_new(optimizer: Any) -> bool:
    """It has not made a step yet."""
    return optimizer is not None and not optimizer.state


def _made_new(optimizer: Any, its_state: Mapping[str, Any]) -> dict[str, Any]:
    """
    torch lets an optimizer without a state make an empty step to get one, which counts as a step and, with weight decay, leaves traces in
    the averages. Take it back: the optimizer is as it was, and what is saved of it has no state.
    """
    optimizer.state.clear()
    return {key: value for key, value in its_state.items() if key != "state"}


def _checked_extra(given: Any, taken: tuple[str, str]) -> dict[str, Any]:
    extra = dict(given or {})
    if clash := sorted(set(extra) & set(taken)):
        raise ValueError(
            f"`extra` has the keys {clash}, which are reserved for the model and the optimizer. Use other names."
        )
    return extra


__all__ = [
    "FsdpCheckpointer",
    "FsdpFullCheckpointer",
    "FsdpShardCheckpointer",
    "SaveReason",
    "SaveResult",
    "StorageType",
]
