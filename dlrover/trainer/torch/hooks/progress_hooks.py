"""
Hooks in torch that say what a worker is doing, without a line of the user's code.

Everything that reaches into torch for this is here; written against torch 2.4 to 2.13. Names that torch calls private: the base class
of the DataLoader's iterators and its count of batches, and dynamo's list of callbacks. Of Lightning (2.6): what restores its loops. A function
is replaced by one that torch, `pickle` and `inspect` take for the same, does its work around the call, and steps aside while dynamo traces, in
other threads and in forked children.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from dlrover.protocol import progress_page as layout
from dlrover.trainer import phases
from dlrover.trainer.late_imports import when_imported
from dlrover.trainer.phases import (
    AFTER_DATA,
    AFTER_WORK,
    BACKWARD,
    CHECKPOINT,
    COLLECTIVE,
    COMPILE,
    DATA,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    START,
)
from dlrover.trainer.torch.hooks.model_steps import ModelSteps

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
)
"""Of torch.distributed, as far as the installed version has them. Not isend and irecv: torch compares their identity."""

DigestSink = Callable[[Any, int], None]


def install(torch: Any, *, on_step: DigestSink | None = None) -> None:
    """After `import torch`, in a worker that has a page. `on_step` gets each optimizer and its number of steps so far."""
    steps = _StepHooks(torch, on_step)
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    optimizer.register_optimizer_step_pre_hook(steps.before)
    optimizer.register_optimizer_step_post_hook(steps.after)
    _install_loading(torch, optimizer.Optimizer, steps.model)
    _replace(torch.autograd, "backward", _around(torch, BACKWARD, AFTER_WORK))
    _replace(torch.nn.Module, "eval", functools.partial(_noting_eval, torch))
    loading: Any = sys.modules["torch.utils.data.dataloader"]
    _replace(loading._BaseDataLoaderIter, "__next__", _around_batches)
    save = _around(torch, CHECKPOINT)
    _replace(torch.serialization, "save", save)
    torch.save = torch.serialization.save
    when_imported("torch.distributed.distributed_c10d", lambda module: _install_collectives(torch, module))
    when_imported("torch.distributed.checkpoint.state_dict_saver", lambda module: _replace(module, "save", save))
    when_imported("torch._dynamo.callback", _install_compiling)


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))


def _replace_class_method(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = owner.__dict__[name].__func__
    setattr(owner, name, classmethod(functools.wraps(original)(wrap(original))))


def _around(
    torch: ModuleType, phase: int, after: Mapping[int, int] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    is_compiling = torch.compiler.is_compiling

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # First, and as torch's own function: while dynamo traces, nothing of ours may be in the way.
            if is_compiling():
                return original(*args, **kwargs)
            writer = phases.current()
            if writer is None:
                return original(*args, **kwargs)
            before = writer.enter(phase)
            try:
                return original(*args, **kwargs)
            finally:
                writer.leave(before, after)

        return replacement

    return wrap


def _install_loading(torch: Any, optimizer: Any, model: ModelSteps) -> None:
    """Whatever a script may restore its state with, and who tells the step of that state."""

    def after(note: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                with contextlib.suppress(AttributeError, IndexError, TypeError):  # of another version: not understood
                    note(args, result)
                return result

            return replacement

        return wrap

    loaded = after(lambda args, _result: model.loaded(args[0] if args else None))
    _replace(optimizer, "load_state_dict", loaded)
    _replace(torch.nn.Module, "load_state_dict", loaded)
    _replace(torch.serialization, "load", loaded)
    torch.load = torch.serialization.load
    when_imported("torch.distributed.checkpoint.state_dict_loader", lambda module: _replace(module, "load", loaded))
    of_sampler = after(lambda args, _result: phases.tell_data(args[0].epoch, 0))
    when_imported(
        "torch.utils.data.distributed", lambda module: _replace(module.DistributedSampler, "set_epoch", of_sampler)
    )
    of_state = after(lambda _args, state: model.restored(state.global_step))
    when_imported(
        "transformers.trainer_callback",
        lambda module: _replace_class_method(module.TrainerState, "load_from_json", of_state),
    )
    of_loops = after(lambda args, _result: model.restored(args[0].trainer.global_step))
    for package in ("lightning.pytorch", "pytorch_lightning"):
        when_imported(
            f"{package}.trainer.connectors.checkpoint_connector",
            lambda module: _replace(module._CheckpointConnector, "restore_loops", of_loops),
        )


def _around_batches(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def next_batch(self: Any) -> Any:
        writer = phases.current()
        if writer is None:
            return original(self)
        if _is_evaluating.pop(writer.main_thread, False) and writer.phase == FORWARD:
            writer.enter(EVALUATION)
        before = writer.enter(DATA)
        try:
            batch = original(self)
        except StopIteration:
            writer.leave(before)
            if _steps_before.pop(self, writer.num_optimizer_steps) < writer.num_optimizer_steps:
                writer.end_epoch()
            raise
        except BaseException:
            writer.leave(before)
            raise
        if getattr(self, "_num_yielded", 0) == 1:
            _steps_before[self] = writer.num_optimizer_steps
        writer.leave(before, AFTER_DATA)
        writer.count_batch()
        return batch

    return next_batch


_steps_before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Steps that were taken before an iterator gave its first batch: one that ends without a step since then was no epoch of training."""
_is_evaluating: dict[int, bool] = {}
"""`eval()` was called on some module. A frozen part of the model may be meant; a batch that follows without a step says it is not."""


