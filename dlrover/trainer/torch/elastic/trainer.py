"""
`ElasticTrainer`: the same mathematics with fewer workers.

    trainer = ElasticTrainer(model, loader)
    optimizer, scheduler = trainer.prepare(optimizer, scheduler)
    for batch in loader:
        with trainer.step(fix_total_batch_size=True):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

The job is meant for a number of workers. When it has fewer, each of them does the work of several: so many micro-batches that together they are the batch of the
full world, gradients averaged as there, and the optimizer and the scheduler step once for all of them. With a sampler that is dealt (`deal`)
some ranks do one micro-batch more than others where the numbers do not divide; all synchronise once per step, so no rank waits in vain.

A GradScaler is given to `prepare`, too: gradients are unscaled once, when all micro-batches of the step are in. Who clips gradients does so only
where `trainer.is_last_micro_batch`: before, they are those of a part.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.scaling import JobFacts
from dlrover.trainer import environment, phases
from dlrover.trainer.facts import tell_facts
from dlrover.trainer.older_names import older_names
from dlrover.trainer.progress import report
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.resilience.guard import StepGuard

LOOK_EVERY = 20
"""Steps after which the parallel-config file is looked at: the ranks tell each other then, which costs a message."""


class GradientState:
    """What the original's scripts read from `trainer.gradient_state`; always as it is now."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    @property
    def sync_gradients(self) -> bool:
        return self._trainer.is_last_micro_batch

    @property
    def num_steps(self) -> int:
        return self._trainer.num_steps

    @property
    def num_backward_steps(self) -> int:
        return self._trainer.num_micro_batches


