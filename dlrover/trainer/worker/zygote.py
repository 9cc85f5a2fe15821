"""
The zygote: a process that has imported torch once, and from which workers are forked in milliseconds.

Started by the agent's first lines with one end of a socket pair. It stays single-threaded and never touches a device,
gRPC or an event loop, because whatever it holds every worker inherits. Each worker is forked twice, so that the agent
(a subreaper) adopts it and can read its exit status, and then waits on a leash until the agent knows of it. A zygote
that cannot or shall not be warm executes itself anew without the imports and then only forks and executes: one way to
start any worker. An import cannot be undone either: where one of the user's modules is unsuitable, the zygote executes itself anew
without that one and keeps the others warm.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from dlrover.host.edges import contained
from dlrover.host.lifeline import follow_parent
from dlrover.protocol.local_frames import receive_frame, send_frame
from dlrover.protocol.messages.spawning import (
    CountDevices,
    Counted,
    Forked,
    ForkWorker,
    FromZygote,
    Prepared,
    Spares,
    SpawnRefused,
    ToZygote,
)
from dlrover.trainer.worker import entry as worker_entry
from dlrover.trainer.worker import sigterm

_PID = struct.Struct("!q")
_READ_AT_IMPORT = ("GOMP_", "KERAS_", "KMP_", "LD_", "MALLOC_", "PYTHON", "PYTORCH_", "TF_", "TORCH_")
"""Variables that libraries or the interpreter read once, when they are loaded: too late to change in a fork."""
_IDLE = 1.0
"""Seconds without a request before workers are forked ahead: the last ones are busy starting until then."""
_FLASH_CHECKPOINT = "dlrover.trainer.torch.flash_checkpoint.ddp"
_NO_COMPILER = "-torch._dynamo"
_NO_FLASH_CHECKPOINT = "-dlrover.trainer.torch.flash_checkpoint"
"""Names of --preload with a minus: what is imported by default, and shall not be."""
_READ_LATER = ("TF_CONFIG", "TORCH_NCCL_", "TORCHELASTIC_")
_TENSORFLOW = "tensorflow"
_TENSORFLOW_ROLE = "dlrover.trainer.tensorflow.process"
_MAX_CGROUP_ATTEMPTS = 3
_MAX_AT_ONCE = 8
"""Requests that are taken together. Each brings descriptors along, and the user's limit may be small."""


def main() -> None:
    """Runs in the zygote until the agent hangs up, and in every worker that is forked from it, to its end."""
    arguments = _parse(sys.argv[1:])
    if not follow_parent(signal.SIGKILL, arguments.agent_pid):
        return  # the agent has gone
    sigterm.announce()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # The agent decides when we end: it closes the socket or kills us. Ctrl-C in a terminal must not.
        signal.signal(number, signal.SIG_IGN)
    worker_entry.close_all_but({0, 1, 2, arguments.fd})
    worker_entry.show_as(b"dlrover zygote" + (b" (warm)" if arguments.is_warm else b""))
    os.set_inheritable(arguments.fd, False)
    order = _Zygote(arguments).serve()
    if order is not None:
        del arguments
        worker_entry.run(order.kind, os.fsdecode(order.target), [os.fsdecode(argument) for argument in order.args])


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dlrover zygote", allow_abbrev=False)
    parser.add_argument("--fd", type=int, required=True, help="our end of the agent's socket pair")
    parser.add_argument("--agent-pid", type=int, required=True)
    parser.add_argument("--warm", dest="is_warm", action="store_true")
    parser.add_argument("--preload", default="", help="modules to import beside torch, separated by commas")
    parser.add_argument("--framework", choices=("torch", _TENSORFLOW), default="torch")
    parser.add_argument("--search-path", default="", help="where preloaded modules are looked for first")
    parser.add_argument(
        "--left-out", default="", help="modules of --preload that a zygote before this one could not import"
    )
    parser.add_argument("--note", default="", help="why this zygote is not warm, or has left something out")
    parser.add_argument("--cgroups", default="", help="directory to make cgroups in, for the workers and ourselves")
    parser.add_argument("--room", default="", help="room for the title of the process")
    return parser.parse_args(argv)


