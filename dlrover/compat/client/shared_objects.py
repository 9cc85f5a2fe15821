"""
A lock, a queue and a dictionary that processes of one node share by name, and named memory beside them.

Our own checkpoints need none of this: what trainers and agents share stands in the segments. Scripts and extensions written for the
original use these classes (`dlrover.python.common.multi_process`), so they are kept, in a form that cannot harm: one process creates
the object and serves it on a unix socket in a directory of its user alone; messages are MessagePack and never pickles; a
lock belongs to the connection that took it, only that one can release it, and the kernel tells when it is gone.

No request waits long at the server: a client that wants to wait asks again, in slices, until its own deadline.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import mmap
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
from msgspec import Struct

from dlrover.host.ownership import check_directory, check_server, make_private, open_checked, peer_credentials
from dlrover.protocol.errors import DLRoverError, Rejected
from dlrover.protocol.local_frames import pack, receive_frame

log = logging.getLogger("dlrover.compat.client.shared_objects")

SOCKET_TMP_DIR = f"/tmp/dlrover-sockets-{os.getuid()}"
SUCCESS_CODE = "OK"
ERROR_CODE = "ERROR"
RETRIES = 30
"""How often a client looks again for a server that is not there yet."""
PAUSE = 1.0
"""Seconds between two looks."""
PATIENCE = 30.0
"""Seconds that a client waits for one answer of a server."""
_SLICE = 1.0
"""Longest wait of one request at the server."""
_MAX_PATH = 100
"""Bytes of a socket's path; the kernel takes 108."""
_MEMORY_DIR = Path("/dev/shm")

P = ParamSpec("P")
R = TypeVar("R")


class SharedObjectFailed(DLRoverError, RuntimeError):
    """The server of a shared object refused a request. A `RuntimeError`, as scripts of the original expect it."""


@dataclass(frozen=True)
class SocketResponse:
    status: str = ""


@dataclass(frozen=True)
class LockedResponse(SocketResponse):
    """What a client's `locked` gives: the answer as `locked`, and as its truth."""

    locked: bool = False

    def __bool__(self) -> bool:
        return self.locked


class _Request(Struct, array_like=True):
    method: str
    args: list[Any] = []


class _Reply(Struct, array_like=True):
    value: Any = None
    error: str = ""


_REQUEST_DECODER, _REPLY_DECODER = msgspec.msgpack.Decoder(_Request), msgspec.msgpack.Decoder(_Reply)


def retry_socket(func: Callable[P, R]) -> Callable[P, R]:
    """
    Call again while the server's socket is not there or refuses: `RETRIES` times, or as often as the function's own argument `retry` says. The
    error of the last call comes out.
    """

    @functools.wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(int(kwargs.get("retry", RETRIES))):  # type: ignore[call-overload]  # the function's own
            try:
                return func(*args, **kwargs)
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(PAUSE)
        return func(*args, **kwargs)

    return wrapped


