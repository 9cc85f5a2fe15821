"""
Starts the zygote, keeps one alive, and asks it for workers.

`Spawner.start` is meant for the first lines of the agent: it needs nothing but the standard library and msgspec, so
that the zygote imports torch while the agent still imports asyncio and gRPC. Asking comes later, from the event loop.
The zygote is always started from the main thread: the kernel ties "kill it when the parent dies" to the thread that
forked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from dlrover.agent.process_tree import become_subreaper
from dlrover.protocol.errors import ConfigError, JobError
from dlrover.protocol.local import FrameBuffer, pack, send_some
from dlrover.protocol.messages import MAX_MESSAGE_BYTES
from dlrover.protocol.spawning import CountDevices, Counted, Forked, ForkWorker, FromZygote, Prepared, Refused, Spares

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger(__name__)

# `-c` and not `-m`: with `-m` the current directory would be searched first, so that a user's `random.py` could
# replace the standard one in the zygote and in all workers. Python 3.11's `-P` would do, but stays visible in the
# workers' `sys.flags`.
_CODE = "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; from dlrover.trainer.zygote import main; main()"
_TITLE_ROOM = "." * 1024
_MAX_ATTEMPTS = 3
"""
A request that has outlived so many zygotes is refused; so many zygotes dead before their first word: no more warm
ones.
"""


class StartFailed(JobError):
    """A worker could not be started at all."""


class Spawner:
    def __init__(
        self,
        *,
        is_warm: bool = True,
        preload: Sequence[str] = (),
        interpreter: str = "",
        search_path: str = "",
        environ: Mapping[bytes, bytes] | None = None,
    ) -> None:
        self._interpreter = interpreter or sys.executable
        self._wants_warm = is_warm and os.path.abspath(self._interpreter) == os.path.abspath(sys.executable)
        self._preload = tuple(preload)
        self._search_path = os.path.abspath(search_path)
        self._environ = dict(os.environb if environ is None else environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._frames = FrameBuffer()
        self._next_id = 1
        self._requests: dict[int, _Request] = {}  # unanswered, in the order of their ids
        self._outbox: deque[_Parcel] = deque()
        self._num_early_deaths = 0
        self._spare_pids: set[int] = set()
        self._prepared: Prepared | None = None
        self._prepared_waiters: list[asyncio.Future[Prepared]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def start(
        cls,
        *,
        is_warm: bool = True,
        preload: Sequence[str] = (),
        interpreter: str = "",
        search_path: str = "",
        environ: Mapping[bytes, bytes] | None = None,
    ) -> Spawner:
        """Become a subreaper and have a zygote begin its imports. Returns at once."""
        become_subreaper()
        spawner = cls(
            is_warm=is_warm, preload=preload, interpreter=interpreter, search_path=search_path, environ=environ
        )
        spawner._start_zygote()
        return spawner

    @property
    def zygote_pids(self) -> tuple[int, ...]:
        """The zygote and the spares it has forked ahead: what a `ProcessTree` keeps. Empty after `close`."""
        return () if self._process is None else (self._process.pid, *self._spare_pids)

    @property
    def environ(self) -> dict[str, str]:
        """The environment that the agent was started with, before it changed anything for itself."""
        return {os.fsdecode(name): os.fsdecode(value) for name, value in self._environ.items()}

    @property
    def is_warm(self) -> bool:
        """What the zygote said of itself; until it has spoken, what we asked for."""
        return self._prepared.is_warm if self._prepared is not None else self._wants_warm

    async def wait_prepared(self) -> Prepared:
        """Until the imports are done."""
        loop = self._attach()
        if self._prepared is not None:
            return self._prepared
        waiter: asyncio.Future[Prepared] = loop.create_future()
        self._prepared_waiters.append(waiter)
        return await waiter

    async def count_devices(self, kind: str) -> int:
        """What torchrun's `--nproc-per-node=auto|cpu|gpu|xpu` stands for on this node."""
        request = _Request(CountDevices(id=self._new_id(), kind=kind), (), self._attach())
        answer = await self._ask(request)
        if isinstance(answer, Refused):
            raise ConfigError(f"--nproc-per-node={kind}: {answer.message} Give a number, or auto.")
        assert isinstance(answer, Counted), f"{answer} as a reply to {request.message}"
        if answer.count < 1:
            raise ConfigError(
                f"--nproc-per-node={kind}: this node has no {answer.device} device. Give a number, or auto."
            )
        _log.info("nproc_per_node=%s means %d, the number of %s devices here", kind, answer.count, answer.device)
        return answer.count

    async def spawn(
        self,
        *,
        kind: str,
        target: str,
        args: Sequence[str],
        environ: Mapping[bytes, bytes],
        streams: tuple[int, int, int],
        cwd: str = "",
    ) -> Leash:
        """
        Fork a worker with these stdin, stdout and stderr, which stay the caller's. It runs nothing before
        `Leash.release`.
        """
        loop = self._attach()
        ours, theirs = socket.socketpair()
        leash = Leash(ours)
        umask = os.umask(0o077)
        os.umask(umask)
        message = ForkWorker(
            id=self._new_id(),
            agent_pid=os.getpid(),
            kind=kind,
            target=os.fsencode(target),
            args=tuple(os.fsencode(argument) for argument in args),
            environ=dict(environ),
            cwd=os.fsencode(cwd or os.getcwd()),
            umask=umask,
            interpreter=os.fsencode(self._interpreter),
            is_warm=self._wants_warm,
        )
        try:
            with theirs:
                # Own copies: the request may have to be sent to another zygote when the caller's are closed already.
                descriptors = tuple(os.dup(descriptor) for descriptor in (*streams, theirs.fileno()))
            request = _Request(message, descriptors, loop)
            size = sum(len(name) + len(value) for name, value in message.environ.items())
            if size + sum(map(len, message.args)) > MAX_MESSAGE_BYTES - 65536:
                raise StartFailed(
                    "The environment and arguments of a worker are larger than 4 MB; nothing can be started."
                )
            answer = await self._ask(request)
            if isinstance(answer, Refused):
                raise StartFailed(answer.message)
        except BaseException:
            leash.close()
            raise
        assert isinstance(answer, Forked), f"{answer} as a reply to a fork request"
        leash.pid = answer.pid
        return leash

    def close(self) -> None:
        """End the zygote. Workers live on; whoever still waits for an answer gets an error."""
        self._disconnect()
        self._prepared = None
        if self._process is not None:
            self._process.kill()  # holds nothing that wants cleaning up
            self._process.wait()
            self._process = None
        for pid in self._spare_pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)  # our own child until we wait for it: no pid could be meant by mistake
                os.waitpid(pid, 0)
        self._spare_pids = set()
        self._fail_all("The agent ends.")

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair()
        # Our own Python, whatever the workers run under: a cold zygote only forks and executes.
        command = [sys.executable, "-u", "-c", _CODE, "--fd", str(theirs.fileno()), "--agent-pid", str(os.getpid())]
        if self._wants_warm:
            command += ["--warm", "--preload", ",".join(self._preload), "--search-path", self._search_path]
        command += ["--room", _TITLE_ROOM]
        environ = dict(self._environ)
        if self._wants_warm:
            # Starts its threads at import, and a fork needs a process without any. Workers get their own number back.
            environ[b"OPENBLAS_NUM_THREADS"] = b"1"
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=environ, close_fds=True
            )
        ours.setblocking(False)
        self._socket = ours
        self._frames = FrameBuffer()
        self._prepared = None
        self._spare_pids = set()  # those of a dead zygote end with it

    def _attach(self) -> asyncio.AbstractEventLoop:
        """Listen to the zygote on the running loop. asyncio is imported only now: see the top."""
        import asyncio

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            assert self._process is not None, "the spawner is closed"
            self._loop = loop
            self._listen()
        return loop

    def _listen(self) -> None:
        assert self._loop is not None, "not attached to a loop"
        assert self._socket is not None, "no zygote to listen to"
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        if self._outbox:
            self._on_writable()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    async def _ask(self, request: _Request) -> Forked | Counted | Refused:
        self._requests[request.message.id] = request
        self._post(request)
        try:
            return await request.answer
        finally:
            self._requests.pop(request.message.id, None)
            request.close()

    def _post(self, request: _Request) -> None:
        self._outbox.append(_Parcel(pack(msgspec.msgpack.encode(request.message)), request))
        self._on_writable()

    def _on_writable(self) -> None:
        assert self._loop is not None, "not attached to a loop"
        if self._socket is None:
            return
        try:
            while self._outbox:
                parcel = self._outbox[0]
                if parcel.sent == 0 and parcel.request.answer.done():
                    self._outbox.popleft()  # the asker has gone, and its descriptors with it
                    continue
                descriptors = parcel.request.descriptors if parcel.sent == 0 else ()
                parcel.sent += send_some(self._socket, memoryview(parcel.data)[parcel.sent :], descriptors)
                if parcel.sent == len(parcel.data):
                    self._outbox.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)
            return
        except OSError:
            self._on_lost()
            return
        self._loop.remove_writer(self._socket.fileno())

    def _on_readable(self) -> None:
        assert self._socket is not None, "readable without a socket"
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_lost()
            return
        for frame in self._frames.feed(data):
            self._take(_decode(frame))

    def _take(self, message: FromZygote) -> None:
        if isinstance(message, Prepared):
            self._prepared = message
            self._num_early_deaths = 0
            if message.note:
                _log.warning("Workers start cold, each importing torch itself: %s.", message.note)
            waiters, self._prepared_waiters = self._prepared_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(message)
            return
        if isinstance(message, Spares):
            self._spare_pids = set(message.pids)
            return
        if isinstance(message, Forked):
            self._spare_pids.discard(message.pid)
        request = self._requests.get(message.id)
        if request is not None and not request.answer.done():
            request.answer.set_result(message)

    def _on_lost(self) -> None:
        """The zygote died. No worker depends on it; start another and repeat what it has not answered."""
        assert self._process is not None, "lost a zygote that never was"
        self._disconnect()
        self._process.kill()
        status = self._process.wait()
        _log.warning("The zygote (pid %d) died with status %d; starting another.", self._process.pid, status)
        if self._prepared is None:
            self._num_early_deaths += 1
            if self._num_early_deaths == _MAX_ATTEMPTS and self._wants_warm:
                _log.warning("%d zygotes died while importing; workers start cold from now on.", _MAX_ATTEMPTS)
                self._wants_warm = False
            if self._num_early_deaths >= 2 * _MAX_ATTEMPTS:
                self._process = None
                self._fail_all(
                    "The process that starts workers dies again and again; see the log above for its last words."
                )
                return
        self._start_zygote()
        self._outbox.clear()
        self._listen()
        for request in list(self._requests.values()):
            request.num_attempts += 1
            if request.answer.done():
                continue
            if request.num_attempts >= _MAX_ATTEMPTS:
                request.answer.set_result(
                    Refused(id=request.message.id, message=f"{_MAX_ATTEMPTS} zygotes died over this request")
                )
            else:
                self._post(request)

    def _disconnect(self) -> None:
        if self._socket is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._socket = None

    def _fail_all(self, reason: str) -> None:
        for request in self._requests.values():
            if not request.answer.done():
                request.answer.set_result(Refused(id=request.message.id, message=reason))
        for waiter in self._prepared_waiters:
            if not waiter.done():
                waiter.set_exception(StartFailed(reason))
        self._prepared_waiters = []
        self._outbox.clear()


