"""
`dlrover.Checkpointer` behind the calls of the older front ends, so that their tests run through it as well.

Each class takes what the test would give to the front end of that kind, and hands it to the one checkpointer: what was a state dict becomes an object
with a state, what was given to each save becomes `extra`. Options that only the older front ends have are not here; tests that need one stay with theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import dlrover
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult, StorageType

PLACES = {StorageType.MEMORY: "memory", StorageType.DISK: "storage"}


class Holder:
    """A state dict as an object that has one."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class PlainFront:
    """Instead of `DdpCheckpointer`."""

    def __init__(self, directory: object, **options: Any) -> None:
        self._holder = Holder()
        self.inner = dlrover.Checkpointer(
            os.fspath(directory), model=torch.nn.Identity(), also={"all": self._holder}, **options
        )
        self.engine = self.inner._way.engine
        self.wait_latest_checkpoint, self.close = self.inner.wait, self.inner.close

    def save_checkpoint(
        self, step: int, state: dict[str, Any], *, storage_type: StorageType = StorageType.DISK, **options: Any
    ) -> SaveResult:
        self._holder.state = state
        return self.inner.save(step, to=PLACES[storage_type], **options)

    def load_checkpoint(self, path: str = "") -> dict[str, Any]:
        self._holder.state = {}
        return self._holder.state if self.inner.restore(path) is not None else {}


class ShardedFront:
    """Instead of `FsdpShardCheckpointer`, which gets the model with each call: another model means another checkpointer here, as in a new life."""

    def __init__(self, directory: object, **options: Any) -> None:
        self._directory, self._options = os.fspath(directory), options
        self._of: tuple[Any, Any] | None = None
        self._inner: dlrover.Checkpointer | None = None
        self.restored_step: int | None = None

    def _for(self, model: Any, optimizer: Any) -> dlrover.Checkpointer:
        if self._inner is None or self._of != (model, optimizer):
            self.close()
            self._of = (model, optimizer)
            self._inner = dlrover.Checkpointer(self._directory, model=model, optimizer=optimizer, **self._options)
            assert self._inner.kind == "sharded"
        return self._inner

    def save_checkpoint(
        self,
        step: int,
        model: Any,
        optimizer: Any,
        extra: dict[str, Any] | None = None,
        *,
        storage_type: StorageType = StorageType.DISK,
        **options: Any,
    ) -> SaveResult:
        return self._for(model, optimizer).save(step, extra, to=PLACES[storage_type], **options)

    def save_if_due(self, step: int, model: Any, optimizer: Any, extra: dict[str, Any]) -> SaveResult | None:
        return self._for(model, optimizer).save_if_due(step, extra)

    def load_checkpoint(self, model: Any, optimizer: Any, resume_path: str = "") -> dict[str, Any]:
        inner = self._for(model, optimizer)
        self.restored_step = inner.restore(resume_path)
        return {} if self.restored_step is None else dict(inner.extra)

    def wait_latest_checkpoint(self, timeout: float) -> bool:
        return self._inner is None or self._inner.wait(timeout)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        self._inner = None


class DeepSpeedFront:
    """Instead of `DeepSpeedCheckpointer`; the tag is the step."""

    def __init__(self, engine: Any, directory: object, **options: Any) -> None:
        self._model, self._directory = engine, os.fspath(directory)
        self.inner = dlrover.Checkpointer(self._directory, model=engine, kind="deepspeed", **options)
        self.async_save_engine = self.inner._way.engine
        self.wait_latest_checkpoint, self.close = self.inner.wait, self.inner.close

    def save_checkpoint(
        self,
        directory: object,
        tag: int | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        storage_type: StorageType = StorageType.DISK,
        **options: Any,
    ) -> SaveResult:
        step = self._model.global_steps if tag is None else tag
        return self.inner.save(step, client_state, to=PLACES[storage_type], **options)

    def load_checkpoint(
        self, directory: object, tag: int | str | None = None
    ) -> tuple[str | None, dict[str, Any] | None]:
        """The file of the step that was restored, as DeepSpeed tells it."""
        path = "" if tag is None else os.path.join(self._directory, str(tag))
        step = self.inner.restore(path)
        if step is None:
            return None, None
        return os.path.join(self._directory, str(step), "mp_rank_00_model_states.pt"), self.inner.extra


class _Pieces:
    """A sharded state dict as a model of Megatron-Core that has one."""

    def __init__(self) -> None:
        self.wanted: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}

    def sharded_state_dict(self) -> dict[str, Any]:
        return self.wanted

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class MegatronFront:
    """Instead of `MegatronShardedCheckpointer`, for states of a model alone."""

    def __init__(self, directory: object, **options: Any) -> None:
        self._model = _Pieces()
        self.inner = dlrover.Checkpointer(os.fspath(directory), model=self._model, kind="megatron", **options)
        self.wait_latest_checkpoint, self.close = self.inner.wait, self.inner.close
        self.is_save_requested = self.inner.is_save_requested

    def save_checkpoint(self, iteration: int, state: dict[str, Any], storage_type: StorageType) -> SaveResult:
        self._model.wanted = state["model"]
        return self.inner.save(iteration, to=PLACES[storage_type])

    def save_if_due(self, iteration: int, state_fn: Callable[[], dict[str, Any]]) -> SaveResult | None:
        self._model.wanted = state_fn().get("model", {})
        return self.inner.save_if_due(iteration)

    def load_checkpoint(self, state: dict[str, Any]) -> dict[str, Any] | None:
        self._model.wanted = state["model"]
        step = self.inner.restore()
        return None if step is None else {"model": self._model.loaded, "step": step}
