"""
Flash Checkpoint for Megatron-LM with the distributed optimizer: every rank saves its own share, nothing is gathered.

    from dlrover.trainer.torch.flash_checkpoint.megatron_dist_ckpt import load_checkpoint, save_checkpoint

The model file is Megatron's (`iter_0000100/mp_rank_00/model_optim_rng.pt`), once for each data-parallel group; the optimizer's shares are
`iter_0000100/rank_00003/distrib_optim.pt`, one for each rank.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from dlrover.agreed.cadence import BUDGET
from dlrover.snapshot.storage import user_deletion
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.snapshot.storage.user_storage import get_checkpoint_storage as get_checkpoint_storage
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType as StorageType
from dlrover.trainer.torch.flash_checkpoint.frameworks.megatron_optimizer import load_parameter_state, parameter_state
from dlrover.trainer.torch.flash_checkpoint.megatron import Megatron, find_megatron, is_resuming, own_model_file
from dlrover.trainer.torch.flash_checkpoint.megatron_engine import (
    MegatronCheckpointEngine,
    MegatronDistCheckpointEngine,
    Memory,
)
from dlrover.trainer.torch.flash_checkpoint.restoring.megatron_stored import (
    RELEASE,
    TRACKER,
    iteration_directory,
    named_iteration,
    whole_directory,
)
from dlrover.trainer.torch.flash_checkpoint.saving.cadence import AUTO, Interval, SaveCadence

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

CHECKPOINT_VERSION = 3.0


class KeepStepIntervalStrategy(user_deletion.KeepStepIntervalStrategy):
    """The same, for directories named as Megatron names them."""

    def directory_of(self, step: int) -> str:
        return os.path.join(self.checkpoint_dir, iteration_directory(step))


class KeepLatestStepStrategy(user_deletion.KeepLatestStepStrategy):
    """The same, for directories named as Megatron names them."""

    def directory_of(self, step: int) -> str:
        return os.path.join(self.checkpoint_dir, iteration_directory(step))


class MegatronDistCheckpointer:
    """One per process: what the first call says counts, later ones are ignored."""

    _instance: ClassVar[MegatronDistCheckpointer | None] = None
    cadence: SaveCadence | None = None
    """Of `save_checkpoint_if_due`, once that was called."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        storage: object = None,
        comm_backend: str = "",
        use_distributed_optimizer: bool = False,
        save_timeout: float = 600,
        *,
        deletion_strategy: object = None,
    ) -> None:
        kind = MegatronDistCheckpointEngine if use_distributed_optimizer else MegatronCheckpointEngine
        self.engine = kind(checkpoint_dir, storage, comm_backend, save_timeout, deletion_strategy=deletion_strategy)
        self.storage = self.engine.storage

    @classmethod
    def singleton_instance(
        cls, checkpoint_dir: str | os.PathLike[str], *args: Any, **options: Any
    ) -> MegatronDistCheckpointer:
        if MegatronDistCheckpointer._instance is None:
            MegatronDistCheckpointer._instance = cls(checkpoint_dir, *args, **options)
        return MegatronDistCheckpointer._instance

    def wait_latest_checkpoint(self, timeout: float = 1800) -> bool:
        return self.engine.wait_latest_checkpoint(timeout)

    def close(self) -> None:
        self.engine.close()
        if MegatronDistCheckpointer._instance is self:
            MegatronDistCheckpointer._instance = None


def get_dist_optimizer_checkpoint_name(checkpoints_path: str, iteration: int, release: bool = False) -> str:
    """Of this rank."""
    directory = RELEASE if release else iteration_directory(iteration)
    return os.path.join(checkpoints_path, directory, _own_optimizer_file())


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float = 0,
    storage_type: StorageType = StorageType.DISK,
    comm_backend: str = "",
    deletion_strategy: object = None,
    save_timeout: float = 600,
    *,
    storage: object = None,
    on_busy: str = "skip",
    metric: float | None = None,
) -> SaveResult:
    """All ranks call it, and leave it together."""
    if not isinstance(storage_type, StorageType):
        raise ValueError(f"storage_type must be StorageType.MEMORY or StorageType.DISK (got {storage_type!r}).")
    megatron = find_megatron()
    args = megatron.get_args()
    checkpointer = _checkpointer(args, storage, comm_backend, deletion_strategy, save_timeout)
    if deletion_strategy is not None:
        checkpointer.engine.delete_by(deletion_strategy)
    files: dict[str, Any] = {}
    rng_state = _rng_state(args)  # a collective, so on all ranks
    if _saves_the_model():
        state = _model_file(args, model, optimizer, opt_param_scheduler, iteration, rng_state)
        state["num_floating_point_operations_so_far"] = num_floating_point_operations_so_far
        files[own_model_file(megatron, iteration)] = state
    if _has_shares(args, optimizer) and not args.no_save_optim:
        files[_own_optimizer_file()] = parameter_state(optimizer)
    is_storage = storage_type is StorageType.DISK
    result = checkpointer.engine.save(iteration, files, is_storage=is_storage, on_busy=on_busy, metric=metric)
    if dist.is_initialized():
        dist.barrier()
    return result


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
    names = ("storage", "comm_backend", "deletion_strategy", "save_timeout")
    given = {"storage": None, "comm_backend": "", "deletion_strategy": None, "save_timeout": 600.0, **options}
    checkpointer = _checkpointer(find_megatron().get_args(), **{name: given[name] for name in names})
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
    found = MegatronDistCheckpointer._instance
    return found is not None and found.engine.engine.is_save_requested


