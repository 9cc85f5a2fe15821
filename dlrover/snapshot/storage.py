"""
Where checkpoints are kept: a local (or mounted) directory, or whatever fsspec reaches.

The interface is small on purpose. Everything that must survive a power cut is said explicitly: a file is durable when `write` returned, its *name*
when the directory was synced, and a rename likewise. Object stores have no rename, but what they store is durable and
named at once: only what is `Renaming` too can move a directory, and whoever wants to has to ask (`isinstance`).

Paths are strings with `/`, also for URLs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import posixpath
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.direct_io import UNIT_BYTES, WrittenFile, file_crc32

Read = TypeVar("Read")
UNKNOWN_SIZE = -1
"""Of a file in a storage that tells no sizes."""


class StoredName(Struct, frozen=True, order=True):
    name: str
    is_directory: bool
    size_bytes: int


class Storage(Protocol):
    def make_directory(self, path: str) -> None: ...
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Durable when it returns, but for the name."""

    def write_atomic(self, path: str, content: bytes) -> None:
        """Replace a small file: readers see the old or the new content, also after a power cut."""

    def read(self, path: str) -> bytes:
        """FileNotFoundError when there is none."""

    def load(self, path: str, read: Callable[[Any], Read]) -> Read:
        """Let a function read a file of any size: it gets a path of this machine or an open file. FileNotFoundError as above."""

    def measure(self, path: str) -> WrittenFile:
        """Size and CRC-32 of a file of any size, as it is stored."""

    def list(self, path: str) -> list[StoredName]:
        """Sorted; empty when there is no such directory."""

    def remove_file(self, path: str) -> None:
        """Nothing happens when there is none."""

    def remove_tree(self, path: str) -> None: ...
    def sync_directory(self, path: str) -> None: ...


@runtime_checkable
class Renaming(Protocol):
    """What a storage can do besides where directories can be renamed at once. Elsewhere files are written where they belong."""

    def rename(self, source: str, target: str) -> None:
        """The target must not exist."""

    def exchange(self, source: str, target: str) -> bool:
        """Let two directories change places at once; False where that is not possible."""


def join(*parts: str) -> str:
    return posixpath.join(*parts)


def parent_of(path: str) -> str:
    return posixpath.dirname(path)


def read_bytes(source: Any) -> bytes:
    """For `load`: the whole content, of a path or an open file."""
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb") as file:
            return file.read()
    content: bytes = source.read()
    return content


def storage_for(location: str, **options: Any) -> Storage:
    """`options` go to fsspec: credentials, endpoints."""
    if "://" not in location:
        return LocalStorage()
    if location.startswith("file://"):
        raise ConfigError(f"{location}: give a local directory as a plain path, {location.removeprefix('file://')}")
    return FsspecStorage(location, options)


class LocalStorage:
    """A directory of a file system that this machine has mounted."""

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        with open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def write_atomic(self, path: str, content: bytes) -> None:
        temporary = f"{path}.new-{secrets.token_hex(4)}"
        try:
            self.write(temporary, [content])
            os.replace(temporary, path)
        except BaseException:
            self.remove_file(temporary)
            raise
        self.sync_directory(parent_of(path))

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def load(self, path: str, read: Callable[[Any], Read]) -> Read:
        return read(path)

    def measure(self, path: str) -> WrittenFile:
        return file_crc32(path)

    def list(self, path: str) -> list[StoredName]:
        try:
            with os.scandir(path) as entries:
                return sorted(found for entry in entries if (found := _stored_name(entry)) is not None)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def rename(self, source: str, target: str) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "the target of a rename exists", target)
        os.rename(source, target)

    def exchange(self, source: str, target: str) -> bool:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "renameat2"):
            return False
        at_cwd, exchange = -100, 2
        if libc.renameat2(at_cwd, os.fsencode(source), at_cwd, os.fsencode(target), exchange) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise OSError(code, os.strerror(code), source, None, target)

    def remove_file(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=False) if os.path.isdir(path) else self.remove_file(path)

    def untouched_for(self, path: str) -> float:
        """Seconds since anything below this directory was written or renamed."""
        times = [os.stat(path).st_mtime]
        for parent, folders, files in os.walk(path):
            for name in (*folders, *files):
                with contextlib.suppress(FileNotFoundError):
                    times.append(os.lstat(os.path.join(parent, name)).st_mtime)
        return max(0.0, time.time() - max(times))

    def sync_directory(self, path: str) -> None:
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
                raise
        finally:
            os.close(fd)


def _stored_name(entry: os.DirEntry[str]) -> StoredName | None:
    """None for what has just been removed, and for links that lead nowhere: they must not hide their neighbours."""
    try:
        return StoredName(entry.name, entry.is_dir(), entry.stat().st_size)
    except FileNotFoundError:
        return None


class FsspecStorage:
    """An object store, or anything else that fsspec speaks. It is not `Renaming`: a rename there copies file by file."""

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(
                f"Checkpoints in {location} need the fsspec package. Install it with: pip install 'dlrover[storage]'"
            ) from error
        try:
            self._files = fsspec.url_to_fs(location, **options)[0]
        except (ImportError, ValueError) as error:
            raise ConfigError(f"Checkpoints in {location} cannot be reached: {error}") from error

    def make_directory(self, path: str) -> None:
        self._files.makedirs(path, exist_ok=True)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        with self._files.open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def write_atomic(self, path: str, content: bytes) -> None:
        self._files.pipe_file(path, content)

    def read(self, path: str) -> bytes:
        return bytes(self._files.cat_file(path))

    def load(self, path: str, read: Callable[[Any], Read]) -> Read:
        with self._files.open(path, "rb") as file:
            return read(file)

    def measure(self, path: str) -> WrittenFile:
        crc = size = 0
        with self._files.open(path, "rb") as file:
            while content := file.read(UNIT_BYTES):
                crc, size = zlib.crc32(content, crc), size + len(content)
        return WrittenFile(size, crc)

    def list(self, path: str) -> list[StoredName]:
        self._files.invalidate_cache()  # other machines write there too
        try:
            found = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return []
        names = (
            StoredName(posixpath.basename(entry["name"].rstrip("/")), entry["type"] == "directory", entry["size"] or 0)
            for entry in found
        )
        return sorted(name for name in names if name.name)

    def remove_file(self, path: str) -> None:
        try:
            self._files.rm_file(path)
        except FileNotFoundError:
            return

    def remove_tree(self, path: str) -> None:
        try:
            self._files.rm(path, recursive=True)
        except FileNotFoundError:
            return

    def sync_directory(self, path: str) -> None:
        """What an object store has taken is durable."""
