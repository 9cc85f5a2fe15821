"""
`dlrover.Checkpointer`: one checkpointer for every kind of model.

    checkpointer = dlrover.Checkpointer("/shared/run7", model=model, optimizer=optimizer, also=[scheduler])
    first = (checkpointer.restore() or 0) + 1        # None: there is nothing to restore
    for step in range(first, num_steps + 1):
        ...
        checkpointer.save(step)                      # in memory; to="storage" writes the directory, too

It looks at the model once and chooses how its state is saved. The four ways have front ends of their own for scripts that need more than this one
offers; the files are theirs, so a script may change from one to the other.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from dlrover.agreed.cadence import BUDGET
from dlrover.protocol.errors import ConfigError
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult, StorageType
from dlrover.trainer.torch.flash_checkpoint.saving.cadence import AUTO, Interval, SaveCadence

KINDS = ("plain", "sharded", "deepspeed", "megatron")
_PLACES = {"memory": StorageType.MEMORY, "storage": StorageType.DISK}
_MODEL, _OPTIMIZER = "model", "optimizer"
_STEP, _EXTRA, _ALSO = "step", "extra", "also"


class Way(Protocol):
    """One kind of model: the objects are named once, and `rest` travels beside their states."""

    front: Any
    """The checkpointer below: it waits, closes, and knows of wishes."""
    engine: Any

    def save(self, step: int, rest: dict[str, Any], storage_type: StorageType, **options: Any) -> SaveResult:
        """All ranks call it."""

    def restore(self, path: str) -> dict[str, Any] | None:
        """Fill the model and the optimizer. What was saved beside them; None: there is no state."""


class Checkpointer:
    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        model: Any,
        optimizer: Any = None,
        also: Sequence[Any] | Mapping[str, Any] = (),
        kind: str = "auto",
        deletion_strategy: object = None,
        save_timeout: float = 600,
        storage: Any = None,
        replica_count: int = 0,
        num_slots: int = 2,
        lazy: bool | str = False,
        checkpoint_interval: Interval = AUTO,
        overhead_budget: float = BUDGET,
    ) -> None:
        """
        All ranks make it together, after the process group and after the model has its final form (DDP, `fully_shard`, `deepspeed.initialize`).

        `also`: more objects with `state_dict()` and `load_state_dict()`, such as a scheduler, a GradScaler or a data set. With names, or in an order
        that stays the same. `kind`: "plain" (the whole state on each rank), "sharded" (FSDP, tensor parallelism, anything with DTensors),
        "deepspeed" (`model` is its engine) or "megatron" (Megatron-Core); "auto" looks at the model.

        `lazy`: copy while training goes on, for plain and sharded models. `replica_count`: copies in the memory of other nodes. The last two are for
        `save_if_due`: how often, or "auto", and which part of the training time saves may take then.
        """
        self.kind = _kind_of(model) if kind == "auto" else kind
        if self.kind not in KINDS:
            raise ConfigError(f"kind={kind!r} is unknown. Give one of auto, {', '.join(KINDS)}.")
        self._also = _named(also)
        self.extra: dict[str, Any] = {}
        """What was given to the save that `restore` found."""
        shared: dict[str, Any] = {
            "deletion_strategy": deletion_strategy,
            "save_timeout": save_timeout,
            "replica_count": replica_count,
            "num_slots": num_slots,
        }
        self._is_lazy_known = self.kind in ("plain", "sharded")
        if self._is_lazy_known:
            shared["lazy"] = lazy
        elif lazy is True:
            raise ConfigError(
                f'Lazy saves are not possible for a model of kind "{self.kind}". Leave `lazy` out, or give lazy="auto".'
            )
        if self.kind != "megatron":
            shared["storage"] = storage
        elif storage is not None:
            raise ConfigError("Megatron-Core writes only to a file system. Leave `storage` out.")
        self._way: Way = _WAYS[self.kind](checkpoint_dir, model, optimizer, shared)
        self.checkpoint_dir = os.fspath(checkpoint_dir)
        self._cadence = SaveCadence(self._way.engine, checkpoint_interval, overhead_budget)

    def save(
        self,
        step: int,
        extra: Mapping[str, Any] | None = None,
        *,
        to: str = "memory",
        on_busy: str = "skip",
        metric: float | None = None,
    ) -> SaveResult:
        """
        Copy the state of this step. True if it is in memory; the model may change again as soon as this returns.

        `to="storage"`: the agent writes it to the directory afterwards, while training goes on; `wait` waits for that. `extra` is what else
        `restore` shall find: numbers, texts, tensors. `on_busy="block"` waits for room instead of skipping the save: for the last one of a training.
        `metric`: how good the state is, for `KeepBest`. All ranks call this.
        """
        if to not in _PLACES:
            raise ConfigError(f'to={to!r} is unknown. Give "memory" or "storage".')
        return self._save(step, extra, _PLACES[to], on_busy=on_busy, metric=metric)

    def save_if_due(self, step: int, extra: Mapping[str, Any] | None = None) -> SaveResult | None:
        """Save this step if it is time, to memory or to storage. All ranks call this at every step. None: it is not time."""
        return self._cadence.save_if_due(step, lambda storage_type: self._save(step, extra, storage_type))

    def restore(self, path: str | os.PathLike[str] = "") -> int | None:
        """
        Load the newest state that all ranks can have, from memory or storage, into the model, the optimizer and the others. Its step; None: there
        is none yet, and nothing was changed. `extra` has what was saved beside it.

        A `path` (the directory of one checkpoint) wins over everything, and has to exist. All ranks call this.
        """
        rest = self._way.restore(os.fspath(path))
        if rest is None:
            return None
        if _STEP not in rest:
            raise ConfigError(
                f"The checkpoint in {os.fspath(path) or self.checkpoint_dir} has no step, so "
                "dlrover.Checkpointer did not save it. Load it with the checkpointer that saved it."
            )
        states = rest.get(_ALSO) or {}
        if missing := sorted(self._also.keys() - states.keys()):
            raise ConfigError(
                f"The checkpoint of step {rest[_STEP]} has no state of {', '.join(missing)} (it has "
                f"{', '.join(sorted(states)) or 'none'}). Give the same objects in `also` as in the run that "
                "saved it."
            )
        for name, each in self._also.items():
            each.load_state_dict(states[name])
        self.extra = dict(rest.get(_EXTRA) or {})
        return int(rest[_STEP])

    def wait(self, timeout: float = 1800) -> bool:
        """Until the newest save of this rank to storage counts. False: it did not within so many seconds. Other ranks return at once."""
        return bool(self._way.front.wait_latest_checkpoint(timeout))

    def is_save_requested(self) -> bool:
        """Whether a checkpoint is wanted soon (`dlrover save`, a node that has to leave). The next `save` goes to storage by itself."""
        return bool(self._way.front.is_save_requested())

    def close(self) -> None:
        """End the threads. Under `dlrover-run` what was saved stays; elsewhere this waits until it is written."""
        self._way.front.close()

    def _save(
        self, step: int, extra: Mapping[str, Any] | None, storage_type: StorageType, **options: Any
    ) -> SaveResult:
        rest = {
            _STEP: step,
            _EXTRA: dict(extra or {}),
            _ALSO: {name: each.state_dict() for name, each in self._also.items()},
        }
        return self._way.save(step, rest, storage_type, **options)


class _PlainWay:
    """Every rank holds the whole state; one of each node saves it."""

    def __init__(self, checkpoint_dir: Any, model: Any, optimizer: Any, options: dict[str, Any]) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._model, self._optimizer = _unwrapped(model), optimizer
        self.front = DdpCheckpointer(checkpoint_dir, **options)
        self.engine = self.front.engine

    def save(self, step: int, rest: dict[str, Any], storage_type: StorageType, **options: Any) -> SaveResult:
        state = {_MODEL: self._model.state_dict()}
        if self._optimizer is not None:
            state[_OPTIMIZER] = self._optimizer.state_dict()
        return self.front.save_checkpoint(step, {**state, **rest}, storage_type=storage_type, **options)

    def restore(self, path: str) -> dict[str, Any] | None:
        state = self.front.load_checkpoint(path)
        if not state:
            return None
        if _MODEL not in state or _STEP not in state:
            return {}
        self._model.load_state_dict(state[_MODEL])
        if self._optimizer is not None:
            if _OPTIMIZER not in state:
                raise ConfigError(
                    f"The checkpoint of step {state[_STEP]} has no state of an optimizer, because its "
                    "Checkpointer was made without one. Make this Checkpointer without an optimizer too, or "
                    "restore another checkpoint."
                )
            self._optimizer.load_state_dict(state[_OPTIMIZER])
        return state


class _ShardedWay:
    """Every rank saves its own pieces."""

    def __init__(self, checkpoint_dir: Any, model: Any, optimizer: Any, options: dict[str, Any]) -> None:
        from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer

        self._model, self._optimizer = model, optimizer
        self.front = FsdpShardCheckpointer(checkpoint_dir, **options)
        self.engine = self.front.engine

    def save(self, step: int, rest: dict[str, Any], storage_type: StorageType, **options: Any) -> SaveResult:
        return self.front.save_checkpoint(
            step, self._model, self._optimizer, rest, storage_type=storage_type, **options
        )

    def restore(self, path: str) -> dict[str, Any] | None:
        rest = self.front.load_checkpoint(self._model, self._optimizer, path)
        return rest or ({} if self.front.restored_step is not None or path else None)


class _DeepSpeedWay:
    """What DeepSpeed's engine would write."""

    def __init__(self, checkpoint_dir: Any, model: Any, optimizer: Any, options: dict[str, Any]) -> None:
        from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer

        if optimizer is not None and optimizer is not getattr(model, "optimizer", None):
            raise ConfigError("DeepSpeed's engine saves its optimizer itself. Leave `optimizer` out.")
        self._dir = os.fspath(checkpoint_dir)
        self.front = DeepSpeedCheckpointer(model, checkpoint_dir, **options)
        self.engine = self.front.async_save_engine

    def save(self, step: int, rest: dict[str, Any], storage_type: StorageType, **options: Any) -> SaveResult:
        return self.front.save_checkpoint(self._dir, tag=step, extra=rest, storage_type=storage_type, **options)

    def restore(self, path: str) -> dict[str, Any] | None:
        directory, tag = os.path.split(path.rstrip("/")) if path else (self._dir, None)
        loaded, rest = self.front.load_checkpoint(directory, tag)
        if loaded is None:
            if path:
                raise ConfigError(f"There is no DeepSpeed checkpoint in {path}.")
            return None
        return rest or {}


