"""
The measured process of the checkpoint benchmark: trains a GPT, saves it with one system, and writes down how long everything took.

    python benchmarks/checkpoint_worker.py "torch.save" --bytes 64000000 --dir DIR --out FIGURES.json

It lives up to three times. In the first life it trains and saves; then, where the system keeps memory beyond the process, it kills itself and its launcher starts
it again: the second life restores from memory. The third (`--restore`) restores from storage, with and without the file cache. Every restored
state is compared with what was saved, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a launcher may run this as another kind of script

from checkpoint_state import Training, build, digest, shape_for
from checkpoint_systems import SYSTEMS, System, Unsupported, newest

GIB = 1 << 30
PAUSE_FOR_SAMPLER = 0.3
"""Between the mark and the first save, so that memory is looked at once before."""


class Figures:
    """Samples by name, written at once: the next life reads what the last one knew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.samples: dict[str, list[float]] = json.loads(path.read_text())["samples"] if path.exists() else {}

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"samples": self.samples}))
        os.replace(temporary, self._path)


@dataclass(frozen=True)
class Timing:
    """Of one step with what belongs to it; all in seconds."""

    call: float
    compute: float
    """Forward and backward."""
    wait: float
    """In hooks, or before the optimizer."""
    whole: float


class Trainer:
    """Steps of the training, with a save before them or without."""

    def __init__(self, training: Training) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._training = training
        self.num_steps = 0
        self._hooks_began_at = 0.0
        # Global hooks run before an optimizer's own, in the order in which they were registered; so this one is the first of all.
        register_optimizer_step_pre_hook(self._before_hooks)

    def step(self, system: System | None = None, *, is_storage: bool = False, is_saving: bool = True) -> Timing:
        """One step; with a system, a save of the state as it is before the step."""
        hooks_ended_at = 0.0

        def after_hooks(*_: object) -> None:
            nonlocal hooks_ended_at
            hooks_ended_at = time.perf_counter()

        state = {} if system is None else self._training.state(self.num_steps)  # the user's work, the same for all
        began_at = time.perf_counter()
        if system is not None and is_saving:
            system.save(self.num_steps, state, is_storage=is_storage)
        called_at = time.perf_counter()
        self._training.forward_and_backward(self.num_steps)
        computed_at = time.perf_counter()
        if system is not None and is_saving:
            system.before_step()
        waited_at = time.perf_counter()
        last = self._training.optimizer.register_step_pre_hook(after_hooks)  # anew, so that it is behind all others
        self._training.optimizer.step()
        last.remove()
        ended_at = time.perf_counter()
        self.num_steps += 1
        wait = (waited_at - computed_at) + (hooks_ended_at - self._hooks_began_at)
        return Timing(called_at - began_at, computed_at - called_at, wait, ended_at - began_at)

    def state(self) -> dict[str, Any]:
        return self._training.state(self.num_steps)

    def _before_hooks(self, *_: object) -> None:
        self._hooks_began_at = time.perf_counter()


def main() -> int:
    args = parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    figures = Figures(args.out)
    try:
        if args.restore:
            restore(args, figures, from_memory=False)
        elif args.out.exists():
            restore(args, figures, from_memory=True)
        else:
            first_life(args, figures)
    except Unsupported as error:
        args.out.with_suffix(".unsupported").write_text(str(error))
        return 0
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--bytes", type=int, required=True, help="of the state, about")
    parser.add_argument("--dir", type=Path, required=True, help="for the checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="file for the samples")
    parser.add_argument("--saves", type=int, default=5, help="warm saves (default %(default)s)")
    parser.add_argument("--storage-saves", type=int, default=2, help="saves to storage (default %(default)s)")
    parser.add_argument("--pause-per-gib", type=float, default=1.5, help="seconds before the first save")
    parser.add_argument("--restore", action="store_true", help="from storage, nothing else")
    return parser.parse_args()


def first_life(args: argparse.Namespace, figures: Figures) -> None:
    trainer = start_training(args, seed=1)
    began_at = time.perf_counter()
    system = SYSTEMS[args.system](args.dir)
    figures.add("construct", time.perf_counter() - began_at)
    trainer.step()
    time.sleep(args.pause_per_gib * shape_for(args.bytes).num_bytes / GIB)
    barrier()
    args.out.with_suffix(".ready").touch()
    time.sleep(PAUSE_FOR_SAMPLER)

    save_while_training(trainer, system, figures, args)
    if world_size() == 1:
        persist_idle(trainer, system, figures, args)
        if system.is_async:
            persist_while_training(trainer, system, figures, args)
        final_save(trainer, system, figures, args)
    args.out.with_suffix(".saved").touch()
    if rank() == 0:
        figures.write()
    barrier()
    if world_size() == 1 and system.has_memory and "TORCHELASTIC_RUN_ID" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)  # the launcher starts the next life
    system.close()