def load_checkpoint(
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    comm_backend: str = "",
    deletion_strategy: object = None,
    save_timeout: float = 600,
    *,
    storage: object = None,
) -> tuple[int, float]:
    """
    Iteration and operations so far; (0, 0) when there is nothing. All ranks call it.

    Memory first, the same iteration on all ranks, then the tracker of `args.<load_arg>`.
    """
    megatron = find_megatron()
    args = megatron.get_args()
    memory = agreement = None
    if args.save and is_resuming(args, load_arg):
        engine = _checkpointer(args, storage, comm_backend, deletion_strategy, save_timeout).engine
        memory, agreement = engine.restore_memory(), engine.engine.agreement
    if memory is not None:
        return _apply(args, model, optimizer, opt_param_scheduler, _from_memory(memory, megatron), strict)
    with whole_directory(args, load_arg, agreement):
        source = _from_storage(args, load_arg, megatron)
        if source is not None:
            return _apply(args, model, optimizer, opt_param_scheduler, source, strict)
    if getattr(args, "exit_on_missing_checkpoint", False):
        raise SystemExit(f"There is no checkpoint in {getattr(args, load_arg, None)} (--exit-on-missing-checkpoint).")
    return 0, 0


def wait_latest_checkpoint(timeout: float = 1800) -> bool:
    """Until the newest DISK save of this rank is committed."""
    found = MegatronDistCheckpointer._instance
    return True if found is None else found.wait_latest_checkpoint(timeout)


class _CheckpointSource:
    """One checkpoint, wherever it is."""

    def __init__(self, state: dict[str, Any], is_release: bool) -> None:
        self.state, self.is_release = state, is_release

    def load_shares(self, optimizer: Any) -> None:
        raise NotImplementedError


class _MemorySource(_CheckpointSource):
    def __init__(self, memory: Memory, state: dict[str, Any]) -> None:
        super().__init__(state, is_release=False)
        self._memory = memory

    def load_shares(self, optimizer: Any) -> None:
        load_parameter_state(optimizer, self._memory.read(_own_optimizer_file()))


class _StorageSource(_CheckpointSource):
    def __init__(self, directory: str, model_file: str, is_release: bool) -> None:
        super().__init__(_read(os.path.join(directory, model_file)), is_release)
        self._directory, self._model_file = directory, model_file

    def load_shares(self, optimizer: Any) -> None:
        own = os.path.join(self._directory, _own_optimizer_file())
        native = os.path.join(self._directory, os.path.dirname(self._model_file), "distrib_optim.pt")
        if os.path.exists(own):
            load_parameter_state(optimizer, _read(own))
        elif os.path.exists(native):  # gathered by Megatron itself
            optimizer.load_parameter_state(native)
        else:
            raise FileNotFoundError(
                f"This rank's share of the optimizer is missing: neither {own} nor {native} exists."
            )


def _checkpointer(
    args: Any, storage: object, comm_backend: str, deletion_strategy: object, save_timeout: float
) -> MegatronDistCheckpointer:
    return MegatronDistCheckpointer.singleton_instance(
        args.save,
        storage,
        comm_backend,
        bool(args.use_distributed_optimizer),
        save_timeout,
        deletion_strategy=deletion_strategy,
    )


def _from_memory(memory: Memory, megatron: Megatron) -> _CheckpointSource:
    name = own_model_file(megatron, memory.step)
    memory.fetch(name)
    return _MemorySource(memory, memory.read(name))


def _from_storage(args: Any, load_arg: str, megatron: Megatron) -> _CheckpointSource | None:
    load = getattr(args, load_arg, None)
    if load is None:
        return None
    if not (said := named_iteration(LocalStorage(), load)):
        return None
    is_release = said == RELEASE
    if not is_release and not said.isdigit():
        raise ValueError(
            f"{os.path.join(load, TRACKER)} must contain the number of an iteration (found {said[:40]!r}). "
            "Write the iteration to load into it."
        )
    iteration = 0 if is_release else int(said)
    directory = os.path.join(load, RELEASE if is_release else iteration_directory(iteration))
    return _StorageSource(directory, own_model_file(megatron, iteration), is_release)