class _CannotWarmError(Exception):
    """Forking from this process would not be safe, or torch is not there."""


class _CannotPreloadError(_CannotWarmError):
    """Only because of one of the user's modules."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(f"--preload {module} {why}")
        self.module = module


@dataclass
class _Birth:
    """A fork under way: the process in the middle tells the worker's pid and ends."""

    middle_pid: int
    """Negative: the error number of a fork that failed."""
    reader: int = -1


class _Zygote:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._socket = socket.socket(fileno=arguments.fd)
        self._decode = msgspec.msgpack.Decoder(ToZygote).decode
        self._is_warm: bool = arguments.is_warm
        self._library_descriptors: frozenset[int] = frozenset()
        self._environ = {name: value for name, value in os.environb.items() if _is_read_at_import(name)}
        self._spares: dict[int, socket.socket] = {}
        """Workers forked ahead by pid, each with the socket on which it waits for its order."""
        self._num_spares_wanted = 0
        self._has_flash_checkpoint = False
        self._num_cgroups = 0
        self._shares_cgroup = False
        """With workers that run."""

    def serve(self) -> ForkWorker | None:
        """Returns None when the agent has hung up, or in a forked child the order that it has become."""
        self._prepare()
        while True:
            if self._is_idle():
                if self._shares_cgroup:
                    self._enter_new_cgroup(os.getpid())
                order = self._fork_ahead()
                if order is not None:
                    return order
                continue
            batch = self._receive()
            if batch is None:
                return None
            births = []
            for message, descriptors in batch:
                if isinstance(message, CountDevices):
                    self._count(message)
                elif not self._hand_to_spare(message, descriptors):
                    birth = _fork()
                    if birth is None:
                        return self._become(message, descriptors)
                    births.append((message.id, birth))
                for descriptor in descriptors:
                    os.close(descriptor)
                if isinstance(message, ForkWorker):
                    self._shares_cgroup = bool(self._arguments.cgroups)
            for number, birth in births:
                self._tell(number, _finish(birth))

    def _is_idle(self) -> bool:
        """Wait for a request; True if none came for a while and there is something to do ahead."""
        while True:
            is_short = len(self._spares) < self._num_spares_wanted
            timeout = _IDLE if is_short or self._shares_cgroup else None
            ready, _, _ = select.select([self._socket, *self._spares.values()], [], [], timeout)
            if not ready:
                return True
            if self._socket in ready:
                return False
            self._spares = {pid: sock for pid, sock in self._spares.items() if sock not in ready}
            for sock in ready:
                sock.close()  # a spare says nothing, so it has died
            self._reply(Spares(pids=tuple(self._spares)))

    def _prepare(self) -> None:
        started_at = time.monotonic()
        if self._is_warm:
            # Off for good. During the imports it would find nothing to free and cost a sixth of their time; later it
            # would touch, and so copy, pages that are shared with all workers.
            gc.disable()
            known = worker_entry.open_descriptors()
            moved = self._begin_to_enter_cgroup()
            obstacle: _CannotWarmError | None = None
            try:
                self._import_all()
            except _CannotWarmError as error:
                obstacle = error
            moved()
            if obstacle is not None:
                self._restart(obstacle)
            self._library_descriptors = frozenset(worker_entry.open_descriptors() - known)
            gc.freeze()
        else:
            self._enter_new_cgroup(os.getpid())
        prepared = Prepared(
            is_warm=self._is_warm,
            seconds=time.monotonic() - started_at,
            note=self._arguments.note,
            left_out=tuple(_split(self._arguments.left_out)),
        )
        self._reply(prepared)

    def _begin_to_enter_cgroup(self) -> Callable[[], object]:
        """While we import: the kernel lets a process wait for it. Not by a thread, which a fork would lose; call the result."""
        if not self._arguments.cgroups:
            return lambda: None
        own_pid = os.getpid()
        helper_pid = os.fork()
        if helper_pid == 0:
            try:
                self._enter_new_cgroup(own_pid)
            finally:
                os._exit(0)  # whatever happens: there must not be a second zygote
        self._num_cgroups += _MAX_CGROUP_ATTEMPTS
        return lambda: os.waitpid(helper_pid, 0)

    def _enter_new_cgroup(self, pid: int) -> None:
        """Leave the workers forked until now among themselves: then the agent can kill their cgroup as a whole."""
        self._shares_cgroup = False
        for _ in range(_MAX_CGROUP_ATTEMPTS if self._arguments.cgroups else 0):
            self._num_cgroups += 1
            path = f"{self._arguments.cgroups}/{pid}-{self._num_cgroups}"
            try:
                os.mkdir(path)
                with open(f"{path}/cgroup.procs", "w") as file:
                    file.write(str(pid))
                return
            except FileNotFoundError:
                continue  # the agent has just removed it, empty as it was
            except OSError as error:
                print(f"dlrover: no cgroup could be made for the workers: {error}", file=sys.stderr)
                self._arguments.cgroups = ""

    def _import_all(self) -> None:
        if self._arguments.framework == _TENSORFLOW:
            self._import_tensorflow()
        else:
            self._import_torch()
        search_path = self._arguments.search_path
        if search_path:
            sys.path.insert(0, search_path)
        for name in _split(self._arguments.preload):
            if name.startswith("-"):
                continue
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:
                raise _CannotPreloadError(name, f"failed ({type(error).__name__}: {error})") from error
            if obstacle := _obstacle_to_forks():
                raise _CannotPreloadError(name, obstacle)
        if search_path:
            sys.path.remove(search_path)

    def _import_tensorflow(self) -> None:
        """Everything that a process of a cluster imports; no device, session or eager operation is touched."""
        self._has_flash_checkpoint = True  # there is none to import later
        try:
            importlib.import_module(_TENSORFLOW)
            importlib.import_module(_TENSORFLOW_ROLE)
        except Exception as error:
            raise _CannotWarmError(
                f"tensorflow cannot be imported by {sys.executable} ({type(error).__name__}: {error})"
            ) from error
        if obstacle := _obstacle_to_forks():
            raise _CannotWarmError(f"tensorflow {obstacle}")

    def _import_torch(self) -> None:
        try:
            import torch
        except Exception as error:
            raise _CannotWarmError(
                f"torch cannot be imported by {sys.executable} ({type(error).__name__}: {error})"
            ) from error
        if torch.distributed.is_available():
            importlib.import_module("torch.distributed")
        unwanted = [name for name in _split(self._arguments.preload) if name.startswith("-")]
        if _NO_COMPILER not in unwanted:
            _preload("torch._dynamo")  # without it, the first optimizer of a worker pays for what it finds
        for name in ("progress_hooks", "flight_recorder"):  # what every worker installs
            importlib.import_module(f"dlrover.trainer.torch.hooks.{name}")
        if obstacle := _obstacle_to_forks():
            raise _CannotWarmError(f"torch {obstacle}")

    def _import_flash_checkpoint(self) -> None:
        """What a worker that restores would import first. Not before the first workers run, whose start would wait for it."""
        is_wanted = _NO_FLASH_CHECKPOINT not in _split(self._arguments.preload)
        if self._is_warm and is_wanted and not self._has_flash_checkpoint:
            self._has_flash_checkpoint = True
            _preload(_FLASH_CHECKPOINT)
            gc.freeze()

    def _restart(self, obstacle: _CannotWarmError) -> None:
        """A clean process without what stands in the way; requests that wait in the socket stay there."""
        os.set_inheritable(self._socket.fileno(), True)
        given = self._arguments
        arguments = ["--fd", str(self._socket.fileno()), "--agent-pid", str(given.agent_pid)]
        if isinstance(obstacle, _CannotPreloadError):
            kept = [name for name in _split(given.preload) if name != obstacle.module]
            left_out = [*_split(given.left_out), obstacle.module]
            arguments += ["--warm", f"--preload={','.join(kept)}", "--search-path", given.search_path]
            arguments += ["--framework", given.framework]
            arguments += ["--left-out", ",".join(left_out)]
        note = f"{given.note}; {obstacle}" if given.note else str(obstacle)
        arguments += ["--note", note, "--cgroups", given.cgroups, "--room", given.room]
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:4], *arguments])

    def _receive(self) -> list[tuple[ToZygote, list[int]]] | None:
        """One request, and what else already waits, up to a number: forks of one world then run side by side."""
        batch: list[tuple[ToZygote, list[int]]] = []
        while True:
            try:
                frame = receive_frame(self._socket)
            except ConnectionError:
                frame = None
            if frame is None:
                return None
            batch.append((self._decode(frame[0]), frame[1]))
            if len(batch) == _MAX_AT_ONCE or not select.select([self._socket], [], [], 0)[0]:
                return batch

    def _become(self, order: ForkWorker, descriptors: list[int]) -> ForkWorker:
        """In the child."""
        self._socket.detach()
        is_warm = self._is_warm and order.is_warm and self._suits(order)
        worker_entry.become(order, descriptors, self._library_descriptors, is_warm=is_warm)
        gc.enable()
        return order

    def _fork_ahead(self) -> ForkWorker | None:
        """Fork the next workers before the agent asks: then a restart need not wait for it. An order in the child."""
        self._import_flash_checkpoint()
        while len(self._spares) < self._num_spares_wanted:
            try:
                ours, theirs = socket.socketpair()
            except OSError:
                self._num_spares_wanted = 0  # not now: too few descriptors
                break
            birth = _fork()
            if birth is None:
                self._socket.detach()
                worker_entry.show_as(b"dlrover spare worker")
                worker_entry.close_all_but({0, 1, 2, theirs.fileno(), *self._library_descriptors})
                for sock in (ours, *self._spares.values()):
                    sock.detach()
                try:
                    frame = receive_frame(theirs)
                except ConnectionError:
                    frame = None
                if frame is None:
                    os._exit(0)  # the zygote has gone
                theirs.close()
                return self._become(self._decode(frame[0]), frame[1])
            theirs.close()
            pid = _finish(birth)
            if pid <= 0:
                ours.close()
                self._num_spares_wanted = 0  # not now: too many processes, or too little memory
                break
            self._spares[pid] = ours
        self._reply(Spares(pids=tuple(self._spares)))
        return None

    def _hand_to_spare(self, order: ForkWorker, descriptors: list[int]) -> bool:
        if not (self._is_warm and order.is_warm and self._suits(order)):
            return False
        self._num_spares_wanted = int(order.environ.get(b"LOCAL_WORLD_SIZE", b"0"))
        while self._spares:
            pid, sock = self._spares.popitem()
            with sock:
                try:
                    send_frame(sock, msgspec.msgpack.encode(order), descriptors)
                except OSError:
                    continue  # it has died
            self._tell(order.id, pid)
            return True
        return False

    def _suits(self, order: ForkWorker) -> bool:
        if order.kind == "program":
            return False
        wanted = {name: value for name, value in order.environ.items() if _is_read_at_import(name)}
        return wanted == self._environ

    def _tell(self, number: int, pid: int) -> None:
        if pid > 0:
            self._reply(Forked(id=number, pid=pid))
        else:
            reason = os.strerror(-pid) if pid else "the process that forks the worker ended"
            self._reply(SpawnRefused(id=number, message=f"fork failed: {reason}"))

    def _count(self, request: CountDevices) -> None:
        """In a child that is thrown away: asking for devices may initialise them, which no fork survives."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                answer: FromZygote = _count_devices(request)
            except Exception as error:  # the edge of the throw-away process
                answer = SpawnRefused(id=request.id, message=str(error) or type(error).__name__)
            with open(writer, "wb") as file:
                file.write(msgspec.msgpack.encode(answer))
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as file:
            raw = file.read()
        os.waitpid(pid, 0)
        if raw:
            send_frame(self._socket, raw)
        else:
            self._reply(SpawnRefused(id=request.id, message=f"the process that counts {request.kind} devices ended"))

    def _reply(self, message: FromZygote) -> None:
        send_frame(self._socket, msgspec.msgpack.encode(message))


def _fork() -> _Birth | None:
    """None in the worker."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        reader, writer = os.pipe()
    except OSError as error:
        return _Birth(-(error.errno or 1))
    try:
        middle_pid = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return _Birth(-(error.errno or 1))
    if middle_pid:
        os.close(writer)
        return _Birth(middle_pid, reader)
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid:
        os.write(writer, _PID.pack(pid))
        os._exit(0)
    os.close(reader)
    os.close(writer)
    return None