def _noting_eval(torch: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

    def switch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        writer = phases.current()
        if writer is not None and writer.phase == FORWARD:
            if is_grad_enabled():
                _is_evaluating[writer.main_thread] = True
            else:
                writer.enter(EVALUATION)
        return original(self, *args, **kwargs)

    return switch


class _StepHooks:
    """Around the step of every optimizer."""

    def __init__(self, torch: ModuleType, on_step: DigestSink | None) -> None:
        self._is_compiling = torch.compiler.is_compiling
        self.model = ModelSteps()
        self._before = START
        self._on_step = on_step

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_compiling():
            return
        writer = phases.current()
        if writer is not None and writer.phase != OPTIMIZER:  # else one optimizer inside another, or a step that raised
            self._before = writer.enter(OPTIMIZER)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_compiling():
            return
        writer = phases.current()
        if writer is None:
            return
        _is_evaluating.pop(writer.main_thread, None)
        writer.num_optimizer_steps += 1
        count = self.model.took_one(optimizer, writer)
        if writer.phase == OPTIMIZER:
            writer.leave(self._before, AFTER_WORK)
        if count is not None:
            writer.set_step(count, layout.INFERRED)
            if self._on_step is not None:
                self._on_step(optimizer, count)


def _install_collectives(torch: ModuleType, c10d: ModuleType) -> None:
    seen = _Collectives(torch, c10d)
    public = sys.modules.get("torch.distributed")
    for name in COLLECTIVES:
        original = getattr(c10d, name, None)
        if original is None:
            continue
        _replace(c10d, name, functools.partial(seen.around, name))
        if public is not None and getattr(public, name, None) is original:
            setattr(public, name, getattr(c10d, name))
    work = getattr(c10d, "Work", None)
    if work is not None:
        _replace(work, "wait", seen.around_wait)


class _Collectives:
    """Counts collectives that are called from Python, by process group."""

    def __init__(self, torch: ModuleType, c10d: ModuleType) -> None:
        self._torch = torch
        self._c10d = c10d
        self._is_compiling = torch.compiler.is_compiling
        self._sequences: dict[str, int] = {}
        self._shapes: dict[tuple[Any, Any], str] = {}

    def around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling = self._is_compiling

        def replacement(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            writer = phases.current()
            if writer is None or writer.phase == COLLECTIVE:  # one that is made of others counts once
                return original(*args, **kwargs)
            group = self._group_name(args, kwargs)
            sequence = self._sequences[group] = self._sequences.get(group, 0) + 1
            writer.begin_collective(sequence, name, group, self._shape(args, kwargs))
            before = writer.enter(COLLECTIVE)
            try:
                return original(*args, **kwargs)
            finally:
                writer.leave(before)
                writer.end_collective()

        return replacement

    def around_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Where a collective that was begun with `async_op` is waited for."""
        is_compiling = self._is_compiling

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(self, *args, **kwargs)
            writer = phases.current()
            if writer is None or writer.phase == COLLECTIVE:
                return original(self, *args, **kwargs)
            writer.words[layout.IS_INSIDE] = 1
            before = writer.enter(COLLECTIVE)
            try:
                return original(self, *args, **kwargs)
            finally:
                writer.leave(before)
                writer.end_collective()

        return wait

    def _group_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        group = kwargs.get("group")
        if group is None:
            kind = self._c10d.ProcessGroup
            group = next((each for each in args if isinstance(each, kind)), None)
        try:
            return "default" if group is None or group is self._c10d.GroupMember.WORLD else str(group.group_name)
        except (AttributeError, RuntimeError):  # not a member of that group
            return "unknown"

    def _shape(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        first = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first, list | tuple) and first:
            first = first[0]
        if not isinstance(first, self._torch.Tensor):
            return ""
        try:
            key = (first.dtype, first.shape)
            text = self._shapes.get(key)
            if text is None:
                text = f"{str(first.dtype).removeprefix('torch.')}[{','.join(map(str, first.shape))}]"
                if len(self._shapes) < 1024:
                    self._shapes[key] = text
        except (RuntimeError, TypeError):  # a shape that is only known while tracing
            return ""
        return text


def _install_compiling(callback: ModuleType) -> None:
    before: list[int] = []

    def begin(*_args: Any) -> None:
        writer = phases.current()
        if writer is not None:
            before.append(writer.enter(COMPILE))

    def end(*_args: Any) -> None:
        writer = phases.current()
        if writer is not None and before:
            writer.leave(before.pop())

    callback.callback_handler.register_start_callback(begin)
    callback.callback_handler.register_end_callback(end)
