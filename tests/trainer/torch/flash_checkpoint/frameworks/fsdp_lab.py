"""
Ranks for the tests of cut states: a few processes that form one world after another, and share the memory of one "node".

A scene is a function that every rank of a world runs; it gets its `Rank`. The processes stay, so a scene of four ranks can be followed by one of three
that finds the snapshots of the former: all that a new world on the same node would find.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import shutil
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PATIENCE = 60.0


class Rank(NamedTuple):
    rank: int
    world_size: int
    folder: Path
    """Empty at the beginning of a test, and kept from scene to scene."""
    front: Any = None
    """Which checkpointer a scene for several of them uses."""


Scene = Callable[[Rank], Any]


class Ranks:
    """Processes with torch imported; `play` lets the first ones of them be a world."""

    def __init__(self, count: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.trainer.torch.flash_checkpoint.frameworks.fsdp_preload"])
        self._pipes: list[Any] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def play(self, scene: Scene, folder: Path, homes: Sequence[Path], front: Any = None) -> list[Any]:
        """A world with one rank for each home. What each rank's scene returned; raises what went wrong, with its traceback."""
        world_size = len(homes)
        meeting = f"file://{folder}/meeting-{uuid.uuid4().hex}"
        for rank in range(world_size):
            self._pipes[rank].send((scene, Rank(rank, world_size, folder, front), homes[rank], meeting))
        answers = []
        for rank in range(world_size):
            if not self._pipes[rank].poll(PATIENCE):
                raise AssertionError(f"rank {rank} did not end within {PATIENCE:g} s")
            answers.append(self._pipes[rank].recv())
        troubles = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if not answer[0]]
        assert not troubles, "\n".join(troubles)
        return [answer[1] for answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


class Node:
    """One test's place: files, and memory that all its worlds share."""

    def __init__(self, ranks: Ranks, folder: Path, front: Any = None) -> None:
        self._ranks, self.folder, self._front = ranks, folder, front
        self.home = Path(tempfile.mkdtemp(prefix="dlrover-test-", dir="/dev/shm"))

    def play(self, scene: Scene, world_size: int = 2) -> list[Any]:
        return self._ranks.play(scene, self.folder, [self.home] * world_size, self._front)

    def play_apart(self, scene: Scene, homes: Sequence[str]) -> list[Any]:
        """Every rank on a node of its own; the names say which."""
        for name in homes:
            (self.home / name).mkdir(exist_ok=True)
        return self._ranks.play(scene, self.folder, [self.home / name for name in homes], self._front)

    @contextlib.contextmanager
    def without_memory(self) -> Iterator[None]:
        """As after a restart of the machine, until the end of the block."""
        aside = self.home.with_name(f"{self.home.name}-aside")
        self.home.rename(aside)
        self.home.mkdir(mode=0o700)
        try:
            yield
        finally:
            shutil.rmtree(self.home)
            aside.rename(self.home)

    def close(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)


def _serve(pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported is not looked at again: each collection below takes some milliseconds
    while True:
        try:
            scene, rank, home, meeting = pipe.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank.rank),
            WORLD_SIZE=str(rank.world_size),
            LOCAL_RANK=str(rank.rank),
            LOCAL_WORLD_SIZE=str(rank.world_size),
        )
        try:
            with _memory_of(home):
                dist.init_process_group("gloo", init_method=meeting, rank=rank.rank, world_size=rank.world_size)
                answer = (True, scene(rank))
                dist.barrier()
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            gc.collect()  # models stand in cycles and hold the group, whose threads must end before the interpreter does
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)


class _memory_of:  # noqa: N801  # used as a function
    """Engines that are made meanwhile keep their segments in this directory, as those under one agent do."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def __enter__(self) -> None:
        from dlrover.trainer.torch.flash_checkpoint import engine
        from dlrover.trainer.torch.flash_checkpoint.saving.outlets import ThreadOutlet

        home = self._home
        made: list[ThreadOutlet] = []

        class NodeOutlet(ThreadOutlet):
            def __init__(self) -> None:
                super().__init__(home.parent / f"{home.name}-own")
                self.home = home
                made.append(self)

        self._engine, self._made, self._original = engine, made, engine.ThreadOutlet
        engine.ThreadOutlet = NodeOutlet  # type: ignore[misc]

    def __exit__(self, *_: object) -> None:
        self._engine.ThreadOutlet = self._original  # type: ignore[misc]
        for outlet in self._made:
            outlet.close()
