"""
`DeepSpeedCheckpointer`: Flash Checkpoint for a DeepSpeed engine, ZeRO stages 0 to 3.

    from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer, StorageType

    checkpointer = DeepSpeedCheckpointer(engine, "/shared/run7")
    path, client_state = checkpointer.load_checkpoint("/shared/run7")   # (None, None) at the very beginning
    ...
    checkpointer.save_checkpoint("/shared/run7", tag=step, extra={"step": step}, storage_type=StorageType.MEMORY)

DeepSpeed asks a checkpoint engine of its own to write and read files, one call per file. For the time of a save ours takes its place and keeps
the objects instead of writing them; for the time of a load it answers from memory. So nothing of torch is replaced, other threads notice
nothing, and the files are exactly those that DeepSpeed would have written. DeepSpeed itself is never imported here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from dlrover.agreed.cadence import BUDGET
from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.storage.manifest import DIRECTORY, ManifestInvalid
from dlrover.trainer.older_names import older_names
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveReason, SaveResult
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType as StorageType
from dlrover.trainer.torch.flash_checkpoint.deepspeed_engine import DeepSpeedCheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.encoding.parts import RawPart
from dlrover.trainer.torch.flash_checkpoint.restoring.node_snapshots import Snapshot
from dlrover.trainer.torch.flash_checkpoint.saving.cadence import AUTO, Interval, SaveCadence, read_interval

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

LATEST = "latest"
"""DeepSpeed's tracker: the tag of the newest checkpoint."""
_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""What DeepSpeed puts beside its checkpoints so that they can be converted without it."""


class AsyncCheckpointAgent:
    """
    Stands where DeepSpeed's own checkpoint engine is: keeps what is saved, answers what is loaded.

    `state_dict` and `paths` hold what was collected, by path relative to the directory of the save. By the path and not by its ending: there
    are many files whose names end the same.
    """

    name = "DLRover"

    def __init__(self, root: str = "", files: Mapping[str, Any] | None = None) -> None:
        self.root = os.path.abspath(root) if root else ""
        self.state_dict: dict[str, Any] = {}
        self.paths: dict[str, str] = {}
        self._files = files or {}
        """What can be loaded, by path relative to `root`."""

    def save(self, state_dict: Any, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        name = self._name_of(path)
        self.state_dict[name] = state_dict
        self.paths[name] = os.fspath(path)

    def load(self, path: str | os.PathLike[str], map_location: Any = None, **kwargs: Any) -> Any:
        name = path.file if isinstance(path, FileInMemory) else self._name_of(path)
        if name not in self._files:
            raise FileNotFoundError(
                f"The snapshot in memory has no {name}; it has {', '.join(sorted(self._files)) or 'nothing'}."
            )
        return self._files[name]

    def _name_of(self, path: str | os.PathLike[str]) -> str:
        full = os.path.abspath(path)
        return os.path.relpath(full, self.root) if self.root else full

    # The rest of what DeepSpeed asks of a checkpoint engine.

    def create(self, info: Any) -> None:
        """A checkpoint begins."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing is written here: the agent makes the directories it needs."""

    def commit(self, info: Any) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is under way."""

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(dp_rank == 0)

    def is_decoupled(self) -> bool:
        return False

    def set_commit_info(self, info: Any) -> None:
        """Only for engines that commit later by themselves."""

    def get_commit_info(self) -> None:
        return None

    def cleanup(self) -> None:
        """Nothing is open."""

    def preserves_storage_sharing(self) -> bool:
        """False spares DeepSpeed a clone of every tensor: we keep each storage once, whole."""
        return False


AsyncSaveEngine = AsyncCheckpointAgent


class FileInMemory(os.PathLike[str]):
    """
    A file of a checkpoint that has none on disk, for code that asks whether its path exists before it has the checkpoint engine
    load it. As a path it is the segment that holds the bytes.
    """

    def __init__(self, file: str, segment: str, shown: str) -> None:
        self.file, self._segment, self._shown = file, segment, shown

    def __fspath__(self) -> str:
        return self._segment

    def __str__(self) -> str:
        return self._shown


class DeepSpeedCheckpointer:
    @older_names(engine="model")
    def __init__(
        self,
        model: Any,
        checkpoint_dir: str | os.PathLike[str],
        comm_backend: str = "",
        deletion_strategy: object = None,
        save_timeout: float = 600,
        *,
        storage: Any = None,
        num_slots: int = 2,
        replica_count: int = 0,
        checkpoint_interval: Interval = AUTO,
        overhead_budget: float = BUDGET,
    ) -> None:
        """
        `model` is what `deepspeed.initialize` returned. All ranks make this together. `comm_backend` is accepted and not needed: ranks
        agree over gloo. The last two are for `save_if_due`.
        """
        if _says(model, "zero_nvme_offload_optimizer"):
            raise ConfigError(
                "Snapshots in memory cannot contain the optimizer state, because DeepSpeed offloads it to NVMe "
                "(offload_optimizer). Save with engine.save_checkpoint, or switch the offload to NVMe off."
            )
        read_interval(checkpoint_interval, overhead_budget)  # before anything exists that would have to be closed
        self.engine = model
        self._engine = DeepSpeedCheckpointEngine(
            checkpoint_dir,
            storage=storage,
            zero_stage=_zero_stage(model),
            save_timeout=save_timeout,
            deletion_strategy=deletion_strategy,
            num_slots=num_slots,
            replica_count=replica_count,
        )
        self.checkpoint_dir, self.storage = os.fspath(checkpoint_dir), self._engine.storage
        self._cadence = SaveCadence(self._engine, checkpoint_interval, overhead_budget)
        self._is_model_holder = _is_first_with(_model_file(model, "", ""))
        self._lock = threading.Lock()
        """Guards the engine's attributes while ours stand in their place: two saves at a time would restore them wrongly."""

    @property
    def async_save_engine(self) -> DeepSpeedCheckpointEngine:
        return self._engine

    @older_names(save_dir="checkpoint_dir", client_state="extra")
    def save_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str],
        tag: int | str | None = None,
        extra: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        storage_type: StorageType = StorageType.DISK,
        *,
        on_busy: str = "skip",
        exclude_frozen_parameters: bool = False,
        metric: float | None = None,
    ) -> SaveResult:
        """
        What `engine.save_checkpoint` would write, copied into memory; with DISK the agent writes it afterwards. All ranks call this.

        `checkpoint_dir` is the directory of checkpoints or one below it. The tag names the checkpoint; its step is the tag where that is a number, else
        the engine's count of steps. `metric` is how good the state is, for `KeepBest`.
        """
        if not isinstance(storage_type, StorageType):
            raise ValueError(f"storage_type must be StorageType.MEMORY or StorageType.DISK (got {storage_type!r}).")
        tag_name = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        step = self._step_of(tag)
        target, inside = self._place(os.fspath(checkpoint_dir), tag_name)
        is_storage = storage_type is StorageType.DISK
        more = {"exclude_frozen_parameters": True} if exclude_frozen_parameters else {}  # older engines do not know it
        with self._standing_in(AsyncCheckpointAgent(os.fspath(checkpoint_dir))) as agent, self._keeping_the_model():
            # Without "latest": the agent writes it when the checkpoint counts.
            self.engine.save_checkpoint(
                os.fspath(checkpoint_dir), tag=tag_name, client_state=dict(extra or {}), save_latest=False, **more
            )
        files: dict[str, Any] = {
            os.path.normpath(os.path.join(inside, os.path.relpath(name, tag_name))): state
            for name, state in agent.state_dict.items()
        }
        model = os.path.normpath(os.path.join(inside, os.path.basename(_model_file(self.engine, "", tag_name))))
        memory_only = [model] if not self.engine.save_non_zero_checkpoint else []
        # On every rank, and also for memory: whichever of them the committer looks at says it all, and a break point may write it after all.
        trackers = self._scripts()
        if save_latest and not inside:
            trackers[LATEST] = tag_name
        elif save_latest and self._engine.shard == 0:
            files[os.path.join(os.path.dirname(inside), LATEST)] = RawPart(tag_name.encode())
        return self._engine.save_files(
            step,
            files,
            target=target,
            is_storage=is_storage,
            memory_only=memory_only,
            trackers=trackers,
            on_busy=on_busy,
            metric=metric,
        )

    @older_names(save_dir="checkpoint_dir", client_state="extra")
    def save_if_due(
        self,
        checkpoint_dir: str | os.PathLike[str],
        tag: int | str | None = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SaveResult | None:
        """
        Save this step if it is time, to memory or to storage. All ranks call this at every step. None: it is not time. `options` are those
        of `save_checkpoint`.
        """
        return self._cadence.save_if_due(
            self._step_of(tag),
            lambda storage_type: self.save_checkpoint(checkpoint_dir, tag, extra, storage_type=storage_type, **options),
        )

    def is_save_requested(self) -> bool:
        """Whether a checkpoint is wanted soon; the next save will be one to storage by itself. The same on all ranks."""
        return self._engine.is_save_requested

    @older_names(load_dir="checkpoint_dir")
    def load_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str],
        tag: int | str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """
        As the engine's own. Without a tag the newest checkpoint, from memory or storage; with one, that one, from memory if it
        is there. All ranks call this.
        """
        directory = os.fspath(checkpoint_dir)
        arguments: dict[str, Any] = {
            "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "load_module_only": load_module_only,
            "custom_load_fn": custom_load_fn,
        }
        is_own = os.path.abspath(directory) == self._engine.checkpoint_dir
        if is_own and self._reads_by_name(load_optimizer_states):
            found = self._from_memory(directory, tag, arguments)
            if found is not None:
                return found
        name = None if tag is None else str(tag)
        if is_own and name is None:
            name = self._stored_tag()
        elif (named := name or _latest_tag(directory)) is not None:
            self._engine.refuse_damaged(os.path.abspath(os.path.join(directory, named)))
        loaded: tuple[str | None, dict[str, Any] | None] = self.engine.load_checkpoint(directory, tag=name, **arguments)
        if loaded[0] is not None:
            log.info("restored %s", loaded[0])
        return loaded

    def wait_latest_checkpoint(self, timeout: float = 1800) -> bool:
        """Until the newest DISK save of this rank is committed."""
        return self._engine.wait_latest_checkpoint(timeout)

    def close(self) -> None:
        """End the threads. Under `dlrover-run` what was saved stays; elsewhere this waits until it is written."""
        self._engine.close()

    # Saving.

    def _step_of(self, tag: int | str | None) -> int:
        if isinstance(tag, int):
            return tag
        return int(tag) if tag is not None and tag.isdecimal() else int(self.engine.global_steps)

    def _place(self, save_dir: str, tag: str) -> tuple[str, str]:
        """The name of the checkpoint below our directory, and where in it the files of the tag are."""
        if not tag or "/" in tag:
            raise ValueError(f"`tag` must be a plain file name (got {tag!r}).")
        root = self._engine.checkpoint_dir
        below = os.path.relpath(os.path.abspath(save_dir), root)
        if below == os.curdir:
            return tag, ""
        if below.startswith(os.pardir):
            raise ConfigError(
                f"save_dir {save_dir} lies outside the checkpoint_dir {root} of this checkpointer. Save inside "
                "checkpoint_dir, or make the checkpointer with the other directory."
            )
        first, *rest = below.split("/")
        return first, "/".join((*rest, tag))

    @contextlib.contextmanager
    def _standing_in(self, agent: AsyncCheckpointAgent) -> Iterator[AsyncCheckpointAgent]:
        """Our agent in the place of the engine's, for this engine alone; and no conversion scripts on disk."""
        with self._lock, _attributes(self.engine, checkpoint_engine=agent, _copy_recovery_script=lambda path: None):
            yield agent

    def _keeping_the_model(self) -> contextlib.AbstractContextManager[None]:
        """Of a model file that one rank writes for all, the first rank of every node keeps a copy in memory."""
        keeps = self._is_model_holder or self.engine.save_non_zero_checkpoint
        return _attributes(self.engine, save_non_zero_checkpoint=keeps)

    def _scripts(self) -> dict[str, str]:
        """DeepSpeed's conversion scripts, where they are not in the directory yet."""
        directory = self._engine.checkpoint_dir
        if "://" in directory or not _says(self.engine, "zero_optimization"):
            return {}
        return {name: text for name, text in _scripts().items() if not os.path.exists(os.path.join(directory, name))}

    # Restoring.

    def _reads_by_name(self, load_optimizer_states: bool) -> bool:
        """Whether every file that this load opens can be named beforehand; where it cannot, the files in storage are read."""
        engine = self.engine
        searches = (
            getattr(engine, "has_moe_layers", False)
            or _says(engine, "load_universal_checkpoint")
            or hasattr(engine.module, "ckpt_layer_path_list")  # a pipeline's module: a file per layer
            or (_zero_stage(engine) == 3 and not load_optimizer_states)
        )
        return not searches

    def _from_memory(
        self, directory: str, tag: int | str | None, arguments: dict[str, Any]
    ) -> tuple[str | None, dict[str, Any] | None] | None:
        """None: not all ranks have it in memory, or storage has something newer."""
        snapshots = self._engine.snapshots()
        own = [
            snapshot
            for snapshot in snapshots.of_shard(self._engine.shard)
            if tag is None or snapshot.request.target == str(tag)
        ]
        stored = self._engine.step_beside_memory()
        for snapshot in self._engine.common_saves(own):
            if tag is None and stored is not None and stored > snapshot.name.step:
                return None
            files = self._engine.read(snapshots, snapshot, self._needed(snapshot.request.target))
            if self._engine.have_all(files is not None):
                assert files is not None, "all ranks have it"
                return self._load(directory, snapshot, files, arguments)
            log.warning(
                "The snapshot of step %d cannot be used on all ranks; an older one is tried.", snapshot.name.step
            )
        return None

    def _needed(self, tag: str) -> list[str]:
        """The files that this rank opens: of the model the first one, which is only looked at, and its own; its optimizer's."""
        names = [_model_file(self.engine, "", tag, mp_rank) for mp_rank in (0, None)]
        if _says(self.engine, "zero_optimization"):
            names.append(self.engine._get_zero_ckpt_name("", tag))
        return sorted({os.path.relpath(name, tag) for name in names})

    def _load(
        self, directory: str, own: Snapshot, files: dict[str, Any], arguments: dict[str, Any]
    ) -> tuple[str | None, dict[str, Any] | None]:
        tag = own.request.target
        agent = AsyncCheckpointAgent(os.path.join(directory, tag), files)

        def names(path: str, tag: str) -> list[FileInMemory]:
            ranks = range(max(1, int(getattr(self.engine, "mp_world_size", 1))))
            paths = [_model_file(self.engine, path, tag, mp_rank) for mp_rank in ranks]
            return [FileInMemory(os.path.basename(each), own.name.path, each) for each in paths]

        with self._standing_in(agent), _attributes(self.engine, _get_all_ckpt_names=names):
            path, client_state = self.engine.load_checkpoint(directory, tag=tag, **arguments)
        log.info("restored step %d from memory", own.name.step)
        self._engine.restored_step = own.name.step
        return (None if path is None else str(path)), client_state

    def _stored_tag(self) -> str | None:
        """
        The newest checkpoint in storage that is as it was written. None: DeepSpeed shall look for itself. All ranks call this.

        Our tracker is written before DeepSpeed's, so after a cut between the two ours is right; unless DeepSpeed's names a
        checkpoint that DeepSpeed has written itself since.
        """
        directory = self._engine.checkpoint_dir
        newest = self._engine.stored_step()
        named = _latest_tag(directory)
        path = os.path.join(directory, named or "")
        is_there = named is not None and os.path.isdir(path)
        if self._engine.is_so_for_all(is_there and not os.path.isdir(os.path.join(path, DIRECTORY))):
            return named
        found = None if newest is None else self._engine.newest_whole(newest)
        if found is None and not self._engine.is_so_for_all(newest is None and named is None):
            said = f"{LATEST} names {named}" if newest is None else f"its tracker names step {newest}"
            raise ManifestInvalid(
                f"{directory} has no complete checkpoint, but {said}. Restore the files, or start from scratch "
                "in another directory."
            )
        return None if found is None else os.path.basename(found.path)


