"""
Storages of the user's: the interface that scripts implement, the two that come with it, and how ours uses theirs.

A script hands an object over as `storage=`. The agent builds it again from the words of `class_meta` and writes through it. Nothing is asked of
it that the interface does not promise: no rename, no sizes, no atomic replacement. As in an object store, files go to their places at once
and the global manifest makes them count.

State files go through `write_state_dict` and `read_state_dict`, as they always did. What comes as the state dict is no dictionary
here but the finished bytes of the file (the agent has no tensor library); `write_func(state_dict, path_or_file)` writes them.
"""

from __future__ import annotations

import abc
import logging
import os
import posixpath
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, TypeVar

import msgspec

from dlrover.protocol.errors import ConfigError, DLRoverError
from dlrover.snapshot.files.direct_io import UNIT_BYTES, WrittenFile
from dlrover.snapshot.storage.class_meta import ClassMeta, Rebuildable, build, describe
from dlrover.snapshot.storage.commit import TRACKER
from dlrover.snapshot.storage.storage import UNKNOWN_SIZE, LocalStorage, Storage, StoredName, storage_for
from dlrover.snapshot.storage.user_deletion import CheckpointDeletionStrategy
from dlrover.snapshot.storage.user_deletion import KeepLatestStepStrategy as KeepLatestStepStrategy
from dlrover.snapshot.storage.user_deletion import KeepStepIntervalStrategy as KeepStepIntervalStrategy

log = logging.getLogger("dlrover.snapshot")

Read = TypeVar("Read")
AnyPath = str | os.PathLike[str]
_built: dict[bytes, UserStorage] = {}
_building = threading.Lock()
"""Guards the above: the threads that write and that commit ask for the same storage."""


class CheckpointStorage(Rebuildable, abc.ABC):
    """Where checkpoints go. Constructor arguments have to be plain (JSON), and the class importable by its module's name."""

    @abc.abstractmethod
    def write(self, content: str | bytes | memoryview, path: AnyPath) -> None:
        """A small file, whole or not at all."""

    @abc.abstractmethod
    def write_state_dict(self, state_dict: Any, path: AnyPath, write_func: Callable[[Any, Any], Any]) -> None:
        """A state file: `write_func(state_dict, target)` writes it to a path or an open file."""

    @abc.abstractmethod
    def read(self, path: AnyPath) -> str | bytes:
        """Empty when there is none."""

    @abc.abstractmethod
    def read_state_dict(self, path: AnyPath, read_func: Callable[[Any], Any]) -> Any:
        """What `read_func(source)` makes of a path or an open file; {} when there is none."""

    @abc.abstractmethod
    def safe_rmtree(self, dir: AnyPath) -> None: ...  # noqa: A002

    @abc.abstractmethod
    def safe_remove(self, path: AnyPath) -> None: ...

    @abc.abstractmethod
    def safe_makedirs(self, dir: AnyPath) -> None: ...  # noqa: A002

    @abc.abstractmethod
    def safe_move(self, src_path: AnyPath, dst_path: AnyPath) -> None: ...

    @abc.abstractmethod
    def commit(self, step: int, success: bool) -> None:
        """The checkpoint of a step counts, or was given up."""

    @abc.abstractmethod
    def exists(self, path: AnyPath) -> bool: ...

    @abc.abstractmethod
    def listdir(self, path: AnyPath) -> list[str]: ...