def clear_sock_dir() -> None:
    """Remove the sockets of this user's shared objects, of this run and of others."""
    try:
        check_directory(SOCKET_TMP_DIR)
    except FileNotFoundError:
        return
    for path in sorted(Path(SOCKET_TMP_DIR).rglob("*"), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


class _Shared:
    """One side of an object: the server of it (`create`), or a client."""

    def __init__(self, name: str = "", create: bool = False) -> None:
        self.name = name
        self.is_server = create
        self._path = _socket_path(f"{type(self).__name__.lower()}_{name}")
        self._changed = threading.Condition()
        """Guards the state at the server, and tells waiting requests of a change."""
        self._talking = threading.Lock()
        """One request at a time on a client's connection."""
        self._connection: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        if create:
            self._serve()

    def is_available(self) -> bool:
        return self._path.exists()

    def close(self) -> None:
        """Hang up; the server's end removes the socket."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        with self._changed:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    unlink = close

    def _handle(self, method: str, args: list[Any], who: object) -> Any:
        """At the server. `who` is the connection, or None for the server's own process."""
        raise NotImplementedError

    def _gone(self, who: object) -> None:
        """At the server: a client has hung up or died."""

    def _ask(self, method: str, *args: Any) -> Any:
        if self.is_server:
            return self._handle(method, list(args), None)
        try:
            payload = pack(msgspec.msgpack.encode(_Request(method, list(args))))
        except TypeError as error:
            raise SharedObjectFailed(
                f"{self.name}: only plain data can be shared (numbers, text, bytes, lists, dictionaries): {error}"
            ) from error
        with self._talking:
            reply = self._exchange(payload)
        if reply.error:
            raise SharedObjectFailed(f"{self.name}: {reply.error}")
        return reply.value

    def _exchange(self, payload: bytes) -> _Reply:
        """A server that was started anew is found again, once."""
        for is_last in (False, True):
            if self._connection is None:
                self._connection = _connect(self._path)
            try:
                self._connection.sendall(payload)
                frame = receive_frame(self._connection)
                if frame is None:
                    raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
                return _REPLY_DECODER.decode(frame[0])
            except OSError:
                self._connection.close()
                self._connection = None
                if is_last:
                    raise
        raise AssertionError("the last try returns or raises")

    def _ask_until(self, timeout: float | None, method: str, *args: Any) -> Any:
        """Ask in slices until the answer is not None or the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SLICE if deadline is None else min(_SLICE, max(0.0, deadline - time.monotonic()))
            value = self._ask(method, left, *args)
            if value is not None or (deadline is not None and time.monotonic() >= deadline):
                return value

    def _serve(self) -> None:
        make_private(Path(SOCKET_TMP_DIR))
        make_private(self._path.parent)
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, args=(self._listener,), name=f"dlrover-{self.name}", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if peer_credentials(connection)[1] != os.getuid():
                connection.close()
                continue
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with self._changed:
            self._open.add(connection)
        try:
            while (frame := receive_frame(connection)) is not None:
                connection.sendall(pack(self._reply(frame[0], connection)))
        except (OSError, Rejected):
            pass  # the client is gone or speaks nonsense; either way its connection ends here
        finally:
            with self._changed:
                self._open.discard(connection)
                self._gone(connection)
                self._changed.notify_all()
            connection.close()

    def _reply(self, frame: bytes, who: socket.socket) -> bytes:
        try:
            request = _REQUEST_DECODER.decode(frame)
            return msgspec.msgpack.encode(_Reply(self._handle(request.method, request.args, who)))
        except (msgspec.MsgspecError, TypeError, ValueError, DLRoverError) as error:
            return msgspec.msgpack.encode(_Reply(error=f"{type(error).__name__}: {error}"))


class SharedLock(_Shared):
    """Held by one connection; given back by it, or by the kernel when its process dies."""

    _SERVER = "server"

    def __init__(self, name: str = "", create: bool = False, owner: str = "") -> None:
        """`owner` is accepted and not needed: the connection owns the lock."""
        self._holder: object = None
        super().__init__(name, create)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """False: another holds it, or, with a warning, the server cannot be asked."""
        try:
            return bool(self._ask_until(timeout if blocking else 0.0, "acquire"))
        except (OSError, SharedObjectFailed) as error:
            log.warning("the lock %s was not acquired: %s", self.name, error)
            return False

    def release(self) -> bool:
        """False, and nothing changes, when this side does not hold it."""
        return bool(self._ask("release"))

    def locked(self) -> bool | LockedResponse:
        """A client gets an object with the attribute `locked`, which is true if the lock is held."""
        is_locked = bool(self._ask("locked"))
        return is_locked if self.is_server else LockedResponse(SUCCESS_CODE, is_locked)

    def __enter__(self) -> SharedLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _handle(self, method: str, args: list[Any], who: object) -> Any:
        who = who or self._SERVER
        with self._changed:
            match method:
                case "acquire":
                    if not self._changed.wait_for(lambda: self._holder is None, timeout=float(args[0])):
                        return None
                    self._holder = who
                    return True
                case "release":
                    if self._holder is not who:
                        return False
                    self._holder = None
                    self._changed.notify_all()
                    return True
                case "locked":
                    return self._holder is not None
        raise ValueError(f"a lock has no {method!r}")

    def _gone(self, who: object) -> None:
        if self._holder is who:
            self._holder = None


class SharedQueue(_Shared):
    def __init__(self, name: str = "", create: bool = False, maxsize: int = 1) -> None:
        self._maxsize = maxsize
        self._items: deque[Any] = deque()
        super().__init__(name, create)

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Raises `queue.Full` when the queue stays full."""
        if self._ask_until(timeout if block else 0.0, "put", obj) is None:
            raise queue.Full(f"the queue {self.name} is full")

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """When nothing comes, a client gets None, and the server's own process `queue.Empty`."""
        found = self._ask_until(timeout if block else 0.0, "get")
        if found is None and self.is_server:
            raise queue.Empty(f"the queue {self.name} is empty")
        return None if found is None else found[0]

    def qsize(self) -> int:
        return int(self._ask("qsize"))

    def empty(self) -> bool:
        return self.qsize() == 0

    def _handle(self, method: str, args: list[Any], who: object) -> Any:
        with self._changed:
            match method:
                case "put":
                    if not self._changed.wait_for(
                        lambda: self._maxsize <= 0 or len(self._items) < self._maxsize, timeout=float(args[0])
                    ):
                        return None
                    self._items.append(args[1])
                    self._changed.notify_all()
                    return True
                case "get":
                    if not self._changed.wait_for(lambda: bool(self._items), timeout=float(args[0])):
                        return None
                    item = self._items.popleft()
                    self._changed.notify_all()
                    return [item]
                case "qsize":
                    return len(self._items)
        raise ValueError(f"a queue has no {method!r}")


class SharedDict(_Shared):
    """A client's `set` has reached the server when it returns, so no process reads what is older."""

    def __init__(self, name: str = "", create: bool = False) -> None:
        self._content: dict[Any, Any] = {}
        super().__init__(name, create)

    def set(self, new_dict: Mapping[Any, Any]) -> None:
        """Raises `SharedObjectFailed`, which is a RuntimeError, when the server does not take it."""
        self._content = dict(new_dict)
        self._ask("set", self._content)

    def get(self, local: bool = False) -> dict[Any, Any]:
        """`local`: what this side saw last. That is the answer, too, with a warning, when the server refuses its own."""
        if not local:
            try:
                self._content = dict(self._ask("get"))
            except SharedObjectFailed as error:
                log.warning("the dictionary may be out of date: %s", error)
        return self._content

    def _handle(self, method: str, args: list[Any], who: object) -> Any:
        with self._changed:
            match method:
                case "set":
                    self._content = dict(args[0])
                    return True
                case "get":
                    return dict(self._content)
        raise ValueError(f"a dictionary has no {method!r}")


class SharedMemory:
    """
    Named memory like the standard library's, but untracked: it stays until `unlink`, whichever process dies.

    Room is reserved for real: a full /dev/shm is an error here and not a SIGBUS at the first write.
    """

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0) -> None:
        if size < 0 or (create and size == 0):
            raise ValueError(f"shared memory cannot have a size of {size}")
        if name is None and not create:
            raise ValueError("name can only be None if create=True")
        self.name = (name or f"dlrover_{secrets.token_hex(6)}").lstrip("/")
        self._path = _MEMORY_DIR / self.name
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = open_checked(str(self._path), flags)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, size)
            self.size = os.fstat(descriptor).st_size
            self._map: mmap.mmap | None = mmap.mmap(descriptor, self.size)
        except BaseException:
            if create:
                self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._view: memoryview | None = memoryview(self._map)

    @property
    def buf(self) -> memoryview:
        assert self._view is not None, "this shared memory was closed"
        return self._view

    def close(self) -> None:
        """Views that are still in use keep the memory mapped until they go."""
        with contextlib.suppress(BufferError):
            if self._view is not None:
                self._view.release()
            if self._map is not None:
                self._map.close()
        self._view = self._map = None

    def unlink(self) -> None:
        self._path.unlink(missing_ok=True)


def create_shared_memory(name: str, create: bool, size: int = 0) -> SharedMemory | None:
    """Open, or create with exactly this size. None: there is none, or none was wanted. Raises NotOurs for another user's."""
    if not create:
        try:
            return SharedMemory(name)
        except FileNotFoundError:
            return None
    if size <= 0:
        return None
    try:
        return SharedMemory(name, create=True, size=size)
    except FileExistsError:
        found = SharedMemory(name)
    if found.size == size:
        return found
    found.close()
    found.unlink()  # whoever has it mapped keeps the old memory, which has no name any more
    return SharedMemory(name, create=True, size=size)


def _socket_path(name: str) -> Path:
    root = Path(SOCKET_TMP_DIR)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    path = root / run / f"{name}.sock" if run else root / f"{name}.sock"
    if len(os.fsencode(path)) > _MAX_PATH or "/" in run + name:
        path = root / f"{hashlib.blake2b(f'{run} {name}'.encode(), digest_size=16).hexdigest()}.sock"
    return path


@retry_socket
def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(PATIENCE)
        connection.connect(str(path))
        check_server(connection)
    except BaseException:
        connection.close()
        raise
    return connection