def _latest_tag(directory: str) -> str | None:
    """What DeepSpeed's tracker names."""
    latest = os.path.join(directory, LATEST)
    if not os.path.isfile(latest):
        return None
    with open(latest, encoding="utf-8") as file:
        return file.read().strip() or None


@functools.cache
def _scripts() -> dict[str, str]:
    """As they are installed; read once, because every save asks."""
    package = importlib.util.find_spec("deepspeed")
    if package is None or package.origin is None:
        return {}
    found = {}
    for script in _SCRIPTS:
        source = os.path.join(os.path.dirname(package.origin), "utils", script)
        if os.path.isfile(source):
            with open(source, encoding="utf-8") as file:
                found[script] = file.read()
    return found


def _zero_stage(engine: Any) -> int:
    return int(engine.zero_optimization_stage()) if _says(engine, "zero_optimization") else 0


def _says(engine: Any, question: str) -> bool:
    """A yes or no of the engine; DeepSpeed's versions do not all know all questions."""
    asked = getattr(engine, question, None)
    return bool(asked()) if callable(asked) else False


def _model_file(engine: Any, directory: str, tag: str, mp_rank: int | None = None) -> str:
    placeholder = None if mp_rank is None else f"{mp_rank:02d}"
    return str(engine._get_ckpt_name(directory, tag, mp_placeholder=placeholder))


def _is_first_with(file: str) -> bool:
    """Whether no rank before us on this node has a model file of the same name. All ranks call this."""
    import torch.distributed as dist

    from dlrover.trainer.torch.flash_checkpoint.saving.agreement import own_ranks

    ranks = own_ranks()
    if not dist.is_initialized() or ranks.world_size == 1:
        return True
    files: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(files, (ranks.global_rank - ranks.local_rank, file))
    node = ranks.global_rank - ranks.local_rank
    return files.index((node, file)) == ranks.global_rank


@contextlib.contextmanager
def _attributes(target: Any, **values: Any) -> Iterator[None]:
    """Attributes of one object for the time of a block, put back whatever happens."""
    before = {name: target.__dict__[name] for name in values if name in target.__dict__}
    target.__dict__.update(values)
    try:
        yield
    finally:
        for name in values:
            target.__dict__.pop(name, None)
        target.__dict__.update(before)


__all__ = [
    "AsyncCheckpointAgent",
    "AsyncSaveEngine",
    "DeepSpeedCheckpointer",
    "SaveReason",
    "SaveResult",
    "StorageType",
]