def _apply(
    args: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, source: _CheckpointSource, strict: bool
) -> tuple[int, float]:
    state = source.state
    is_fresh = bool(args.finetune or source.is_release)
    iteration = 0 if is_fresh else int(state["iteration"])
    if "args" in state and not args.finetune:
        assert args.consumed_train_samples == 0 and args.consumed_valid_samples == 0, "loaded after training began"  # noqa: PT018
        args.consumed_train_samples = getattr(state["args"], "consumed_train_samples", 0)
        args.consumed_valid_samples = getattr(state["args"], "consumed_valid_samples", 0)
    if getattr(args, "transformer_impl", "") == "transformer_engine" or getattr(args, "retro_add_retriever", False):
        strict = False  # their states carry extras that come and go with the version
    for module, name in zip(_unwrapped(model), _model_keys(model), strict=True):
        module.load_state_dict(state[name], strict=strict)
    is_loading_optimizer = not is_fresh and not args.no_load_optim and optimizer is not None
    if is_loading_optimizer:
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
        if _has_shares(args, optimizer):
            source.load_shares(optimizer)
        if opt_param_scheduler is not None and "opt_param_scheduler" in state:
            opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
    elif optimizer is not None and (args.fp16 or args.bf16):
        optimizer.reload_model_params()
    if not is_fresh and not args.no_load_rng and state.get("rng_state"):
        _set_rng_state(args, state["rng_state"])
    if dist.is_initialized():
        dist.barrier()
    log.info("loaded iteration %d", iteration)
    return iteration, state.get("num_floating_point_operations_so_far", 0)


def _model_file(
    args: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, iteration: int, rng_state: list[Any]
) -> dict[str, Any]:
    state: dict[str, Any] = {"args": args, "checkpoint_version": CHECKPOINT_VERSION, "iteration": iteration}
    for module, name in zip(_unwrapped(model), _model_keys(model), strict=True):
        save = getattr(module, "state_dict_for_save_checkpoint", module.state_dict)
        state[name] = save()
    if not args.no_save_optim:
        if optimizer is not None:
            state["optimizer"] = optimizer.state_dict()  # with shares: what is not a parameter's
        if opt_param_scheduler is not None:
            state["opt_param_scheduler"] = opt_param_scheduler.state_dict()
    if not args.no_save_rng:
        state["rng_state"] = rng_state
    return state


def _model_keys(model: Any) -> list[str]:
    chunks = _chunks(model)
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _chunks(model: Any) -> list[Any]:
    return list(model) if isinstance(model, (list, tuple)) else [model]


def _unwrapped(model: Any) -> list[Any]:
    """Without the wrappers for gradients and half precision, all of which keep what they wrap as `module`."""
    found = []
    for each in _chunks(model):
        while hasattr(each, "module"):
            each = each.module
        found.append(each)
    return found


def _has_shares(args: Any, optimizer: Any) -> bool:
    return bool(args.use_distributed_optimizer) and optimizer is not None


def _own_optimizer_file() -> str:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return f"rank_{rank:05d}/distrib_optim.pt"


def _saves_the_model() -> bool:
    """
    The first rank of a data-parallel group, or of its experts' one: where the two are laid out differently neither alone
    covers all pieces.
    """
    mpu = _parallel_state()
    if mpu is None or not dist.is_initialized():
        return True
    expert = getattr(mpu, "get_expert_data_parallel_rank", None) or getattr(
        mpu, "get_data_modulo_expert_parallel_rank", None
    )
    return mpu.get_data_parallel_rank() == 0 or (expert is not None and expert() == 0)


def _parallel_state() -> Any:
    for name in ("megatron.core.parallel_state", "megatron.core.mpu", "megatron.mpu"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("megatron"):
                raise
    return None


def _rng_state(args: Any) -> list[dict[str, Any]]:
    """Of this rank; of all ranks of its data-parallel group where each began with its own."""
    own: dict[str, Any] = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        own["cuda_rng_state"] = torch.cuda.get_rng_state()
        own["rng_tracker_states"] = _rng_tracker().get_states()
    mpu = _parallel_state()
    if not getattr(args, "data_parallel_random_init", False) or mpu is None or not dist.is_initialized():
        return [own]
    if mpu.get_data_parallel_world_size() == 1:
        return [own]
    found: list[Any] = [None] * mpu.get_data_parallel_world_size()
    dist.all_gather_object(found, own, group=mpu.get_data_parallel_group())
    return found


def _set_rng_state(args: Any, states: list[dict[str, Any]]) -> None:
    mpu = _parallel_state()
    is_own = getattr(args, "data_parallel_random_init", False) and mpu is not None and len(states) > 1
    state = states[mpu.get_data_parallel_rank() if is_own else 0]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if torch.cuda.is_available() and "cuda_rng_state" in state:
        torch.cuda.set_rng_state(state["cuda_rng_state"])
        if state.get("rng_tracker_states"):
            _rng_tracker().set_states(state["rng_tracker_states"])


def _rng_tracker() -> Any:
    return importlib.import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker()


def _read(path: str) -> dict[str, Any]:
    """In full, not only weights: Megatron's files hold its arguments."""
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return found