class ElasticTrainer:
    def __init__(self, model: torch.nn.Module, dataloader: Any = None, *, max_workers: int | None = None) -> None:
        """
        An `ElasticDataLoader` given here follows the parallel-config file by itself, every `LOOK_EVERY` steps on all ranks together.

        `max_workers`: of the full world; by default the most nodes (`--nnodes`, or WORKER_NUM) with LOCAL_WORLD_SIZE workers each.
        """
        is_grouped = dist.is_available() and dist.is_initialized()
        self._world_size = dist.get_world_size() if is_grouped else 1
        self._rank = dist.get_rank() if is_grouped else 0
        wanted = _configured_workers() if max_workers is None else max_workers
        self.max_workers = max(wanted, self._world_size)
        self.model = model
        self.dataloader = dataloader
        if isinstance(dataloader, ElasticDataLoader) and dataloader.accumulation and dataloader.script_batch_size:
            # Tuned in a former life, in which the world may have been smaller: the first batch is drawn before the first step.
            dataloader.keep_within(max(1, dataloader.script_batch_size * self.max_workers // self._world_size))
        if isinstance(dataloader, DataLoader):
            _watch_epochs(dataloader, self._note_epoch)
        self._micro_step = 0
        """In the accumulation that runs, from 1."""
        self._num_micro_steps = 1
        """Of that accumulation: decided when it begins, because its gradients are scaled by it."""
        self._is_last = True
        """Whether the micro-step that runs completes a step."""
        self._is_accumulating = False
        """Whether there are gradients of a step that is not done: they must not be cleared."""
        self._has_scaler = False
        self._is_total_fixed = False
        """Whether the step that runs is to have the batch of the full world."""
        self._hooks: list[Any] = []
        self.num_steps = 0
        """Steps of the optimizer so far; a restored state counts on."""
        self.num_micro_batches = 0
        """That this process has begun."""
        self.gradient_state = GradientState(self)
        self._num_in_epoch = 0
        self._sampler: ElasticDistributedSampler | None = None
        self._micro_batch_size = 0
        self._total_batch = 0
        """Records of one step, once it is known; it stays the same for any number of workers."""
        self._script_size: int | None = None
        """Of the script's batches when that was found."""
        self._guard: StepGuard | None = None
        """Made when the optimizer is known."""
        self.whole_state = self.state_dict()
        """After the last step that is whole."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """
        Micro-batches of this rank for one step. Of a sampler that is dealt (`deal`) as many as the rank stands in for; else equally many on all
        ranks, because they have equally many in an epoch: where the numbers do not divide the batch is a little larger than that of the
        full world.
        """
        if self._sampler is not None:
            return len(range(self._rank, self.max_workers, self._world_size))
        loader = self.dataloader
        if isinstance(loader, ElasticDataLoader) and loader.accumulation:
            size = loader.get_batch_size()
            # The tuner counted on the workers of its time; the records of a step are what stays.
            return (
                -(-self._total_batch // (size * self._world_size))
                if self._total_batch and size
                else loader.accumulation
            )
        return -(-self.max_workers // self._world_size)

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the micro-batch that runs completes a step: after its backward, and not before, the gradients are those of the whole batch."""
        return self._is_last

    def prepare(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None, grad_scaler: Any = None) -> Any:
        """
        The optimizer (and the scheduler) that step once for each batch of the full world.

        They are the same objects: only their `step` and `zero_grad` wait until it is time. So do `unscale_`, `step` and `update` of a
        GradScaler that is given here, which need not be taken from the result.
        """
        _gate(optimizer, "step", lambda: self._is_last, then=self._note_step)
        _gate(optimizer, "zero_grad", lambda: not self._is_accumulating)
        if grad_scaler is not None:
            self._has_scaler = True
            _gate_class(grad_scaler, ("unscale_", "step", "update"), lambda: self._is_last)
        self._guard = StepGuard(
            self.model,
            optimizer,
            also=[each for each in (lr_scheduler, grad_scaler, _WholeState(self)) if each is not None],
        )
        is_unscaling = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        optimizer._step_supports_amp_scaling = _ScalerGuard(self._check_scaler, answer=is_unscaling)
        if lr_scheduler is None:
            return optimizer
        _gate_class(lr_scheduler, ("step",), lambda: self._is_last)
        return optimizer, lr_scheduler

    @contextlib.contextmanager
    def step(self, fix_total_batch_size: bool = False) -> Iterator[None]:
        """Around each micro-batch. With `fix_total_batch_size` the batch of a step is that of the full world; without, each micro-batch is a step."""
        if fix_total_batch_size is not self._is_total_fixed or not self.num_micro_batches:
            self._is_total_fixed = fix_total_batch_size
            self._tell_shape()
        num_left = self._count_in_epoch()
        if not self._micro_step:
            self._num_micro_steps = min(self.gradient_accumulation_steps, num_left or sys.maxsize)
        is_divided = self.max_workers != self._world_size or self._num_micro_steps > 1
        self._scale_gradients(is_wanted=fix_total_batch_size and is_divided)
        self._micro_step += 1
        self.num_micro_batches += 1
        self._is_last = not fix_total_batch_size or self._micro_step >= self._num_micro_steps
        no_sync = getattr(self.model, "no_sync", None)
        guard = self._guard
        if guard is not None:
            guard.enter(is_first=self._micro_step == 1)
        try:
            with contextlib.nullcontext() if self._is_last or no_sync is None else no_sync():
                yield
        except BaseException as error:
            if guard is not None:
                guard.leave(error)
            raise
        if self._sampler is not None and not self._sampler.is_counted:
            self._sampler.count_batch(self._micro_batch_size)
        if self._is_last:
            self._micro_step = 0
            self._is_accumulating = False
            self.num_steps += 1
            if guard is not None:
                self.whole_state = self.state_dict()
            report(self.num_steps)
        if guard is not None:
            guard.leave(is_last=self._is_last)
        is_look_due = self._is_last and self.num_steps % LOOK_EVERY == 0
        if is_look_due and isinstance(self.dataloader, ElasticDataLoader):
            self.dataloader.load_config()
            self._tell_shape()

    def _tell_shape(self) -> None:
        """What a step consists of, for the part that decides how large the job is to be."""
        tell_facts(self._facts())
        if not self._is_total_fixed:
            phases.tell_shape(accumulation=1, total_batch=0)
            return
        loader = self.dataloader
        is_elastic = isinstance(loader, ElasticDataLoader) and not self._micro_batch_size
        script_size = loader.script_batch_size if is_elastic else None
        if not self._total_batch or script_size != self._script_size:
            self._script_size = script_size
            size = script_size or self._micro_batch_size or getattr(loader, "batch_size", None) or 0
            self._total_batch = int(size) * self.max_workers
        if is_elastic and self._total_batch:
            loader.keep_within(max(1, self._total_batch // self._world_size))
        size = self._micro_batch_size or getattr(loader, "batch_size", None) or 0
        phases.tell_shape(
            micro_batch=int(size) or None,
            accumulation=self.gradient_accumulation_steps,
            total_batch=self._total_batch,
        )

    def _facts(self) -> JobFacts:
        dataset = getattr(self.dataloader, "dataset", None)
        sizes = [each.numel() * each.element_size() for each in self.model.parameters()]
        return JobFacts(
            batch_size=int(self._micro_batch_size or getattr(self.dataloader, "batch_size", None) or 0),
            dataset_size=len(dataset) if isinstance(dataset, Sized) else 0,
            dataset_name="" if dataset is None else type(dataset).__name__,
            variable_count=len(sizes),
            total_variable_size=sum(sizes),
            max_variable_size=max(sizes, default=0),
        )

    def _count_in_epoch(self) -> int:
        """Micro-batches that the loader has left, with the one that begins: a step at the end is taken with what there is. 0: not known."""
        if self._sampler is not None or not isinstance(self.dataloader, Sized):
            return 0
        try:
            loader = self.dataloader
            num_batches = loader.num_batches if isinstance(loader, ElasticDataLoader) else len(loader)
        except TypeError:  # a stream
            return 0
        num_left = max(0, num_batches - self._num_in_epoch)
        self._num_in_epoch = self._num_in_epoch + 1 if num_left > 1 else 0
        return num_left

    def _note_epoch(self) -> None:
        """An accumulation that was begun goes on: its gradients are there."""
        self._num_in_epoch = 0

    def reset(self) -> None:
        """Count steps from 0 again, as scripts do at the start of each epoch; an accumulation that was begun is forgotten."""
        phases.tell_count_anew(is_epoch_over=self.num_steps > 0)
        self.num_steps = self._micro_step = self._num_in_epoch = 0
        self._is_last, self._is_accumulating = True, False
        self.whole_state = self.state_dict()

    @older_names(micro_batch_size="batch_size")
    def deal(self, sampler: ElasticDistributedSampler, batch_size: int) -> None:
        """Let every rank read what it stands in for. To be called before the loader is iterated."""
        sampler.play(self.max_workers, batch_size)
        self._sampler, self._micro_batch_size = sampler, batch_size

    def state_dict(self) -> dict[str, Any]:
        """Between two steps: where the training stands, also in the middle of an epoch, for any number of workers."""
        if self._micro_step:
            raise RuntimeError(
                "state_dict() was called between the micro-batches of a step. Call it after optimizer.step() "
                "has changed the model."
            )
        state: dict[str, Any] = {"num_steps": self.num_steps, "max_workers": self.max_workers}
        if self._sampler is not None:
            state["sampler"] = self._sampler.state_dict()
        return state

    @older_names(state="state_dict")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there. The batch of a step stays what it was: a job for another number of workers is refused."""
        if state_dict["max_workers"] != self.max_workers:
            raise ConfigError(
                f"The state was saved by a job for at most {state_dict['max_workers']} workers, and this job is "
                f"for {self.max_workers}. Steps would have another global batch size. Start the job with the "
                "same largest number of nodes, or give max_workers."
            )
        self.num_steps = int(state_dict["num_steps"])
        if self._sampler is not None and "sampler" in state_dict:
            self._sampler.load_state_dict(state_dict["sampler"])
        self.whole_state = self.state_dict()

    def _check_scaler(self) -> None:
        """
        A scaler that we were not told of unscales what is accumulated at every micro-batch, and all but the last one are lost. That shows in no
        error, and not before there are fewer workers: so it is refused from the first step on.
        """
        if self._is_total_fixed and self.max_workers > 1 and not self._has_scaler:
            raise ConfigError(
                "Do not step the optimizer with your own GradScaler: with fewer workers than the full world it "
                "would unscale the gradients once for each micro-batch. Give it to the trainer: "
                "trainer.prepare(optimizer, lr_scheduler, grad_scaler=scaler)."
            )

    def _note_step(self) -> None:
        self._is_accumulating = False

    def _scale_gradients(self, *, is_wanted: bool) -> None:
        """
        DDP divides by the workers there are; a step has the micro-batches of the full world. So what each backward adds is scaled by their
        quotient, before it is accumulated: clipping and scalers see what they would see in the full world.
        """
        if is_wanted == bool(self._hooks):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if is_wanted:
            parameters = [each for each in self.model.parameters() if each.requires_grad]
            if not parameters:
                raise ConfigError(
                    "The model has no parameter that requires a gradient, so there is nothing to train. Set "
                    "requires_grad on those to train."
                )

            def scale(gradient: torch.Tensor) -> torch.Tensor:
                # After the last backward clearing is right, also if nobody steps because the gradients are not finite.
                self._is_accumulating = not self._is_last
                is_dealt = self._sampler is not None
                return gradient * (self._world_size / self.max_workers if is_dealt else 1 / self._num_micro_steps)

            self._hooks = [each.register_hook(scale) for each in parameters]


class _WholeState:
    """The trainer as it was after its last whole step: in the middle of one it has counted batches already."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return self._trainer.whole_state


def _configured_workers() -> int:
    """Nodes of the full world times workers of a node; 0: not told."""
    where = environment.current()
    num_nodes = int(os.environ.get("WORKER_NUM") or 0) or (0 if where is None else where.max_nodes)
    return num_nodes * int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


class _ScalerGuard:
    """
    Stands where an optimizer says whether it unscales gradients itself. Only a scaler that is about to step asks for that, and it does so before
    the step: the one place where a scaler shows that was not given to the trainer.
    """

    def __init__(self, check: Callable[[], None], *, answer: bool) -> None:
        self._check = check
        self._answer = answer

    def __bool__(self) -> bool:
        self._check()
        return self._answer


def _gate_class(owner: Any, names: tuple[str, ...], is_open: Any) -> None:
    """The same by a class of its own for one object: a scheduler's `state_dict` is all that hangs on the object."""
    base = type(owner)

    def gate(inner: Any) -> Any:
        def gated(self: Any, *args: Any, **options: Any) -> Any:
            return inner(self, *args, **options) if is_open() else None

        return gated

    methods = {name: gate(getattr(base, name)) for name in names}
    told = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    owner.__class__ = type(base.__name__, (base,), methods | told)


def _watch_epochs(loader: Any, note: Callable[[], None]) -> None:
    """Hear when the script iterates the loader: `break` ends an epoch where no count shows it. Python looks for `__iter__` at the class only."""
    base = type(loader)

    def watched(self: Any) -> Any:
        note()
        return base.__iter__(self)

    names = {"__iter__": watched, "__module__": base.__module__, "__qualname__": base.__qualname__}
    loader.__class__ = type(base.__name__, (base,), names)


def _gate(owner: Any, name: str, is_open: Any, then: Any = None) -> None:
    """Let a method of one object do something only while the gate is open."""
    inner = getattr(owner, name)

    def gated(*args: Any, **options: Any) -> Any:
        if not is_open():
            return None
        result = inner(*args, **options)
        if then is not None:
            then()
        return result

    # torch's schedulers look at these to see whether `step` is still the one they wrapped.
    gated.__func__ = getattr(inner, "__func__", inner)  # type: ignore[attr-defined]
    gated.__self__ = owner  # type: ignore[attr-defined]
    if hasattr(inner, "_wrapped_by_lr_sched"):
        gated._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    setattr(owner, name, gated)
