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

from dlrover.agent.workers.process_tree import become_subreaper
from dlrover.host.open_files import UsersLimit
from dlrover.protocol.errors import ConfigError, JobError
from dlrover.protocol.local_frames import FrameBuffer, pack, send_some
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES
from dlrover.protocol.messages.spawning import (
    CountDevices,
    Counted,
    Forked,
    ForkWorker,
    FromZygote,
    Prepared,
    Spares,
    SpawnRefused,
)

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger(__name__)

# `-c` and not `-m`: with `-m` the current directory would be searched first, so that a user's `random.py` could
# replace the standard one in the zygote and in all workers. Python 3.11's `-P` would do, but stays visible in the
# workers' `sys.flags`.
_CODE = (
    "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; from dlrover.trainer.worker.zygote import main; main()"
)
_TITLE_ROOM = "." * 1024
_MAX_ATTEMPTS = 3
"""
A request that has outlived so many zygotes is refused; so many zygotes dead before their first word: no more warm
ones.
"""
RESTART_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""
Seconds between attempts to start a zygote when the kernel has no memory or no process for it. Afterwards only a request
for a worker tries again.
"""


class StartFailed(JobError):
    """A worker could not be started at all."""


class Spawner:
    def __init__(
        self,
        *,
        is_warm: bool = True,
        preload: Sequence[str] = (),
        framework: str = "torch",
        interpreter: str = "",
        search_path: str = "",
        environ: Mapping[bytes, bytes] | None = None,
        cgroups: str = "",
        restart_delays: Sequence[float] = RESTART_DELAYS,
    ) -> None:
        self._interpreter = interpreter or sys.executable
        self._wants_warm = is_warm and os.path.abspath(self._interpreter) == os.path.abspath(sys.executable)
        self._preload = tuple(preload)
        self._framework = framework
        self._search_path = os.path.abspath(search_path)
        self._environ = dict(os.environb if environ is None else environ)
        self._users_limit = UsersLimit()
        self._cgroups = cgroups
        self._restart_delays = tuple(restart_delays)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._frames = FrameBuffer()
        self._next_id = 1
        self._requests: dict[int, _Request] = {}  # unanswered, in the order of their ids
        self._outbox: deque[_Parcel] = deque()
        self._num_early_deaths = 0
        self._spare_pids: set[int] = set()
        self._prepared: Prepared | None = None
        self._waiters: list[asyncio.Future[None]] = []  # for the end of the imports
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._why_none = ""
        self._is_closed = False

    @classmethod
    def start(
        cls,
        *,
        is_warm: bool = True,
        preload: Sequence[str] = (),
        framework: str = "torch",
        interpreter: str = "",
        search_path: str = "",
        environ: Mapping[bytes, bytes] | None = None,
        cgroups: str = "",
        restart_delays: Sequence[float] = RESTART_DELAYS,
    ) -> Spawner:
        """
        Become a subreaper and have a zygote begin its imports. Returns at once.

        `cgroups` is the directory in which the zygote makes cgroups for itself and its workers, if there is one.
        """
        become_subreaper()
        spawner = cls(
            is_warm=is_warm,
            preload=preload,
            framework=framework,
            interpreter=interpreter,
            search_path=search_path,
            environ=environ,
            cgroups=cgroups,
            restart_delays=restart_delays,
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

    async def warm_up(self, timeout: float) -> None:
        """Until workers can start without imports, or never will, or the timeout. Raises nothing: they start either way."""
        import asyncio

        try:
            loop = self._attach()
        except StartFailed:
            return  # whoever asks for a worker hears of it
        if self._prepared is not None or not self._wants_warm:
            return
        waiter = loop.create_future()
        self._waiters.append(waiter)
        await asyncio.wait([waiter], timeout=timeout)

    async def count_devices(self, kind: str) -> int:
        """What torchrun's `--nproc-per-node=auto|cpu|gpu|xpu` stands for on this node."""
        request = _Request(CountDevices(id=self._new_id(), kind=kind), self._attach())
        answer = await self._ask(request)
        advice = "Give a number." if kind == "auto" else "Give a number, or auto."
        if isinstance(answer, SpawnRefused):
            raise ConfigError(f"--nproc-per-node={kind}: {answer.message} {advice}")
        assert isinstance(answer, Counted), f"{answer} as a reply to {request.message}"
        if answer.count < 1:
            raise ConfigError(f"--nproc-per-node={kind}: this node has no {answer.device} device. {advice}")
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
        `Leash.release`; of one whose caller is cancelled meanwhile nothing is left.
        """
        loop = self._attach()
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
        size = sum(len(name) + len(value) for name, value in message.environ.items())
        size += sum(map(len, message.args))
        if size > MAX_MESSAGE_BYTES - 65536:
            raise StartFailed(
                f"The worker cannot start, because its environment and arguments have {size} bytes; at most "
                f"{MAX_MESSAGE_BYTES - 65536} are possible. Shorten its arguments, or remove large variables."
            )
        request = _Request(message, loop, streams)
        answer = await self._ask(request)
        if isinstance(answer, SpawnRefused):
            raise StartFailed(answer.message)
        assert isinstance(answer, Forked), f"{answer} as a reply to a fork request"
        assert request.leash is not None, "a worker without a leash"
        request.leash.pid = answer.pid
        return request.leash

    def close(self) -> None:
        """End the zygote. Workers live on; a caller that still waits for an answer, or asks later, gets an error."""
        self._is_closed = True
        self._cancel_restart()
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
        self._end_warm_up()
        self._fail_all("The agent ends.")

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair()
        # Our own Python, whatever the workers run under: a cold zygote only forks and executes.
        command = [sys.executable, "-u", "-c", _CODE, "--fd", str(theirs.fileno()), "--agent-pid", str(os.getpid())]
        if self._wants_warm:
            command += ["--warm", f"--preload={','.join(self._preload)}", "--search-path", self._search_path]
            command += ["--framework", self._framework]
        command += ["--cgroups", self._cgroups, "--room", _TITLE_ROOM]
        environ = dict(self._environ)
        if self._wants_warm:
            # Starts its threads at import, and a fork needs a process without any. Workers get their own number back.
            environ[b"OPENBLAS_NUM_THREADS"] = b"1"
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=environ,
                    close_fds=True,
                    start_new_session=True,  # what it forks and leaves to us must not look like a helper of ours
                )
        except BaseException:
            ours.close()
            raise
        self._users_limit.give_back(self._process.pid)
        ours.setblocking(False)
        self._socket = ours
        self._frames = FrameBuffer()
        self._prepared = None
        self._spare_pids = set()  # those of a dead zygote end with it

    def _attach(self) -> asyncio.AbstractEventLoop:
        """
        Listen to the zygote on the running loop, to a new one if there is none. Raises StartFailed if that fails.

        asyncio is imported only now: see the top.
        """
        import asyncio

        if self._is_closed:
            raise StartFailed("The agent ends.")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._cancel_restart()
            self._loop = loop
            if self._process is not None:
                self._listen()
        if self._process is None and not self._restart_zygote():
            raise StartFailed(self._why_none)
        return loop

    def _listen(self) -> None:
        assert self._loop is not None, "not attached to a loop"
        assert self._socket is not None, "no zygote to listen to"
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    async def _ask(self, request: _Request) -> Forked | Counted | SpawnRefused:
        answer: Forked | Counted | SpawnRefused | None = None
        self._requests[request.message.id] = request
        try:
            self._post(request)
            self._on_writable()
            answer = await request.answer
            return answer
        finally:
            self._requests.pop(request.message.id, None)
            request.close(keep_leash=isinstance(answer, Forked))

    def _post(self, request: _Request) -> None:
        """Into the outbox, for whatever zygote there is."""
        try:
            request.begin_attempt()
        except OSError as error:
            request.refuse(f"no file descriptors are left for another worker: {error.strerror}")
            return
        self._outbox.append(_Parcel(pack(msgspec.msgpack.encode(request.message)), request))

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
            # It is dead or of no use. The end of file on its socket says so, after all that it had still answered;
            # that alone leads to another one.
            assert self._process is not None, "a socket without a zygote"
            self._process.kill()
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
            self._end_warm_up()
            if message.left_out:
                self._preload = tuple(name for name in self._preload if name not in message.left_out)
            if message.note and message.is_warm:
                _log.warning("Not preloaded, so that each worker imports it itself: %s.", message.note)
            elif message.note:
                _log.warning("Workers start more slowly, because each imports torch itself: %s.", message.note)
            return
        if isinstance(message, Spares):
            self._spare_pids = set(message.pids)
            return
        if isinstance(message, Forked):
            self._spare_pids.discard(message.pid)
        request = self._requests.get(message.id)
        if request is not None and not request.answer.done():
            request.answer.set_result(message)

    def _end_warm_up(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters = []

    def _on_lost(self) -> None:
        """The zygote died. No worker depends on it; start another and repeat what it has not answered."""
        assert self._process is not None, "lost a zygote that never was"
        self._disconnect()
        self._process.kill()
        status = self._process.wait()
        _log.warning(
            "The process that starts workers (pid %d) ended with status %d; starting another.",
            self._process.pid,
            status,
        )
        self._process = None
        self._spare_pids = set()  # they end with it
        if self._prepared is None:
            self._num_early_deaths += 1
            if self._num_early_deaths == _MAX_ATTEMPTS and self._wants_warm:
                _log.warning(
                    "The process that starts workers failed %d times while importing modules; from now on each worker "
                    "imports them itself, which is slower.",
                    _MAX_ATTEMPTS,
                )
                self._wants_warm = False
                self._end_warm_up()
            if self._num_early_deaths >= 2 * _MAX_ATTEMPTS:
                # Only a later request tries again: what kills them may pass, but not by being repeated.
                self._fail_all(
                    "The process that starts workers failed several times in a row. Its last lines are in the "
                    "log above."
                )
                return
        self._keep_trying(self._restart_delays)

    def _keep_trying(self, delays: Sequence[float]) -> None:
        """Start a zygote; as long as the kernel refuses, try again after these delays."""
        assert self._loop is not None, "not attached to a loop"
        self._restart = None
        if not self._restart_zygote() and delays:
            self._restart = self._loop.call_later(delays[0], self._keep_trying, delays[1:])

    def _restart_zygote(self) -> bool:
        """Start one and repeat to it what waits. False if the kernel refuses: what waits has failed then."""
        try:
            self._start_zygote()
        except OSError as error:
            # No memory, no process, no descriptor: after an out-of-memory kill all of them are likely, and pass.
            self._why_none = f"The process that starts workers cannot be started: {error.strerror or error}."
            _log.warning("%s", self._why_none)
            self._fail_all(self._why_none)
            return False
        self._cancel_restart()
        self._listen()
        self._outbox.clear()
        for request in self._requests.values():
            if request.answer.done():
                continue
            if request.num_attempts >= _MAX_ATTEMPTS:
                request.refuse(f"{_MAX_ATTEMPTS} processes that start workers ended during this request")
            else:
                self._post(request)
        self._on_writable()
        return True

    def _cancel_restart(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None

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
            request.refuse(reason)
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
                f"The worker (pid {self.pid}) did not start to run within {timeout:g} s after its fork."
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
    """A question that waits for its answer, and the descriptors that travel with it."""

    def __init__(
        self, message: ForkWorker | CountDevices, loop: asyncio.AbstractEventLoop, streams: Sequence[int] = ()
    ) -> None:
        self.message = message
        self.num_attempts = 0
        self.leash: Leash | None = None
        self.answer: asyncio.Future[Forked | Counted | SpawnRefused] = loop.create_future()
        self._streams = streams
        self._worker_end: socket.socket | None = None
        self._copies: list[int] = []

    @property
    def descriptors(self) -> tuple[int, ...]:
        return () if self._worker_end is None else (*self._copies, self._worker_end.fileno())

    def begin_attempt(self) -> None:
        """
        Each attempt has a leash of its own: the zygote before may have forked a worker that we shall never hear of, and
        that one has to find the end of its file, not to share a leash with its successor.
        """
        self.num_attempts += 1
        if not isinstance(self.message, ForkWorker):
            return
        self._drop_leash()
        # Own copies: the request may have to be sent to another zygote when the caller's are closed already.
        while len(self._copies) < len(self._streams):
            self._copies.append(os.dup(self._streams[len(self._copies)]))
        ours, self._worker_end = socket.socketpair()
        self.leash = Leash(ours)

    def refuse(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_result(SpawnRefused(id=self.message.id, message=reason))

    def close(self, *, keep_leash: bool) -> None:
        if not keep_leash:
            self._drop_leash()
        self._close_worker_end()
        for descriptor in self._copies:
            os.close(descriptor)
        self._copies = []

    def _drop_leash(self) -> None:
        if self.leash is not None:
            self.leash.close()
            self.leash = None
        self._close_worker_end()

    def _close_worker_end(self) -> None:
        if self._worker_end is not None:
            self._worker_end.close()
            self._worker_end = None


class _Parcel:
    def __init__(self, data: bytes, request: _Request) -> None:
        self.data = data
        self.request = request
        self.sent = 0


def _decode(frame: bytes) -> FromZygote:
    message: FromZygote = msgspec.msgpack.decode(frame, type=FromZygote)
    return message
