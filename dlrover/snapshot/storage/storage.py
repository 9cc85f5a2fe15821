"""
Where checkpoints are kept: a local (or mounted) directory, or whatever fsspec reaches.

The interface is small on purpose. What an object store has taken is durable and named at once. On a disk everything that must survive a power cut is
said explicitly: a file is durable when `write` returned, its *name* when the directory was synced, and a rename likewise. A sync costs the
disk's patience and hardly more for many files than for one, so they are asked for together. Only what is `Renaming` can do all that, and
move a directory; a caller that wants to has to ask (`isinstance`).

Paths are strings with `/`, also for URLs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import posixpath
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from dlrover.protocol.errors import ConfigError, DLRoverError
from dlrover.snapshot.files.direct_io import UNIT_BYTES, WrittenFile, file_crc32, run_in_threads

Read = TypeVar("Read")
UNKNOWN_SIZE = -1
"""Of a file in a storage that tells no sizes."""
PREPARED = ".new-"
"""In the name of a file that has not got its own yet."""
_SYNC_THREADS = 8


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


@runtime_checkable
class Renaming(Protocol):
    """What a storage can do besides where directories can be renamed at once. Elsewhere files are written where they belong."""

    def prepare(self, path: str, content: bytes) -> str:
        """Write what shall replace a small file beside it, and say where; not durable yet."""

    def replace(self, prepared: str, path: str) -> None:
        """Give it the name: readers see the old or the new content; also after a power cut, if it was synced before."""

    def sync(self, paths: Iterable[str]) -> None:
        """Make files, and the names in directories, durable; all at the same time."""

    def rename(self, source: str, target: str) -> None:
        """The target must not exist."""

    def exchange(self, source: str, target: str) -> bool:
        """Let two directories change places at once; False where that is not possible."""


def join(*parts: str) -> str:
    return posixpath.join(*parts)


def full_path(path: str | os.PathLike[str]) -> str:
    """Independent of the working directory. A URL is that already."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


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
        raise ConfigError(f"{location}: give a local directory as a plain path: {location.removeprefix('file://')}")
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
        prepared = self.prepare(path, content)
        try:
            self.sync([prepared])
            self.replace(prepared, path)
        except BaseException:
            self.remove_file(prepared)
            raise
        self.sync([parent_of(path)])

    def prepare(self, path: str, content: bytes) -> str:
        temporary = f"{path}{PREPARED}{secrets.token_hex(4)}"
        try:
            with open(temporary, "wb") as file:
                file.write(content)
        except BaseException:
            self.remove_file(temporary)
            raise
        return temporary

    def replace(self, prepared: str, path: str) -> None:
        os.replace(prepared, path)

    def sync(self, paths: Iterable[str]) -> None:
        """The file system's journal takes what several threads want at a time in one turn."""
        left = list(dict.fromkeys(paths))
        if len(left) > 1:
            run_in_threads(lambda: _sync_some(left), min(len(left), _SYNC_THREADS))
        _sync_some(left)

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
        while os.path.isdir(path):
            with contextlib.suppress(FileNotFoundError):  # another deleter is quicker: both go on until it is gone
                shutil.rmtree(path)
        self.remove_file(path)

    def untouched_for(self, path: str) -> float:
        """Seconds since anything below this directory was written or renamed."""
        times = [os.stat(path).st_mtime]
        for parent, folders, files in os.walk(path):
            for name in (*folders, *files):
                with contextlib.suppress(FileNotFoundError):
                    times.append(os.lstat(os.path.join(parent, name)).st_mtime)
        return max(0.0, time.time() - max(times))


def _sync_some(left: list[str]) -> None:
    """Until none is left; several threads share the list."""
    while True:
        try:
            path = left.pop()
        except IndexError:
            return
        _sync(path)


def _sync(path: str) -> None:
    fd = os.open(path or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # nobody reads it soon
    except OSError as error:
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        if not is_directory or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise  # only directories of some network file systems cannot, and need not
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
                f"Checkpoints in {location} need the package fsspec and the package of the store (s3fs for "
                "s3://). Install fsspec with: pip install 'dlrover[storage]'"
            ) from error
        try:
            self._files = fsspec.url_to_fs(location, **options)[0]
        except (ImportError, ValueError) as error:
            raise ConfigError(f"Checkpoints in {location} cannot be reached: {error}") from error

    def make_directory(self, path: str) -> None:
        with _told_as_os_error(path):
            self._files.makedirs(path, exist_ok=True)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        with _told_as_os_error(path), self._files.open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def write_atomic(self, path: str, content: bytes) -> None:
        with _told_as_os_error(path):
            self._files.pipe_file(path, content)

    def read(self, path: str) -> bytes:
        with _told_as_os_error(path):
            return bytes(self._files.cat_file(path))

    def load(self, path: str, read: Callable[[Any], Read]) -> Read:
        with self._open(path) as file:
            return read(file)

    def measure(self, path: str) -> WrittenFile:
        crc = size = 0
        with self._open(path) as file:
            while content := file.read(UNIT_BYTES):
                crc, size = zlib.crc32(content, crc), size + len(content)
        return WrittenFile(size, crc)

    def list(self, path: str) -> list[StoredName]:
        self._files.invalidate_cache()  # other machines write there too
        try:
            with _told_as_os_error(path):
                found = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return []
        names = (
            StoredName(posixpath.basename(entry["name"].rstrip("/")), entry["type"] == "directory", entry["size"] or 0)
            for entry in found
        )
        return sorted(name for name in names if name.name)

    def remove_file(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _told_as_os_error(path):
            self._files.rm_file(path)

    def remove_tree(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _told_as_os_error(path):
            self._files.rm(path, recursive=True)

    def _open(self, path: str) -> io.BufferedReader:
        self._files.invalidate_cache()  # a size that it remembers may be of a former file of this name
        with _told_as_os_error(path):
            return io.BufferedReader(_StoredFile(self._files.open(path, "rb"), path), UNIT_BYTES)


class _StoredFile(io.RawIOBase):
    """A file of a store whose errors are those of files."""

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _told_as_os_error(self._path):
            return int(self._file.readinto(buffer))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def _told_as_os_error(path: str) -> Iterator[None]:
    """Clients of object stores have errors of their own, each others; who saves and restores knows those of files."""
    try:
        yield
    except (OSError, DLRoverError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error