def _finish(birth: _Birth) -> int:
    """The worker's pid; from here on its parent is the agent. Negative: the number of an error; 0: unknown."""
    if birth.reader < 0:
        return birth.middle_pid
    raw = os.read(birth.reader, _PID.size)
    os.close(birth.reader)
    os.waitpid(birth.middle_pid, 0)
    pid: int = _PID.unpack(raw)[0] if raw else 0
    return pid


def _is_read_at_import(name: bytes) -> bool:
    text = os.fsdecode(name)
    return text.startswith(_READ_AT_IMPORT) and not text.startswith(_READ_LATER)


def _preload(name: str) -> None:
    """What uses it imports it in any case and gets the error; the others need not care."""

    def tell(error: Exception) -> None:
        print(f"dlrover: {name} could not be preloaded ({type(error).__name__}: {error})", file=sys.stderr)

    with contained(tell):
        importlib.import_module(name)


def _split(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


def _obstacle_to_forks() -> str:
    """What the newest import did after which this process must not be forked; empty: nothing."""
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return f"started {num_threads - 1} thread(s) when imported; a fork would lose them and keep their locks"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "initialised CUDA when imported; a forked worker could not use the device"
    return ""


def _count_devices(request: CountDevices) -> Counted:
    """torchrun's rules and words."""
    import torch

    num_cpus = len(os.sched_getaffinity(0))
    kind = request.kind
    match kind:
        case "cpu":
            return Counted(id=request.id, count=num_cpus, device="cpu")
        case "gpu":
            if not torch.cuda.is_available():
                raise ValueError("Cuda is not available.")
            return Counted(id=request.id, count=torch.cuda.device_count(), device="gpu")
        case "xpu":
            if not torch.xpu.is_available():
                raise ValueError("Xpu is not available.")
            return Counted(id=request.id, count=torch.xpu.device_count(), device="xpu")
        case "auto":
            accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
            if accelerator is not None and accelerator.is_available():
                return Counted(
                    id=request.id, count=accelerator.device_count(), device=accelerator.current_accelerator().type
                )
            if accelerator is None and torch.cuda.is_available():
                return Counted(id=request.id, count=torch.cuda.device_count(), device="gpu")
            return Counted(id=request.id, count=num_cpus, device="cpu")
    custom = torch._C._get_privateuse1_backend_name()
    if kind == custom:
        module = getattr(torch, kind)
        if not module.is_available():
            raise ValueError(f"{kind} is not available.")
        return Counted(id=request.id, count=module.device_count(), device=kind)
    known = "gpu and xpu" if custom == "privateuseone" else f"gpu, xpu and {custom}"
    raise ValueError(f"torch has no device type {kind} here, only {known}.")
