"""
Keeping what a library would write to files.

Libraries without an interface for it write wherever they are told to. So they are given a directory in shared memory, and whatever lies there
afterwards belongs to the checkpoint, byte for byte. Only the large files are worth more: while a `FileCollector` collects, `torch.save` and safetensors'
`save_file` give it the object instead of writing it, and its tensors are copied once, by the engine. If a library should write them in
another way some day, they become ordinary files here: slower, but never missing.

The two functions are replaced for the time of a `with` block, whatever ends it, and only for calls from the thread that
entered it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dlrover.snapshot.memory.contents import RAW
from dlrover.trainer.torch.flash_checkpoint.encoding.parts import RawPart
from dlrover.trainer.torch.flash_checkpoint.encoding.safetensors_part import SafetensorsPart
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import Skeleton

_LARGE_BYTES = 1024 * 1024
_torch_save = torch.save
_BY_NAME = (
    "safetensors.torch",
    "transformers.modeling_utils",
    "transformers.trainer",
    "peft.utils.save_and_load",
    "peft.peft_model",
)
"""Modules that may have imported safetensors' function under a name of their own."""


class FilePart(dict[str, torch.Tensor]):
    """A large file of any format: its bytes go where tensors go, not into the metadata."""

    def __init__(self, path: str) -> None:
        size = os.path.getsize(path)
        content = torch.empty(size, dtype=torch.uint8)
        with open(path, "rb") as file:
            file.readinto(memoryview(content.numpy()))
        super().__init__(content=content)

    def skeleton(self) -> Skeleton:
        return Skeleton(b"", [self["content"].untyped_storage()], RAW)


class FileCollector:
    """
    What was saved below a directory, by path relative to it: in `state_dict` the objects, in `paths` the paths as they were given.

    `save` has the signature of `torch.save`; what does not go below the directory is written as ever.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(root)
        self.state_dict: dict[str, Any] = {}
        self.paths: dict[str, str] = {}

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not self._keep(obj, f):
            _torch_save(obj, f, *args, **kwargs)

    def add_files(self) -> None:
        """What really lies below the directory now."""
        for parent, folders, files in os.walk(self.root):
            folders.sort()
            for file in sorted(files):
                path = os.path.join(parent, file)
                self._keep(_part_of(path), path)

    def clear(self) -> None:
        self.state_dict.clear()
        self.paths.clear()

    @contextlib.contextmanager
    def collecting(self, root: str | os.PathLike[str]) -> Iterator[None]:
        """This thread's saves below `root` come to us."""
        before, self.root = self.root, os.path.abspath(root)
        try:
            with _installed(self):
                yield
        finally:
            self.root = before

    def save_file(self, tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None) -> bool:
        """safetensors' function. False: nothing for us, or nothing that we could write."""
        try:
            return self._keep(SafetensorsPart(tensors, metadata), filename)
        except ValueError:
            return False

    def _keep(self, obj: Any, target: Any) -> bool:
        if not isinstance(target, (str, os.PathLike)):
            return False
        path = os.path.abspath(target)
        name = os.path.relpath(path, self.root)
        if name.split(os.sep, 1)[0] == os.pardir:
            return False
        self.state_dict[name] = obj
        self.paths[name] = os.fspath(target)
        return True


def _part_of(path: str) -> RawPart | FilePart:
    if os.path.getsize(path) >= _LARGE_BYTES:
        return FilePart(path)
    with open(path, "rb") as file:
        return RawPart(file.read())


_lock = threading.Lock()
"""Guards `_collectors`, and that the functions are replaced once and put back once."""
_collectors: dict[int, FileCollector] = {}
"""By thread."""
_put_back: list[Callable[[], None]] = []


@contextlib.contextmanager
def _installed(collector: FileCollector) -> Iterator[None]:
    thread = threading.get_ident()
    with _lock:
        assert thread not in _collectors, "a thread collects for one checkpoint at a time"
        if not _collectors:
            _install()
        _collectors[thread] = collector
    try:
        yield
    finally:
        with _lock:
            del _collectors[thread]
            if not _collectors:
                while _put_back:
                    _put_back.pop()()


def _install() -> None:
    former_save = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        collector = _collectors.get(threading.get_ident())
        if collector is None or not collector._keep(obj, f):
            former_save(obj, f, *args, **kwargs)

    _replace(torch, "save", save)
    safetensors = sys.modules.get("safetensors.torch")
    if safetensors is None:
        return
    former_save_file = safetensors.save_file

    def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None, **kwargs: Any) -> None:
        collector = _collectors.get(threading.get_ident())
        if collector is None or kwargs or not collector.save_file(tensors, filename, metadata):
            former_save_file(tensors, filename, metadata=metadata, **kwargs)

    for module_name in _BY_NAME:
        module = sys.modules.get(module_name)
        names = [name for name, value in vars(module).items() if value is former_save_file] if module else []
        for name in names:
            _replace(module, name, save_file)


def _replace(module: Any, name: str, function: Any) -> None:
    former = getattr(module, name)
    setattr(module, name, function)
    _put_back.append(lambda: setattr(module, name, former))