def save_while_training(trainer: Trainer, system: System, figures: Figures, args: argparse.Namespace) -> None:
    """The first save, then warm ones with plain steps between them. To memory, where the system has one."""
    is_storage = not system.has_memory
    is_saving = rank() == 0 or not system.is_by_one_rank
    for number in range(args.saves + 1):
        timing = trainer.step(system, is_storage=is_storage, is_saving=is_saving)
        kind = "warm" if number else "first"
        figures.add(f"{kind}_call", timing.call)
        figures.add(f"{kind}_wait", timing.wait)
        figures.add(f"{kind}_block", timing.call + timing.wait)
        figures.add(f"{kind}_step", timing.whole)
        if is_storage:
            system.wait()
        if is_storage and rank() == 0:
            make_durable(args.dir)
            remove_old(args.dir)
        barrier()
        for is_counted in (False, True):  # the first step after a save may still feel it
            timing = trainer.step()
            if is_counted:
                figures.add("plain_step", timing.whole)
                figures.add("plain_compute", timing.compute)
                figures.add("plain_wait", timing.wait)


def persist_idle(trainer: Trainer, system: System, figures: Figures, args: argparse.Namespace) -> None:
    """Until the state is on the disk, while nothing else happens."""
    for _ in range(args.storage_saves):
        trainer.step()
        durable_save(trainer, system, figures, args)


def persist_while_training(trainer: Trainer, system: System, figures: Figures, args: argparse.Namespace) -> None:
    """The same while steps go on: how many seconds of training one save to storage costs."""
    plain = sorted(figures.samples["plain_step"])[len(figures.samples["plain_step"]) // 2]
    for _ in range(args.storage_saves):
        errors: list[BaseException] = []
        began_at = time.perf_counter()
        timing = trainer.step(system, is_storage=True)
        num_steps, busy_steps = 1, [timing.whole]

        def finish(errors: list[BaseException] = errors) -> None:
            try:
                system.wait()
                make_durable(args.dir)
            except BaseException as error:
                errors.append(error)

        watcher = threading.Thread(target=finish, name="until durable")
        watcher.start()
        while watcher.is_alive():
            busy_steps.append(trainer.step().whole)
            num_steps += 1
        watcher.join()
        if errors:
            raise errors[0]
        took = time.perf_counter() - began_at
        figures.add("persist_extra", took - num_steps * plain)
        for whole in busy_steps[1:]:
            figures.add("busy_step", whole)


def final_save(trainer: Trainer, system: System, figures: Figures, args: argparse.Namespace) -> None:
    """What the next lives have to find."""
    durable_save(trainer, system, figures, args)
    figures.add("digest", digest(trainer.state()))
    figures.add("file_bytes", sum(path.stat().st_size for path in newest(args.dir).rglob("*") if path.is_file()))


def durable_save(trainer: Trainer, system: System, figures: Figures, args: argparse.Namespace) -> None:
    state = trainer.state()
    began_at = time.perf_counter()
    system.save(trainer.num_steps, state, is_storage=True)
    called_at = time.perf_counter()
    system.before_step()
    system.wait()
    make_durable(args.dir)
    ended_at = time.perf_counter()
    figures.add("durable", ended_at - began_at)
    figures.add("persist", ended_at - called_at)
    remove_old(args.dir)
    trainer.num_steps += 1  # a step is saved once


def restore(args: argparse.Namespace, figures: Figures, *, from_memory: bool) -> None:
    """Into the tensors of a model with other values; what was there before is the harder case for some, so it is there for all."""
    if from_memory:
        args.out.with_suffix(".ready").touch()
    began_at = time.perf_counter()
    system = SYSTEMS[args.system](args.dir)  # before the model, as our documentation advises
    figures.add("construct_again", time.perf_counter() - began_at)
    trainer = start_training(args, seed=2)
    trainer.step()  # a restarted process has no moments yet; here they are to be live tensors, too
    live = trainer.state()
    names = ["restore_memory"] if from_memory else ["restore_cold", "restore_warm"]
    for name in names:
        if name == "restore_cold":
            forget_file_cache(newest(args.dir))
        began_at = time.perf_counter()
        system.load(live)
        took = time.perf_counter() - began_at
        if digest(live) != figures.samples["digest"][-1]:
            raise AssertionError(f"{args.system}: the restored state is not the saved one")
        figures.add(name, took)
    figures.write()
    system.close()


def start_training(args: argparse.Namespace, seed: int) -> Trainer:
    if world_size() > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    num_cores = len(os.sched_getaffinity(0))
    training = build(
        shape_for(args.bytes),
        seed=seed,
        num_threads=max(1, num_cores // world_size()),
        is_distributed=world_size() > 1,
    )
    return Trainer(training)


def make_durable(directory: Path) -> None:
    """Sync what a system calls complete: some leave that to the kernel. Costs nothing for what is synced already."""
    target = newest(directory)
    for path in [*target.rglob("*"), target, directory]:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def remove_old(directory: Path) -> None:
    last = newest(directory)
    for path in directory.iterdir():
        if path.name.isdecimal() and path != last:
            shutil.rmtree(path)


def forget_file_cache(target: Path) -> None:
    for path in target.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def barrier() -> None:
    if world_size() > 1:
        import torch.distributed as dist

        dist.barrier()


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    sys.exit(main())