class Leash:
    """Our hold on a worker that has been forked and has not run anything yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.pid = 0
        self._socket = sock
        sock.setblocking(False)

    async def release(self, timeout: float = 30.0) -> None:
        """Let it run; returns when it does. The caller watches the pid by now, so that no exit goes unseen."""
        import asyncio

        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._socket, b"!")
            async with asyncio.timeout(timeout):
                said = await loop.sock_recv(self._socket, 4096)
        except TimeoutError:
            raise StartFailed(
                f"The worker (pid {self.pid}) did not begin within {timeout:g} s after its fork."
            ) from None
        except ConnectionError:
            said = b""  # killed meanwhile: its exit status tells
        finally:
            self.close()
        if said:
            raise StartFailed(said.decode("utf-8", "replace"))

    def close(self) -> None:
        """Without `release` before, the worker ends without having run anything."""
        self._socket.close()


class _Request:
    def __init__(
        self, message: ForkWorker | CountDevices, descriptors: tuple[int, ...], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.message = message
        self.descriptors = descriptors
        self.num_attempts = 0
        self.answer: asyncio.Future[Forked | Counted | Refused] = loop.create_future()

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


class _Parcel:
    def __init__(self, data: bytes, request: _Request) -> None:
        self.data = data
        self.request = request
        self.sent = 0


def _decode(frame: bytes) -> FromZygote:
    message: FromZygote = msgspec.msgpack.decode(frame, type=FromZygote)
    return message