class PosixDiskStorage(CheckpointStorage):
    """A directory of a mounted file system."""

    def write(self, content: str | bytes | memoryview, path: AnyPath) -> None:
        data = content.encode() if isinstance(content, str) else bytes(content)
        LocalStorage().write_atomic(os.path.abspath(path), data)

    def write_state_dict(
        self, state_dict: Any, path: AnyPath, write_func: Callable[[Any, Any], Any] | None = None
    ) -> None:
        """Without `write_func` only the directory is made, as in the original."""
        target = os.path.abspath(path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if write_func is None:
            return
        temporary = f"{target}.new-{os.getpid()}"
        try:
            write_func(state_dict, temporary)
            _sync_file(temporary)
            os.replace(temporary, target)
        except BaseException:
            LocalStorage().remove_file(temporary)
            raise
        LocalStorage().sync([os.path.dirname(target)])

    def read(self, path: AnyPath, mode: str = "r") -> str | bytes:
        try:
            with open(path, mode) as file:
                content: str | bytes = file.read()
        except FileNotFoundError:
            return b"" if "b" in mode else ""
        return content

    def read_state_dict(self, path: AnyPath, read_func: Callable[[Any], Any]) -> Any:
        return read_func(os.fspath(path)) if os.path.exists(path) else {}

    def safe_rmtree(self, dir: AnyPath) -> None:  # noqa: A002
        try:
            shutil.rmtree(dir)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s could not be removed: %s", dir, error)

    def safe_remove(self, path: AnyPath) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s could not be removed: %s", path, error)

    def safe_makedirs(self, dir: AnyPath) -> None:  # noqa: A002
        os.makedirs(dir, exist_ok=True)

    def safe_move(self, src_path: AnyPath, dst_path: AnyPath) -> None:
        if not os.path.exists(src_path) or os.path.lexists(dst_path):
            log.warning("%s was not moved to %s: the source does not exist, or the target exists", src_path, dst_path)
            return
        shutil.move(src_path, dst_path)

    def commit(self, step: int, success: bool) -> None:
        log.info("the checkpoint of step %d %s", step, "is committed" if success else "was given up")

    def exists(self, path: AnyPath) -> bool:
        return os.path.exists(path)

    def listdir(self, path: AnyPath) -> list[str]:
        return os.listdir(path)


class PosixStorageWithDeletion(PosixDiskStorage):
    """The same, and a strategy is asked about the step that the tracker named before."""

    def __init__(self, tracker_file: str, deletion_strategy: CheckpointDeletionStrategy) -> None:
        self.tracker_file = tracker_file
        self.deletion_strategy = deletion_strategy
        self._former_step: int | None = None

    def write(self, content: str | bytes | memoryview, path: AnyPath) -> None:
        if os.fspath(path).endswith(self.tracker_file):
            self._former_step = _number(self.read(path))
        super().write(content, path)

    def commit(self, step: int, success: bool) -> None:
        super().commit(step, success)
        former, self._former_step = self._former_step, None
        if success and former is not None and former != step:
            self.deletion_strategy.clean_up(former, self.safe_rmtree)


def get_checkpoint_storage(deletion_strategy: CheckpointDeletionStrategy | None = None) -> CheckpointStorage:
    if deletion_strategy is None:
        return PosixDiskStorage()
    return PosixStorageWithDeletion(TRACKER, deletion_strategy)


def shown_storage(directory: str, storage: object, deletion_strategy: object) -> Any:
    """What a script finds as `checkpointer.storage`: its own, or one for this directory. None: the directory is a URL."""
    if storage is not None:
        return storage
    if "://" in directory:
        return None
    return get_checkpoint_storage(
        deletion_strategy if isinstance(deletion_strategy, CheckpointDeletionStrategy) else None
    )


def meta_for(storage: object) -> tuple[ClassMeta | None, CheckpointDeletionStrategy | None]:
    """
    How the agent shall build a `storage=` of the user's, and the strategy that came with it. None: our own storage does the same, better.

    Raises ConfigError for what the agent could not build.
    """
    if storage is None or type(storage) is PosixDiskStorage:
        return None, None
    if type(storage) is PosixStorageWithDeletion:
        return None, storage.deletion_strategy
    missing = [
        name for name in sorted(CheckpointStorage.__abstractmethods__) if not callable(getattr(storage, name, None))
    ]
    if missing:
        raise ConfigError(
            f"storage={type(storage).__name__} lacks {', '.join(missing)}. Derive it from CheckpointStorage or PosixDiskStorage of "
            "dlrover.python.common.storage."
        )
    return describe(storage, CheckpointStorage), None


def storage_of(directory: str, meta: ClassMeta | None = None) -> Storage:
    """
    The storage of a job's checkpoints: the user's own, or what the directory says.

    One object per description and process: it may hold a connection, or remember something between two calls.
    """
    if meta is None:
        return storage_for(directory)
    key = msgspec.msgpack.encode(meta)
    with _building:
        if key not in _built:
            _built[key] = UserStorage(build(meta, CheckpointStorage))
        return _built[key]


def announce(storage: Storage, step: int, *, is_committed: bool) -> None:
    """A storage of the user's is told how an attempt ended. That it fails then changes nothing about the checkpoint."""
    if isinstance(storage, UserStorage):
        try:
            storage.announce(step, is_committed)
        except (OSError, DLRoverError) as error:
            log.error("step %d: %s", step, error)


class UserStorageFailed(DLRoverError):
    """The storage of the user's raised something."""


class FileContent:
    """The finished bytes of a state file, in place of a state dict."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = chunks

    def write_to(self, target: AnyPath | BinaryIO) -> None:
        if isinstance(target, (str, os.PathLike)):
            with open(target, "wb") as file:
                self.write_to(file)
            return
        for chunk in self._chunks:
            target.write(chunk)

    def __reduce__(self) -> Any:
        raise TypeError(
            "this state_dict holds the finished bytes of a file and cannot be pickled. Call "
            "write_func(state_dict, path) instead"
        )


class UserStorage:
    """A `CheckpointStorage` as our commit wants it."""

    def __init__(self, inner: CheckpointStorage) -> None:
        self._inner = inner

    def announce(self, step: int, is_committed: bool) -> None:
        self._call("commit", step, is_committed)

    def make_directory(self, path: str) -> None:
        self._call("safe_makedirs", path)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._call("write_state_dict", FileContent(chunks), path, lambda content, target: content.write_to(target))

    def write_atomic(self, path: str, content: bytes) -> None:
        self._call("write", content.decode() if content.isascii() else content, path)

    def read(self, path: str) -> bytes:
        content = self._call("read", path)
        if not content and not self._call("exists", path):
            raise FileNotFoundError(path)
        return content.encode() if isinstance(content, str) else bytes(content or b"")

    def load(self, path: str, read: Callable[[Any], Read]) -> Read:
        if not self._call("exists", path):
            raise FileNotFoundError(path)
        found: Read = self._call("read_state_dict", path, read)
        return found

    def measure(self, path: str) -> WrittenFile:
        return self.load(path, _measure)

    def list(self, path: str) -> list[StoredName]:
        if not self._call("exists", path):
            return []
        names = self._call("listdir", path)
        return sorted(_stored_name(path, posixpath.basename(str(name).rstrip("/"))) for name in names)

    def remove_file(self, path: str) -> None:
        self._call("safe_remove", path)

    def remove_tree(self, path: str) -> None:
        self._call("safe_rmtree", path)

    def move(self, source: str, target: str) -> None:
        """Only for scripts that commit by themselves: our commit moves nothing."""
        self._call("safe_move", source, target)

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._inner, name)(*args)
        except (OSError, DLRoverError):
            raise
        except (Exception, SystemExit) as error:  # code of the user's: it must not look like a bug of ours, nor end us
            raise UserStorageFailed(
                f"The storage {type(self._inner).__name__} failed in {name}: {type(error).__name__}: {error}"
            ) from error


def _stored_name(directory: str, name: str) -> StoredName:
    """The interface tells names only. Where they are files of this machine more is known."""
    path = posixpath.join(directory, name)
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return StoredName(name, True, UNKNOWN_SIZE)  # looked into like a directory: a file has no manifest inside
    return StoredName(name, os.path.isdir(path), found.st_size)


def _measure(source: AnyPath | BinaryIO) -> WrittenFile:
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb") as file:
            return _measure(file)
    crc = size = 0
    while content := source.read(UNIT_BYTES):
        crc, size = zlib.crc32(content, crc), size + len(content)
    return WrittenFile(size, crc)


def _sync_file(path: str) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _number(content: str | bytes) -> int | None:
    try:
        return int(content)
    except ValueError:
        return None