class _MegatronWay:
    """Megatron-Core's distributed checkpoints."""

    def __init__(self, checkpoint_dir: Any, model: Any, optimizer: Any, options: dict[str, Any]) -> None:
        from dlrover.trainer.torch.flash_checkpoint.megatron_sharded import MegatronShardedCheckpointer

        self._model, self._optimizer = _unwrapped(model), optimizer
        self.front = MegatronShardedCheckpointer(checkpoint_dir, **options)
        self.engine = self.front.engine

    def save(self, step: int, rest: dict[str, Any], storage_type: StorageType, **options: Any) -> SaveResult:
        # How these saves wait and are valued is Megatron-Core's own business.
        return self.front.save_checkpoint(step, {**self._sharded(is_loading=False), **rest}, storage_type)

    def restore(self, path: str) -> dict[str, Any] | None:
        wanted = self._sharded(is_loading=True)
        if path:
            state = importlib.import_module("megatron.core.dist_checkpointing").load(wanted, path)
        else:
            state = self.front.load_checkpoint(wanted)
        if state is None:
            return None
        self._model.load_state_dict(state[_MODEL])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state[_OPTIMIZER])
        return {key: value for key, value in state.items() if key not in (_MODEL, _OPTIMIZER)}

    def _sharded(self, *, is_loading: bool) -> dict[str, Any]:
        state = {_MODEL: self._model.sharded_state_dict()}
        if self._optimizer is not None:
            state[_OPTIMIZER] = self._optimizer.sharded_state_dict(state[_MODEL], is_loading=is_loading)
        return state


