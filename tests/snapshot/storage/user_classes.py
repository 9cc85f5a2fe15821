"""Storages and deletion strategies as users write them: importable by name, built from plain arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import quote

from dlrover.snapshot.storage.user_deletion import CheckpointDeletionStrategy
from dlrover.snapshot.storage.user_storage import CheckpointStorage, PosixDiskStorage


class DrawerStorage(CheckpointStorage):
    """Keeps everything in one flat directory under other names, so that nothing of it is a path of this machine."""

    def __init__(self, drawer: str, *, label: str = "none") -> None:
        self._drawer, self.label = Path(drawer), label
        self._drawer.mkdir(exist_ok=True)

    def write(self, content, path):
        data = content.encode() if isinstance(content, str) else bytes(content)
        self._place(path).write_bytes(data)

    def write_state_dict(self, state_dict, path, write_func):
        with self._place(path).open("wb") as file:
            write_func(state_dict, file)

    def read(self, path):
        return self._place(path).read_text() if self._place(path).exists() else ""

    def read_state_dict(self, path, read_func):
        return read_func(str(self._place(path)))

    def safe_rmtree(self, dir):  # noqa: A002
        for each in self._drawer.glob(f"{quote(str(dir), safe='')}*"):
            each.unlink()

    def safe_remove(self, path):
        self._place(path).unlink(missing_ok=True)

    def safe_makedirs(self, dir):  # noqa: A002
        return

    def safe_move(self, src_path, dst_path):
        self._place(src_path).rename(self._place(dst_path))

    def commit(self, step, success):
        with (self._drawer / "commits").open("a") as file:
            file.write(json.dumps([self.label, step, success]) + "\n")

    def exists(self, path):
        return any(self._drawer.glob(f"{quote(str(path), safe='')}*"))

    def listdir(self, path):
        prefix = quote(f"{path}/", safe="")
        inside = [each.name.removeprefix(prefix) for each in self._drawer.iterdir() if each.name.startswith(prefix)]
        return sorted({name.split("%2F")[0] for name in inside})

    def _place(self, path) -> Path:
        return self._drawer / quote(os.fspath(path), safe="")


class FailingStorage(PosixDiskStorage):
    def write_state_dict(self, state_dict, path, write_func):
        raise KeyError("no credentials")


class KeepEven(CheckpointDeletionStrategy):
    """Remembers what it saw, and prints, as users do."""

    def __init__(self, checkpoint_dir: str, pattern: str = "{}") -> None:
        self._directory, self._pattern = checkpoint_dir, pattern

    def clean_up(self, step, delete_func):
        print("cleaning up", step)
        if step % 2:
            delete_func(os.path.join(self._directory, self._pattern.format(step)))


class DeleteEverything(CheckpointDeletionStrategy):
    """Asks for all it can think of, the newest and a foreign directory included."""

    def __init__(self, checkpoint_dir: str) -> None:
        self._directory = checkpoint_dir

    def clean_up(self, step, delete_func):
        for name in (str(step), str(step + 1), "notes", "../elsewhere/7", "999"):
            delete_func(os.path.join(self._directory, name))


class Raising(CheckpointDeletionStrategy):
    def clean_up(self, step, delete_func):
        raise RuntimeError("cannot decide")


class TakingAnything(CheckpointDeletionStrategy):
    def __init__(self, *things: object) -> None:
        self._things = things

    def clean_up(self, step, delete_func):
        return
