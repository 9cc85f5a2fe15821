"""
The systems of the checkpoint benchmark, each used as its documentation says, behind one small interface.

Runs inside the measured process, in the environment of that system: nothing is imported before it is needed.

All of them get the same live state. What a user has to wait for between a save and the next change of the state is part of what a save
costs, wherever the system puts it: into the call, into `before_step`, or into a hook of the optimizer, which the worker times itself.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from checkpoint_state import fill

TRACKER = "dlrover_latest.txt"
"""Ours and dlrover 0.6.1's: the newest committed step."""
PATIENCE = 600.0
_LOOK_EVERY = 0.002

State = dict[str, Any]


class Unsupported(Exception):
    """This system cannot do that here; the message says why."""


class System(Protocol):
    has_memory: bool
    """It has saves that stay in memory and outlive the process."""
    is_async: bool
    """A save to storage goes on after the call has returned."""
    is_by_one_rank: bool
    """Only rank 0 saves; the others need not call."""

    def save(self, step: int, state: State, *, is_storage: bool) -> None:
        """The call for which training stands still."""

    def before_step(self) -> None:
        """What the user has to wait for before the optimizer changes the state."""

    def wait(self) -> None:
        """Until the newest save to storage is complete, by the system's own word."""

    def load(self, live: State) -> None:
        """The newest state into the live tensors: from memory where this life has it, else from storage."""

    def close(self) -> None: ...


class TorchSave:
    has_memory = False
    is_async = False
    is_by_one_rank = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, step: int, state: State, *, is_storage: bool) -> None:
        import torch

        path = self._directory / f"{step}"
        path.mkdir()
        torch.save(state, path / "state.tmp")
        os.replace(path / "state.tmp", path / "state.pt")

    def before_step(self) -> None:
        return

    def wait(self) -> None:
        return

    def load(self, live: State) -> None:
        import torch

        fill(live, torch.load(newest(self._directory) / "state.pt", map_location="cpu", weights_only=True))

    def close(self) -> None:
        return


class TorchSaveMapped(TorchSave):
    """The same file, mapped instead of read."""

    def load(self, live: State) -> None:
        import torch

        fill(live, torch.load(newest(self._directory) / "state.pt", map_location="cpu", weights_only=True, mmap=True))