_WAYS: dict[str, Callable[..., Way]] = {
    "plain": _PlainWay,
    "sharded": _ShardedWay,
    "deepspeed": _DeepSpeedWay,
    "megatron": _MegatronWay,
}


def _kind_of(model: Any) -> str:
    """By what the model is, and without importing a framework that the script does not use."""
    names = {f"{each.__module__}.{each.__qualname__}" for each in type(model).__mro__}
    if any(name.startswith("deepspeed.") and name.endswith("Engine") for name in names):
        return "deepspeed"
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"`model` is a {type(model).__name__}. Give a torch module or DeepSpeed's engine. To save a plain "
            "state dict, use DdpCheckpointer."
        )
    inner = _unwrapped(model)
    if any(f"{each.__module__}".startswith("megatron.core.") for each in type(inner).__mro__):
        return "megatron"
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.tensor import DTensor

        if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
            return "sharded"
        if any(isinstance(each, DTensor) for each in model.parameters()):
            return "sharded"
    return "plain"


def _unwrapped(model: Any) -> Any:
    """Without DDP and `torch.compile`, which only put something before each name."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def _named(also: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    named = dict(also) if isinstance(also, Mapping) else {str(place): each for place, each in enumerate(also)}
    for name, each in named.items():
        if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
            raise ConfigError(
                f"`also`: {name} is a {type(each).__name__}, which lacks state_dict() and load_state_dict(). "
                "Save plain values with `extra`."
            )
    return named
