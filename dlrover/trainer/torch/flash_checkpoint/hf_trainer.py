"""
`FlashCkptTrainer`: the Trainer of transformers, with Flash Checkpoint in the place of its checkpoint writing.

    from dlrover.trainer.torch.flash_checkpoint.hf_trainer import FlashCkptTrainer

    trainer = FlashCkptTrainer(model=model, args=args, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=True)      # newest of memory and storage; from the start when there is none

The Trainer collects a checkpoint as it always does, by its own code, but into memory: nothing appears in the output directory before the agent
has written everything, and then the whole directory `checkpoint-{step}` at once. A restore from memory is the way back: the files
are laid out in shared memory, and the Trainer reads them as it reads any checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dlrover.agreed.cadence import BUDGET
from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.storage.manifest import ManifestInvalid
from dlrover.snapshot.storage.newest import newest_complete
from dlrover.snapshot.storage.retention import KeepTotal, apply_retention
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.trainer.older_names import older_names
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveReason, SaveResult
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType as StorageType
from dlrover.trainer.torch.flash_checkpoint.deepspeed_engine import FileCheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.encoding.safetensors_part import SafetensorsPart
from dlrover.trainer.torch.flash_checkpoint.restoring.node_snapshots import Snapshot, broadcast_files, write_out
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import Ranks, own_ranks
from dlrover.trainer.torch.flash_checkpoint.saving.cadence import AUTO, Interval, SaveCadence, read_interval
from dlrover.trainer.torch.flash_checkpoint.saving.collecting import FileCollector

try:
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint as newest_directory
except ImportError as error:
    raise ImportError(
        "FlashCkptTrainer needs transformers and accelerate. Install them with: pip install 'dlrover[frameworks]'"
    ) from error

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

PREFIX = "checkpoint"
TRAINER_STATE = "trainer_state.json"
SAFE_SERIALIZATION = "safe_serialization"
"""A key among the collected objects that asks for weights as safetensors."""
_SAFE_NAMES = (
    (re.compile(r"^adapter_model\.bin$"), "adapter_model.safetensors"),
    (re.compile(r"^pytorch_model\.bin$"), "model.safetensors"),
    (re.compile(r"^pytorch_model-(\d{5}-of-\d{5})\.bin$"), r"model-\1.safetensors"),
)


class HfFlashCheckpointer:
    """
    Saves what `ckpt_agent` has collected below `checkpoint_dir`, as one checkpoint. All ranks make it, and save, together.

    A script with a training loop of its own gives `ckpt_agent.save` to its libraries in the place of `torch.save`.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        storage: Any = None,
        comm_backend: str = "",
        save_timeout: float = 600,
        checkpoint_interval: Interval = AUTO,
        overhead_budget: float = BUDGET,
        **options: Any,
    ) -> None:
        """
        `comm_backend` is accepted and not needed: ranks agree over gloo. `checkpoint_interval` and `overhead_budget` are for `save_if_due`;
        `options` are the engine's own: `num_slots`, `replica_count`, `deletion_strategy`.
        """
        read_interval(checkpoint_interval, overhead_budget)  # before anything exists that would have to be closed
        self.async_save_engine = FileCheckpointEngine(
            checkpoint_dir, save_timeout=save_timeout, storage=storage, **options
        )
        self.checkpoint_dir, self.storage = self.async_save_engine.checkpoint_dir, self.async_save_engine.storage
        self.cadence = SaveCadence(self.async_save_engine, checkpoint_interval, overhead_budget)
        self.ckpt_agent = FileCollector(self.checkpoint_dir)
        self._ranks = own_ranks()
        self._firsts: Any = _group_of_first_ranks(self._ranks)
        """The first rank of each node; None where there is one node."""

    def save_checkpoint_to_memory(self, step: int, blocking: bool = False) -> bool:
        return bool(self.save(step, StorageType.MEMORY, blocking=blocking))

    def save_checkpoint_to_storage(self, step: int, blocking: bool = False) -> bool:
        """Whether it is in memory; the agent writes it from there. `blocking` waits for a free slot instead of skipping the save."""
        return bool(self.save(step, StorageType.DISK, blocking=blocking))

    def save(
        self, step: int, storage_type: StorageType, *, blocking: bool = False, metric: float | None = None
    ) -> SaveResult:
        """The same, with the reason when it is not."""
        target, files = self._collected(step)
        self.ckpt_agent.clear()
        return self.async_save_engine.save_files(
            step,
            files,
            target=target,
            is_storage=storage_type is StorageType.DISK,
            on_busy="block" if blocking else "skip",
            metric=metric,
        )

    def save_if_due(self, step: int, collect: Callable[[], object]) -> SaveResult | None:
        """
        Save this step if it is time, to memory or to storage. `collect` gives everything to `ckpt_agent.save`; it is only called when there is
        something to save. All ranks call this at every step. None: it is not time.
        """

        def save(storage_type: StorageType) -> SaveResult:
            collect()
            return self.save(step, storage_type)

        return self.cadence.save_if_due(step, save)

    def is_save_requested(self) -> bool:
        """Whether a checkpoint is wanted soon; the next save will be one to storage by itself. The same on all ranks."""
        return self.async_save_engine.is_save_requested

    def wait_latest_checkpoint(self, timeout: float = 1800) -> bool:
        return self.async_save_engine.wait_latest_checkpoint(timeout)

    def lay_out_newest(self) -> str | None:
        """
        The newest checkpoint in memory as a directory that this rank and its neighbours can read: what they had saved themselves, and what
        global rank 0 had, because that writes what all share. None: storage has a newer one, or not all ranks have one. All ranks
        call this.
        """
        engine = self.async_save_engine
        own = engine.snapshots().of_shard(engine.shard)
        stored = engine.step_beside_memory()
        for snapshot in engine.common_saves(own):
            step = snapshot.name.step
            if stored is not None and stored > step:
                return None
            directory = self._layout_directory(snapshot)
            if engine.have_all(_lay_out(snapshot, directory)) and engine.have_all(self._is_shared(directory)):
                engine.restored_step = step
                log.info("restored step %d from memory", step)
                return str(directory)
            log.warning("The snapshot of step %d cannot be used on all ranks; an older one is tried.", step)
        return None

    def newest_whole(self) -> str | None:
        """The newest checkpoint in storage that is as it was written. None: there is none of ours. All ranks call this."""
        newest = self.async_save_engine.stored_step()
        found = None if newest is None else self.async_save_engine.newest_whole(newest)
        return None if found is None else found.path

    def remove_layouts(self) -> None:
        """All ranks of this node have read what they wanted."""
        for path in self.async_save_engine.outlet.home.glob("layout-*"):
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[str]:
        """A directory in memory for files that a library writes."""
        path = self.async_save_engine.outlet.home / f"collected-{self._ranks.global_rank}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700, parents=True)
        try:
            yield str(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        self.async_save_engine.close()

    def _is_shared(self, directory: Path) -> bool:
        """Global rank 0's files are on every node. False, with a warning, when it did not work out."""
        try:
            if self._firsts is not None and self._ranks.local_rank == 0:
                broadcast_files(directory, self._firsts)
            return self._ranks.local_rank != 0 or (directory / TRAINER_STATE).is_file()
        except (OSError, RuntimeError) as error:
            log.warning("The snapshot of global rank 0 did not reach this node: %s", error)
            return False

    def _layout_directory(self, own: Snapshot) -> Path:
        return self.async_save_engine.outlet.home / f"layout-{own.request.attempt}" / own.request.target

    def _collected(self, step: int) -> tuple[str, dict[str, Any]]:
        """The name of the checkpoint, and its files by their path in it."""
        state = dict(self.ckpt_agent.state_dict)
        is_safe = bool(state.pop(SAFE_SERIALIZATION, False))
        targets = {name.split("/", 1)[0] for name in state}
        if len(targets) > 1 or any("/" not in name for name in state):
            raise ValueError(
                f"A checkpoint must be a single directory below {self.checkpoint_dir}, but files were saved at "
                f"{', '.join(sorted(state)[:4])}. Save the files of each checkpoint to a directory of their "
                "own, one checkpoint at a time."
            )
        files = {}
        for name, value in state.items():
            inside = name.split("/", 1)[1]
            if is_safe and (safe_name := _safe_name(inside)) is not None:
                files[safe_name] = SafetensorsPart(value, {"format": "pt"})
            else:
                files[inside] = value
        return (targets.pop() if targets else f"{PREFIX}-{step}"), files


class HfDdpCheckpointer(HfFlashCheckpointer):
    """For models that every rank holds whole."""


class HfDeepSpeedCheckpointer(HfFlashCheckpointer):
    """For models that a DeepSpeed engine holds. DeepSpeed writes through `torch.save`, so it is collected as everything else is."""

    @older_names(engine="model")
    def __init__(
        self,
        model: Any,
        checkpoint_dir: str | os.PathLike[str],
        storage: Any = None,
        comm_backend: str = "",
        save_timeout: float = 600,
        **options: Any,
    ) -> None:
        super().__init__(checkpoint_dir, storage, comm_backend, save_timeout, **options)
        self.engine = model


class FlashCkptTrainer(Trainer):  # type: ignore[misc]
    """
    As `transformers.Trainer`. With `memory_steps=N` every N-th step is kept in memory, whatever `save_steps` says: after a crash the training goes
    on from there. `checkpoint_interval="auto"` (or steps between storage saves, or two numbers, for memory and for storage) saves besides
    `save_steps` when it is time. A checkpoint that a person asks for (`dlrover save`) is made at the end of the step.
    """

    def __init__(
        self,
        *args: Any,
        memory_steps: int = 0,
        num_slots: int = 2,
        replica_count: int = 0,
        checkpoint_interval: Interval | None = None,
        overhead_budget: float = BUDGET,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        options: dict[str, Any] = {
            "num_slots": num_slots,
            "replica_count": replica_count,
            "checkpoint_interval": checkpoint_interval or AUTO,
            "overhead_budget": overhead_budget,
        }
        self._is_saving_by_itself = checkpoint_interval is not None
        self.memory_steps = memory_steps
        self._scratch: str | None = None
        self._is_laid_out = False
        self._found: str | None = None
        """What `get_last_checkpoint` said last."""
        self._is_native = self._why_native() != ""
        self.flash_checkpointer: HfFlashCheckpointer
        if self.is_deepspeed_enabled:
            self.flash_checkpointer = HfDeepSpeedCheckpointer(None, self.args.output_dir, **options)
        else:
            self.flash_checkpointer = HfDdpCheckpointer(self.args.output_dir, **options)
        if self._is_native:
            log.warning(
                "transformers itself writes the checkpoints, without snapshots in memory: %s", self._why_native()
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        With True from the newest checkpoint in memory or storage, and from the start when there is none; with a path from
        there.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest()
            if resume_from_checkpoint is None:
                log.info(
                    "There is no checkpoint in %s yet, so training starts from the beginning.", self.args.output_dir
                )
        elif isinstance(resume_from_checkpoint, (str, os.PathLike)):
            resume_from_checkpoint = self._whole(os.path.abspath(resume_from_checkpoint))
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._remove_layout()

    def get_last_checkpoint(self) -> str | bool:
        """The newest committed checkpoint in the output directory, or False."""
        directory = self.flash_checkpointer.checkpoint_dir
        try:
            found = newest_complete(LocalStorage(), directory)
        except DLRoverError as error:
            log.warning("%s", error)
            found = None
        if found is not None:
            self._found = found.path
            return found.path
        newest = newest_directory(directory) if os.path.isdir(directory) else None
        return newest or False

    def wait_latest_checkpoint(self, timeout: float = 1800) -> bool:
        """Until the newest checkpoint is committed."""
        return self.flash_checkpointer.wait_latest_checkpoint(timeout)

    # What transformers calls.

    def _get_output_dir(self, trial: Any) -> str:
        return self._scratch or str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._is_native or trial is not None or self.hp_search_backend is not None:
            super()._save_checkpoint(model, trial)
            return
        is_last = self.state.global_step >= self.state.max_steps
        result = self._snapshot(model, StorageType.DISK, blocking=is_last)
        if not result:
            log.warning(
                "checkpoint-%d was not saved: %s %s", self.state.global_step, result.reason.value, result.message
            )

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        self._remove_layout()  # a whole step is done, on all ranks: everything has been read
        has_saved = self.control.should_save
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)
        if self._is_native:
            return
        step, checkpointer = self.state.global_step, self.flash_checkpointer
        due = checkpointer.cadence.due(step) if self._is_saving_by_itself else None
        if due is None and self.memory_steps > 0 and step % self.memory_steps == 0:
            due = StorageType.MEMORY
        if checkpointer.is_save_requested():
            due = StorageType.DISK
        if due is not None and not has_saved:
            checkpointer.cadence.saved(self._snapshot(model, due, blocking=False), due)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """
        The best model may still be on its way to storage. Older saves may be, too: who commits a save deletes afterwards, by the rule as it
        was at that save.
        """
        if not self._is_native:
            engine = self.flash_checkpointer.async_save_engine
            engine.wait_for_storage(engine._save_timeout)
            engine.wait_until_settled(engine._save_timeout)
            self.accelerator.wait_for_everyone()
            self._rotate()
            self.accelerator.wait_for_everyone()
        return super()._finalize_training(*args, **kwargs)

    # Ours.

    def _why_native(self) -> str:
        """Empty: nothing speaks against collecting."""
        if self.args.push_to_hub and str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy)) != "end":
            return "hub_strategy pushes checkpoints to the hub at every save, so the files must exist at once"
        return ""

    def _snapshot(self, model: Any, storage_type: StorageType, *, blocking: bool) -> SaveResult:
        """Let transformers write its checkpoint, and keep everything of it."""
        checkpointer = self.flash_checkpointer
        step = self.state.global_step
        with checkpointer.scratch() as scratch:
            agent = checkpointer.ckpt_agent
            agent.clear()
            with agent.collecting(scratch):
                self._scratch = scratch
                try:
                    super()._save_checkpoint(model, None)
                finally:
                    self._scratch = None
                self._name_best_model(scratch, storage_type)
                agent.add_files()
            if self._rule() is not None:
                checkpointer.async_save_engine.delete_by(self._rule())
            return checkpointer.save(step, storage_type, blocking=blocking)

    def _name_best_model(self, scratch: str, storage_type: StorageType) -> None:
        """transformers has looked for the best checkpoint in the scratch directory; it is, or will be, in the real one."""
        best = getattr(self.state, "best_global_step", None)
        if best:
            path = os.path.join(self.flash_checkpointer.checkpoint_dir, f"{PREFIX}-{best}")
            is_coming = best == self.state.global_step and storage_type is StorageType.DISK
            if is_coming or os.path.isdir(path):
                self.state.best_model_checkpoint = path
            elif (self.state.best_model_checkpoint or "").startswith(scratch):
                self.state.best_model_checkpoint = None
        written = os.path.join(scratch, f"{PREFIX}-{self.state.global_step}", TRAINER_STATE)
        if best and os.path.isfile(written):
            self.state.save_to_json(written)

    def _rule(self) -> KeepTotal | None:
        """What `save_total_limit` keeps; each save carries it to its committer. None: everything."""
        limit = self.args.save_total_limit
        if not limit or limit < 0:
            return None
        best = os.path.abspath(self.state.best_model_checkpoint or "")
        is_here = os.path.dirname(best) == self.flash_checkpointer.checkpoint_dir
        return KeepTotal(limit, best=os.path.basename(best) if is_here else "")

    def _rotate(self) -> None:
        """Delete what `save_total_limit` gives up. Only committed checkpoints count, so there is always one to go back to."""
        rule, directory = self._rule(), self.flash_checkpointer.checkpoint_dir
        if rule is None or not self.args.should_save:
            return
        try:
            apply_retention(LocalStorage(), directory, rule)
        except (OSError, DLRoverError) as error:
            log.warning("old checkpoints in %s could not be deleted: %s", directory, error)

    def _newest(self) -> str | None:
        laid_out = self.flash_checkpointer.lay_out_newest()
        if laid_out is not None:
            self._is_laid_out = True
            return laid_out
        stored = self.flash_checkpointer.newest_whole() or self.get_last_checkpoint()
        if isinstance(stored, str):
            return stored
        if (step := self.flash_checkpointer.async_save_engine.stored_step()) is not None:
            raise ManifestInvalid(
                f"{self.args.output_dir} has no checkpoint, but its tracker names step {step}. Restore the "
                "files, or start from scratch in another directory."
            )
        return None

    def _whole(self, path: str) -> str:
        """
        What was named, compared with its manifest. If it is only what we called the newest ourselves, a damaged one gives way to the next older
        one; one that the user has chosen is refused.
        """
        engine = self.flash_checkpointer.async_save_engine
        if engine.is_so_for_all(path == self._found):
            return self.flash_checkpointer.newest_whole() or path
        engine.refuse_damaged(path)
        return path

    def _remove_layout(self) -> None:
        if self._is_laid_out:
            self._is_laid_out = False
            if self.args.local_process_index == 0:
                self.flash_checkpointer.remove_layouts()


def _lay_out(own: Snapshot, directory: Path) -> bool:
    """Our files, where our neighbours put theirs. False, with a warning, when something is missing or damaged."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_out(own, directory)
    except (OSError, DLRoverError) as error:
        log.warning("%s", error)
        return False
    return True


def _group_of_first_ranks(ranks: Ranks) -> Any:
    """Made by all ranks together, as torch's groups are."""
    if not (dist.is_available() and dist.is_initialized()) or ranks.world_size <= ranks.local_world_size:
        return None
    found: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(found, ranks.global_rank - ranks.local_rank)
    firsts = sorted(set(found))
    return dist.new_group(firsts, backend="gloo") if len(firsts) > 1 else None


def _safe_name(name: str) -> str | None:
    folder, _, file = name.rpartition("/")
    for pattern, replacement in _SAFE_NAMES:
        if pattern.match(file):
            safe = pattern.sub(replacement, file)
            return f"{folder}/{safe}" if folder else safe
    return None


__all__ = [
    "FlashCkptTrainer",
    "HfDdpCheckpointer",
    "HfDeepSpeedCheckpointer",
    "HfFlashCheckpointer",
    "SaveReason",
    "SaveResult",
    "StorageType",
]