class Dcp:
    """torch's distributed checkpoint. `is_cached` reuses one stager, which is what its authors advise for many saves."""

    has_memory = False
    is_by_one_rank = False

    def __init__(
        self, directory: Path, *, how: str = "sync", is_cached: bool = False, is_staging_async: bool = False
    ) -> None:
        import torch.distributed as dist

        self.is_async = how != "sync"
        self._directory, self._how = directory, how
        if not dist.is_initialized():  # the process executor has no other way to find its peers
            dist.init_process_group("gloo")
        # Its own group, or its background collectives and those of the training would take each other's turn and hang.
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._stager: Any = None
        if is_cached:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            # Pinned memory and copies that do not block need an accelerator; there is none here.
            self._stager = DefaultStager(StagingOptions(False, how == "process", is_staging_async, False))
        self._staged: Any = None
        self._written: Any = None

    def save(self, step: int, state: State, *, is_storage: bool) -> None:
        import torch.distributed.checkpoint as dcp

        if self._how == "sync":
            dcp.save(state, checkpoint_id=str(self._directory / f"{step}"), process_group=self._group)
            return
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

        answer = dcp.async_save(
            state,
            checkpoint_id=str(self._directory / f"{step}"),
            async_checkpointer_type=AsyncCheckpointerType(self._how),
            async_stager=self._stager,
            process_group=self._group,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._written = answer.staging_completion, answer.upload_completion
        else:
            self._written = answer

    def before_step(self) -> None:
        if self._staged is not None:
            self._staged.result(PATIENCE)
            self._staged = None

    def wait(self) -> None:
        if self._written is not None:
            self._written.result(PATIENCE)
            self._written = None

    def load(self, live: State) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(live, checkpoint_id=str(newest(self._directory)))

    def close(self) -> None:
        import torch.distributed as dist

        if self._stager is not None:
            self._stager.close()
        dist.destroy_process_group()


class TorchSnapshot:
    has_memory = False
    is_by_one_rank = False

    def __init__(self, directory: Path, *, is_async: bool = False) -> None:
        self.is_async = is_async
        self._directory = directory
        self._pending: Any = None

    def save(self, step: int, state: State, *, is_storage: bool) -> None:
        from torchsnapshot import Snapshot

        take = Snapshot.async_take if self.is_async else Snapshot.take
        self._pending = take(path=str(self._directory / f"{step}"), app_state=self._app_state(state), replicated=["**"])

    def before_step(self) -> None:
        return

    def wait(self) -> None:
        if self.is_async and self._pending is not None:
            self._pending.wait()

    def load(self, live: State) -> None:
        from torchsnapshot import Snapshot

        Snapshot(path=str(newest(self._directory))).restore(app_state=self._app_state(live))

    def close(self) -> None:
        return

    def _app_state(self, state: State) -> dict[str, Any]:
        from torchsnapshot import StateDict

        return {"state": StateDict(**state)}


class Ours:
    has_memory = True
    is_async = True
    is_by_one_rank = False

    def __init__(self, directory: Path, *, is_lazy: bool = False) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self._types, self._directory = StorageType, directory
        in_constructor = "lazy" in inspect.signature(DdpCheckpointer.__init__).parameters
        in_call = "lazy" in inspect.signature(DdpCheckpointer.save_checkpoint).parameters
        if is_lazy and not (in_constructor or in_call):
            raise Unsupported("this version has no lazy saves")
        self._checkpointer: Any = DdpCheckpointer(str(directory), **({"lazy": is_lazy} if in_constructor else {}))
        self._options = {"lazy": is_lazy} if in_call else {}
        self._step = -1

    def save(self, step: int, state: State, *, is_storage: bool) -> None:
        storage_type = self._types.DISK if is_storage else self._types.MEMORY
        result = self._checkpointer.save_checkpoint(step, state, storage_type=storage_type, **self._options)
        if not result and result.reason != "not_a_saving_rank":
            raise RuntimeError(f"step {step} was not saved: {result}")
        if is_storage:
            self._step = step

    def before_step(self) -> None:
        return

    def wait(self) -> None:
        wait_for_tracker(self._directory, self._step)

    def load(self, live: State) -> None:
        has_into = "into" in inspect.signature(self._checkpointer.load_checkpoint).parameters
        if has_into:
            self._checkpointer.load_checkpoint(into=live)
        else:
            fill(live, self._checkpointer.load_checkpoint())

    def close(self) -> None:
        self._checkpointer.close()


class Dlrover061:
    has_memory = True
    is_async = True
    is_by_one_rank = False

    def __init__(self, directory: Path) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self._types, self._directory = StorageType, directory
        self._checkpointer: Any = DdpCheckpointer(str(directory))
        self._step = -1

    def save(self, step: int, state: State, *, is_storage: bool) -> None:
        storage_type = self._types.DISK if is_storage else self._types.MEMORY
        self._checkpointer.save_checkpoint(step, state, storage_type=storage_type)
        if is_storage:
            self._step = step

    def before_step(self) -> None:
        return

    def wait(self) -> None:
        wait_for_tracker(self._directory, self._step)

    def load(self, live: State) -> None:
        # What it returns from memory are views of its shared segment, which the next save overwrites: copied, as its users have to.
        fill(live, self._checkpointer.load_checkpoint())

    def close(self) -> None:
        return


SYSTEMS: dict[str, Callable[[Path], System]] = {
    "torch.save": TorchSave,
    "torch.save, mmap load": TorchSaveMapped,
    "dcp.save": Dcp,
    "dcp.async_save thread": lambda directory: Dcp(directory, how="thread"),
    "dcp.async_save thread, cached": lambda directory: Dcp(directory, how="thread", is_cached=True),
    "dcp.async_save thread, zero overhead": lambda directory: Dcp(
        directory, how="thread", is_cached=True, is_staging_async=True
    ),
    "dcp.async_save process": lambda directory: Dcp(directory, how="process"),
    "dcp.async_save process, cached": lambda directory: Dcp(directory, how="process", is_cached=True),
    "torchsnapshot": TorchSnapshot,
    "torchsnapshot async": lambda directory: TorchSnapshot(directory, is_async=True),
    "dlrover-0.6.1": Dlrover061,
    "ours": Ours,
    "ours lazy": lambda directory: Ours(directory, is_lazy=True),
    "ours plain": Ours,
    "ours plain lazy": lambda directory: Ours(directory, is_lazy=True),
}


def newest(directory: Path) -> Path:
    """The folder of the highest step."""
    return max((path for path in directory.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))


def wait_for_tracker(directory: Path, step: int) -> None:
    """Looked at every 2 ms: both systems' own waits look ten times a second or more rarely, which would be in the figure."""
    deadline = time.monotonic() + PATIENCE
    tracker = directory / TRACKER
    while True:
        try:
            if tracker.read_text().strip() == str(step):
                return
        except FileNotFoundError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step} was not committed within {PATIENCE:g} s")
        time.sleep(_LOOK_EVERY)
