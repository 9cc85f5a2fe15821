"""
The launcher's view of its children: start one, hear of its end, signal it. (Orphans: `agent.workers.process_tree`.)

The launcher is the parent of agent and master and a subreaper, so the kernel tells it of every end through SIGCHLD, and
whatever a killed agent leaves becomes its child. That is enough: no pidfd, no thread, no asyncio, and one descriptor
to wait on. Works on every kernel that we support.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType

from dlrover.host.signals import signal_name
from dlrover.protocol.errors import JobError


class SignalInbox:
    """
    Signals as data: they are noted by the C handler and read here, in order, at a place of our choice.

    SIGCHLD is always among them. Use as a context manager: the former handlers come back at the end.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = [int(number) for number in dict.fromkeys((*numbers, signal.SIGCHLD))]
        self._formers: dict[int, object] = {}
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> SignalInbox:
        self._former_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started under nohup: the user wants to outlive the terminal
            self._formers[number] = signal.signal(number, _noted)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._formers.items():
            signal.signal(number, former)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._former_wakeup)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout: float | None) -> list[int]:
        """The signals that came, or nothing after the timeout. Others' wake-ups (`wake`) return early, too."""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        poller.poll(None if timeout is None else max(0, int(timeout * 1000) + 1))
        try:
            return [number for number in self._reader.recv(4096) if number]
        except BlockingIOError:
            return []

    def wake(self) -> None:
        """From another thread: have `wait` return."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")


def _noted(number: int, frame: FrameType | None) -> None:
    """The byte in the wake-up descriptor is the message; a Python handler must exist for it to be written."""


def spawn(argv: Sequence[str], environ: Mapping[str, str], *, output: str = "") -> int:
    """
    Start a process in a session of its own, so that the terminal's signals reach only us. Gives its pid.

    With `output` its streams go to that file and it reads nothing; else it has ours.
    """
    actions: list[tuple[object, ...]] = []
    if output:
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, output, append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
    try:
        return os.posix_spawn(
            argv[0],
            list(argv),
            dict(environ),
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # ignored by Python; a child should find them as usual
        )
    except OSError as error:
        raise JobError(
            f"{argv[0]} could not be started: {error.strerror}. The limit of processes may be reached (ulimit -u)."
        ) from error


def reap_children() -> dict[int, int]:
    """Wait status by pid of all children that ended, adopted orphans included."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def describe_status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal_name(os.WTERMSIG(status))}"
    return f"exit code {os.WEXITSTATUS(status)}"


def send(pid: int, number: int) -> None:
    """To a child that has not been reaped yet, so the pid cannot belong to another process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
